"""Adapters for iterables of batches, which give every process all batches or give each process its own part."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, cycle, islice
from typing import Any, Literal, final

from torch.utils.data import DataLoader

from lumen.console import logger as _log
from lumen.data.adapter import START, LoadedStep, LoaderAdapter, Position, read_ahead, read_one_by_one
from lumen.data.fingerprint import get_length
from lumen.data.rank_checks import check_same_data_on_ranks, digest_batch, share_batch
from lumen.data.resumable_iterator import ResumableIterator
from lumen.data.windows import SINGLE_RANK, AccumulationWindow, LoadedBatch, RankSlice
from lumen.errors import DataError


class _IterableAdapterBase(LoaderAdapter, ABC):
    """Base class of the two adapters for iterables.

    Args:
        loader: The iterable, whose `__iter__` begins an epoch.
        seed: The run's seed, which keys everything random.
        accumulate: Batches of an optimizer step, of all processes together.
        rank_slice: Rank of this process, number of processes, and their communication.
        rewinds: True: every pass restarts where the first pass began, for evaluations.
    """

    _reads_part = False  # True if the processes read different batches

    def __init__(self, loader: Any, seed: int, accumulate: int, rank_slice: RankSlice, *, rewinds: bool) -> None:
        self._name = type(getattr(loader, "dataset", loader)).__name__
        self._loader, self.per_step, self._rank_slice, self._rewinds = loader, accumulate, rank_slice, rewinds
        iterator_slice = rank_slice if self._reads_part else SINGLE_RANK
        self._iterator = ResumableIterator(loader, seed, rewinds=rewinds, rank_slice=iterator_slice)
        self.measure()

    def get_fingerprints(self) -> list[str | None]:
        return [None]

    def get_batching(self) -> dict[str, int | None]:
        return {"batch_size": self._iterator.batching.get("batch_size"), "batches of a step": self.per_step}

    def explain_empty(self) -> str:
        return self._iterator.explain_empty()

    def close(self) -> None:
        self._iterator.close()


@final
class IterableAdapter(_IterableAdapterBase):
    """Adapter of an iterable that gives every process all batches; each process keeps its part.

    Args:
        loader: The iterable; its `__iter__` restarts an epoch, with the same batches in every process.
        seed: The run's seed, which keys everything random.
        accumulate: Batches of an optimizer step, of all processes together.
        rank_slice: The part of each step that this process keeps.
        rewinds: True: every pass restarts where the first pass began, for evaluations.
    """

    def measure(self, position: Position = START) -> None:
        """Update `length` from the loader's `__len__`."""
        self.length = get_length(self._loader)

    def iterate_windows(self, epoch: int, position: Position, limit: int | None) -> Iterator[AccumulationWindow]:
        """Yield the optimizer steps of an epoch, from a position on."""
        is_beginning = self._rewinds and not position.batches
        state = self._iterator.beginning if is_beginning else position.get_state("stream")
        if position.batches and state.get("ended"):
            self._iterator.restore_state(state)
            return
        left = None if limit is None else max(0, limit - position.batches)
        if left == 0:
            return
        items: Iterator[LoadedBatch] = islice(
            self._iterator.iterate_batches(epoch, position, state, position.batches), left
        )
        if self._rank_slice.processes > 1:
            items = self._check_first_on_ranks(items)
        steps = self._iterate_steps(items, position.first_step)
        read = _choose_reader(self._loader, self.length, limit, rewinds=self._rewinds)
        yield from read(steps, position.batches, self._rank_slice, lambda state: self._iterator.get_last_state())

    def _check_first_on_ranks(self, items: Iterator[LoadedBatch]) -> Iterator[LoadedBatch]:
        """Check that all processes begin with the same batch, then yield all batches. Collective."""
        first = list(islice(items, 1))
        found = {"batches": self.length, "digest of the first": [digest_batch(item.batch) for item in first]}
        check_same_data_on_ranks(
            self._rank_slice, "stream", found,
            f"Every rank reads all batches of {self._name}, and Lumen keeps each rank's share. If {self._name} gives "
f"every rank different batches, set shards_itself = True on {self._name}. Otherwise return the same "
"batches on every rank.",
        )  # fmt: skip
        return chain(first, items)

    def _iterate_steps(self, items: Iterator[LoadedBatch], first_step: int | None) -> Iterator[LoadedStep]:
        assign = self._rank_slice.make_assigner(first_step)
        while True:
            assigned, kept, sizes = assign(self.per_step), [], []
            for number, item in enumerate(islice(items, self.per_step)):
                sizes.append(item.samples)
                if number in assigned:  # Batches of other processes are dropped at once.
                    kept.append(item)
            if not sizes:
                return
            if len(sizes) < self.per_step:
                assigned = assign(len(sizes))
            if self._rank_slice.needs_dummies:
                kept += [item] * assigned.count(None)
            yield LoadedStep(kept, sizes, assigned, self._iterator.get_state())


