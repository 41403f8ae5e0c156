"""Adapter of a standard DataLoader over map-style data, whose order is known before any sample is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from ctypes import c_bool
from functools import partial
from itertools import chain, tee
from multiprocessing.sharedctypes import RawValue
from typing import Any, final

import torch
from torch.utils.data import DataLoader

from lumen.data.adapter import START, LoadedStep, LoaderAdapter, Position, SampleCounter, read_ahead
from lumen.data.dataloader_workers import fork_workers, init_worker
from lumen.data.fingerprint import get_length, make_fingerprint
from lumen.data.orders import Order, StepRequests
from lumen.data.rank_checks import check_same_data_on_ranks, digest_batch
from lumen.data.seeded_dataset import BatchRequest, SeededDataset
from lumen.data.windows import AccumulationWindow, Assigned, LoadedBatch, RankSlice, iterate_in_blocks
from lumen.internals.loaders import end_persistent_workers, end_workers, get_pin_function
from lumen.random import Domain, make_key

Load = Callable[[BatchRequest], Any]
AssignedSteps = Iterator[tuple[list[BatchRequest], Assigned, dict[str, Any]]]


@final
class _RequestSampler:
    """Sampler of the DataLoader that replaces the user's; yields the requests of this process."""

    def __init__(self, rank_slice: RankSlice) -> None:
        self.plan: AssignedSteps = iter(())
        self._rank_slice = rank_slice

    def __iter__(self) -> Iterator[BatchRequest]:
        for requests, assigned, _ in self.plan:
            yield from self._rank_slice.take_assigned(requests, assigned)


