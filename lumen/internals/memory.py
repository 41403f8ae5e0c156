"""Memory of devices and of the host: what torch keeps of it, and its errors when there is none."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

_reentrant: list[int] = []
_OUT_OF_MEMORY = ("out of memory", "DefaultCPUAllocator: can't allocate memory", "CUDNN_STATUS_NOT_SUPPORTED")


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that memory has not sufficed; for the CPU, and within cuDNN, torch has no class for it."""
    return isinstance(error, torch.OutOfMemoryError) or any(said in str(error) for said in _OUT_OF_MEMORY)


def drop_failed_backward() -> None:
    """Free what a backward of this thread that has failed did not come to: autograd holds it until the next one."""
    torch.zeros((), requires_grad=True).backward()  # type: ignore[no-untyped-call]


def count_reentrant_checkpoints() -> int:
    """Return how many forwards of reentrant activation checkpoints this process has made since the first call."""
    if not _reentrant:
        _reentrant.append(0)
        plain = CheckpointFunction.forward

        def counted(ctx: Any, *args: Any) -> Any:
            _reentrant[0] += 1
            return plain(ctx, *args)  # type: ignore[no-untyped-call]

        CheckpointFunction.forward = staticmethod(counted)  # type: ignore[method-assign]
    return _reentrant[0]


def empty_host_cache() -> None:
    """Free cached pinned memory that is not in use. torch < 2.13 has no public name for it."""
    empty = getattr(torch.accelerator, "empty_host_cache", None) or getattr(torch._C, "_host_emptyCache", None)
    if empty is not None:
        empty()


def empty_device_cache(device: torch.device) -> None:
    """Give back memory of an accelerator that torch keeps for tensors to come."""
    if device.type != "cpu":
        getattr(torch, device.type).empty_cache()
