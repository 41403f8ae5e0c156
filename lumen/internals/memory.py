"""Memory of devices and of the host: what torch keeps of it, and its errors when there is none."""

from __future__ import annotations

import torch

_OUT_OF_MEMORY = ("out of memory", "DefaultCPUAllocator: can't allocate memory", "CUDNN_STATUS_NOT_SUPPORTED")


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an error says that memory has not sufficed; for the CPU, and within cuDNN, torch has no class for it."""
    return isinstance(error, torch.OutOfMemoryError) or any(said in str(error) for said in _OUT_OF_MEMORY)


def drop_failed_backward() -> None:
    """Free what a backward of this thread that has failed did not come to: autograd holds it until the next one."""
    torch.zeros((), requires_grad=True).backward()  # type: ignore[no-untyped-call]


def empty_host_cache() -> None:
    """Free cached pinned memory that is not in use. torch < 2.13 has no public name for it."""
    empty = getattr(torch.accelerator, "empty_host_cache", None) or getattr(torch._C, "_host_emptyCache", None)
    if empty is not None:
        empty()


def empty_device_cache(device: torch.device) -> None:
    """Give back memory of an accelerator that torch keeps for tensors to come."""
    if device.type != "cpu":
        getattr(torch, device.type).empty_cache()