def has_capability(loader: Any, capability: Literal["shards_itself", "follows_training"]) -> bool:
    """Return True if a loader, or the data set of a `DataLoader`, sets an attribute of this name to True.

    Loaders and data sets of the user do not inherit from Lumen, so only this function reads the attributes.

    Args:
        loader: The user's loader.
        capability: The name of the attribute. `shards_itself`: each process gets a different part.
            `follows_training`:
            batches depend on the parameters, so each step is read after the previous step is done.
    """
    parts = (loader, loader.dataset) if isinstance(loader, DataLoader) else (loader,)
    return any(getattr(part, capability, False) for part in parts)


def shards_itself(loader: Any, world: int) -> bool:
    """Return True if a loader or its data set says that it gives each of `world` processes a different part."""
    dataset = loader.dataset if isinstance(loader, DataLoader) else None
    split = getattr(getattr(dataset, "_distributed", None), "world_size", None)  # set by Hugging Face's datasets
    return split == world or has_capability(loader, "shards_itself")


def depends_on_training(loader: Any) -> bool:
    """Return True if the batches of a loader depend on the trained parameters, as in reinforcement learning.

    An attribute of the loader or of its data set says so.

    Raises:
        DataError: Workers read the loader, and each worker has a copy of the model from its start.
    """
    depends = has_capability(loader, "follows_training")
    if depends and isinstance(loader, DataLoader) and loader.num_workers:
        raise DataError(
            f"{type(loader.dataset).__name__} sets follows_training, but its DataLoader has "
            f"num_workers={loader.num_workers}: a worker has a copy of the model that is never trained. Set "
            "num_workers=0."
        )
    return depends


def _choose_reader(loader: Any, length: int | None, limit: int | None, *, rewinds: bool) -> Callable[..., Any]:
    """Return the function that reads the steps of a loader: one step ahead, or each after the previous one is done."""
    known = [number for number in (length, limit) if number is not None]
    if not depends_on_training(loader) or (rewinds and not known):  # An evaluation does not change parameters.
        return read_ahead
    return partial(read_one_by_one, length=min(known, default=None))


