"""Tensors that are sharded over processes (DTensors): this process's shard, where it lies, and who writes it."""

from __future__ import annotations

import sys
from typing import Any

import torch

from lumen.distributed.processes import Processes
from lumen.internals.fully_shard import local_block_of, shards


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor, so that this process may hold only a shard of it."""
    if type(tensor) is torch.Tensor:
        return False
    module = sys.modules.get("torch.distributed.tensor")  # without it, and it is slow to import, there can be none
    return module is not None and isinstance(tensor, module.DTensor)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The elements that this process holds: the local tensor of a DTensor, else the tensor itself."""
    sharded: Any = tensor
    return sharded.to_local() if is_sharded(tensor) else tensor


def local_block(
    tensor: torch.Tensor, whole: torch.Size | None = None, *, copied: bool = False
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offset and shape of `local_tensor` in each dimension of the whole tensor; nothing is communicated.

    Args:
        tensor: A DTensor or an ordinary tensor.
        whole: The shape of another tensor that is sharded as `tensor` is; None: `tensor` itself.
        copied: That other tensor is whole on every process.
    """
    whole = tensor.shape if whole is None else whole
    if not is_sharded(tensor):
        return (0,) * len(whole), tuple(whole)
    sharded: Any = tensor
    return local_block_of(whole, sharded.device_mesh, _cuts(tensor, whole, copied=copied))


def from_local(own: torch.Tensor, like: torch.Tensor, whole: torch.Size, *, copied: bool = False) -> torch.Tensor:
    """A DTensor that is sharded as another one is, from this process's shard; nothing is communicated.

    Args:
        own: This process's shard, of the shape that `local_block` gives.
        like: The DTensor whose mesh and placements are used.
        whole: Shape of the whole tensor.
        copied: The tensor is whole on every process.
    """
    sharded: Any = like
    stride = torch.empty(whole, device="meta").stride()
    tensor: torch.Tensor = type(sharded).from_local(
        own, sharded.device_mesh, _cuts(like, whole, copied=copied), run_check=False, shape=whole, stride=stride
    )
    return tensor


def _cuts(like: torch.Tensor, whole: torch.Size, *, copied: bool) -> list[Any]:
    """The placements for a tensor of shape `whole` beside `like`; dimensions that it lacks are replicated."""
    from torch.distributed.tensor import Replicate

    sharded: Any = like
    return [Replicate() if shards(each) and (copied or each.dim >= len(whole)) else each for each in sharded.placements]


def is_cut(tensor: torch.Tensor, whole: torch.Size | None = None) -> bool:
    """Whether a process holds less than the whole of a tensor, or of one of shape `whole` that is sharded like it.

    A tensor made from a sharded one (an optimizer's state, say) is sharded only in dimensions whose size is the same.
    """
    sharded: Any = tensor
    whole = tensor.shape if whole is None else whole
    cut = [placement.dim for placement in sharded.placements if shards(placement)] if is_sharded(tensor) else []
    return any(whole[dim : dim + 1] == tensor.shape[dim : dim + 1] for dim in cut)


def copies(tensor: torch.Tensor, processes: Processes) -> tuple[int, int]:
    """Return the number of the replica that this process holds of its shard, and the count; without communication.

    Returns:
        The number of the replica, or -1 on a mesh of some of the processes that lacks rank 0, and their count.
    """
    if not is_sharded(tensor):
        return processes.rank, processes.world_size
    sharded: Any = tensor
    mesh, index, count = sharded.device_mesh, 0, 1
    for place, size, placement in zip(mesh.get_coordinate(), mesh.shape, sharded.placements, strict=True):
        if not shards(placement):
            index, count = index * size + place, count * size
    return index if mesh.size() == processes.world_size or 0 in mesh.mesh else -1, count


def is_first(tensor: torch.Tensor) -> bool:
    """Whether this process holds the shard that begins at offset 0, or the whole; nothing is communicated."""
    if not is_sharded(tensor):
        return True
    sharded: Any = tensor
    places = zip(sharded.device_mesh.get_coordinate(), sharded.placements, strict=True)
    return all(place == 0 for place, placement in places if shards(placement))


def placed_like(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A whole tensor as a DTensor that is sharded as `like` of the same shape is; nothing is communicated."""
    if not is_sharded(like):
        return value
    from torch.distributed.tensor import distribute_tensor

    sharded: Any = like
    return distribute_tensor(value, sharded.device_mesh, sharded.placements, src_data_rank=None)
