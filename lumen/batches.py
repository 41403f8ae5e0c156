"""Nested batches: walk them, move them to a device, count their samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, MutableMapping
from copy import copy
from typing import Any

import torch


def move(batch: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Copy every tensor of a nested batch to a device, keeping the structure.

    Mappings, lists, tuples, named tuples and dataclasses are walked; anything else with a `to` method (a
    `PackedSequence`) is asked to move, and not cast; the rest (None, strings, numbers) is returned as it is. Copies
    from pinned memory do not block the host.

    Args:
        batch: What a loader returned.
        device: Where the tensors go.
        dtype: Of all floating tensors; None: each keeps its own.
    """
    if isinstance(batch, torch.Tensor):
        dtype = dtype if batch.is_floating_point() else None
        return batch.to(device, dtype, non_blocking=device.type != "mps")  # on MPS the copy may come too late
    if isinstance(batch, Mapping):
        moved = {key: move(value, device, dtype) for key, value in batch.items()}
        if type(batch) is dict:
            return moved
        if isinstance(batch, MutableMapping):
            kept = copy(batch)  # with whatever makes it more than its items
            kept.update(moved)
            return kept
        return type(batch)(moved)  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        if hasattr(batch, "to"):
            return batch.to(device)
        return type(batch)(*(move(value, device, dtype) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)([move(value, device, dtype) for value in batch])
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = {field.name: move(getattr(batch, field.name), device, dtype) for field in dataclasses.fields(batch)}
        moved_batch = object.__new__(type(batch))  # not replace(): init=False and InitVar fields must survive
        for name, value in fields.items():
            object.__setattr__(moved_batch, name, value)
        return moved_batch
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    return batch


def tensors(batch: Any) -> Iterator[torch.Tensor]:
    """The tensors of a nested batch, depth first."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from tensors(value)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            yield from tensors(getattr(batch, field.name))


def count_samples(batch: Any) -> int:
    """Size of dimension 0 of the first tensor that has one; 1 where there is none."""
    return next((tensor.shape[0] for tensor in tensors(batch) if tensor.dim() > 0), 1)
