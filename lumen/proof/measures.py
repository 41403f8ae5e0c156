"""Tensors as a digest of their bits, and as a few numbers that are as near to each other as the tensors are."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from functools import lru_cache
from typing import Any, final
from zlib import crc32

import torch

from lumen.distributed.dtensor import is_sharded

_PERIOD, _PROJECTIONS = 4093, 3


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor on this process. Collective where it is sharded."""
    sharded: Any = tensor.detach()
    value: torch.Tensor = sharded.full_tensor() if is_sharded(tensor) else sharded
    return value.to_dense() if value.layout is not torch.strided else value


def measure(tensors: list[torch.Tensor], *, quick: bool = False) -> tuple[str, tuple[float, ...]]:
    """The digest of some tensors' bits, and numbers that are as near to each other as the tensors are.

    Args:
        tensors: Whole or sharded.
        quick: A checksum will do.
    """
    found: Any = _Checksum() if quick else hashlib.sha256()
    sums = [0.0] * (1 + _PROJECTIONS)
    for tensor in tensors:
        value = whole(tensor).cpu().contiguous().clone()  # numpy would keep FSDP from freeing what it looks at
        found.update(f"{value.dtype}{tuple(value.shape)}".encode())
        found.update(value.reshape(-1).view(torch.uint8).numpy().data if value.numel() else b"")
        flat = value.reshape(-1)
        flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
        for number, part in enumerate(_numbers(flat.double())):
            sums[number] += part
    return found.hexdigest()[:16], (math.sqrt(sums[0]), *sums[1:])


@final
class _Checksum:
    """One of 32 bits, with the methods of a hash."""

    def __init__(self) -> None:
        self._code = 0

    def update(self, data: Any) -> None:
        self._code = crc32(data, self._code)

    def hexdigest(self) -> str:
        return f"{self._code:08x}"


def _numbers(flat: torch.Tensor) -> list[float]:
    """The square of a vector's norm, and its projections."""
    rows, rest = divmod(len(flat), _PERIOD)
    body, tail = flat[: rows * _PERIOD].view(rows, _PERIOD), flat[rows * _PERIOD :]
    columns = _columns()
    heights = torch.cos(torch.arange(rows + 1, dtype=torch.float64) * 0.7 + 0.3)
    projections = heights[:rows] @ body @ columns + heights[rows] * (tail @ columns[:rest])
    return [float(flat @ flat), *projections.tolist()]


@lru_cache(maxsize=1)
def _columns() -> torch.Tensor:
    places = torch.arange(_PERIOD, dtype=torch.float64)
    return torch.stack([torch.cos(places * factor + factor) for factor in (0.0, 1.1, 2.3)], 1)


def tensors_in(thing: Any, place: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in a batch or an output, with where they are; numbers too, as tensors."""
    if isinstance(thing, torch.Tensor):
        yield place, thing
    elif isinstance(thing, bool | int | float):
        yield place, torch.tensor(thing)
    elif isinstance(thing, str):
        yield place, torch.tensor(list(thing.encode()), dtype=torch.uint8)
    elif isinstance(thing, Mapping):
        for name, value in thing.items():
            yield from tensors_in(value, f"{place}[{name!r}]")
    elif isinstance(thing, list | tuple):
        for number, value in enumerate(thing):
            yield from tensors_in(value, f"{place}[{number}]")
    elif is_dataclass(thing):
        for name, value in vars(thing).items():
            yield from tensors_in(value, f"{place}.{name}")


def loss_in(output: Any) -> torch.Tensor | None:
    """The loss in what a training step returned."""
    if isinstance(output, Mapping):
        output = output.get("loss")
    if isinstance(output, tuple | list) and output:
        output = output[0]
    return output if isinstance(output, torch.Tensor) else None


def counts_in(batch: Any) -> dict[str, int]:
    """What could be the number of units in a batch: samples, tokens that are no padding, what a mask marks."""
    found: dict[str, int] = {}
    for place, tensor in tensors_in(batch, "batch"):
        if tensor.ndim and "samples" not in found:
            found["samples"] = len(tensor)
        if tensor.is_floating_point() or tensor.is_complex() or not tensor.ndim:
            continue
        for value in (-100, 0, -1, 1):
            found[f"{place} != {value}"] = int((tensor != value).sum())
        found[f"the sum of {place}"] = int(tensor.sum())
    return found
