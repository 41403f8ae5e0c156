"""Temporary replacement of attributes of objects and classes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any


@contextmanager
def replaced_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of one object within the context, hiding the attribute of its class.

    Args:
        owner: An object, whose `__setattr__` is bypassed; or a class that defines the attribute itself.
        name: The name of the attribute.
        value: The value in the context.
    """
    own: Any = vars(owner)
    is_own, before = name in own, own.get(name)
    put = partial(setattr, owner) if isinstance(owner, type) else own.__setitem__
    put(name, value)
    try:
        yield
    finally:
        if is_own:
            put(name, before)
        else:
            own.pop(name, None)
