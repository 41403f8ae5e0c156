"""What is wrong with the settings, in words: the key, who set it, what was found, what there is instead."""

from __future__ import annotations

import difflib
import inspect
import os
import pkgutil
import sys
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from jsonargparse import ArgumentError, ArgumentParser
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lumen.callbacks import Callback
from lumen.cli.config_layers import Added, Keys, Settings
from lumen.errors import ConfigError
from lumen.errors.arguments import local_path
from lumen.task.data_module import DataModule
from lumen.task.task_module import TaskModule

BASES = {"data": DataModule, "model": TaskModule, "optimizer": Optimizer, "lr_scheduler": LRScheduler}
SUPPLIED = {"optimizer": {"params"}, "lr_scheduler": {"optimizer"}, "trainer": {"seed"}}


def check(settings: Settings, top: ArgumentParser, groups: Mapping[str, type]) -> list[str]:
    """Check every key, class and value, one by one because jsonargparse speaks of whole unions of classes.

    Returns:
        The required arguments of the model that are not set, if there is data to take them from.
    """
    tree, defaults, links = settings.tree, top.get_defaults(), list[str]()
    known, plain = defaults.as_dict(), {key: tree[key] for key in tree if key not in {*BASES, *groups}}
    problems = [_unknown(settings, (key,), "lumen", [*known, *defaults.keys()]) for key in plain if key not in known]
    problems += _wrong(settings, (), top, {key: value for key, value in plain.items() if key in known})
    for key, kind in groups.items():
        problems += _check(settings, (key,), kind, tree.get(key) or {})[0]
    for path, node in nodes(tree, ()):
        callback = path[:2] == ("trainer", "callbacks") and len(path) <= 3
        where, base = settings.where((*path, "class_path")), Callback if callback else BASES.get(".".join(path))
        try:
            kind = find_class(node.get("class_path", ""), base, where, settings.files)
        except ConfigError as error:
            problems.append(str(error))
            continue
        if inspect.isclass(kind) and "dict_kwargs" not in node:
            wrong, missing = _check(settings, (*path, "init_args"), kind, node.get("init_args") or {})
            links, missing = (missing, []) if path == ("model",) and tree.get("data") else (links, missing)
            problems += wrong + [f"{where}: {kind.__name__} needs {name}. Set it." for name in missing]
    if tree.get("lr_scheduler") and not tree.get("optimizer"):
        problems.append("lr_scheduler: it needs the optimizer that it schedules. Set optimizer too.")
    if not tree.get("model"):
        problems.append("no model is configured. Give --config FILE, or --model module.Class.")
    if problems:
        raise ConfigError("\n".join(problems))
    return links


def find_class(name: str, base: type | None, where: str = "", files: Sequence[str] = ()) -> Any:
    """Import a class by its full name, or find it by its short one among the imported classes of a base.

    Args:
        name: Its name.
        base: What it must be derived from.
        where: Who names it, for errors.
        files: The config files, in whose directories its module may be.

    Returns:
        None for a short name without a base: jsonargparse finds it by the type of its parameter.
    """
    module, _, short = name.rpartition(".")
    if not module and base is None:
        return None
    try:
        owner = import_module(module) if module else None
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # of what the user's module imports
        text = f"{where}: cannot import {name}: there is no module {error.name}.{_where_it_may_be(error.name, files)}"
        raise ConfigError(text) from error
    known = {key: getattr(owner, key, None) for key in dir(owner)} if owner else _subclasses(base or object)
    if short not in known:
        what = f"{module or 'lumen'} has no class {short}." if short else "no class is named."
        raise ConfigError(f"{where}: {what}{_nearest(short, known)} Write class_path: module.Class.")
    found = known[short]
    if base and inspect.isclass(found) and not issubclass(found, base):
        raise ConfigError(f"{where}: {name} is no {base.__name__}. Name a class that is derived from it.")
    return found


def _where_it_may_be(missing: str, files: Sequence[str]) -> str:
    """Where a module was looked for, which has nearly its name, and which directory of a config file has it."""
    parent, _, short = missing.rpartition(".")
    looked_in = [*sys.modules[parent].__path__] if parent else [os.getcwd()]
    hint = _nearest(short, (module.name for module in pkgutil.iter_modules(looked_in)))
    if parent:
        return f"{hint} It was looked for in {', '.join(looked_in)}."
    around = [place for file in files for place in Path(os.path.abspath(local_path(file))).parents]
    found = next((place for place in around if (place / f"{short}.py").is_file() or (place / short).is_dir()), None)
    it_is = "Start lumen in the directory that it is in" if found is None else f"It is in {found}: start lumen there"
    others = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    everywhere = ", ".join([f"{os.getcwd()} (where lumen was started)", *others])
    return f"{hint} It was looked for in {everywhere} and among what is installed. {it_is}, or add that to PYTHONPATH."


