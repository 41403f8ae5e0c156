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
    if most is not None and isinstance(part, torch.Tensor | np.ndarray) and part.ndim and not _is_irregular(part):
        yield str(tuple(part.shape)).encode()
        part = part.reshape(-1)
        part = part[:: max(1, len(part) // most)]
    elif most is not None and isinstance(part, str | bytes):
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


def _is_irregular(part: torch.Tensor | np.ndarray) -> bool:
    return isinstance(part, torch.Tensor) and (part.layout is not torch.strided or part.is_nested)
