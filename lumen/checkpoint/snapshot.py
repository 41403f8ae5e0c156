"""Snapshot: copies of tensors in host memory, made while training waits and written while it goes on."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from typing import final

import numpy as np
import torch

from lumen.checkpoint.safetensors_files import COPIED_TOGETHER, bytes_of, lies_in_order
from lumen.torch_internals import copy_all

Key = tuple[str, str]
_FEW = 1 << 15  # numbers that torch copies by one thread


@final
class Snapshot:
    """Copies of tensors, in memory that is kept from one copy to the next: to touch new pages costs several times more.

    CUDA tensors are copied to pinned memory in the order of their device's current stream, so that no later kernel
    changes them before, and without making the host wait.
    """

    def __init__(self) -> None:
        self._buffers: dict[Key, torch.Tensor] = {}
        self._copied: list[torch.cuda.Event] = []

    def reserve(self, sections: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Take the memory for tensors like these, and touch all of it."""
        for key, tensor in _flat(sections).items():
            if key not in self._buffers:
                self._buffers[key] = buffer = _buffer_for(tensor)
                np.asarray(bytes_of(buffer))[:: mmap.PAGESIZE] = 0

    def take(self, sections: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, dict[str, torch.Tensor]]:
        """Copy tensors of any device and strides. The copies are there after `wait`, until the next `take`."""
        kept, self._buffers = self._buffers, {}
        copies: dict[str, dict[str, torch.Tensor]] = {section: {} for section in sections}
        small: list[tuple[torch.Tensor, torch.Tensor]] = []
        devices = set()
        for (section, name), tensor in _flat(sections).items():
            buffer = kept.pop((section, name), None)
            if buffer is None or (buffer.dtype, buffer.shape) != (tensor.dtype, tensor.shape):
                buffer = _buffer_for(tensor)
            if tensor.is_cuda:
                devices.add(tensor.device)
            if _is_small(tensor):
                small.append((buffer, tensor))
            else:
                _copy(tensor, buffer)
            self._buffers[section, name] = copies[section][name] = buffer
        if small:
            copy_all(*map(list, zip(*small, strict=True)))
        self._copied = [torch.cuda.current_stream(device).record_event() for device in devices]
        return copies

    def wait(self) -> None:
        """Wait until the devices have made the copies; in any thread."""
        for event in self._copied:
            event.synchronize()


def _flat(sections: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[Key, torch.Tensor]:
    return {(section, name): tensor for section, tensors in sections.items() for name, tensor in tensors.items()}


def _is_small(tensor: torch.Tensor) -> bool:
    """Whether to copy it takes less time than to ask for that; and it lies in memory that was not freed."""
    return (
        tensor.numel() <= _FEW
        and tensor.is_cpu
        and tensor.dtype in COPIED_TOGETHER
        and tensor.is_contiguous()
        and tensor.untyped_storage().nbytes() >= (tensor.storage_offset() + tensor.numel()) * tensor.itemsize
    )


def _buffer_for(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    if not lies_in_order(source):
        target.copy_(source, non_blocking=source.is_cuda)
    else:  # by one thread, which saturates the memory; torch's wait for each other where all cores are busy
        np.copyto(np.asarray(bytes_of(target)), np.asarray(bytes_of(source)))
