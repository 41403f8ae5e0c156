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
    attributes: Any = vars(owner)
    was_set, before = name in attributes, attributes.get(name)
    set_value = partial(setattr, owner) if isinstance(owner, type) else attributes.__setitem__
    set_value(name, value)
    try:
        yield
    finally:
        if was_set:
            set_value(name, before)
        else:
            attributes.pop(name, None)
