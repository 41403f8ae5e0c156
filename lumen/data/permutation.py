"""Order of samples as a pure function of (seed, epoch), independent of the hardware.

The global batch of step s is `order[s*G : (s+1)*G]`; its micro-batches are consecutive slices of at most B samples. The
position of a run inside an epoch is therefore one integer: samples consumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, final

import numpy as np
import torch

from lumen.random import Domain, make_key

#: Length above which a shuffled order is computed piece by piece: `randperm` needs 8 bytes per sample, and seconds.
MAX_MATERIALIZED = 2**24


def make_epoch_order(length: int, seed: int, epoch: int, *, shuffle: bool) -> range | torch.Tensor | Permutation:
    """Return the sample indices of an epoch in order.

    Returns:
        An int64 tensor of shape (length,); above `MAX_MATERIALIZED` samples a range or `Permutation`, which return
        slices.
    """
    if not shuffle:
        return range(length) if length > MAX_MATERIALIZED else torch.arange(length, device="cpu")
    key = make_key(seed, Domain.ORDER, epoch)
    if length > MAX_MATERIALIZED:
        return Permutation(length, key)
    return torch.randperm(length, generator=torch.Generator().manual_seed(key), device="cpu")


@final
class Permutation:
    """Permutation of range(length) that is never held in memory: slices are computed on demand.

    The algorithm is a Feistel network over the next power of four, with cycle walking until the result is in the range.
    Source: Black & Rogaway, Ciphers with Arbitrary Finite Domains, 2002. The round function is the finaliser of
    MurmurHash3, whose output is well mixed but not secret. The result does not depend on the version of torch.

    Args:
        length: Number of elements, 1 to 2**62.
        key: Any integer; different keys give unrelated permutations.
    """

    _ROUNDS = 6
    _BLOCK = 4096  # Indices computed at once. For fewer, calling numpy costs more than the computation.

    def __init__(self, length: int, key: int) -> None:
        self.length = length
        self._half = np.uint64(((length - 1).bit_length() + 1) // 2 or 1)
        self._mask = np.uint64((1 << int(self._half)) - 1)
        self._keys = [np.uint64(make_key(key, Domain.ORDER, number)) for number in range(self._ROUNDS)]
        self._cached = -1
        self._block = np.empty(0, np.int64)

    def __getitem__(self, part: slice) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the indices at positions `part.start` to `part.stop`: int64 of shape (stop - start,)."""
        start, stop, _ = part.indices(self.length)
        pieces = []
        while start < stop:
            number, offset = divmod(start, self._BLOCK)
            if number != self._cached:
                self._cached, first = number, number * self._BLOCK
                self._block = self._permute(np.arange(first, min(first + self._BLOCK, self.length), dtype=np.uint64))
            pieces.append(self._block[offset : offset + stop - start])
            start += len(pieces[-1])
        return np.concatenate(pieces) if pieces else self._block[:0]

    def _permute(self, numbers: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.int64]]:
        numbers = self._encrypt(numbers)
        while (outside := numbers >= self.length).any():
            numbers[outside] = self._encrypt(numbers[outside])
        return numbers.astype(np.int64)

    def _encrypt(self, numbers: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
        left, right = numbers >> self._half, numbers & self._mask
        for key in self._keys:
            mixed = (right ^ key) * np.uint64(0xFF51AFD7ED558CCD)
            mixed = (mixed ^ (mixed >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
            left, right = right, left ^ ((mixed ^ (mixed >> np.uint64(33))) & self._mask)
        return (left << self._half) | right


def cut_steps(
    take: Callable[[int], list[Any]], batch_size: int, step_size: int, *, drop_last: bool, limit: int | None = None
) -> Iterator[list[list[Any]]]:
    """Divide a stream of indices into the micro-batches of optimizer steps.

    Args:
        take: Function of n that returns the next n indices, or fewer at the end.
        batch_size: Number of samples in a micro-batch.
        step_size: Number of samples in an optimizer step, of all processes together.
        drop_last: Omit the last micro-batch if the data ended before it was full.
        limit: The most samples to use; None: all.

    Yields:
        Indices of each micro-batch of one step, never an empty list.
    """
    ended = False
    while not ended:
        wanted = step_size if limit is None else min(step_size, limit)
        indices = take(wanted)
        ended = len(indices) < wanted or wanted < step_size
        if limit is not None:
            limit -= len(indices)
        batches = [indices[first : first + batch_size] for first in range(0, len(indices), batch_size)]
        if drop_last and len(indices) < step_size and batches and len(batches[-1]) < batch_size:
            batches.pop()
        if batches:
            yield batches
