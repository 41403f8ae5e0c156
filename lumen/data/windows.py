"""A window: the micro-batches of one optimizer step, fetched one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any, NamedTuple, final


class Item(NamedTuple):
    """What a loader gave.

    Attributes:
        batch: As it is.
        samples: How many samples it holds.
        loader: Which of several loaders it came from.
    """

    batch: Any
    samples: int
    loader: int = 0


@final
class MicroBatch:
    """One forward and backward.

    Attributes:
        batch: What the loader returned.
        index: Its number in the epoch, as one process would count.
        samples: How many samples it holds.
        weight: What it counts in its step; the number of samples unless the task weighs batches itself.
        loader: Which of several loaders that take turns it came from.
        first: It opens its optimizer step.
        last: It closes its optimizer step.
    """

    __slots__ = ("batch", "first", "index", "last", "loader", "samples", "weight")

    def __init__(self, item: Item, index: int, first: bool, last: bool) -> None:
        self.batch = item.batch
        self.index = index
        self.samples = item.samples
        self.weight: float = item.samples
        self.loader = item.loader
        self.first = first
        self.last = last


@final
class Window:
    """The micro-batches of one optimizer step; iterate it once.

    Args:
        fetch: Returns the next of them.
        sizes: Samples of each micro-batch.
        first_index: Number of its first micro-batch in the epoch.
        last: It is the epoch's last step.
        state: Where the feed stands after this step, as plain data and tensors.
        waited_s: Seconds spent waiting for the loader before.

    Attributes:
        fetch: Returns the next micro-batch's batch and size.
        sizes: Samples of each micro-batch.
        samples: Samples of the whole step.
        last: It is the epoch's last step.
        state: Where the feed stands after this step.
        waited_s: Seconds spent waiting for the loader so far.
    """

    __slots__ = ("_first_index", "fetch", "last", "samples", "sizes", "state", "waited_s")

    def __init__(
        self,
        fetch: Callable[[], Item],
        sizes: list[int],
        first_index: int,
        last: bool,
        state: dict[str, Any],
        waited_s: float = 0.0,
    ) -> None:
        self.fetch = fetch
        self._first_index = first_index
        self.sizes = sizes
        self.samples = sum(sizes)
        self.last = last
        self.state = state
        self.waited_s = waited_s

    def __iter__(self) -> Iterator[MicroBatch]:
        closing = len(self.sizes) - 1
        for number in range(closing + 1):
            start = perf_counter()
            item = self.fetch()
            self.waited_s += perf_counter() - start
            yield MicroBatch(item, self._first_index + number, number == 0, number == closing)