@final
class MapStyleAdapter(LoaderAdapter):
    """Adapter of a DataLoader: Lumen decides the order of samples, and the user's code loads them.

    Args:
        loader: The user's loader; Lumen keeps its data set, collate function, workers, pinning, prefetching and
            `worker_init_fn`.
        order: The order, which assigns samples to micro-batches.
        seed: The run's seed, which keys everything random.
        rank_slice: The part of each step that this process loads.
    """

    def __init__(self, loader: DataLoader[Any], order: Order, seed: int, rank_slice: RankSlice) -> None:
        self._seed = seed
        self._order, self.per_step = order, order.per_step
        self._rank_slice = rank_slice
        self._parts = rank_slice.world_size if rank_slice.splits and order.is_cut_by_lumen else 1
        self._count = SampleCounter(loader)
        self._makes_batches = loader.batch_size is not None or loader.batch_sampler is not None
        self._batches = SeededDataset(loader.dataset, loader.collate_fn, seed, single=not self._makes_batches)
        pins = loader.pin_memory and torch.accelerator.is_available() and not torch.backends.mps.is_available()
        self._pin = get_pin_function() if pins else None
        self._sampler = _RequestSampler(rank_slice)
        self._generator = torch.Generator()  # A DataLoader draws its workers' seed from it even without shuffling.
        self._iterator: Iterator[Any] | None = None
        self._checked_samples: int | None = None
        self._worker_fingerprint = ""
        self._loader = self._make_worker_loader(loader) if loader.num_workers else None
        self.measure()

    def measure(self, position: Position = START) -> None:
        """Update `length` from the order."""
        self._order.measure(position)
        self.length = self._order.length

    def set_per_step(self, per_step: int) -> None:
        """Set the number of micro-batches per optimizer step, from the next pass on."""
        self._order.set_per_step(per_step)
        self.per_step = per_step

    def get_fingerprints(self) -> list[str | None]:
        """Return the fingerprint of the data set."""
        return [make_fingerprint(self._batches.dataset)]

    def get_batching(self) -> dict[str, int | None]:
        """Return the batch size and the samples of a step."""
        return self._order.get_batching()

    def _make_worker_loader(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        self._batches.has_drawn = RawValue(c_bool, False)
        sampling: dict[str, Any] = (
            {"batch_sampler": self._sampler} if self._makes_batches else {"sampler": self._sampler, "batch_size": None}
        )
        return DataLoader(
            self._batches,
            **sampling,
            num_workers=loader.num_workers,
            collate_fn=_return_batch,
            pin_memory=self._pin is not None,
            timeout=loader.timeout,
            worker_init_fn=partial(init_worker, loader.dataset, loader.worker_init_fn),
            multiprocessing_context=loader.multiprocessing_context,
            generator=self._generator,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
        )

    def iterate_windows(self, epoch: int, position: Position, limit: int | None) -> Iterator[AccumulationWindow]:
        """Yield the optimizer steps of an epoch, from a position on, without loading any consumed sample."""
        requests = self._order.iterate_steps(epoch, position, limit)
        samples = get_length(self._batches.dataset)
        if self._rank_slice.processes > 1 and not (self._order.has_known_samples and self._checked_samples == samples):
            requests, self._checked_samples = self._check_first_on_ranks(requests), samples
        plan = _assign_steps(requests, self._rank_slice.make_assigner(position.first_step), self._parts)
        self._batches.should_watch = self._batches.keys_collate
        self._batches.is_seeded |= self._batches.has_drawn.value  # must be set before workers start
        if self._loader is not None:
            # The DataLoader consumes one copy ahead of the steps. The other copy gives the sizes and the last step.
            self._sampler.plan, plan = tee(plan)
            worker_key = 1 + (self._rank_slice.rank << 32)  # seeds workers' generators that Lumen does not find
            self._generator.manual_seed(make_key(self._seed, Domain.ORDER, position.get_order_key(epoch), worker_key))
            self._renew_workers(self._loader)
            with fork_workers(self._loader.num_workers):
                self._iterator = iter(self._loader)
        load = self._make_load_function()
        if self._makes_batches:
            windows = self._read_known_steps(plan, load, position.batches)
            yield from iterate_in_blocks(windows) if self._order.has_known_samples else windows
        else:
            yield from read_ahead(self._read_unknown_steps(plan, load), position.batches, self._rank_slice)
        self._iterator = None  # ends workers that are not persistent

    def _renew_workers(self, loader: DataLoader[Any]) -> None:
        """End persistent workers that hold an old state of the data set."""
        if loader.persistent_workers:
            known, self._worker_fingerprint = self._worker_fingerprint, make_fingerprint(self._batches.dataset)
            if known != self._worker_fingerprint:
                end_persistent_workers(loader)

    def _check_first_on_ranks(self, steps: Iterator[StepRequests]) -> Iterator[StepRequests]:
        """Yield the same steps, after a check that all processes begin with the same step. Collective."""
        first = next(steps, None)
        requests, state = first or ([], {})
        indices = [request.indices for request in requests]
        found = {
            "samples": get_length(self._batches.dataset),
            "batches": self.length,
            "first": str(indices[:1])[:60],
            "digest": digest_batch([indices, state]),
        }
        check_same_data_on_ranks(
            self._rank_slice, "data set or order", found,
            "Lumen assigns the samples to the processes. Use the same data set on all processes, and a sampler that "
"does not depend on the rank.",
        )  # fmt: skip
        return steps if first is None else chain([first], steps)

    def _make_load_function(self) -> Load:
        """Return a function that loads the batches of a pass, one after the other."""
        if (iterator := self._iterator) is not None:
            return lambda request: next(iterator)  # The workers have received the same requests.
        load, pin = self._batches.__getitems__, self._pin
        return load if pin is None else lambda request: pin(load(request))

    def _read_known_steps(self, plan: AssignedSteps, load: Load, index: int) -> Iterator[AccumulationWindow]:
        rank_slice, ahead = self._rank_slice, next(plan, None)
        while ahead:
            (requests, assigned, state), ahead = ahead, next(plan, None)
            sizes = [len(request.indices) for request in requests]
            assigned_requests = rank_slice.take_assigned(requests, assigned)
            fetch = map(
                partial(_load_batch, load), assigned_requests
            ).__next__  # `zip` would keep a reference to the batch.
            window = AccumulationWindow(
                fetch, sizes, index, state, 0.0, rank_slice, assigned, last=ahead is None, is_one_batch=self._parts > 1
            )
            window.requests = assigned_requests
            yield window
            index += window.batches

    def _read_unknown_steps(self, plan: AssignedSteps, load: Load) -> Iterator[LoadedStep]:
        """Yield the steps of a loader without a batch size, whose numbers of samples are only known after loading."""
        rank_slice = self._rank_slice
        for requests, assigned, state in plan:
            batches = [load(request) for request in rank_slice.take_assigned(requests, assigned)]
            items = [LoadedBatch(batch, self._count(batch)) for batch in batches]
            own_sizes = {number: item.samples for number, item in zip(assigned, items, strict=False)}
            sizes = {number: size for rank_sizes in rank_slice.gather(own_sizes) for number, size in rank_sizes.items()}
            yield LoadedStep(items, [sizes[number] for number in range(len(requests))], assigned, state)

    def explain_empty(self) -> str:
        """Return the reason for a pass without batches."""
        return self._order.explain_empty()

    def close(self) -> None:
        """End the workers, and restore the user's random generators."""
        self._batches.kept_generators.restore_states()
        end_workers(self._iterator)
        self._iterator = None
        if self._loader is not None:  # Its workers may be persistent.
            end_persistent_workers(self._loader)


def _load_batch(load: Load, request: BatchRequest) -> tuple[Any, int]:
    return load(request), 0


def _return_batch(batch: Any) -> Any:
    """Return the batch unchanged: collate function of a loader whose workers return whole batches."""
    return batch


def _assign_steps(steps: Iterator[StepRequests], assign: Callable[[int], Assigned], parts: int) -> AssignedSteps:
    for requests, state in steps:
        divided = [part for request in requests for part in request.split(parts)] if parts > 1 else requests
        yield divided, assign(len(divided)), state
