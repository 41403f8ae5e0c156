"""The order of samples: pure functions of (seed, epoch), the same whatever the hardware.

The global batch of step s is `order[s*G : (s+1)*G]`; its micro-batches are consecutive slices of at most B samples.
So the position of a run inside an epoch is one integer: samples consumed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lumen.random import Domain, make_key

#: One micro-batch: positions [start, end) of the epoch's order.
Slice = tuple[int, int]


def epoch_order(length: int, seed: int, epoch: int, *, shuffle: bool) -> torch.Tensor:
    """The indices of an epoch.

    Returns:
        int64 of shape (length,).
    """
    if not shuffle:
        return torch.arange(length)
    generator = torch.Generator().manual_seed(make_key(seed, Domain.ORDER, epoch))
    return torch.randperm(length, generator=generator)


def step_slices(start: int, length: int, batch_size: int, step_size: int, *, drop_last: bool) -> Iterator[list[Slice]]:
    """The micro-batches of each optimizer step, from a position to the end of the epoch.

    Args:
        start: Samples already consumed, 0 to length.
        length: Samples of the epoch.
        batch_size: Samples of a micro-batch.
        step_size: Samples of an optimizer step.
        drop_last: Leave out the epoch's last micro-batch if the data ended before it was full.

    Yields:
        Slices of one step, never an empty list.
    """
    for step in range(start, length, step_size):
        step_end = min(step + step_size, length)
        slices = [(first, min(first + batch_size, step_end)) for first in range(step, step_end, batch_size)]
        first, end = slices[-1]
        cut_by_the_data = end == length and step_end - step < step_size and end - first < batch_size
        if drop_last and cut_by_the_data:
            slices.pop()
        if slices:
            yield slices
