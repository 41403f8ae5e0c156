"""Fingerprint of a map-style data set, computed without reading a sample; shows a resumed run that its data changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset

from lumen.data.rank_checks import digest_batch

_MAX_SHOWN = 8
_WITH_INDICES = ", indices "


def get_length(thing: Any) -> int | None:
    """Return `len(thing)`, or None if its `__len__` is missing or raises an exception."""
    try:
        return len(thing)
    except Exception:  # PyTorch Geometric's batch samplers raise ValueError.
        return None


def is_single_pass(thing: Any, iterator: Any) -> bool:
    """Return True if an iterable can be read only once, judged by `iterator = iter(thing)`.

    The iterable can be read once if it is its own iterator, like a generator, and its `__iter__` only returns it.
    """
    if iterator is not thing:
        return False
    code = getattr(type(thing).__iter__, "__code__", None)
    return code is None or code.co_code == Iterator.__iter__.__code__.co_code


def make_fingerprint(dataset: Any) -> str:
    """Return one line that almost always differs for two data sets: classes, lengths, a digest of subsets' indices.

    Returns:
        For example `Subset(80, indices 1f3a77c2, TensorDataset(100))`. For a user's class, the line also includes its
        attribute `indices`, and the subsets among its attributes.
    """
    return _describe_part(dataset, set())


def _describe_part(dataset: Any, visited: set[int]) -> str:
    if id(dataset) in visited:
        return "itself"
    visited.add(id(dataset))
    length = get_length(dataset)
    summary = "" if length is None else str(length)
    if (indices := getattr(dataset, "indices", None)) is not None and hasattr(indices, "__len__"):
        summary += f"{_WITH_INDICES}{_digest_indices(indices):08x}"
    parts = [_describe_part(part, visited) for part in _iterate_datasets(dataset)]
    if not isinstance(dataset, (Subset, ConcatDataset, StackDataset)):  # Other attributes may be created by reading.
        parts = [part for part in parts if _WITH_INDICES in part]
    if len(parts) > _MAX_SHOWN:
        parts = [*parts[:_MAX_SHOWN], f"and {len(parts) - _MAX_SHOWN} more {digest_batch(parts):08x}"]
    return f"{type(dataset).__name__}({', '.join([summary, *parts])})"


def _iterate_datasets(dataset: Any) -> Iterator[Any]:
    """Yield the data sets among an object's attributes, and in lists and dictionaries that begin with a data set."""
    for value in list(getattr(dataset, "__dict__", {}).values()):
        several = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
        if isinstance(value, Dataset):
            yield value
        elif isinstance(next(iter(several), None), Dataset):
            yield from several


def _digest_indices(indices: Any) -> int:
    try:
        numbers = np.asarray(indices, np.int64)
    except (TypeError, ValueError, OverflowError):  # Indices of a data set may be of any type.
        return digest_batch(indices)
    return digest_batch([numbers])
