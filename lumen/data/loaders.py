"""A user's loader, made resumable: Lumen decides which sample comes when, the user's loader how it is loaded."""

from __future__ import annotations

import signal
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from time import perf_counter
from typing import Any, NamedTuple, final

import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from lumen.batches import count_samples
from lumen.data.order import Slice, epoch_order, step_slices
from lumen.data.windows import Window
from lumen.errors import ConfigError, DataError
from lumen.random import Domain, make_key, seed_generators


class Position(NamedTuple):
    """Where an epoch stands: what was consumed of it."""

    samples: int = 0
    batches: int = 0


class Feed(ABC):
    """One loader as the loop reads it.

    Attributes:
        length: Micro-batches of an epoch as one process would count them; None if the loader does not know.
    """

    length: int | None

    @abstractmethod
    def windows(self, epoch: int, position: Position, limit: int | None) -> Iterator[Window]:
        """The optimizer steps of an epoch, from a position on.

        Args:
            epoch: Decides the order.
            position: What was consumed of the epoch before.
            limit: Micro-batches of the epoch to use at most.
        """

    @abstractmethod
    def steps(self, limit: int | None) -> int | None:
        """Optimizer steps of an epoch; None if the loader has no length."""

    def close(self) -> None:
        """End the workers; the lengths stay known."""


class _Draw(NamedTuple):
    """What the batch sampler hands to a worker: everything that a micro-batch's randomness depends on."""

    epoch: int
    start: int
    indices: list[int]


