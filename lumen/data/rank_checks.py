"""Checks that all processes of a run have the same data, before they train on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any
from zlib import crc32

import numpy as np
import torch

from lumen.data.windows import LoadedBatch, RankSlice
from lumen.errors import DataError

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_same_data_on_ranks(rank_slice: RankSlice, description: str, found: Any, advice: str) -> None:
    """Raise if data differs between processes. Collective: every rank must call this.

    Args:
        rank_slice: Rank of this process, number of processes, and their communication.
        description: Description of the compared data for the message: "data set or order".
        found: The data of this process: plain data, compared by `==`.
        advice: A sentence for the message: the user's remedy.

    Raises:
        DataError: The data of a rank differs from that of rank 0; raised on every rank.
    """
    reports = rank_slice.gather_all(found)
    for rank, other in enumerate(reports):
        if other != reports[0]:
            raise DataError(
                f"rank {rank} has a different {description} than rank 0: {other}, not {reports[0]}. {advice}"
            )


def share_batch(rank_slice: RankSlice, source: int, item: LoadedBatch | None) -> LoadedBatch:
    """Return this process's own batch, or that of rank `source` without one. Collective: every rank must call this."""
    shared = rank_slice.gather(item if rank_slice.rank == source else None)[source]
    assert shared is not None
    return shared if item is None else item


def digest_batch(batch: Any, code: int = 0, most: int | None = None) -> int:
    """Return a checksum of a batch's values; objects other than plain data and tensors count by their class alone.

    Args:
        batch: Nested data, as given by a loader.
        code: The checksum of the preceding data.
        most: Approximate number of values of each tensor and array to include. Default: all.
    """
    for piece in iterate_bytes(batch, most):
        code = crc32(piece, code)
    return code


def iterate_bytes(part: Any, most: int | None = None) -> Iterator[Any]:
    """Yield the bytes of nested data in order; for objects other than plain data and tensors, the class name."""
    if most is not None and isinstance(part, torch.Tensor | np.ndarray):
        yield repr((part.dtype, *part.shape)).encode()
        if (numbers := _as_host_array(part)) is not None:
            yield numbers.flat[:: max(1, numbers.size // most)].tobytes()
        return
    if most is not None and isinstance(part, str | bytes):
        part = part[:most]
    if isinstance(part, torch.Tensor):
        yield f"{part.dtype}{tuple(part.shape)}".encode()
        if part.layout is torch.strided and not part.is_nested:
            yield part.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy()
    elif isinstance(part, np.ndarray) and part.dtype != object:
        yield f"{part.dtype}{part.shape}".encode()
        yield part.tobytes()
    elif isinstance(part, Mapping):
        for key, value in part.items():
            yield str(key).encode()
            yield from iterate_bytes(value, most)
    elif isinstance(part, (list, tuple)):
        yield str(len(part)).encode()
        for value in part:
            yield from iterate_bytes(value, most)
    elif dataclasses.is_dataclass(part) and not isinstance(part, type):
        yield from iterate_bytes({each.name: getattr(part, each.name) for each in dataclasses.fields(part)}, most)
    elif isinstance(part, np.generic):
        yield repr(part.item()).encode()
    elif part is None or isinstance(part, (bool, int, float, complex, str, bytes)):
        yield repr(part).encode()
    else:
        yield type(part).__name__.encode()


def _as_host_array(part: torch.Tensor | np.ndarray) -> np.ndarray[Any, Any] | None:
    """Return the memory of an array or tensor; None for tensors that need a copy or a wait for a device."""
    if isinstance(part, np.ndarray):
        return None if part.dtype == object else part
    if part.device.type != "cpu" or part.layout is not torch.strided or part.is_nested or part.is_complex():
        return None
    return part.detach().view(_BITS[part.itemsize]).numpy()
