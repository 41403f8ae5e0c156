"""Memory of devices and of the host: torch's caches, and errors when memory runs out."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

_reentrant_count: list[int] = []
_OUT_OF_MEMORY = ("out of memory", "DefaultCPUAllocator: can't allocate memory", "CUDNN_STATUS_NOT_SUPPORTED")


def is_out_of_memory(error: Exception) -> bool:
    """Return True if an error means out of memory; torch has no class for such errors of the CPU and within cuDNN."""
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in _OUT_OF_MEMORY)


def free_failed_backward() -> None:
    """Free the memory of this thread's failed backward, which autograd holds until the next backward."""
    torch.zeros((), requires_grad=True).backward()  # type: ignore[no-untyped-call]


def count_reentrant_checkpoints() -> int:
    """Return the number of forwards of reentrant activation checkpoints in this process since the first call."""
    if not _reentrant_count:
        _reentrant_count.append(0)
        forward = CheckpointFunction.forward

        def count_and_forward(ctx: Any, *args: Any) -> Any:
            _reentrant_count[0] += 1
            return forward(ctx, *args)  # type: ignore[no-untyped-call]

        CheckpointFunction.forward = staticmethod(count_and_forward)  # type: ignore[method-assign]
    return _reentrant_count[0]


def empty_host_cache() -> None:
    """Free cached pinned memory that is not in use; torch < 2.13 has no public name for this."""
    empty = getattr(torch.accelerator, "empty_host_cache", None) or getattr(torch._C, "_host_emptyCache", None)
    if empty is not None:
        empty()


def empty_device_cache(device: torch.device) -> None:
    """Free cached memory of an accelerator, which torch keeps for later tensors."""
    if device.type != "cpu":
        getattr(torch, device.type).empty_cache()
