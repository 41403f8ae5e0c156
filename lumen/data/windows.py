"""The micro-batches of one optimizer step, divided among the processes of a run and fetched one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import count, islice
from time import perf_counter
from typing import Any, NamedTuple, TypeVar, final

T = TypeVar("T")
#: For each round of a step the number of the micro-batch that this process takes; None: others still have one, it not.
Assigned = list[int | None]


class LoadedBatch(NamedTuple):
    """A batch that a loader has returned.

    Attributes:
        batch: The batch, as the loader returned it.
        samples: Number of samples in the batch.
        loader: Index of the loader it came from, where several take turns.
    """

    batch: Any
    samples: int
    loader: int = 0


class RankSlice(NamedTuple):
    """The part of every optimizer step that one process takes: micro-batches whose number is `rank` modulo `world`.

    Attributes:
        rank: Data rank of this process, from 0.
        world: Number of data ranks.
        needs_dummies: In a round for which no micro-batch is left, this process runs a dummy: a batch of another
            process, whose loss counts nothing. FSDP needs it, because all ranks communicate in every forward.
        gather: Returns the plain data of each data rank, in their order. Collective: every rank must call this.
        splits: A step is one batch to the task, of which each process takes a part (manual optimization).
        processes: Number of processes; several may share a data rank.
        gather_all: Returns the plain data of each process, in rank order. Collective: every rank must call this.
    """

    rank: int = 0
    world: int = 1
    needs_dummies: bool = False
    gather: Callable[[Any], list[Any]] = lambda value: [value]
    splits: bool = False
    processes: int = 1
    gather_all: Callable[[Any], list[Any]] = lambda value: [value]

    def assign(self, size: int) -> Assigned:
        """Numbers of the micro-batches of this process in a step of `size`; the list is equally long on all ranks."""
        rounds = range(self.rank, -(-size // self.world) * self.world, self.world)
        return [number if number < size else None for number in rounds]

    def assigner(self, first_step: int | None) -> Callable[[int], Assigned]:
        """A function that is given the size of each step in turn and returns this process's part of it.

        Args:
            first_step: None: every step is divided as `assign` says. An int: every step is a single micro-batch, the
                processes take the steps in turn, and this is the number of the first; the others get an empty list.
        """
        if first_step is None:
            return lru_cache(maxsize=8)(self.assign)  # steps are of one size, but for an epoch's last
        steps = count(first_step)
        return lambda size: [0] if next(steps) % self.world == self.rank else []

    def take(self, step: Sequence[T], assigned: Assigned) -> list[T]:
        """The elements of `step` that this process fetches; for a dummy, the last one of the step."""
        return [
            step[-1 if number is None else number] for number in assigned if number is not None or self.needs_dummies
        ]


ALONE = RankSlice()


def in_blocks(items: Iterator[T], size: int = 16) -> Iterator[T]:
    """Yield the same items, but take `size` of them from the iterator at a time: that runs several times as fast."""
    while block := list(islice(items, size)):
        yield from block


@final
class MicroBatch:
    """One forward and backward.

    Attributes:
        batch: What the loader returned; None before it is fetched.
        index: Number of the micro-batch in the epoch, from 0, as a single process would count.
        number: Number of the micro-batch in its optimizer step, from 0, as a single process would count.
        samples: Number of samples in the batch.
        weight: Weight of the loss in the step: `samples`, unless the task defines `batch_weight`.
        loader: Index of the loader it came from, where several take turns.
        first: It is the first micro-batch of the step in this process.
        last: It is the last micro-batch of the step in this process.
        is_dummy: No micro-batch is left for this process in this round: `batch` is None or a dummy, and counts nothing.
    """

    __slots__ = ("batch", "first", "index", "is_dummy", "last", "loader", "number", "samples", "weight")

    def __init__(self, index: int, number: int, samples: int) -> None:
        self.batch: Any = None
        self.index, self.number, self.samples = index, number, samples
        self.weight: float = samples
        self.loader = 0
        self.first = self.last = self.is_dummy = False

    def weigh(self, weight: float) -> None:
        """Give the loss another weight in the step."""
        self.weight = weight

    def leave_out(self) -> None:
        """Let the batch count nothing, like a dummy."""
        self.is_dummy = True

    def part(self, samples: int, weight: float) -> MicroBatch:
        """A part of it, without the batch and not the last of the step."""
        part = MicroBatch(self.index, self.number, samples)
        part.first, part.weight, part.loader = self.first, weight, self.loader
        return part

    def end(self) -> MicroBatch:
        """A dummy that ends its step."""
        end = MicroBatch(self.index, self.number, 0)
        end.last = end.is_dummy = True
        return end


def _dummy(index: int, number: int, samples: int) -> MicroBatch:
    dummy = MicroBatch(index, number, samples)
    dummy.weight, dummy.is_dummy = 0, True
    return dummy


@final
class AccumulationWindow:
    """The micro-batches of one optimizer step. Iterating it, once, fetches and yields those of this process.

    Args:
        fetch: Returns the batch of the next micro-batch of this process (dummies included) and its loader's index.
        sizes: Number of samples of each micro-batch, of all processes.
        requests: What this process asks a map-style data set for, a request for each fetch; None: it is no such set.
        first_index: Number of the step's first micro-batch in the epoch, from 0.
        state: Where the adapter stands after this step: plain data and tensors, for a checkpoint.
        waited_s: Seconds already spent waiting for the loader.
        rank_slice: The part of each step that this process takes.
        assigned: Numbers of the micro-batches of this process; None: those that `rank_slice.assign` gives.
        last: It is the last step of the epoch.
        whole: A single process would take them as one batch.

    Attributes:
        fetch: Returns the batch of the next micro-batch of this process and its loader's index.
        first_index: Number of the step's first micro-batch in the epoch, from 0.
        whole: A single process would take them as one batch.
        batches: Micro-batches of the step, as a single process would count.
        sizes: Number of samples of each micro-batch, of all processes.
        samples: Number of samples of the whole step, of all processes.
        last: It is the last step of the epoch.
        state: Where the adapter stands after this step: plain data and tensors, for a checkpoint.
        waited_s: Seconds spent waiting for the loader so far.
    """

    __slots__ = (
        "_micro_batches", "_needs_dummies", "batches", "fetch", "first_index", "last", "requests", "samples", "sizes",
        "state", "waited_s", "whole",
    )  # fmt: skip

    def __init__(
        self,
        fetch: Callable[[], tuple[Any, int]],
        sizes: list[int],
        first_index: int,
        state: dict[str, Any],
        waited_s: float = 0.0,
        rank_slice: RankSlice = ALONE,
        assigned: Assigned | None = None,
        *,
        last: bool,
        whole: bool = False,
    ) -> None:
        self.fetch, self.first_index = fetch, first_index
        self.requests: Sequence[Any] | None = None
        self.whole, self.batches = whole, 1 if whole else len(sizes)
        self.sizes, self.samples, self.last = sizes, sum(sizes), last
        self.state, self.waited_s = state, waited_s
        self._needs_dummies = rank_slice.needs_dummies
        numbers = rank_slice.assign(len(sizes)) if assigned is None else assigned
        final = len(sizes) - 1
        lent = sizes[final] if self._needs_dummies else 0
        self._micro_batches = [
            MicroBatch(first_index + number, number, sizes[number])
            if number is not None
            else _dummy(first_index + final, final, lent)
            for number in numbers
        ]
        if self._micro_batches:
            self._micro_batches[0].first = self._micro_batches[-1].last = True

    def wrap_fetch(self, wrap: Callable[[Callable[[], Any]], Callable[[], Any]]) -> None:
        """Let a function wrap how micro-batches are fetched, to measure it."""
        self.fetch = wrap(self.fetch)

    def __iter__(self) -> Iterator[MicroBatch]:
        micro_batches, self._micro_batches = self._micro_batches[::-1], []
        while micro_batches:
            micro = micro_batches.pop()  # its batch must not outlive its use
            if not micro.is_dummy or self._needs_dummies:
                start = perf_counter()
                micro.batch, micro.loader = self.fetch()
                self.waited_s += perf_counter() - start
            yield micro
