"""Tensors of which every process holds a part: which part that is, who writes it, and how one is filled."""

from __future__ import annotations

import sys
from typing import Any

import torch

from lumen.distributed.processes import Processes
from lumen.internals.fully_shard import local_box


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor, whose bytes lie on several processes."""
    if type(tensor) is torch.Tensor:
        return False
    module = sys.modules.get("torch.distributed.tensor")  # without it, and it is slow to import, there can be none
    return module is not None and isinstance(tensor, module.DTensor)


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor."""
    sharded: Any = tensor
    return sharded.to_local() if is_sharded(tensor) else tensor


def own_box(
    tensor: torch.Tensor, whole: torch.Size | None = None, *, copied: bool = False
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where `own_part` begins in each dimension of the tensor, and its shape; nothing is communicated.

    Args:
        tensor: Cut up or not.
        whole: The same of a tensor of this shape that lies beside that one.
        copied: Every process has all of that.
    """
    whole = tensor.shape if whole is None else whole
    if not is_sharded(tensor):
        return (0,) * len(whole), tuple(whole)
    sharded: Any = tensor
    return local_box(whole, sharded.device_mesh, _cuts(tensor, whole, copied))


def from_part(own: torch.Tensor, like: torch.Tensor, whole: torch.Size, *, copied: bool = False) -> torch.Tensor:
    """The tensor that lies beside another one, of which this process holds `own`; nothing is communicated.

    Args:
        own: What `own_box` says.
        like: The other one, which is cut up.
        whole: The shape of the tensor.
        copied: Every process has all of it.
    """
    sharded: Any = like
    stride = torch.empty(whole, device="meta").stride()
    tensor: torch.Tensor = type(sharded).from_local(
        own, sharded.device_mesh, _cuts(like, whole, copied), run_check=False, shape=whole, stride=stride
    )
    return tensor


def _cuts(like: torch.Tensor, whole: torch.Size, copied: bool) -> list[Any]:
    """How a tensor of a shape is placed as another one is; one that lacks the dimension is copied."""
    from torch.distributed.tensor import Replicate

    sharded: Any = like
    return [
        Replicate() if each.is_shard() and (copied or each.dim >= len(whole)) else each for each in sharded.placements
    ]


def is_cut(tensor: torch.Tensor, whole: torch.Size | None = None) -> bool:
    """Whether a process holds less than all of a tensor, or would of one of this shape, which lies beside it.

    Beside another one lies what was made from it: it is cut in a dimension that is left as it was.
    """
    sharded: Any = tensor
    whole = tensor.shape if whole is None else whole
    cut = [placement.dim for placement in sharded.placements if placement.is_shard()] if is_sharded(tensor) else []
    return any(whole[dim : dim + 1] == tensor.shape[dim : dim + 1] for dim in cut)


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


def is_first(tensor: torch.Tensor) -> bool:
    """Whether this process holds the first part of a tensor, or all of it; nothing is communicated."""
    if not is_sharded(tensor):
        return True
    sharded: Any = tensor
    places = zip(sharded.device_mesh.get_coordinate(), sharded.placements, strict=True)
    return all(place == 0 for place, placement in places if placement.is_shard())


def placed_like(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A whole tensor, cut as another one of its shape is; nothing is communicated."""
    if not is_sharded(like):
        return value
    from torch.distributed.tensor import distribute_tensor

    sharded: Any = like
    return distribute_tensor(value, sharded.device_mesh, sharded.placements, src_data_rank=None)