def _check(settings: Settings, path: Keys, kind: type, given: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """What is wrong with the arguments of a class, and which are missing. Classes in them are checked elsewhere."""
    parser = ArgumentParser(exit_on_error=False)
    supplied = SUPPLIED.get(path[0], ()) if len(path) < 3 else ()
    added = parser.add_class_arguments(kind, skip={*supplied}, fail_untyped=False)
    for name, value in given.items():
        if isinstance(value, Added) and isinstance(default := parser.get_defaults().get(name), list | tuple):
            value[:0] = default
    instead = getattr(kind, "INSTEAD", {})  # what serves for an argument of Lightning's
    problems = [
        _unknown(settings, (*path, name), kind.__name__, added, instead.get(name, ""))
        for name in given
        if name not in added
    ]
    values = {name: value for name, value in given.items() if name in added and not any(nodes(value, ()))}
    constructors = [vars(owner)["__init__"] for owner in kind.__mro__ if "__init__" in vars(owner)]
    parameters = ChainMap(*({**inspect.signature(each).parameters} for each in constructors))
    required = {name for name, parameter in parameters.items() if parameter.default is parameter.empty}
    missing = [name for name in added if name in required and name not in given]  # jsonargparse knows typed ones only
    return problems + list(_wrong(settings, path, parser, values)), missing


def _wrong(settings: Settings, path: Keys, parser: ArgumentParser, values: Mapping[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        try:
            parsed = parser.parse_object({name: value})[name]
            if isinstance(value, str) and ":" in value and isinstance(parsed, (int, float)):  # as YAML 1.1 had it
                yield f"{settings.where((*path, name))}: {value} would mean {parsed}. For a duration write 0{value}."
        except ArgumentError as error:
            if f'Parser key "{name}"' in str(error):  # and not an argument that is missing
                hints = {each.dest: getattr(each, "_typehint", Any) for each in parser._actions}
                yield f"{settings.where((*path, name))}: expected {_in_words(hints.get(name, Any))}, found {value!r}."


def _in_words(hint: Any) -> str:
    """A type as somebody who fills in a value would call it."""
    origin, inner = get_origin(hint), [each for each in get_args(hint) if each not in (NoneType, ..., Tensor)]
    if origin is Literal:
        return f"one of {', '.join(map(str, inner))}"
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(_in_words, inner)))
    if inspect.isclass(origin) and issubclass(origin, Mapping) and len(inner) == 2:
        return f"a dictionary of {_in_words(inner[1])}"
    if inspect.isclass(origin) and issubclass(origin, Iterable) and inner:
        return f"a list of {' and '.join(map(_in_words, inner))}"
    return str(getattr(hint, "__name__", hint)) if hint is not Any else "another type"


def _unknown(settings: Settings, path: Keys, owner: str, known: Iterable[str], instead: str = "") -> str:
    instead = "Use seed_everything." if path == ("trainer", "seed") else instead
    hint = f" {instead}" if instead else _nearest(str(path[-1]), known)  # YAML has keys that are no text
    return f"{settings.where(path)}: {owner} has no option {path[-1]}.{hint}"


def _nearest(name: str, known: Iterable[str]) -> str:
    by_lower = {each.lower(): each for each in known}
    close = [by_lower[each] for each in difflib.get_close_matches(name.lower(), by_lower, n=2)]
    return f" Did you mean {' or '.join(close)}?" if close else ""


def without_defaults(record: Mapping[str, Any], top: ArgumentParser, groups: Iterable[str]) -> dict[str, Any]:
    """Settings as plain data, of which what options and classes have by default is left out."""
    defaults, left = top.get_defaults().as_dict(), deepcopy(dict(record))
    for _, node in nodes(left, ()):
        kind, given = find_class(node["class_path"], None), node.pop("init_args", None) or {}
        parser = ArgumentParser(exit_on_error=False)
        if inspect.isclass(kind):
            parser.add_class_arguments(kind, fail_untyped=False)
        if given := _differing(given, parser.get_defaults().as_dict()):
            node["init_args"] = given
    for key in groups:
        left[key] = _differing(left[key], defaults[key])
    return {key: value for key, value in _differing(left, defaults).items() if value != {}}


def _differing(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in defaults.items()}
    return {name: value for name, value in given.items() if name not in plain or value != plain[name]}


def nodes(value: Any, path: Keys) -> Iterator[tuple[Keys, dict[str, Any]]]:
    """Every class in a tree, with its place."""
    if isinstance(value, dict) and ("class_path" in value or "init_args" in value):
        yield path, value
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from nodes(item, (*path, str(key)))


def _subclasses(base: type) -> dict[str, Any]:
    kinds: list[type] = base.__subclasses__()
    return {base.__name__: base} | {name: found for kind in kinds for name, found in _subclasses(kind).items()}
