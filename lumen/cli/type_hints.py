"""What a type says: the classes that a value may be of, and its name for somebody who fills in a value."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Protocol, TypeVar, Union, get_args, get_origin

from torch import Tensor

_NO_BASES = {"builtins", "types", "typing", "collections.abc", "inspect", "torch"}  # whose classes no class_path names


def hints_in(hint: Any) -> Iterator[Any]:
    """A type, and all that it is made of."""
    yield hint
    for each in get_args(hint):
        yield from hints_in(each)


def members_of(hint: Any) -> Iterator[Any]:
    """The alternatives of a type: the members of a union, or the type alone."""
    if get_origin(hint) in (Union, UnionType, Annotated):
        for each in get_args(hint)[: 1 if get_origin(hint) is Annotated else None]:
            yield from members_of(each)
    else:
        yield hint


def is_mapping(hint: Any) -> bool:
    """Return True if a type is that of dictionaries."""
    kind = get_origin(hint) or hint
    return inspect.isclass(kind) and issubclass(kind, Mapping)


def item_of(hint: Any, value: Any) -> Any:
    """Return the type of the items of a dictionary or list, of the type of the whole; which it is if that is unknown.

    Args:
        hint: The type of the whole.
        value: A dictionary or a list.
    """
    typed = [each for each in members_of(hint) if inspect.isclass(get_origin(each))]
    containers = [each for each in typed if issubclass(get_origin(each), Iterable)]
    fitting = [each for each in containers if is_mapping(each) is isinstance(value, dict)]
    inner = [part for each in fitting for part in get_args(each)[1 if is_mapping(each) else 0 :] if part is not ...]
    return Union[tuple(inner)] if inner else hint  # noqa: UP007


def bases_in(hint: Any) -> list[type]:
    """The classes in a type that an object may be of: the bases of what a class_path may name."""
    return [kind for kind in classes_in(hint) if kind.__module__ not in _NO_BASES and Protocol not in kind.__bases__]


def classes_in(hint: Any) -> dict[type, None]:
    """The classes in a type."""
    inner = chain.from_iterable((part, get_origin(part)) for part in hints_in(hint))
    return dict.fromkeys(filter(inspect.isclass, inner))


def may_be_true(hint: Any) -> bool:
    """Whether a value of a type may be `true`; so it may if the type is not known here."""
    parts = list(hints_in(hint))
    unknown = isinstance(hint, str) or any(isinstance(each, TypeVar) for each in parts)
    return unknown or any(each in (bool, object, Any, inspect.Parameter.empty) for each in parts)


def in_words(hint: Any) -> str:
    """A type as somebody who fills in a value would call it."""
    origin, inner = get_origin(hint), [each for each in get_args(hint) if each not in (NoneType, ..., Tensor)]
    if hint in (Any, inspect.Parameter.empty):
        return "another type"
    if origin is Literal:
        return f"one of {', '.join(map(str, inner))}"
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(in_words, inner)))
    if inspect.isclass(origin) and issubclass(origin, Mapping) and len(inner) == 2:
        return f"a dictionary of {in_words(inner[1])}"
    if inspect.isclass(origin) and issubclass(origin, Iterable) and inner:
        return f"a list of {' and '.join(map(in_words, inner))}"
    return str(getattr(hint, "__name__", hint))
