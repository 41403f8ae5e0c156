"""Classes that settings name: the values a type accepts, the class a name means, and the defaults of its arguments."""

from __future__ import annotations

import inspect
import os
import pkgutil
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import chain
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypeVar, Union, final, get_args, get_origin

from jsonargparse import ArgumentError, ArgumentParser
from torch import Tensor

import lumen
from lumen import __all__ as public
from lumen.errors import ConfigError
from lumen.errors.arguments import expand_path, suggest_names
from lumen.errors.lightning_names import INSTEAD_OF_CLASSES, LIGHTNING_PACKAGES, RENAMED

# Modules whose classes no class_path names.
_NO_BASES = {"builtins", "types", "typing", "collections.abc", "inspect", "torch"}


def iterate_hints(hint: Any) -> Iterator[Any]:
    """Yield a type, and all types inside it."""
    yield hint
    for each in get_args(hint):
        yield from iterate_hints(each)


def iterate_alternatives(hint: Any) -> Iterator[Any]:
    """Yield the alternatives of a type: the members of a union, or the type alone."""
    if get_origin(hint) in (Union, UnionType, Annotated):
        for each in get_args(hint)[: 1 if get_origin(hint) is Annotated else None]:
            yield from iterate_alternatives(each)
    else:
        yield hint


def is_mapping(hint: Any) -> bool:
    """Return True if a type is a dictionary type."""
    kind = get_origin(hint) or hint
    return inspect.isclass(kind) and issubclass(kind, Mapping)


def get_item_type(hint: Any, value: Any) -> Any:
    """Return the type of the items of a dictionary or list; the type of the whole if the item type is unknown.

    Args:
        hint: The type of the whole.
        value: A dictionary or a list.
    """
    typed = [each for each in iterate_alternatives(hint) if inspect.isclass(get_origin(each))]
    containers = [each for each in typed if issubclass(get_origin(each), Iterable)]
    fitting = [each for each in containers if is_mapping(each) is isinstance(value, dict)]
    inner = [part for each in fitting for part in get_args(each)[1 if is_mapping(each) else 0 :] if part is not ...]
    return Union[tuple(inner)] if inner else hint  # noqa: UP007


def list_bases(hint: Any) -> list[type]:
    """Return the classes in a type that an object may have: the base classes of what a class_path may name."""
    return [kind for kind in list_classes(hint) if kind.__module__ not in _NO_BASES and Protocol not in kind.__bases__]


def list_classes(hint: Any) -> dict[type, None]:
    """Return the classes in a type."""
    inner = chain.from_iterable((part, get_origin(part)) for part in iterate_hints(hint))
    return dict.fromkeys(filter(inspect.isclass, inner))


def is_class_name(text: str, hint: Any) -> bool:
    """Return True if a text is the name of a class, and the type hint allows objects but not text."""
    bases, parts = list_bases(hint), list(iterate_hints(hint))
    if not bases or str in parts or text in parts or not text.replace(".", "").isidentifier():
        return False
    return "." in text or text in group_by_name(bases)


def is_mapping_by_int(hint: Any) -> bool:
    """Return True if a type holds dictionaries with integer keys, and no other dictionaries."""
    return {get_args(each)[0] for each in iterate_hints(hint) if get_origin(each) is dict} == {int}


def accepts_true(hint: Any) -> bool:
    """Return True if a value of a type may be `true`, or if the type is unknown."""
    parts = list(iterate_hints(hint))
    unknown = isinstance(hint, str) or any(isinstance(each, TypeVar) for each in parts)
    return unknown or any(each in (bool, object, Any, inspect.Parameter.empty) for each in parts)


def describe_type(hint: Any) -> str:
    """Return a description of a type, for a user who sets the value."""
    origin, inner = get_origin(hint), [each for each in get_args(hint) if each not in (NoneType, ..., Tensor)]
    if hint in (Any, inspect.Parameter.empty):
        return "another type"
    if origin is Literal:
        return f"one of {', '.join(map(str, inner))}"
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(describe_type, inner)))
    if inspect.isclass(origin) and issubclass(origin, Mapping) and len(inner) == 2:
        return f"a dictionary of {describe_type(inner[1])}"
    if inspect.isclass(origin) and issubclass(origin, Iterable) and inner:
        return f"a list of {' and '.join(map(describe_type, inner))}"
    return str(getattr(hint, "__name__", hint))


# ---------------------------------------------------------------------- names of classes


@final
class Counterpart(NamedTuple):
    """Lumen's class that replaces a class of Lightning.

    Attributes:
        name: The full name of Lumen's class, or None.
        instead: The replacement, as a sentence.
    """

    name: str | None
    advice: str


def find_counterpart(name: str) -> Counterpart | None:
    """Return the replacement of a class of Lightning, given the full name; None for a class of another package."""
    package, _, rest = name.partition(".")
    short = rest.rpartition(".")[2]
    if package not in LIGHTNING_PACKAGES or not short:
        return None
    ours: str | None = f"lumen.{short}" if short in public else RENAMED.get(short)
    if ours is not None and ours.startswith("lumen.") and ours.rpartition(".")[2] not in public:
        ours = None
    return Counterpart(ours, f"Write {ours}." if ours else INSTEAD_OF_CLASSES.get(short, f"Lumen has no {short}."))


