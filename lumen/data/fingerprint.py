"""Fingerprint of a map-style data set, computed without reading a sample; shows a resumed run that its data changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset

from lumen.data.rank_checks import digest

_SHOWN = 8
_WITH_INDICES = ", indices "


def known_length(thing: Any) -> int | None:
    """Return `len(thing)`, or None if its `__len__` is missing or raises an exception."""
    try:
        return len(thing)
    except Exception:  # PyTorch Geometric's batch samplers raise ValueError.
        return None


def reads_once(thing: Any, iterator: Any) -> bool:
    """Return True if an iterable can be read only once, judged by `iterator = iter(thing)`.

    The iterable can be read once if it is its own iterator, like a generator, and its `__iter__` only returns it.
    """
    if iterator is not thing:
        return False
    code = getattr(type(thing).__iter__, "__code__", None)
    return code is None or code.co_code == Iterator.__iter__.__code__.co_code


def describe(dataset: Any) -> str:
    """Return one line that almost always differs for two data sets: classes, lengths, a digest of subsets' indices.

    Returns:
        For example `Subset(80, indices 1f3a77c2, TensorDataset(100))`. For a user's class, the line also includes its
        attribute `indices`, and the subsets among its attributes.
    """
    return _describe(dataset, set())


def _describe(dataset: Any, met: set[int]) -> str:
    if id(dataset) in met:
        return "itself"
    met.add(id(dataset))
    length = known_length(dataset)
    said = "" if length is None else str(length)
    if (indices := getattr(dataset, "indices", None)) is not None and hasattr(indices, "__len__"):
        said += f"{_WITH_INDICES}{_digest(indices):08x}"
    parts = [_describe(part, met) for part in _parts(dataset)]
    if not isinstance(dataset, (Subset, ConcatDataset, StackDataset)):  # Other attributes may be created by reading.
        parts = [part for part in parts if _WITH_INDICES in part]
    if len(parts) > _SHOWN:
        parts = [*parts[:_SHOWN], f"and {len(parts) - _SHOWN} more {digest(parts):08x}"]
    return f"{type(dataset).__name__}({', '.join([said, *parts])})"


def _parts(dataset: Any) -> Iterator[Any]:
    """Yield the data sets among an object's attributes, and in lists and dictionaries that begin with a data set."""
    for value in list(getattr(dataset, "__dict__", {}).values()):
        several = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
        if isinstance(value, Dataset):
            yield value
        elif isinstance(next(iter(several), None), Dataset):
            yield from several


def _digest(indices: Any) -> int:
    try:
        numbers = np.asarray(indices, np.int64)
    except (TypeError, ValueError, OverflowError):  # Indices of a data set may be of any type.
        return digest(indices)
    return digest([numbers])
