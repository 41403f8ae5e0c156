"""A window: the micro-batches of one optimizer step, fetched one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any, final


@final
class MicroBatch:
    """One forward and backward.

    Attributes:
        batch: What the loader returned.
        index: Its number in the epoch, as one process would count.
        samples: How many samples it holds.
        weight: What it counts in its step; the number of samples unless the task weighs batches itself.
        first: It opens its optimizer step.
        last: It closes its optimizer step.
    """

    __slots__ = ("batch", "first", "index", "last", "samples", "weight")

    def __init__(self, batch: Any, index: int, samples: int, first: bool, last: bool) -> None:
        self.batch = batch
        self.index = index
        self.samples = samples
        self.weight: float = samples
        self.first = first
        self.last = last


@final
class Window:
    """The micro-batches of one optimizer step; iterate it once.

    Args:
        fetch: Returns the loader's next batch.
        sizes: Samples of each micro-batch.
        first_index: Number of its first micro-batch in the epoch.
        last: It is the epoch's last step.
        waited_s: Seconds spent waiting for the loader before.

    Attributes:
        sizes: Samples of each micro-batch.
        samples: Samples of the whole step.
        last: It is the epoch's last step.
        waited_s: Seconds spent waiting for the loader so far.
    """

    __slots__ = ("_fetch", "_first_index", "last", "samples", "sizes", "waited_s")

    def __init__(
        self, fetch: Callable[[], Any], sizes: list[int], first_index: int, last: bool, waited_s: float = 0.0
    ) -> None:
        self._fetch = fetch
        self._first_index = first_index
        self.sizes = sizes
        self.samples = sum(sizes)
        self.last = last
        self.waited_s = waited_s

    def __iter__(self) -> Iterator[MicroBatch]:
        closing = len(self.sizes) - 1
        for number, samples in enumerate(self.sizes):
            start = perf_counter()
            batch = self._fetch()
            self.waited_s += perf_counter() - start
            yield MicroBatch(batch, self._first_index + number, samples, number == 0, number == closing)
