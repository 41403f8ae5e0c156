"""Tensors of which every process holds a part: which part that is, who writes it, and how one is filled."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from lumen.strategies.processes import Processes


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor, whose bytes lie on several processes."""
    module = sys.modules.get("torch.distributed.tensor")  # without it, and it is slow to import, there can be none
    return module is not None and isinstance(tensor, module.DTensor)


def any_sharded(sections: Mapping[str, Mapping[str, torch.Tensor]]) -> bool:
    """Whether one of the tensors, by section and name, is."""
    return any(is_sharded(tensor) for tensors in sections.values() for tensor in tensors.values())


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor. Collective where it is sharded: every rank must call this, for the same tensors in one order."""
    sharded: Any = tensor
    return sharded.full_tensor() if is_sharded(tensor) else tensor


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor."""
    sharded: Any = tensor
    return sharded.to_local() if is_sharded(tensor) else tensor


def own_box(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where `own_part` begins in each dimension of the tensor, and its shape; nothing is communicated."""
    if not is_sharded(tensor):
        return (0,) * tensor.ndim, tuple(tensor.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sharded: Any = tensor
    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, sharded.device_mesh, sharded.placements)
    return tuple(offsets), tuple(shape)


def copies(tensor: torch.Tensor, processes: Processes) -> tuple[int, int]:
    """Which copy of its part this process holds, and how many copies there are; nothing is communicated."""
    if not is_sharded(tensor):
        return processes.rank, processes.world_size
    sharded: Any = tensor
    mesh, index, count = sharded.device_mesh, 0, 1
    for place, size, placement in zip(mesh.get_coordinate(), mesh.shape, sharded.placements, strict=True):
        if not placement.is_shard():
            index, count = index * size + place, count * size
    return index, count


def placed_like(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A whole tensor, cut as another one of its shape is; nothing is communicated."""
    if not is_sharded(like):
        return value
    from torch.distributed.tensor import distribute_tensor

    sharded: Any = like
    return distribute_tensor(value, sharded.device_mesh, sharded.placements, src_data_rank=None)


@torch.no_grad()
def fill(destination: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a whole tensor, or this process's part of it, in place."""
    own_part(destination).copy_(own_part(placed_like(value, destination)))
