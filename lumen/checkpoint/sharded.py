"""Tensors of which every process holds a part: made whole to be written, and filled from what was read whole."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch


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