def _can_draw(dataset: Any) -> bool:
    """Whether fetching from a data set may use random numbers."""
    if type(dataset) is Subset:
        return _can_draw(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return any(_can_draw(part) for part in dataset.datasets)
    return type(dataset) is not TensorDataset and getattr(dataset, "draws_randomness", True)


def _fetches_many(dataset: Any) -> bool:
    """Whether a data set fetches a micro-batch at once in a way of its own; a `Subset` passes on what it is part of."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return hasattr(dataset, "__getitems__")


@final
class _KeyedDataset(Dataset[Any]):
    """Fetches a whole micro-batch, with the generators keyed for each sample and then for the collate function."""

    def __init__(self, dataset: Any, seed: int, collates: bool) -> None:
        self.dataset = dataset
        self.seed = seed
        self.draws = _can_draw(dataset)
        self.collates = collates
        self.fetch_many = None if self.draws and not _fetches_many(dataset) else getattr(dataset, "__getitems__", None)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, draw: _Draw) -> list[Any]:
        if self.fetch_many is not None:
            if self.draws:
                seed_generators(make_key(self.seed, Domain.SAMPLE, draw.epoch, draw.start))
            samples = self.fetch_many(draw.indices)
        elif self.draws:
            samples = []
            for index in draw.indices:
                seed_generators(make_key(self.seed, Domain.SAMPLE, draw.epoch, index))
                samples.append(self.dataset[index])
        else:
            samples = [self.dataset[index] for index in draw.indices]
        if self.collates:
            seed_generators(make_key(self.seed, Domain.COLLATE, draw.epoch, draw.start))
        return samples  # type: ignore[no-any-return]


_GRACE_S = 30


def _init_worker(dataset: Any, user_init: Callable[[int], None] | None, worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    # a stop request reaches every process of the group; the main one decides, and still needs its data for this step
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.alarm(_GRACE_S))
    object.__setattr__(info, "dataset", dataset)  # where a user's worker_init_fn expects its own, not our wrapper
    if user_init is not None:
        user_init(worker_id)


@final
class _Draws:
    """The batch sampler of the DataLoader that replaces the user's: gives the draws of the epoch set on it."""

    def __init__(self) -> None:
        self.epoch = 0
        self.order = torch.empty(0, dtype=torch.int64)
        self.steps: Callable[[], Iterator[list[Slice]]] = lambda: iter(())

    def __iter__(self) -> Iterator[_Draw]:
        for step in self.steps():
            for start, end in step:
                yield _Draw(self.epoch, start, self.order[start:end].tolist())


@final
class MapFeed(Feed):
    """A standard `DataLoader` over a map-style data set, taken over.

    Args:
        loader: The user's; its data set, collate function, workers, pinning, prefetching and `worker_init_fn` stay.
        seed: Of the run.
        accumulate: Micro-batches of an optimizer step, when `step_size` is None.
        step_size: Samples of an optimizer step (`global_batch_size`).
    """

    def __init__(self, loader: DataLoader[Any], seed: int, accumulate: int = 1, step_size: int | None = None) -> None:
        assert loader.batch_size is not None
        self._samples = len(loader.dataset)  # type: ignore[arg-type]
        self._seed = seed
        self._shuffle = isinstance(loader.sampler, RandomSampler)
        self._drop_last = loader.drop_last
        self._batch_size = loader.batch_size
        self._step_size = step_size or accumulate * loader.batch_size
        self._draws = _Draws()
        self._iterator: Iterator[Any] | None = None
        self._generator = torch.Generator()  # a DataLoader draws its workers' seed even from no shuffling at all
        collates = _can_draw(loader.dataset) or loader.collate_fn is not default_collate
        self._loader: DataLoader[Any] = DataLoader(
            _KeyedDataset(loader.dataset, seed, collates),
            batch_sampler=self._draws,  # type: ignore[arg-type]
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory and torch.accelerator.is_available(),
            timeout=loader.timeout,
            worker_init_fn=partial(_init_worker, loader.dataset, loader.worker_init_fn),
            multiprocessing_context=loader.multiprocessing_context,
            generator=self._generator,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
        )
        per_step = -(-self._step_size // self._batch_size)
        whole_steps, rest = divmod(self._samples, self._step_size)
        self.length = whole_steps * per_step + (
            rest // self._batch_size if self._drop_last else -(-rest // self._batch_size)
        )

    def windows(self, epoch: int, position: Position, limit: int | None) -> Iterator[Window]:
        """See `Feed.windows`. The position is exact: no sample is loaded that was consumed before."""
        steps = partial(self._steps, position.samples, limit)
        self._draws.epoch = epoch
        self._draws.order = epoch_order(self._samples, self._seed, epoch, shuffle=self._shuffle)
        self._draws.steps = steps
        self._generator.manual_seed(make_key(self._seed, Domain.ORDER, epoch, 1))
        self._iterator = iter(self._loader)
        index = position.batches
        plan = steps()
        ahead = next(plan, None)
        while ahead:
            step, ahead = ahead, next(plan, None)
            yield Window(self._next, [end - start for start, end in step], index, last=ahead is None)
            index += len(step)
        self._iterator = None  # ends workers that are not persistent

    def steps(self, limit: int | None) -> int:
        """See `Feed.steps`."""
        return sum(1 for _ in self._steps(0, limit))

    def _next(self) -> Any:
        assert self._iterator is not None
        return next(self._iterator)

    def close(self) -> None:
        """See `Feed.close`."""
        for iterator in (self._iterator, self._loader._iterator):  # the second one's workers are persistent
            _end_workers(iterator)
        self._iterator = None
        del self._loader

    def _steps(self, start: int, limit: int | None) -> Iterator[list[Slice]]:
        end, drop_last = self._samples, self._drop_last
        if limit is not None:
            steps, batches = divmod(limit, -(-self._step_size // self._batch_size))
            limited = steps * self._step_size + batches * self._batch_size
            if limited < end:
                end, drop_last = limited, False
        return step_slices(start, end, self._batch_size, self._step_size, drop_last=drop_last)


@final
class StreamFeed(Feed):
    """Any other iterable of batches, read as it is: iterable data, samplers and batch samplers of the user's own.

    It is resumed by reading again what was consumed. The generators are keyed before every batch, so what is drawn in
    this process is the same then.

    Args:
        loader: Gives a fresh iterator of batches for every epoch.
        seed: Of the run.
        accumulate: Batches of an optimizer step.
    """

    def __init__(self, loader: Any, seed: int, accumulate: int = 1) -> None:
        self._loader = loader
        self._seed = seed
        self._accumulate = accumulate
        self._said_what_is_counted = False
        self._iterator: Iterator[Any] | None = None
        try:
            self.length = len(loader)
        except (TypeError, NotImplementedError):
            self.length = None

    def windows(self, epoch: int, position: Position, limit: int | None) -> Iterator[Window]:
        """See `Feed.windows`. One step is read ahead, to know which is the last."""
        batches = islice(self._batches(epoch), position.batches, limit)
        index = position.batches
        ahead = list(islice(batches, self._accumulate))
        while ahead:
            start = perf_counter()
            current, ahead = ahead, list(islice(batches, self._accumulate))
            waited_s = perf_counter() - start
            sizes = [self._count(batch) for batch in current]
            yield Window(iter(current).__next__, sizes, index, last=not ahead, waited_s=waited_s)
            index += len(current)

    def steps(self, limit: int | None) -> int | None:
        """See `Feed.steps`."""
        batches = self.length if limit is None else limit if self.length is None else min(limit, self.length)
        return None if batches is None else -(-batches // self._accumulate)

    def _batches(self, epoch: int) -> Iterator[Any]:
        key = make_key(self._seed, Domain.ORDER, epoch)
        seed_generators(key)
        for generator in _own_generators(self._loader):
            generator.manual_seed(key)
        sampler, batch_sampler = (getattr(self._loader, name, None) for name in ("sampler", "batch_sampler"))
        for part in (self._loader, sampler, batch_sampler, getattr(batch_sampler, "sampler", None)):
            if part is not None and hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        self._iterator = iter(self._loader)
        number = 0
        while True:
            seed_generators(make_key(self._seed, Domain.SAMPLE, epoch, number))
            try:
                batch = next(self._iterator)
            except StopIteration:
                return
            yield batch
            number += 1

    def close(self) -> None:
        """See `Feed.close`. A loader of the user's own can be iterated again."""
        _end_workers(self._iterator)
        self._iterator = None
        if isinstance(self._loader, DataLoader):
            self._loader._iterator = None

    def _count(self, batch: Any) -> int:
        if not self._said_what_is_counted:
            self._said_what_is_counted = True
            warnings.warn(
                f"{type(self._loader).__name__}: Lumen did not draw these batches, so a batch counts as many samples "
                "as dimension 0 of its first tensor. Return (loss, weight) from training_step to say it yourself.",
                stacklevel=2,
            )
        return count_samples(batch)


def _end_workers(iterator: Any) -> None:
    """End the workers of a DataLoader's iterator; garbage collection, after an error, would wait 5 s for each."""
    getattr(iterator, "_shutdown_workers", lambda: None)()


def _own_generators(loader: Any) -> Iterator[torch.Generator]:
    """The generators that a loader and its samplers hold: what they draw must not depend on the epochs before."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    for owner in (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)):
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator):
            yield generator


def make_feed(loader: Any, seed: int, accumulate: int = 1, global_batch_size: int | None = None) -> Feed:
    """Take over a standard `DataLoader` over map-style data; read anything else as it is.

    Args:
        loader: A `DataLoader` or any iterable of batches.
        seed: Of the run.
        accumulate: Micro-batches of an optimizer step.
        global_batch_size: Samples of an optimizer step; replaces `accumulate`.

    Raises:
        ConfigError: The batch size does not fit `global_batch_size`.
        DataError: Not a loader.
    """
    if not hasattr(loader, "__iter__"):
        raise DataError(
            f"a loader must be iterable, found {type(loader).__name__}. Return a DataLoader from the data module."
        )
    parts = loader.values() if isinstance(loader, Mapping) else loader if isinstance(loader, (list, tuple)) else ()
    if any(isinstance(part, DataLoader) for part in parts):
        raise DataError(
            f"several loaders were given as one, in a {type(loader).__name__}. Evaluations take a list of loaders; for "
            "training join the data sets (ConcatDataset), or give an iterable whose batches hold what you need."
        )
    if (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and not isinstance(loader.dataset, IterableDataset)
        and loader.batch_size is not None
        and _takes_each_sample_once(loader)
    ):
        if global_batch_size is not None and global_batch_size < loader.batch_size:
            raise ConfigError(
                f"global_batch_size: {global_batch_size} is smaller than the loader's batch_size {loader.batch_size}. "
                "Lower batch_size."
            )
        return MapFeed(loader, seed, accumulate, global_batch_size)
    if global_batch_size is not None:
        batch_size = getattr(loader, "batch_size", None)
        if not batch_size or global_batch_size % batch_size:
            raise ConfigError(
                f"global_batch_size: {global_batch_size} is no multiple of the batch size {batch_size} of "
                f"{type(loader).__name__}, whose batches are read as they come. Set accumulate_grad_batches instead."
            )
        accumulate = global_batch_size // batch_size
    return StreamFeed(loader, seed, accumulate)


def _takes_each_sample_once(loader: Any) -> bool:
    """Whether a loader's order is the data set's own or a plain shuffle of it."""
    sampler = loader.sampler
    if type(sampler) not in (SequentialSampler, RandomSampler) or getattr(sampler, "replacement", False):
        return False
    return len(sampler) == len(sampler.data_source) == len(loader.dataset)
