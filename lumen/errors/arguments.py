"""Checks the arguments of Lumen's own classes before anything is done with them."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, wraps
from numbers import Integral, Real
from pathlib import Path, PurePath
from types import NoneType, UnionType
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from lumen.errors import ConfigError

P = ParamSpec("P")
S = TypeVar("S")
_NAMES = {NoneType: "None", int: "an int", float: "a number", str: "a string", bool: "True or False", Path: "a path"}


def checked(constructor: Callable[Concatenate[S, P], None]) -> Callable[Concatenate[S, P], None]:
    """Let a constructor say which of its arguments is unknown, missing or of another type than it is annotated with.

    Its class may have `INSTEAD`: for arguments that Lightning's class of that name has, what serves in their place.

    Raises:
        ConfigError: By the constructor, before it begins.
    """
    signature = inspect.signature(constructor)

    @wraps(constructor)
    def checking(self: S, /, *args: P.args, **kwargs: P.kwargs) -> None:
        kind = type(self)
        for name in kwargs:
            if name not in signature.parameters:
                raise ConfigError(_unknown(kind, name, list(signature.parameters)[1:]))
        try:
            given = signature.bind(self, *args, **kwargs).arguments
        except TypeError as error:
            raise ConfigError(f"{kind.__name__}: {error}. See help(lumen.{kind.__name__}).") from None
        for name, hint in _hints(constructor).items():
            if name in given and not _fits(given[name], hint):
                raise ConfigError(f"{kind.__name__}: {name}: {_expected(hint, given[name])}")
        constructor(self, *args, **kwargs)

    return checking


def _unknown(kind: type, name: str, parameters: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, parameters)
    hint = getattr(kind, "INSTEAD", {}).get(name) or (f"Did you mean {' or '.join(close)}?" if close else "")
    return f"{kind.__name__} has no argument {name}. {hint or f'See help(lumen.{kind.__name__}).'}"


@cache
def _hints(constructor: Callable[..., Any]) -> Mapping[str, Any]:
    hints = get_type_hints(constructor)
    hints.pop("return", None)
    return hints


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value has an annotated type, values in lists and dictionaries included; True for types unknown here."""
    origin, within = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, each) for each in within)
    if origin is Literal:
        return value in within and type(value) in {type(each) for each in within}
    if origin is list:
        return isinstance(value, list | tuple) and all(_fits(each, within[0]) for each in value)
    if origin is type:
        return inspect.isclass(value) and issubclass(value, within[0])
    if origin is dict:
        return isinstance(value, dict) and all(_fits(each, within[1]) for each in value.values())
    if hint is Any:
        return True
    if hint is Path:  # a URL is none that the operating system knows
        return isinstance(value, PurePath)
    if hint in (int, float):
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    return isinstance(value, hint) if inspect.isclass(hint) and origin is None else True


def _expected(hint: Any, found: Any) -> str:
    *names, last = dict.fromkeys(_names(hint))
    expected = f"{', '.join(names)} or {last}" if names else last
    if inspect.isclass(found):
        return f"expected {expected}, found the class {found.__name__}. Make one: {found.__name__}(...)."
    return f"expected {expected}, found {found!r}."


def _names(hint: Any) -> Iterator[str]:
    origin, within = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        for each in within:
            yield from _names(each)
    elif origin is Literal:
        yield from map(repr, within)
    elif origin is type:
        yield f"a class derived from {within[0].__name__}"
    elif origin in (list, dict):
        yield f"a {origin.__name__} of " + " or ".join(_names(within[-1]))
    else:
        yield _NAMES.get(hint) or f"a {getattr(hint, '__name__', hint)}"


def local_path(path: str | Path) -> Path:
    """A path on this machine as a user wrote it: `~` is the home directory, as in a shell.

    Raises:
        ConfigError: The path is empty, which pathlib takes for the working directory.
    """
    if not str(path):
        raise ConfigError(
            "a path is empty, which names nothing. Give one, or None for none; an attribute such as best_model_path is "
            "empty until there is a checkpoint."
        )
    return Path(os.path.expanduser(str(path)))


def at_least(least: float, **numbers: float | None) -> None:
    """Refuse arguments that are less than `least`; None passes.

    Raises:
        ConfigError: One of them is less; the message names it.
    """
    for name, number in numbers.items():
        if number is not None and number < least:
            raise ConfigError(f"{name}: must be at least {least}, found {number}.")
