"""What the processes of a run tell each other about their data, before they work on it together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any
from zlib import crc32

import numpy as np
import torch

from lumen.data.windows import Item, Shard
from lumen.errors import DataError


def check_same(shard: Shard, what: str, found: Any, advice: str) -> None:
    """Refuse data that is not the same for all processes. Collective: every rank must call this.

    Args:
        shard: This process among them.
        what: Ought to be the same.
        found: Here; plain data.
        advice: What to do.

    Raises:
        DataError: On every process: another one found something else than rank 0.
    """
    told = shard.gather(found)
    for rank, other in enumerate(told):
        if other != told[0]:
            raise DataError(f"rank {rank} has another {what} than rank 0: {other}, not {told[0]}. {advice}")


def lend(shard: Shard, source: int, item: Item | None) -> Item:
    """A process's own item, or that of rank `source` if it has none. Collective: every rank must call this."""
    given = shard.gather(item if shard.rank == source else None)[source]
    assert given is not None
    return given if item is None else item


def digest(batch: Any) -> int:
    """A number that two different batches hardly share: of their values, as far as they are plain or tensors."""
    code = 0
    for piece in _pieces(batch):
        code = crc32(piece, code)
    return code


def _pieces(part: Any) -> Iterator[Any]:
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
            yield from _pieces(value)
    elif isinstance(part, (list, tuple)):
        yield str(len(part)).encode()
        for value in part:
            yield from _pieces(value)
    elif dataclasses.is_dataclass(part) and not isinstance(part, type):
        yield from _pieces(vars(part))
    elif isinstance(part, np.generic):
        yield repr(part.item()).encode()
    elif part is None or isinstance(part, (bool, int, float, complex, str, bytes)):
        yield repr(part).encode()
    else:
        yield type(part).__name__.encode()
