"""Takes over a standard DataLoader over map-style data: which sample comes when is known before any is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, tee
from typing import Any, final

import torch
from torch.utils.data import DataLoader

from lumen.data.adapter import START, Feed, Position, SampleCounter, Step, read_ahead
from lumen.data.dataloader_workers import init_worker
from lumen.data.fingerprint import describe, known_length
from lumen.data.orders import Order
from lumen.data.rank_checks import check_same, digest
from lumen.data.seeded_dataset import Draw, KeyedDataset
from lumen.data.windows import Dealt, Item, Shard, Window, in_blocks
from lumen.internals.loaders import end_persistent_workers, end_workers, pinning
from lumen.random import Domain, make_key

Load = Callable[[Draw], Any]
Draws = tuple[list[Draw], dict[str, Any]]
Plan = Iterator[tuple[list[Draw], Dealt, dict[str, Any]]]


@final
class _Draws:
    """The sampler of the DataLoader that replaces the user's: yields what this process loads in the epoch."""

    def __init__(self, shard: Shard) -> None:
        self.plan: Plan = iter(())
        self._shard = shard

    def __iter__(self) -> Iterator[Draw]:
        for draws, dealt, _ in self.plan:
            yield from self._shard.share(draws, dealt)


@final
class IndexedFeed(Feed):
    """Reads a DataLoader of which Lumen decides the order of the samples, and the user how they are loaded.

    Args:
        loader: The user's; its data set, collate function, workers, pinning, prefetching and `worker_init_fn` stay.
        order: Decides which samples make which micro-batch.
        seed: The run's seed, which keys everything random.
        shard: The part of each step that this process loads.
    """

    def __init__(self, loader: DataLoader[Any], order: Order, seed: int, shard: Shard) -> None:
        self._seed = seed
        self._order = order
        self._shard = shard
        self._dataset = loader.dataset
        self._count = SampleCounter(loader)
        self._makes_batches = loader.batch_size is not None or loader.batch_sampler is not None
        self._batches = KeyedDataset(loader.dataset, loader.collate_fn, seed, single=not self._makes_batches)
        pins = loader.pin_memory and torch.accelerator.is_available() and not torch.backends.mps.is_available()
        self._pin = pinning() if pins else None
        self._draws = _Draws(shard)
        self._generator = torch.Generator()  # a DataLoader draws its workers' seed even from no shuffling at all
        self._iterator: Iterator[Any] | None = None
        self._agreed_samples: int | None = None
        self._known_to_workers = ""
        self._loader = self._with_workers(loader) if loader.num_workers else None
        self.measure()

    def measure(self, position: Position = START) -> None:
        """See `Feed.measure`."""
        self._order.measure(position)
        self.length = self._order.length

    def identity(self) -> list[str | None]:
        """See `Feed.identity`."""
        return [describe(self._dataset)]

    def cut(self) -> dict[str, int | None]:
        """See `Feed.cut`."""
        return self._order.cut()

    def _with_workers(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        draws: dict[str, Any] = (
            {"batch_sampler": self._draws} if self._makes_batches else {"sampler": self._draws, "batch_size": None}
        )
        return DataLoader(
            self._batches,
            **draws,
            num_workers=loader.num_workers,
            collate_fn=_as_it_is,
            pin_memory=self._pin is not None,
            timeout=loader.timeout,
            worker_init_fn=partial(init_worker, loader.dataset, loader.worker_init_fn),
            multiprocessing_context=loader.multiprocessing_context,
            generator=self._generator,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
        )

    def windows(self, epoch: int, position: Position, limit: int | None) -> Iterator[Window]:
        """See `Feed.windows`. The position is exact: no sample is loaded that was consumed before."""
        draws = self._order.steps(epoch, position, limit)
        samples = known_length(self._dataset)
        if self._shard.world > 1 and not (self._order.is_known and self._agreed_samples == samples):
            draws, self._agreed_samples = self._agreed(draws), samples
        plan = _dealt(draws, self._shard.dealer(position.turn))
        if self._loader is not None:
            # one copy for the DataLoader, which runs ahead of the steps; one to know each step's sizes and the last one
            self._draws.plan, plan = tee(plan)
            own = 1 + (self._shard.rank << 32)  # workers' seeds, for what a user draws from no generator that is keyed
            self._generator.manual_seed(make_key(self._seed, Domain.ORDER, position.key(epoch), own))
            self._renew_workers(self._loader)
            self._iterator = iter(self._loader)
        self._batches.looks = self._batches.keys_collate
        load = self._load()
        if self._makes_batches:
            windows = self._follow(plan, load, position.batches)
            yield from in_blocks(windows) if self._order.is_known else windows
        else:
            yield from read_ahead(self._read(plan, load), position.batches, self._shard)
        self._iterator = None  # ends workers that are not persistent

    def _renew_workers(self, loader: DataLoader[Any]) -> None:
        """End persistent workers that hold the data set as it was before it changed."""
        if loader.persistent_workers:
            known, self._known_to_workers = self._known_to_workers, describe(self._dataset)
            if known != self._known_to_workers:
                end_persistent_workers(loader)

    def _agreed(self, steps: Iterator[Draws]) -> Iterator[Draws]:
        """Yield the same steps, after a check that all processes begin with the same. Collective."""
        first = next(steps, None)
        draws, state = first or ([], {})
        indices = [draw.indices for draw in draws]
        found = {
            "samples": known_length(self._dataset),
            "batches": self.length,
            "first": str(indices[:1])[:60],
            "digest": digest([indices, state]),
        }
        check_same(
            self._shard, "data set or order", found,
            "Lumen deals the samples to the processes itself: give all of them the same data set, and a sampler that "
            "does not look at the rank.",
        )  # fmt: skip
        return steps if first is None else chain([first], steps)

    def _load(self) -> Load:
        """A function that returns the batches of a pass, one after the other."""
        if (iterator := self._iterator) is not None:
            return lambda draw: next(iterator)  # the workers were given the same draws
        load = self._batches.__getitems__ if self._makes_batches else self._batches.__getitem__
        pin = self._pin
        return load if pin is None else lambda draw: pin(load(draw))

    def _follow(self, plan: Plan, load: Load, index: int) -> Iterator[Window]:
        shard, ahead = self._shard, next(plan, None)
        while ahead:
            (draws, dealt, state), ahead = ahead, next(plan, None)
            sizes = [len(draw.indices) for draw in draws]
            fetch = ((load(draw), 0) for draw in shard.share(draws, dealt)).__next__  # zip would keep the batch
            yield Window(fetch, sizes, index, ahead is None, state, 0.0, shard, dealt)
            index += len(sizes)

    def _read(self, plan: Plan, load: Load) -> Iterator[Step]:
        """Read a loader that makes no batches, where only a loaded one tells how many samples it holds."""
        shard = self._shard
        for draws, dealt, state in plan:
            batches = [load(draw) for draw in shard.share(draws, dealt)]
            items = [Item(batch, self._count(batch)) for batch in batches]
            own = {number: item.samples for number, item in zip(dealt, items, strict=False)}
            sizes = {number: size for told in shard.gather(own) for number, size in told.items()}
            yield Step(items, [sizes[number] for number in range(len(draws))], dealt, state)

    def nothing(self) -> str:
        """See `Feed.nothing`."""
        return self._order.nothing()

    def steps(self, limit: int | None) -> int | None:
        """See `Feed.steps`."""
        return self._order.count(limit)

    def close(self) -> None:
        """See `Feed.close`."""
        self._batches.own.put_back()
        end_workers(self._iterator)
        self._iterator = None
        if self._loader is not None:  # its workers are persistent
            end_persistent_workers(self._loader)


def _as_it_is(batch: Any) -> Any:
    """The collate function of a loader whose workers return whole batches already."""
    return batch


def _dealt(steps: Iterator[Draws], deal: Callable[[int], Dealt]) -> Plan:
    for draws, state in steps:
        yield draws, deal(len(draws)), state
