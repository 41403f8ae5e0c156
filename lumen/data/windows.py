"""A window: the micro-batches of one optimizer step, dealt to the processes of a run and fetched one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import count, islice
from time import perf_counter
from typing import Any, NamedTuple, TypeVar, final

T = TypeVar("T")
#: Numbers of a process's micro-batches in their step; None where there is none left while others still have one.
Dealt = list[int | None]


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


class Shard(NamedTuple):
    """Which micro-batches of a run this process takes: of every step those whose number is `rank` modulo `world`.

    Attributes:
        rank: Of this process.
        world: Number of processes.
        stands_in: Where there is none left for this process, it fetches one of another process: its forward has to
            take part in theirs.
        gather: Every process's value of plain data, in rank order; every process must call it.
    """

    rank: int = 0
    world: int = 1
    stands_in: bool = False
    gather: Callable[[Any], list[Any]] = lambda value: [value]

    def deal(self, size: int) -> Dealt:
        """What a step of `size` micro-batches has for this process; as many rounds as for every other one."""
        rounds = range(self.rank, -(-size // self.world) * self.world, self.world)
        return [number if number < size else None for number in rounds]

    def dealer(self, turn: int | None) -> Callable[[int], Dealt]:
        """What deals one step after the other.

        Args:
            turn: None: every step is dealt anew, as `deal` says. Otherwise steps have one micro-batch, processes take
                turns, this is the number of the first, and there is nothing for the processes whose turn it is not.
        """
        if turn is None:
            return lru_cache(maxsize=8)(self.deal)  # steps are of one size, but for an epoch's last
        turns = count(turn)
        return lambda size: [0] if next(turns) % self.world == self.rank else []

    def share(self, step: Sequence[T], dealt: Dealt) -> list[T]:
        """What this process fetches of a step; where it stands in, the last one."""
        return [step[-1 if number is None else number] for number in dealt if number is not None or self.stands_in]


ALONE = Shard()


def in_blocks(items: Iterator[T], size: int = 16) -> Iterator[T]:
    """The same, made several at a time: code that runs many times in a row runs several times as fast."""
    while block := list(islice(items, size)):
        yield from block


@final
class MicroBatch:
    """One forward and backward.

    Attributes:
        batch: What the loader returned.
        index: Its number in the epoch, as one process would count.
        number: Its number in the step, likewise.
        samples: How many samples it holds.
        weight: What it counts in its step; the number of samples unless the task weighs batches itself.
        loader: Which of several loaders that take turns it came from.
        first: It opens its optimizer step in this process.
        last: It closes its optimizer step in this process.
        idle: There is none left for this process: `batch` is None, or stands in and counts nothing.
    """

    __slots__ = ("batch", "first", "idle", "index", "last", "loader", "number", "samples", "weight")

    def __init__(self, index: int, number: int, samples: int, first: bool, last: bool, idle: bool) -> None:
        self.batch: Any = None
        self.index = index
        self.number = number
        self.samples = samples
        self.weight: float = 0 if idle else samples
        self.loader = 0
        self.first = first
        self.last = last
        self.idle = idle


@final
class Window:
    """The micro-batches of one optimizer step; iterate it once for those of this process.

    Args:
        fetch: Returns the next one's batch, and which of several loaders it came from; also of those that stand in.
        sizes: Samples of each micro-batch, of all processes.
        first_index: Number of the first one in the epoch.
        last: It is the epoch's last step.
        state: Where the feed stands after this step, as plain data and tensors.
        waited_s: Seconds spent waiting for the loader before.
        shard: Which of them are this process's.
        dealt: Their numbers, where they are not dealt in turn.

    Attributes:
        fetch: Returns the next micro-batch's batch and loader.
        sizes: Samples of each micro-batch, of all processes.
        samples: Samples of the whole step.
        last: It is the epoch's last step.
        state: Where the feed stands after this step.
        waited_s: Seconds spent waiting for the loader so far.
    """

    __slots__ = ("_micro_batches", "_stands_in", "fetch", "last", "samples", "sizes", "state", "waited_s")

    def __init__(
        self,
        fetch: Callable[[], tuple[Any, int]],
        sizes: list[int],
        first_index: int,
        last: bool,
        state: dict[str, Any],
        waited_s: float = 0.0,
        shard: Shard = ALONE,
        dealt: Dealt | None = None,
    ) -> None:
        self.fetch = fetch
        self.sizes = sizes
        self.samples = sum(sizes)
        self.last = last
        self.state = state
        self.waited_s = waited_s
        self._stands_in = shard.stands_in
        numbers = shard.deal(len(sizes)) if dealt is None else dealt
        rounds, final = len(numbers), len(sizes) - 1
        lent = sizes[final] if self._stands_in else 0
        self._micro_batches = [
            MicroBatch(first_index + number, number, sizes[number], place == 1, place == rounds, False)
            if number is not None
            else MicroBatch(first_index + final, final, lent, place == 1, place == rounds, True)
            for place, number in enumerate(numbers, 1)
        ]

    def __iter__(self) -> Iterator[MicroBatch]:
        micro_batches, self._micro_batches = self._micro_batches[::-1], []
        while micro_batches:
            micro = micro_batches.pop()  # its batch must not outlive its use
            if not micro.idle or self._stands_in:
                start = perf_counter()
                micro.batch, micro.loader = self.fetch()
                self.waited_s += perf_counter() - start
            yield micro
