"""Checks of constructor arguments, and the texts of their errors."""

from __future__ import annotations

import difflib
import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, wraps
from numbers import Integral, Real
from pathlib import Path, PurePath
from types import NoneType, UnionType
from typing import (
    Any,
    ClassVar,
    Concatenate,
    Literal,
    ParamSpec,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from lumen.errors import ConfigError
from lumen.errors.lightning_names import ATTRIBUTES_OF_CALLBACKS

P = ParamSpec("P")
S = TypeVar("S")
_NAMES = {NoneType: "None", int: "an int", float: "a number", str: "a string", bool: "True or False", Path: "a path"}
_NO_COLUMN = re.compile(r"^[=+@-]|[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def check_arguments(constructor: Callable[Concatenate[S, P], None]) -> Callable[Concatenate[S, P], None]:
    """Make a constructor raise an error for arguments that are unknown, missing or of a wrong type.

    The class may have `INSTEAD`: advice for arguments that only Lightning's class of the same name has. It may have
    `NEUTRAL`: values of such arguments that request nothing, and are ignored. With `NONE_IS_DEFAULT`, None means
    the default of an argument that has a default.

    Raises:
        ConfigError: An argument is wrong; raised by the constructor, before its body runs.
    """
    signature = inspect.signature(constructor)
    has_kwargs = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in signature.parameters.values())

    @wraps(constructor)
    def checking(self: S, /, *args: P.args, **kwargs: P.kwargs) -> None:
        kind, none_is_default = type(self), getattr(type(self), "NONE_IS_DEFAULT", False)
        by_name = cast("dict[str, Any]", kwargs)
        for name, value in list(by_name.items()):
            if is_neutral_argument(kind, name, value) or (none_is_default and _is_default(constructor, name, value)):
                del by_name[name]
            elif name not in signature.parameters and not (has_kwargs and name not in getattr(kind, "INSTEAD", {})):
                raise ConfigError(_describe_unknown(kind, name, list(signature.parameters)[1:]))
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError as error:
            hint = getattr(kind, "INSTEAD", {}).get("*") or f"See help(lumen.{kind.__name__})."
            raise ConfigError(f"{kind.__name__}: {error}. {hint}") from None
        values = bound.arguments
        for name, hint in _get_hints(constructor).items():
            if name in values and not _matches_hint(values[name], hint):
                if not _matches_hint(converted := _as_builtin(values[name]), hint):
                    raise ConfigError(f"{kind.__name__}: {name}: {_describe_expected(hint, values[name])}")
                values[name] = converted
        constructor(*bound.args, **bound.kwargs)

    return checking


def _as_builtin(value: Any) -> Any:
    """Convert other mappings and sequences, such as OmegaConf's, to dictionaries and lists, and paths to `Path`."""
    if isinstance(value, os.PathLike):
        return Path(value)
    if isinstance(value, Mapping):
        return {key: _as_builtin(item) for key, item in value.items()}
    return [*map(_as_builtin, value)] if isinstance(value, Sequence) and not isinstance(value, str | bytes) else value


def is_neutral_argument(kind: type, name: str, value: Any) -> bool:
    """Return True if only Lightning's class has the argument, and its value requests nothing."""
    neutral = getattr(kind, "NEUTRAL", {}).get(name, ())
    return any(type(each) is type(value) and each == value for each in neutral)


def _is_default(constructor: Callable[..., Any], name: str, value: Any) -> bool:
    """Return True if the value is None and means the default of an argument that does not allow None."""
    parameter = inspect.signature(constructor).parameters.get(name)
    has_default = parameter is not None and parameter.default is not parameter.empty
    return value is None and has_default and not _matches_hint(None, _get_hints(constructor).get(name, Any))


def _describe_unknown(kind: type, name: str, parameters: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, parameters)
    hint = getattr(kind, "INSTEAD", {}).get(name) or (f"Did you mean {' or '.join(close)}?" if close else "")
    return f"{kind.__name__} has no argument {name}. {hint or f'See help(lumen.{kind.__name__}).'}"


def format_first_names(names: Sequence[str]) -> str:
    """Return the first eight names, for a message."""
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def refuse_unknown_arguments(who: str, unknown: Mapping[str, Any], instead: Mapping[str, str]) -> None:
    """Raise an error for an argument that a method lacks, with the replacement; None and False pass.

    Args:
        who: The name of the method.
        unknown: The unknown arguments, by name.
        instead: Advice by name of argument.

    Raises:
        ConfigError: An argument is neither None nor False.
    """
    for name, value in unknown.items():
        if value is not None and value is not False:
            raise ConfigError(f"{who} has no {name}: {instead.get(name, 'there is no such argument.')}")


class LightningAttributeErrors:
    """Mixin for a class that lacks attributes of Lightning's class; `ATTRIBUTES` has advice for each.

    Callbacks of Lumen get their advice from `ATTRIBUTES_OF_CALLBACKS`, by the name of the class.
    """

    ATTRIBUTES: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, **others: Any) -> None:
        super().__init_subclass__(**others)
        is_own = cls.__module__.startswith("lumen.")  # a user's class may have the same name by chance
        if is_own and (advice := ATTRIBUTES_OF_CALLBACKS.get(cls.__name__)):
            cls.ATTRIBUTES = advice

    def __getattr__(self, name: str) -> Any:
        """Raise an error that names the replacement of an attribute of Lightning's class.

        Raises:
            AttributeError: The class has no such attribute; or the error of a property of this name.
        """
        if hint := type(self).ATTRIBUTES.get(name):
            raise AttributeError(f"{type(self).__name__} has no attribute {name}. {hint}")
        return object.__getattribute__(self, name)


