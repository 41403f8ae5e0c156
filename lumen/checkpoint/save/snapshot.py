"""Copies of tensors in host memory, taken while training waits and written while training continues."""

from __future__ import annotations

import heapq
import mmap
from collections.abc import Mapping
from typing import final

import numpy as np
import torch

from lumen.checkpoint.format.safetensors_file import BATCHED_COPY_DTYPES, as_bytes_view, is_contiguous_on_host
from lumen.internals.memory import empty_host_cache
from lumen.internals.tensors import copy_all

Key = tuple[str, str]
_SMALL_TENSOR_BYTES = 1 << 15  # elements up to which torch copies with one thread
_ALIGNED = 64  # alignment in bytes of each tensor in a block


@final
class Snapshot:
    """Copies of tensors in host memory that is reused for the next copy, because touching new pages is slow.

    CUDA tensors are copied to pinned memory on the device's current stream. Kernels launched later therefore run after
    the copy, and the host does not wait.
    """

    def __init__(self) -> None:
        self._buffers: dict[Key, torch.Tensor] = {}
        self._copied: list[torch.cuda.Event] = []

    def reserve_memory(self, sections: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Allocate memory for copies of tensors of these shapes, and touch all of it."""
        new = _allocate_buffers(
            {key: tensor for key, tensor in _flatten_sections(sections).items() if key not in self._buffers}
        )
        for buffer in new.values():
            np.asarray(as_bytes_view(buffer))[:: mmap.PAGESIZE] = 0
        self._buffers |= new

    def start_copy(self, sections: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, dict[str, torch.Tensor]]:
        """Begin to copy tensors of any device and strides.

        `wait` ends the copy. The copies are valid until the next `start_copy`.
        """
        tensors = _flatten_sections(sections)
        kinds = {key: (tensor.dtype, tensor.shape) for key, tensor in tensors.items()}
        kept = {key: each for key, each in self._buffers.items() if kinds.get(key) == (each.dtype, each.shape)}
        self._buffers = kept | _allocate_buffers({key: tensor for key, tensor in tensors.items() if key not in kept})
        copies: dict[str, dict[str, torch.Tensor]] = {section: {} for section in sections}
        small: list[tuple[torch.Tensor, torch.Tensor]] = []
        for (section, name), tensor in tensors.items():
            copies[section][name] = buffer = self._buffers[section, name]
            if _is_small(tensor):
                small.append((buffer, tensor))
            else:
                _start_copy(tensor, buffer)
        if small:
            copy_all(*map(list, zip(*small, strict=True)))
        devices = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        self._copied = [torch.cuda.current_stream(device).record_event() for device in devices]
        return copies

    def wait(self) -> None:
        """Wait until the copies from devices have ended; any thread may call this."""
        for event in self._copied:
            event.synchronize()

    def close(self) -> None:
        """Free the memory of the copies."""
        pinned = any(buffer.is_pinned() for buffer in self._buffers.values())
        self._buffers, self._copied = {}, []
        if pinned:
            empty_host_cache()


def _flatten_sections(sections: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[Key, torch.Tensor]:
    return {(section, name): tensor for section, tensors in sections.items() for name, tensor in tensors.items()}


def _is_small(tensor: torch.Tensor) -> bool:
    """Return True if a tensor should be copied in one call with others: it is small, and its memory was not freed."""
    if tensor.numel() > _SMALL_TENSOR_BYTES or not (
        tensor.is_cpu and tensor.dtype in BATCHED_COPY_DTYPES and tensor.is_contiguous()
    ):
        return False
    return tensor.untyped_storage().nbytes() >= (tensor.storage_offset() + tensor.numel()) * tensor.itemsize


def _allocate_buffers(tensors: Mapping[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
    plain = {
        key: torch.empty(tensor.shape, dtype=tensor.dtype) for key, tensor in tensors.items() if not tensor.is_cuda
    }
    return plain | allocate_pinned_like({key: tensor for key, tensor in tensors.items() if tensor.is_cuda})


def allocate_pinned_like(tensors: Mapping[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
    """Return pinned tensors like the given ones, several per block, because torch rounds blocks up to a power of two.

    The largest tensors come first, and smaller tensors fill the blocks.
    """
    places: dict[Key, tuple[int, int]] = {}
    sizes: list[int] = []
    rooms: list[tuple[int, int]] = []  # (negative number of free bytes, block); the block with most free bytes first
    for key, tensor in sorted(tensors.items(), key=lambda item: -item[1].nbytes):
        needed = -(-tensor.nbytes // _ALIGNED) * _ALIGNED
        if not rooms or -rooms[0][0] < needed:
            sizes.append(1 << (needed - 1).bit_length())
            heapq.heappush(rooms, (-sizes[-1], len(sizes) - 1))
        free, block = rooms[0]
        places[key] = block, sizes[block] + free
        heapq.heapreplace(rooms, (free + needed, block))
    blocks = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes]
    return {
        key: blocks[block][start : start + tensors[key].nbytes].view(tensors[key].dtype).view(tensors[key].shape)
        for key, (block, start) in places.items()
    }


def _start_copy(source: torch.Tensor, target: torch.Tensor) -> None:
    if not is_contiguous_on_host(source):
        target.copy_(source, non_blocking=source.is_cuda)
    else:  # one thread saturates the memory bandwidth; torch's threads wait for one another if all cores are busy
        np.copyto(np.asarray(as_bytes_view(target)), np.asarray(as_bytes_view(source)))
