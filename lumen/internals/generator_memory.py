"""Memory that holds the positions of the global generators of torch, numpy and `random`.

A read of this memory takes 0.1 us. The public methods take 1 to 20 us, because they copy whole states. On import, the
memory is compared with these copies. If its layout differs from the expected one, the generator counts as used.
"""

from __future__ import annotations

import random
import struct
import sys
from ctypes import c_char
from typing import Any, final

import numpy as np
import torch

_SIZE = 28
_numpy_generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]  # keeps the memory alive


@final
class UnreadableMemory:
    """Memory of an unknown layout; its content equals no other value."""

    @property
    def raw(self) -> Any:
        """New object at each read."""
        return object()


def _map_memory(address: int, expected: bytes) -> Any:
    memory = (c_char * _SIZE).from_address(address)
    return memory if memory.raw == expected else UnreadableMemory()


def _map_torch_memory() -> Any:
    state = torch.default_generator.get_state().numpy()  # The seed, two counters, 624 words of 8 bytes, and more.
    seed, left, following = state[:8].tobytes(), state[8:16].tobytes(), state[16:20].tobytes()
    words = state[24:88].view(np.uint64).astype(np.uint32).tobytes()
    if not (address := getattr(torch.default_generator, "_cdata", 0)):
        return UnreadableMemory()
    start = (head := (c_char * 256).from_address(address).raw).find(words) - 20
    if start < 0 or head[start : start + 12] != seed + left[:4]:
        return UnreadableMemory()
    return _map_memory(address + start, seed + head[start + 8 : start + 16] + following + words[:8])


def _map_numpy_memory() -> Any:
    generator = _numpy_generator
    if type(generator) is not np.random.MT19937:
        return UnreadableMemory()
    state = generator.state["state"]  # Numpy keeps 624 words and the position.
    expected = state["key"].tobytes() + struct.pack("=i", state["pos"])
    return _map_memory(generator.ctypes.state_address + len(expected) - _SIZE, expected[-_SIZE:])


def _map_python_memory() -> Any:
    *words, position = random.getstate()[1]  # CPython keeps the position and 624 words behind the object's head.
    head, generator = object.__basicsize__, random.seed.__self__  # type: ignore[attr-defined]
    if sys.implementation.name != "cpython" or random.Random.__basicsize__ < head + _SIZE:
        return UnreadableMemory()
    return _map_memory(id(generator) + head, struct.pack("=i6I", position, *words[:6]))


#: Position and words that a draw changes, of torch's, numpy's and Python's generator; `raw` returns the bytes.
MEMORIES = _map_torch_memory(), _map_numpy_memory(), _map_python_memory()
