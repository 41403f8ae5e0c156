"""Checks that the processes of a run were given the same data, before they train on it."""

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


def check_same(rank_slice: RankSlice, what: str, found: Any, advice: str) -> None:
    """Refuse data that is not the same in all processes. Collective: every rank must call this.

    Args:
        rank_slice: Rank of this process, number of processes, and how they communicate.
        what: What is compared, in words for the message: "data set or order".
        found: What this process has: plain data, compared by `==`.
        advice: A sentence for the message: what the user should do.

    Raises:
        DataError: A rank has found something else than rank 0; raised on every rank.
    """
    told = rank_slice.gather_all(found)
    for rank, other in enumerate(told):
        if other != told[0]:
            raise DataError(f"rank {rank} has another {what} than rank 0: {other}, not {told[0]}. {advice}")


def lend(rank_slice: RankSlice, source: int, item: LoadedBatch | None) -> LoadedBatch:
    """This process's own batch, or that of rank `source` if it has none. Collective: every rank must call this."""
    given = rank_slice.gather(item if rank_slice.rank == source else None)[source]
    assert given is not None
    return given if item is None else item


def digest(batch: Any, code: int = 0, most: int | None = None) -> int:
    """A checksum of a batch's values; parts that are neither plain data nor tensors count by their class alone.

    Args:
        batch: Nested data, as a loader has given it.
        code: The checksum of what comes before.
        most: About how many numbers of each tensor and array count. Default: all.
    """
    for piece in pieces(batch, most):
        code = crc32(piece, code)
    return code


def pieces(part: Any, most: int | None = None) -> Iterator[Any]:
    """The bytes of nested data, in their order; of what is neither plain data nor a tensor, the name of its class."""
    if most is not None and isinstance(part, torch.Tensor | np.ndarray):
        yield repr((part.dtype, *part.shape)).encode()
        if (numbers := _on_host(part)) is not None:
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
            yield from pieces(value, most)
    elif isinstance(part, (list, tuple)):
        yield str(len(part)).encode()
        for value in part:
            yield from pieces(value, most)
    elif dataclasses.is_dataclass(part) and not isinstance(part, type):
        yield from pieces(vars(part), most)
    elif isinstance(part, np.generic):
        yield repr(part.item()).encode()
    elif part is None or isinstance(part, (bool, int, float, complex, str, bytes)):
        yield repr(part).encode()
    else:
        yield type(part).__name__.encode()


def _on_host(part: torch.Tensor | np.ndarray) -> np.ndarray[Any, Any] | None:
    """Return the memory of an array or tensor; None for tensors that only a copy or a wait for a device would read."""
    if isinstance(part, np.ndarray):
        return None if part.dtype == object else part
    if part.device.type != "cpu" or part.layout is not torch.strided or part.is_nested or part.is_complex():
        return None
    return part.detach().view(_BITS[part.itemsize]).numpy()
