"""Helpers for sharded tensors (DTensors): the local shard, its offset, and the process that writes it."""

from __future__ import annotations

import sys
from typing import Any

import torch

from lumen.distributed.processes import Processes
from lumen.internals.fully_shard import compute_local_block, is_sharding


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is a DTensor, so that this process may hold only a shard."""
    if type(tensor) is torch.Tensor:
        return False
    module = sys.modules.get("torch.distributed.tensor")  # slow to import; a DTensor exists only after the import
    return module is not None and isinstance(tensor, module.DTensor)


def get_local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements on this process: the local tensor of a DTensor, else the tensor itself."""
    sharded: Any = tensor
    return sharded.to_local() if is_sharded(tensor) else tensor


def get_local_block(
    tensor: torch.Tensor, shape: torch.Size | None = None, *, is_replicated: bool = False
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offset and shape of `get_local_tensor` in the unsharded tensor, without communication.

    Args:
        tensor: A DTensor or an ordinary tensor.
        shape: The unsharded shape of another tensor with the sharding of `tensor`; None: `tensor` itself.
        is_replicated: The other tensor is replicated on every process.
    """
    shape = tensor.shape if shape is None else shape
    if not is_sharded(tensor):
        return (0,) * len(shape), tuple(shape)
    sharded: Any = tensor
    return compute_local_block(shape, sharded.device_mesh, _get_placements(tensor, shape, is_replicated=is_replicated))


def list_saved_blocks(
    tensor: torch.Tensor, shape: torch.Size | None = None, *, is_replicated: bool = False
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return offset and shape of the parts of `get_local_tensor` in the tensor of one process, in the order of rows.

    This is the block of `get_local_block`, except for a packed tensor (`find_packed`).

    Args:
        tensor: A DTensor or an ordinary tensor.
        shape: The unsharded shape of another tensor with the sharding of `tensor`; None: `tensor` itself.
        is_replicated: The other tensor is replicated on every process.
    """
    offsets, local_shape = get_local_block(tensor, shape, is_replicated=is_replicated)
    packed = find_packed(tensor)
    if packed is None or is_replicated or not offsets:
        return [(offsets, local_shape)]
    rows = (tensor.shape if shape is None else shape)[0]
    count, parts = packed
    size = rows // (count * parts)  # rows of one part on one process
    blocks, row, end = [], offsets[0], offsets[0] + local_shape[0]
    while row < end:
        index, begin = divmod(row, size)
        process, part = divmod(index, parts)
        length = min(size - begin, end - row)
        start = part * (rows // parts) + process * size + begin
        blocks.append(((start, *offsets[1:]), (length, *local_shape[1:])))
        row += length
    return blocks or [(offsets, local_shape)]


def find_packed(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Return the number of processes and of parts of a packed tensor; None for any other tensor.

    A packed tensor holds several matrices one after the other, each of which is cut in dimension 0 over the processes
    of the last mesh dimension. Torch takes it for a tensor whose rows are those of each process one after the other.
    """
    sharded: Any = tensor
    parts = get_packed_parts(tensor)
    return (sharded.device_mesh.shape[-1], parts) if parts is not None and is_sharded(tensor) else None


def get_packed_parts(tensor: torch.Tensor) -> int | None:
    """Return the number of parts of a tensor with a mark of `mark_packed`; None without a mark."""
    return vars(tensor).get("packed_parts")


def mark_packed(tensor: torch.Tensor, parts: int | None) -> torch.Tensor:
    """Mark a tensor as packed, unless `parts` is None, and return the tensor. Results of operations have no mark."""
    if parts is not None:
        vars(tensor)["packed_parts"] = parts
    return tensor


def gather_full_tensor(tensor: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """Return all values of a tensor as one process would hold them. Collective if the tensor is sharded.

    Args:
        tensor: A DTensor or an ordinary tensor, which is returned as it is.
        like: The DTensor from which the tensor was computed, such as the parameter of a gradient; default: `tensor`.
    """
    if not is_sharded(tensor):
        return tensor
    sharded: Any = tensor
    values: torch.Tensor = sharded.full_tensor()
    if (packed := find_packed(tensor if like is None else like)) is not None:
        values = values.unflatten(0, (*packed, -1)).transpose(0, 1).flatten(0, 2)  # type: ignore[no-untyped-call]
    return values


def make_dtensor(
    local: torch.Tensor, like: torch.Tensor, shape: torch.Size, *, is_replicated: bool = False
) -> torch.Tensor:
    """Return a DTensor with the mesh and placements of `like`, from this process's shard, without communication.

    Args:
        local: The shard of this process, with the shape that `get_local_block` returns.
        like: The DTensor whose mesh and placements are used.
        shape: Shape of the unsharded tensor.
        is_replicated: The tensor is replicated on every process.
    """
    sharded: Any = like
    stride = torch.empty(shape, device="meta").stride()
    tensor: torch.Tensor = type(sharded).from_local(
        local,
        sharded.device_mesh,
        _get_placements(like, shape, is_replicated=is_replicated),
        run_check=False,
        shape=shape,
        stride=stride,
    )
    return mark_packed(tensor, get_packed_parts(like))


def _get_placements(like: torch.Tensor, shape: torch.Size, *, is_replicated: bool) -> list[Any]:
    """Return placements like those of `like` for a tensor of this shape; missing dimensions are replicated."""
    from torch.distributed.tensor import Replicate

    sharded: Any = like
    return [
        Replicate() if is_sharding(each) and (is_replicated or each.dim >= len(shape)) else each
        for each in sharded.placements
    ]


def is_split(tensor: torch.Tensor, shape: torch.Size | None = None) -> bool:
    """Return True if a process holds only part of a tensor, or of a tensor of this shape with the same placements.

    A tensor derived from a sharded tensor, such as an optimizer's state, is sharded only in dimensions of equal size.
    """
    sharded: Any = tensor
    shape = tensor.shape if shape is None else shape
    dims = [placement.dim for placement in sharded.placements if is_sharding(placement)] if is_sharded(tensor) else []
    return any(shape[dim : dim + 1] == tensor.shape[dim : dim + 1] for dim in dims)


def get_replica(tensor: torch.Tensor, processes: Processes) -> tuple[int, int]:
    """Return the index of the replica that this process holds of its shard, and the number of replicas.

    No communication is needed.

    Returns:
        The index of the replica, or -1 on a mesh of some processes without rank 0; and the number of replicas.
    """
    if not is_sharded(tensor):
        return processes.rank, processes.world_size
    sharded: Any = tensor
    mesh, index, count = sharded.device_mesh, 0, 1
    for coordinate, size, placement in zip(mesh.get_coordinate(), mesh.shape, sharded.placements, strict=True):
        if not is_sharding(placement):
            index, count = index * size + coordinate, count * size
    return index if mesh.size() == processes.world_size or 0 in mesh.mesh else -1, count


def holds_first_shard(tensor: torch.Tensor) -> bool:
    """Return True if this process holds the shard at offset 0, or the unsharded tensor; without communication."""
    if not is_sharded(tensor):
        return True
    sharded: Any = tensor
    coordinates = zip(sharded.device_mesh.get_coordinate(), sharded.placements, strict=True)
    return all(coordinate == 0 for coordinate, placement in coordinates if is_sharding(placement))


def distribute_like(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return an unsharded tensor as a DTensor with the sharding of `like` (same shape), without communication."""
    if not is_sharded(like):
        return value
    blocks = [
        value[tuple(slice(offset, offset + size) for offset, size in zip(offsets, shape, strict=True))]
        for offsets, shape in list_saved_blocks(like)
    ]
    return make_dtensor(torch.cat(blocks) if len(blocks) > 1 else blocks[0].contiguous(), like, like.shape)
