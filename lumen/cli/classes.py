"""Classes by the names that configurations give them."""

from __future__ import annotations

import difflib
import os
import pkgutil
import sys
from importlib import import_module
from inspect import isclass
from types import ModuleType
from typing import Any

import torch
from torch import nn

from lumen.callbacks import Callback
from lumen.datamodule import DataModule
from lumen.errors import ConfigError
from lumen.loggers import Logger
from lumen.strategies import Strategy
from lumen.task import TaskModule

#: Where the classes are that need no module before their name.
_HOMES: dict[type, str] = {
    Callback: "lumen.callbacks",
    Logger: "lumen.loggers",
    Strategy: "lumen.strategies",
    torch.optim.Optimizer: "torch.optim",
    torch.optim.lr_scheduler.LRScheduler: "torch.optim.lr_scheduler",
    nn.Module: "torch.nn",
}
_BASES: dict[str, type] = {
    "model": TaskModule,
    "data": DataModule,
    "optimizer": torch.optim.Optimizer,
    "lr_scheduler": torch.optim.lr_scheduler.LRScheduler,
}


def base_of(path: tuple[str, ...]) -> type | None:
    """The base class of what a place of a configuration names, as far as the place alone says it."""
    if path[:2] == ("trainer", "callbacks"):
        return Callback
    return _BASES.get(path[0]) if len(path) == 1 else None


def same_class(path: tuple[str, ...], first: str, second: str) -> bool:
    """Whether two names mean one class at a place; names that mean nothing are not the same."""
    base = base_of(path)
    try:
        found = [find_class(name, () if base is None else (base,), "") for name in (first, second)]
    except ConfigError:
        return False
    return found[0][0] is found[1][0]


def find_class(name: str, bases: tuple[type, ...], where: str) -> tuple[type, str]:
    """Find a class.

    Args:
        name: `module.Class`, or the bare name of a class that Lumen or torch brings or that is imported already.
        bases: It must be a subclass of one of them; () for any.
        where: Begins the message of an error.

    Returns:
        The class and its full name.

    Raises:
        ConfigError: There is none; what was looked for and where, and what looks like it.
    """
    module_name, _, _ = name.rpartition(".")
    found, full_name = (_imported(name, bases, where), name) if module_name else _by_short_name(name, bases, where)
    if not isclass(found):
        raise ConfigError(f"{where}: {name} is not a class but {type(found).__name__} {found!r:.60}.")
    if bases and not issubclass(found, bases):
        expected = " or ".join(base.__name__ for base in bases)
        raise ConfigError(f"{where}: {name} is no {expected}.{_suggested(name, _classes_of(found.__module__, bases))}")
    return found, full_name


def _by_short_name(name: str, bases: tuple[type, ...], where: str) -> tuple[Any, str]:
    homes = [home for base, home in _HOMES.items() if any(issubclass(each, base) or each is object for each in bases)]
    for home in homes:
        found = getattr(import_module(home), name, None)
        if isclass(found) and issubclass(found, bases):
            return found, f"{home}.{name}"
    imported = {f"{kind.__module__}.{kind.__qualname__}": kind for base in bases for kind in _subclasses(base)}
    candidates = {full_name: kind for full_name, kind in imported.items() if kind.__name__ == name}
    if len(candidates) > 1:
        raise ConfigError(f"{where}: {name} may be {' or '.join(sorted(candidates))}. Give the full name.")
    if candidates:
        full_name, kind = candidates.popitem()
        return kind, full_name
    known = {kind.__name__ for kind in imported.values()}.union(*(_classes_of(home, bases) for home in homes))
    hint = _suggested(name, sorted(known)) or " Give module and class, such as my_module.MyClass."
    raise ConfigError(f"{where}: there is no class {name}.{hint}")


def _subclasses(base: type) -> set[type]:
    found: set[type] = set() if base is object else set(base.__subclasses__())
    return found.union(*(_subclasses(subclass) for subclass in found))


def _imported(name: str, bases: tuple[type, ...], where: str) -> Any:
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:count])
        try:
            found: Any = import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise  # the module is there, and what is missing is something it imports
            continue
        for number, part in enumerate(parts[count:], start=count):
            if not hasattr(found, part):
                raise ConfigError(f"{where}: {_absent(found, '.'.join(parts[:number]), part, bases)}")
            found = getattr(found, part)
        return found
    top = parts[0]
    modules = {module.name for module in pkgutil.iter_modules([os.getcwd()])}
    hint = _suggested(top, sorted(modules))
    raise ConfigError(
        f"{where}: cannot import {name}: there is no module {top} in {os.getcwd()} or where Python looks for packages "
        f"({sys.prefix}).{hint or ' Run lumen in the directory that holds it, or install it.'}"
    )


def _absent(owner: Any, owner_name: str, part: str, bases: tuple[type, ...]) -> str:
    names = _classes_of(owner_name, bases) if isinstance(owner, ModuleType) else []
    if hasattr(owner, "__path__"):
        names += [module.name for module in pkgutil.iter_modules(owner.__path__)]
    close = [f"{owner_name}.{name}" for name in difflib.get_close_matches(part, names, n=2)]
    hint = f" Did you mean {' or '.join(close)}?" if close else f" There are: {', '.join(names)}." if names else ""
    return f"{owner_name} has no {part}.{hint}"


def _classes_of(module_name: str, bases: tuple[type, ...]) -> list[str]:
    members = vars(sys.modules[module_name]) if module_name in sys.modules else {}
    return [name for name, member in members.items() if isclass(member) and issubclass(member, bases or object)]


def _suggested(name: str, known: list[str]) -> str:
    by_lower = {each.lower(): each for each in known}
    close = [by_lower[each] for each in difflib.get_close_matches(name.rpartition(".")[2].lower(), by_lower, n=2)]
    return f" Did you mean {' or '.join(close)}?" if close else ""
