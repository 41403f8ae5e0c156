"""A standard DataLoader over map-style data, taken over: its samples are known before they are loaded."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import tee
from typing import Any, final

import torch
from torch.utils.data import DataLoader, default_collate

from lumen.data.feed import Feed, Position, SampleCounter, Step, read_ahead
from lumen.data.keyed import Draw, KeyedDataset, can_draw
from lumen.data.samplers import Order
from lumen.data.windows import Item, Window
from lumen.data.workers import end_workers, init_worker
from lumen.random import Domain, make_key

Steps = Iterator[tuple[list[Draw], dict[str, Any]]]


@final
class _Draws:
    """The sampler of the DataLoader that replaces the user's: gives the draws of the epoch in progress."""

    def __init__(self) -> None:
        self.steps: Steps = iter(())

    def __iter__(self) -> Iterator[Draw]:
        for draws, _ in self.steps:
            yield from draws


@final
class IndexedFeed(Feed):
    """A DataLoader of which Lumen decides which sample comes when, and the user how it is loaded.

    Args:
        loader: The user's; its data set, collate function, workers, pinning, prefetching and `worker_init_fn` stay.
        order: Which samples make which micro-batch.
        seed: Of the run.
    """

    def __init__(self, loader: DataLoader[Any], order: Order, seed: int) -> None:
        self._seed = seed
        self._order = order
        self._count = SampleCounter(loader)
        self._draws = _Draws()
        self._iterator: Iterator[Any] | None = None
        self._generator = torch.Generator()  # a DataLoader draws its workers' seed even from no shuffling at all
        self._makes_batches = loader.batch_size is not None or loader.batch_sampler is not None
        collates = can_draw(loader.dataset) or loader.collate_fn is not default_collate
        draws: dict[str, Any] = (
            {"batch_sampler": self._draws} if self._makes_batches else {"sampler": self._draws, "batch_size": None}
        )
        self._loader: DataLoader[Any] = DataLoader(
            KeyedDataset(loader.dataset, seed, collates),
            **draws,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory and torch.accelerator.is_available() and not torch.backends.mps.is_available(),
            timeout=loader.timeout,
            worker_init_fn=partial(init_worker, loader.dataset, loader.worker_init_fn),
            multiprocessing_context=loader.multiprocessing_context,
            generator=self._generator,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
        )
        self.length = order.length

    def windows(self, epoch: int, position: Position, limit: int | None) -> Iterator[Window]:
        """See `Feed.windows`. The position is exact: no sample is loaded that was consumed before."""
        # one copy for the DataLoader, which runs ahead of the steps; one to know each step's sizes and the last one
        self._draws.steps, plan = tee(self._order.steps(epoch, position, limit))
        self._generator.manual_seed(make_key(self._seed, Domain.ORDER, position.key(epoch), 1))
        self._iterator = iter(self._loader)
        if self._makes_batches:
            yield from self._follow(plan, position.batches)
        else:
            yield from read_ahead(self._read(plan), position.batches)
        self._iterator = None  # ends workers that are not persistent

    def _follow(self, plan: Steps, index: int) -> Iterator[Window]:
        ahead = next(plan, None)
        while ahead:
            (draws, state), ahead = ahead, next(plan, None)
            sizes = [len(draw.indices) for draw in draws]
            yield Window(partial(self._fetch, iter(sizes)), sizes, index, last=ahead is None, state=state)
            index += len(draws)

    def _read(self, plan: Steps) -> Iterator[Step]:
        """Without batching only a batch itself tells how many samples it holds."""
        assert self._iterator is not None
        for draws, state in plan:
            batches = [next(self._iterator) for _ in draws]
            yield [Item(batch, self._count(batch)) for batch in batches], state

    def _fetch(self, sizes: Iterator[int]) -> Item:
        assert self._iterator is not None
        return Item(next(self._iterator), next(sizes))

    def steps(self, limit: int | None) -> int | None:
        """See `Feed.steps`."""
        return self._order.count(limit)

    def close(self) -> None:
        """See `Feed.close`."""
        for iterator in (self._iterator, self._loader._iterator):  # the second one's workers are persistent
            end_workers(iterator)
        self._iterator = self._loader._iterator = None