def find_class(name: str, bases: Sequence[type] = (), where: str = "", files: Sequence[str] = ()) -> Any:
    """Import a class by its full name, or find it by its short name among the imported subclasses of its bases.

    Args:
        name: The full or short name of the class.
        bases: The allowed base classes; empty allows any class.
        where: The key that names the class, for errors.
        files: The config files, whose directories may contain the module.

    Returns:
        The class; None for a short name without bases, which jsonargparse resolves by the type of the parameter.

    Raises:
        ConfigError: No class or several classes have the name.
    """
    module, _, short = name.rpartition(".")
    if not module and not bases and name:
        return None
    try:
        owner = import_module(module) if module else None
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the user's module imports a missing module
        text = f"{where}: cannot import {name}: there is no module {error.name}.{_describe_search(error.name, files)}"
        raise ConfigError(text) from error
    known = {key: [getattr(owner, key, None)] for key in dir(owner)} if owner else group_by_name(bases)
    if short not in known:
        problem = f"{module or 'lumen'} has no class {short}." if short else "no class is named."
        if not module and short in RENAMED | INSTEAD_OF_CLASSES and (ours := find_counterpart(f"lightning.{short}")):
            raise ConfigError(f"{where}: {problem} {ours.advice}")
        raise ConfigError(f"{where}: {problem}{suggest_names(short, known)} Write class_path: module.Class.")
    found, *others = known[short]
    if others:
        names = ", ".join(f"{each.__module__}.{short}" for each in known[short])
        raise ConfigError(f"{where}: several classes are called {short}: {names}. Write the full name of one class.")
    if bases and inspect.isclass(found) and not issubclass(found, tuple(bases)):
        kinds = " or ".join(base.__name__ for base in bases)
        raise ConfigError(f"{where}: {name} is not a subclass of {kinds}. Name a subclass of {kinds}.")
    return found


def group_by_name(bases: Iterable[type]) -> dict[str, list[type]]:
    """Return the imported subclasses of some classes, by short name; Lightning's classes have full names only."""
    for name, home in lumen._HOME.items():  # A class that Lumen imports lazily is found by its short name too.
        if home.startswith(("lumen.integrations", "lumen.tools")):
            getattr(lumen, name)
    found: dict[str, list[type]] = {}
    for kind in dict.fromkeys(chain.from_iterable(map(_iterate_subclasses, bases))):
        if "<locals>" not in kind.__qualname__ and kind.__module__.partition(".")[0] not in LIGHTNING_PACKAGES:
            found.setdefault(kind.__name__, []).append(kind)
    for name, kinds in found.items():
        usable = [each for each in kinds if not inspect.isabstract(each) and "._" not in each.__module__]
        usable = [each for each in usable if _is_importable(each)] or usable
        found[name] = usable if usable and len(kinds) > 1 else kinds
    return found


def _is_importable(kind: type) -> bool:
    """Return False if the full name of a class means a newer class, as after a notebook has defined the class again."""
    owner: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        owner = getattr(owner, name, None)
    return owner is kind


def _iterate_subclasses(base: type) -> Iterator[type]:
    kinds: list[type] = type.__subclasses__(base)
    yield from chain([base], *map(_iterate_subclasses, kinds))


def _describe_search(missing: str, files: Sequence[str]) -> str:
    """Return where Python looked for a module, similar names, and the config's directory that contains the module."""
    parent, _, short = missing.rpartition(".")
    looked_in = [*sys.modules[parent].__path__] if parent else [os.getcwd()]
    hint = suggest_names(short, (module.name for module in pkgutil.iter_modules(looked_in)))
    if parent:
        return f"{hint} Python searched {', '.join(looked_in)}."
    folders = [place for file in files for place in Path(os.path.abspath(expand_path(file))).parents]
    found = next((place for place in folders if (place / f"{short}.py").is_file() or (place / short).is_dir()), None)
    advice = (
        "Start lumen in the directory of this module"
        if found is None
        else f"The module is in {found}: start lumen there"
    )
    python_path = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    everywhere = ", ".join([f"{os.getcwd()} (where lumen was started)", *python_path])
    return (
        f"{hint} Python searched {everywhere} and the installed packages. {advice}, or add that directory to "
        "PYTHONPATH."
    )


# ---------------------------------------------------------------------- arguments


def make_class_parser(kind: type, skip: Collection[str] = ()) -> ArgumentParser:
    """Return a parser of the arguments of a class, without the arguments to skip."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind, skip=set(skip), fail_untyped=False)
    return parser


def get_defaults(kind: Any) -> dict[str, Any]:
    """Return the defaults of the arguments of a class; empty for a function."""
    return dict(make_class_parser(kind).get_defaults().as_dict()) if inspect.isclass(kind) else {}


def get_settable_defaults(kind: type, names: Collection[str]) -> dict[str, Any]:
    """Return the defaults of some arguments of a class, limited to values that a config can set."""
    found, known = dict[str, Any](), get_defaults(kind)
    for name in names & known.keys():
        if accepts(make_class_parser(kind, known.keys() - {name}), {name: known[name]}):
            found[name] = known[name]
    return found


def accepts(parser: ArgumentParser, values: Any) -> bool:
    """Return True if the values fit the options of a parser."""
    try:
        parser.parse_object(values)
    except ArgumentError:
        return False
    return True