@final
class ShardedIterableAdapter(_IterableAdapterBase):
    """Adapter of an iterable that gives each process its own batches, possibly of different number.

    A step takes batches from the processes in turn. Once some processes have no batches left, it takes more from the
    others, so only the last step of an epoch can be smaller. Before each step the processes exchange the numbers of
    samples they have read, and the states of their iterators.

    Args:
        loader: The iterable; its `__iter__` restarts an epoch, with this process's batches.
        seed: The run's seed, which keys everything random.
        accumulate: Batches of an optimizer step, of all processes together.
        rank_slice: Rank of this process, number of processes, and their communication.
        rewinds: True: every pass restarts where the first pass began, for evaluations.
    """

    _reads_part = True

    def __init__(self, loader: Any, seed: int, accumulate: int, rank_slice: RankSlice, *, rewinds: bool) -> None:
        super().__init__(loader, seed, accumulate, rank_slice, rewinds=rewinds)
        self._compared = False
        self._read: LoadedBatch | None = None  # the newest batch that this process has read
        self._have_read: set[int] = set()  # processes that have read a batch
        lengths = rank_slice.gather(get_length(loader))
        self.length = None if None in lengths else sum(lengths)

    def measure(self, position: Position = START) -> None:
        """Do nothing: all processes agreed on the length at the start, and one process cannot change it alone."""

    def iterate_windows(self, epoch: int, position: Position, limit: int | None) -> Iterator[AccumulationWindow]:
        """Yield the optimizer steps of an epoch, from a position on."""
        states, rank = self._get_states_at(position), self._rank_slice.rank
        over = bool(position.batches) and position.get_state("stream in parts").get("ended", False)
        alive = [each for each, state in enumerate(states) if not (position.batches and (over or state["exhausted"]))]
        items: Iterator[LoadedBatch] = iter(())
        if rank in alive:
            items = self._iterator.iterate_batches(
                epoch, position, states[rank], states[rank]["read"] if position.batches else 0
            )
        else:
            self._iterator.restore_state(states[rank])
        steps = self._iterate_steps(items, alive, None if limit is None else max(0, limit - position.batches))
        read = _choose_reader(self._loader, self.length, limit, rewinds=self._rewinds)
        yield from read(steps, position.batches, self._rank_slice, lambda state: self._get_last_state())

    def _get_states_at(self, position: Position) -> list[dict[str, Any]]:
        """Return the saved state of every process's iterator, in rank order."""
        world = self._rank_slice.world_size
        state = position.get_state("stream in parts")
        if (self._rewinds and not position.batches) or not state:
            return [self._iterator.beginning] * world
        states: list[dict[str, Any]] = state["ranks"]
        if len(states) == world:
            return states
        if position.batches or not all(each["exhausted"] for each in states):
            raise DataError(
                f"this run resumes in the middle of {self._name}, which {len(states)} processes read in parts, but "
                f"now there are {world} processes. Only {self._name} knows its parts. Resume with {len(states)} "
                "processes, or from a checkpoint at the end of an epoch."
            )
        return [{"kind": "stream"}] * world

    def _iterate_steps(self, items: Iterator[LoadedBatch], alive: list[int], left: int | None) -> Iterator[LoadedStep]:
        rank = self._rank_slice.rank
        while True:
            missing = self.per_step if left is None else min(self.per_step, left)
            kept, sizes, numbers = (
                list[LoadedBatch](),
                list[int](),
                [list[int]() for _ in range(self._rank_slice.world_size)],
            )
            while missing and alive:
                turns = list(islice(cycle(alive), missing))
                read = list(islice(items, turns.count(rank)))
                kept += read
                first = digest_batch(read[0].batch) if read and not self._compared else None
                reports = self._rank_slice.gather(([item.samples for item in read], first, self._iterator.get_state()))
                self._warn_of_equal_parts([code for _, code, _ in reports])
                self._states = [state for _, _, state in reports]  # one per process
                alive = [each for each in alive if len(reports[each][0]) == turns.count(each)]
                waiting = [iter(counts) for counts, _, _ in reports]
                for each in turns:
                    if (size := next(waiting[each], None)) is not None:
                        numbers[each].append(len(sizes))
                        sizes.append(size)
                        missing -= 1
            if not sizes:
                return
            left = None if left is None else left - len(sizes)
            rounds = max(map(len, numbers))
            dummies = rounds - len(kept)
            if self._rank_slice.needs_dummies:
                kept += [self._get_dummy(kept, numbers, rounds)] * dummies
            state = {"kind": "stream in parts", "ranks": self._states}
            yield LoadedStep(kept, sizes, [*numbers[rank], *[None] * dummies], state)

    def _warn_of_equal_parts(self, first: list[int | None]) -> None:
        """Warn once if several processes have read the same first batch, a sign that they read the same data."""
        suspicious = not self._compared and len(first) > 1 and first[0] is not None and len(set(first)) == 1
        self._compared = True
        if suspicious:
            _log.warning(
                "%s sets shards_itself, but every rank reads the same first batch. If every rank reads the whole "
"stream, every sample counts %d times. Remove shards_itself, and Lumen assigns the batches.",
                self._name, len(first),
            )  # fmt: skip

    def _get_dummy(self, kept: list[LoadedBatch], numbers: list[list[int]], rounds: int) -> LoadedBatch:
        """Return a real batch to run as a dummy batch, in rounds without a batch for this process.

        Collective in the rounds in which a process without any batch needs one from a different process.
        """
        if kept:
            self._read = kept[-1]
        self._have_read |= {rank for rank, numbers_of_rank in enumerate(numbers) if numbers_of_rank}
        lacking = {rank for rank, numbers_of_rank in enumerate(numbers) if len(numbers_of_rank) < rounds}
        if not lacking <= self._have_read:
            self._read = share_batch(self._rank_slice, min(self._have_read), self._read)
            self._have_read = set(range(self._rank_slice.world_size))
        assert self._read is not None
        return self._read

    def _get_last_state(self) -> dict[str, Any]:
        states = list(self._states)
        states[self._rank_slice.rank] = self._iterator.get_last_state()
        return {"kind": "stream in parts", "ranks": states, "ended": True}
