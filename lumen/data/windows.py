"""Micro-batches of one optimizer step, divided among the processes of a run and fetched one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import count, islice
from time import perf_counter
from typing import Any, NamedTuple, TypeVar, final

T = TypeVar("T")
#: Number of this process's micro-batch in each round of a step; None: only other processes have one in this round.
Assigned = list[int | None]


class LoadedBatch(NamedTuple):
    """Batch returned by a loader.

    Attributes:
        batch: The batch, as returned by the loader.
        samples: Number of samples in the batch.
        loader: Index of its loader, if several loaders take turns.
    """

    batch: Any
    samples: int
    loader: int = 0


class RankSlice(NamedTuple):
    """Part of every optimizer step that one process takes: micro-batches whose number is `rank` modulo `world_size`.

    Attributes:
        rank: Data rank of this process, from 0.
        world_size: Number of data ranks.
        needs_dummies: True: in a round without a micro-batch, this process runs a dummy batch: a batch of a different
            process, with weight 0. FSDP needs dummy batches, because all ranks communicate in every forward.
        gather: Function that returns the plain data of each data rank, in order. Collective: every rank must call this.
        splits: True: the task gets a step as one batch, of which each process takes a part (manual optimization).
        processes: Number of processes; several may share a data rank.
        gather_all: Function that returns the plain data of each process, in rank order. Collective: every rank must
            call this.
    """

    rank: int = 0
    world_size: int = 1
    needs_dummies: bool = False
    gather: Callable[[Any], list[Any]] = lambda value: [value]
    splits: bool = False
    processes: int = 1
    gather_all: Callable[[Any], list[Any]] = lambda value: [value]

    def assign_step(self, size: int) -> Assigned:
        """Return the numbers of this process's micro-batches in a step of `size`; all ranks get equally long lists."""
        rounds = range(self.rank, -(-size // self.world_size) * self.world_size, self.world_size)
        return [number if number < size else None for number in rounds]

    def make_assigner(self, first_step: int | None) -> Callable[[int], Assigned]:
        """Return a function that maps the size of each step, in turn, to this process's part of the step.

        Args:
            first_step: Number of the first step, if every step is a single micro-batch and the processes take steps in
                turn; processes without the step get an empty list. None: `assign_step` divides every step.
        """
        if first_step is None:
            return lru_cache(maxsize=8)(self.assign_step)  # All steps but an epoch's last have the same size.
        steps = count(first_step)
        return lambda size: [0] if next(steps) % self.world_size == self.rank else []

    def take_assigned(self, step: Sequence[T], assigned: Assigned) -> list[T]:
        """Return the elements of `step` that this process fetches; for a dummy batch, the last element of the step."""
        return [
            step[-1 if number is None else number] for number in assigned if number is not None or self.needs_dummies
        ]


SINGLE_RANK = RankSlice()


def iterate_in_blocks(items: Iterator[T], size: int = 16) -> Iterator[T]:
    """Yield the same items, but take `size` of them from the iterator at a time, which is several times as fast."""
    while block := list(islice(items, size)):
        yield from block


@final
class MicroBatch:
    """One forward and backward.

    Attributes:
        batch: The batch returned by the loader; None before it is fetched.
        index: Number of the micro-batch in the epoch, from 0, counted as in a run with one process.
        number: Number of the micro-batch in its optimizer step, from 0, counted as in a run with one process.
        samples: Number of samples in the batch.
        weight: Weight of the loss in the step: `samples`, unless the task defines `batch_weight`.
        loader: Index of its loader, if several loaders take turns.
        first: True for the first micro-batch of the step in this process.
        last: True for the last micro-batch of the step in this process.
        is_dummy: True in a round without a micro-batch for this process: the weight is 0, and `batch` a dummy or None.
    """

    __slots__ = ("batch", "first", "index", "is_dummy", "last", "loader", "number", "samples", "weight")

    def __init__(self, index: int, number: int, samples: int) -> None:
        self.batch: Any = None
        self.index, self.number, self.samples = index, number, samples
        self.weight: float = samples
        self.loader = 0
        self.first = self.last = self.is_dummy = False

    def set_weight(self, weight: float) -> None:
        """Set the weight of the loss in the step."""
        self.weight = weight

    def exclude(self) -> None:
        """Treat the batch as a dummy batch."""
        self.is_dummy = True

    def make_part(self, samples: int, weight: float) -> MicroBatch:
        """Return a part of the micro-batch, without the batch and not marked as last of the step."""
        part = MicroBatch(self.index, self.number, samples)
        part.first, part.weight, part.loader = self.first, weight, self.loader
        return part

    def make_ending_dummy(self) -> MicroBatch:
        """Return a dummy micro-batch that ends the step."""
        end = MicroBatch(self.index, self.number, 0)
        end.last = end.is_dummy = True
        return end


def _make_dummy(index: int, number: int, samples: int) -> MicroBatch:
    dummy = MicroBatch(index, number, samples)
    dummy.weight, dummy.is_dummy = 0, True
    return dummy


@final
class AccumulationWindow:
    """Micro-batches of one optimizer step. Iterating the window, once, fetches and yields those of this process.

    Args:
        fetch: Function that returns the batch of this process's next micro-batch (including dummy batches) and its
            loader's index.
        sizes: Number of samples of each micro-batch, of all processes.
        first_index: Number of the step's first micro-batch in the epoch, from 0.
        state: State of the adapter after this step: plain data and tensors, for a checkpoint.
        waited_s: Seconds already spent waiting for the loader.
        rank_slice: The part of each step that this process takes.
        assigned: Numbers of this process's micro-batches; None: the result of `rank_slice.assign_step`.
        last: True for the last step of the epoch.
        is_one_batch: True if a single process would take all micro-batches as one batch.

    Attributes:
        fetch: Function that returns the batch of this process's next micro-batch and its loader's index.
        first_index: Number of the step's first micro-batch in the epoch, from 0.
        is_one_batch: True if a single process would take all micro-batches as one batch.
        requests: Requests of this process to a map-style data set, one for each fetch; None for other data.
        batches: Micro-batches of the step, counted as in a run with one process.
        sizes: Number of samples of each micro-batch, of all processes.
        samples: Number of samples of the whole step, of all processes.
        last: True for the last step of the epoch.
        state: State of the adapter after this step: plain data and tensors, for a checkpoint.
        waited_s: Seconds spent waiting for the loader so far.
    """

    __slots__ = (
        "_micro_batches", "_needs_dummies", "batches", "fetch", "first_index", "is_one_batch", "last", "requests",
        "samples", "sizes", "state", "waited_s",
    )  # fmt: skip

    def __init__(
        self,
        fetch: Callable[[], tuple[Any, int]],
        sizes: list[int],
        first_index: int,
        state: dict[str, Any],
        waited_s: float = 0.0,
        rank_slice: RankSlice = SINGLE_RANK,
        assigned: Assigned | None = None,
        *,
        last: bool,
        is_one_batch: bool = False,
    ) -> None:
        self.fetch, self.first_index = fetch, first_index
        self.requests: Sequence[Any] | None = None
        self.is_one_batch, self.batches = is_one_batch, 1 if is_one_batch else len(sizes)
        self.sizes, self.samples, self.last = sizes, sum(sizes), last
        self.state, self.waited_s = state, waited_s
        self._needs_dummies = rank_slice.needs_dummies
        numbers = rank_slice.assign_step(len(sizes)) if assigned is None else assigned
        final = len(sizes) - 1
        dummy_samples = sizes[final] if self._needs_dummies else 0
        self._micro_batches = [
            MicroBatch(first_index + number, number, sizes[number])
            if number is not None
            else _make_dummy(first_index + final, final, dummy_samples)
            for number in numbers
        ]
        if self._micro_batches:
            self._micro_batches[0].first = self._micro_batches[-1].last = True

    def wrap_fetch(self, wrap: Callable[[Callable[[], Any]], Callable[[], Any]]) -> None:
        """Replace the fetch function by a wrapped one, to measure it."""
        self.fetch = wrap(self.fetch)

    def __iter__(self) -> Iterator[MicroBatch]:
        micro_batches, self._micro_batches = self._micro_batches[::-1], []
        while micro_batches:
            micro = micro_batches.pop()  # Popping releases the batch after its use.
            if not micro.is_dummy or self._needs_dummies:
                start = perf_counter()
                micro.batch, micro.loader = self.fetch()
                self.waited_s += perf_counter() - start
            yield micro