@cache
def _get_hints(constructor: Callable[..., Any]) -> Mapping[str, Any]:
    hints = get_type_hints(constructor)
    hints.pop("return", None)
    return hints


def _matches_hint(value: Any, hint: Any) -> bool:
    """Return True if a value has an annotated type, including values in lists and dictionaries.

    Types that this function does not know accept every value.
    """
    origin, within = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_matches_hint(value, each) for each in within)
    if origin is Literal:
        return value in within and type(value) in {type(each) for each in within}
    if origin is list:
        return isinstance(value, list | tuple) and all(_matches_hint(each, within[0]) for each in value)
    if origin is type:
        return inspect.isclass(value) and issubclass(value, within[0])
    if origin is dict:
        return isinstance(value, dict) and all(_matches_hint(each, within[1]) for each in value.values())
    if hint is Any:
        return True
    if hint is Path:  # a URL is a PurePath, not a Path
        return isinstance(value, PurePath)
    if hint in (int, float):
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    return isinstance(value, hint) if inspect.isclass(hint) and origin is None else True


def suggest_names(name: str, known: Iterable[str], cutoff: float = 0.6, form: Callable[[str], str] = str) -> str:
    """Return a question with the most similar names, as `difflib` finds them; empty without similar names.

    Args:
        name: The mistyped name.
        known: The existing names.
        cutoff: The lowest similarity, from 0 to 1.
        form: Function that formats a name for the message.
    """
    by_lower = {each.lower(): each for each in known}
    close = [by_lower[each] for each in difflib.get_close_matches(name.lower(), by_lower, n=2, cutoff=cutoff)]
    return f" Did you mean {' or '.join(map(form, close))}?" if close else ""


def describe_type(thing: Any) -> str:
    """Describe an object: the name of its type, or the name of a class."""
    return f"the class {thing.__name__}" if inspect.isclass(thing) else type(thing).__name__


def _describe_expected(hint: Any, found: Any) -> str:
    *names, last = dict.fromkeys(_iterate_type_names(hint))
    expected = f"{', '.join(names)} or {last}" if names else last
    texts = found if isinstance(found, list | tuple) else [found]
    if classes := [each.__name__ for each in texts if inspect.isclass(each)]:
        where = "" if texts[0] is found else " in a list"
        takes_text = all(each.endswith(("a string", "None")) for each in (*names, last))
        advice = f"Write its name: {classes[0]!r}" if takes_text else f"Create an object: {classes[0]}(...)"
        return f"expected {expected}, found the class {classes[0]}{where}. {advice}."
    known = _list_choices(hint)
    unknown = (each for each in texts if isinstance(each, str) and each not in known)
    close = [match for each in unknown for match in difflib.get_close_matches(each.lower(), known, n=1)]
    return f"expected {expected}, found {found!r}.{f' Did you mean {close[0]}?' if close else ''}"


def _list_choices(hint: Any) -> list[str]:
    """Return the strings that a type allows."""
    within = get_args(hint)
    if get_origin(hint) is Literal:
        return [each for each in within if isinstance(each, str)]
    return [text for each in within for text in _list_choices(each)]


def _iterate_type_names(hint: Any) -> Iterator[str]:
    origin, within = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        for each in within:
            yield from _iterate_type_names(each)
    elif origin is Literal:
        yield from map(repr, within)
    elif origin is type:
        yield f"a class derived from {within[0].__name__}"
    elif origin in (list, dict):
        yield f"a {origin.__name__} of " + " or ".join(_iterate_type_names(within[-1]))
    else:
        yield _NAMES.get(hint) or f"a {getattr(hint, '__name__', hint)}"


def expand_path(path: str | Path) -> Path:
    """Return a user's path on this machine, with `~` as the home directory.

    Raises:
        ConfigError: The path is empty, which pathlib reads as the working directory.
    """
    if not str(path):
        raise ConfigError(
            "a path is empty. Give a path, or None for no path. An attribute such as best_model_path is empty until "
            "a checkpoint exists."
        )
    return Path(os.path.expanduser(str(path)))


def check_column(name: str, call: str) -> None:
    """Raise an error for a name that a table cannot show.

    Args:
        name: The name of a logged value.
        call: The call that gives the name, for the error.

    Raises:
        ConfigError: The name has control characters, or spreadsheets would read it as a formula.
    """
    if _NO_COLUMN.search(name):
        raise ConfigError(
            f"{call}: the name of a value must not contain control characters or begin with =, +, - or @, which "
            "spreadsheets read as formulas. Use a different name."
        )


def check_at_least(least: float, who: str = "", /, **numbers: float | None) -> None:
    """Raise an error for arguments that are less than `least`; None passes.

    Args:
        least: The smallest valid number.
        who: The class of the arguments, for the message; "": the trainer or a method.
        numbers: The arguments, by name.

    Raises:
        ConfigError: An argument is less; the message names it.
    """
    for name, number in numbers.items():
        if number is not None and not number >= least:
            raise ConfigError(f"{f'{who}: {name}' if who else f'{name}:'} must be at least {least}, found {number}.")


def check_positive(**numbers: float | None) -> None:
    """Raise an error for arguments that are not more than 0; None passes.

    Raises:
        ConfigError: An argument is 0, negative or NaN; the message names it.
    """
    for name, number in numbers.items():
        if number is not None and not number > 0:
            raise ConfigError(f"{name}: must be more than 0, or None, found {number}.")
