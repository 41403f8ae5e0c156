"""Orders: assignment of samples to the micro-batches of an epoch, from a position on, without loading any sample.

There are two kinds. `PlainOrder` takes each sample of the data set once, in order or shuffled. `SampledOrder` follows a
user's sampler, divided into batches, or batch sampler. A user's sampler is iterated with every generator seeded from
(seed, epoch). Every process therefore draws the same list, and a resumed run skips the consumed part.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from itertools import islice
from typing import Any, final
from zlib import crc32

import numpy as np
import torch
from torch.utils.data import Sampler

from lumen.data.adapter import START, Position
from lumen.data.fingerprint import get_length, is_single_pass
from lumen.data.generators import KeptGenerators
from lumen.data.permutation import MAX_MATERIALIZED, cut_steps, make_epoch_order
from lumen.data.seeded_dataset import BatchRequest
from lumen.errors import DataError
from lumen.random import Domain, GeneratorStates, make_key, seed_generators

#: Micro-batches of one optimizer step, of all processes, and the state of the order after the step.
StepRequests = tuple[list[BatchRequest], dict[str, Any]]


class Order(ABC):
    """Assignment of samples to micro-batches.

    Attributes:
        length: Micro-batches of an epoch, of all processes; None if it is known only at the epoch's end.
        per_step: Micro-batches of an optimizer step, of all processes.
        has_known_samples: True if the steps depend only on (seed, epoch), so they may be computed long before they run.
        is_cut_by_lumen: True if Lumen forms the batches; False if a user's batch sampler does.
    """

    length: int | None
    per_step: int
    has_known_samples = False
    is_cut_by_lumen = True

    def __init__(self, batch_size: int, step_size: int, *, drop_last: bool) -> None:
        self._batch_size, self._step_size, self._drop_last = batch_size, step_size, drop_last
        self.per_step = -(-step_size // batch_size)

    @abstractmethod
    def measure(self, position: Position = START) -> None:
        """Update `length` for the epoch of `position`."""

    @abstractmethod
    def iterate_steps(self, epoch: int, position: Position, limit: int | None) -> Iterator[StepRequests]:
        """Yield the requests of each optimizer step from a position on, and the order's state after the step.

        Raises:
            DataError: The position was saved by a different order, or for different data.
        """

    @abstractmethod
    def explain_empty(self) -> str:
        """Return why a pass had no batches, as text of an error."""

    def get_batching(self) -> dict[str, int | None]:
        """Return the batch size and the samples of a step."""
        return {"batch_size": self._batch_size, "global_batch_size": self._step_size}

    def set_per_step(self, per_step: int) -> None:
        """Set the number of micro-batches per optimizer step."""
        self.per_step, self._step_size = per_step, per_step * self._batch_size

    def _count_batches(self, samples: int) -> int:
        """Return the number of micro-batches in an epoch of `samples`."""
        (steps, rest), size = divmod(samples, self._step_size), self._batch_size
        return steps * -(-self._step_size // size) + (rest // size if self._drop_last else -(-rest // size))

    def _count_items(self, limit: int) -> int:
        """Return the number of items in the first `limit` micro-batches of an epoch."""
        steps, batches = divmod(limit, self.per_step)
        return steps * self._step_size + batches * self._batch_size

    def _explain_too_few(self, source: Any, samples: int | None) -> str:
        """Return the reason, for an error, why the samples of an epoch fill no batch."""
        name = type(source).__name__
        if not (samples or self._drop_last) or samples == 0:
            return f"{name} has no samples"
        has = "gives fewer samples" if samples is None else f"has {samples} samples, fewer"
        return f"{name} {has} than the batch_size {self._batch_size}, and drop_last=True omits a batch that is not full"


@final
class PlainOrder(Order):
    """Order with each sample once: in the data set's order, or shuffled by (seed, epoch).

    An epoch contains the samples that the data set has at its start, also if a run resumes in the middle.

    Args:
        dataset: A data set with a length, which may change between epochs.
        seed: Seed of the shuffling: the run's seed, or the seed of the loader's own generator.
        shuffle: Shuffle the samples differently in every epoch.
        batch_size: Number of samples in a micro-batch.
        step_size: Number of samples in an optimizer step, of all processes together.
        drop_last: Omit the epoch's last micro-batch if it is not full.
    """

    has_known_samples = True

    def __init__(
        self, dataset: Sized, seed: int, *, shuffle: bool, batch_size: int, step_size: int, drop_last: bool
    ) -> None:
        super().__init__(batch_size, step_size, drop_last=drop_last)
        self._dataset, self._seed, self._shuffle = dataset, seed, shuffle
        self.measure()

    def measure(self, position: Position = START) -> None:
        """Update `length` from the data set, or from the saved number of samples in the middle of an epoch."""
        length = len(self._dataset)
        self._samples = position.get_state("data set").get("samples", length) if position.samples else length
        if length < self._samples:
            raise DataError(
                f"this run resumes in the middle of an epoch of {self._samples} samples, but the "
                f"{type(self._dataset).__name__} now has {length}. Use the data of the original run."
            )
        self.length = self._count_batches(self._samples)

    def explain_empty(self) -> str:
        """Return the reason for a pass without batches."""
        return self._explain_too_few(self._dataset, self._samples)

    def iterate_steps(self, epoch: int, position: Position, limit: int | None) -> Iterator[StepRequests]:
        """Yield the requests of each optimizer step, and the order's state."""
        self.measure(position)
        how = "in order" if not self._shuffle else "in pieces" if self._samples > MAX_MATERIALIZED else "at once"
        state = {"kind": "data set", "samples": self._samples, "shuffled": how, "seed": self._seed}
        if position.samples and position.get_state("data set") not in ({}, state):
            raise DataError(
                "this run resumes in the middle of an epoch, but the order of the samples has changed: then "
                f"{position.state}, now {state}. Use the data and the shuffling of the original run."
            )
        key, end = position.get_order_key(epoch), self._samples
        order = make_epoch_order(self._samples, self._seed, key, shuffle=self._shuffle)
        rows = order.numpy() if isinstance(order, torch.Tensor) else order  # Slicing numpy arrays is faster.
        if limit is not None:
            end = min(end, self._count_items(limit))
        size = self._batch_size
        for first in range(position.samples, end, self._step_size):
            last = min(first + self._step_size, end)
            if self._drop_last and last - first < self._step_size:
                last -= (last - first) % size
            requests = [
                BatchRequest(key, start, np.asarray(rows[start : min(start + size, last)]), by_place=False)
                for start in range(first, last, size)
            ]
            if requests:
                yield requests, state


@final
class SampledOrder(Order):
    """Order of a user's sampler or batch sampler, which may omit samples, repeat them, or never end.

    Args:
        sampler: An iterable of indices, such as a `WeightedRandomSampler`, or of lists of indices.
        seed: The run's seed, which keys everything random.
        batch_size: Number of samples in a micro-batch; None: each list of the sampler is a micro-batch.
        step_size: Number of items of the sampler in an optimizer step, of all processes together.
        drop_last: Omit the epoch's last micro-batch if it is not full.
        single: Without a batch size: the sampler gives single indices instead of lists.
    """

    def __init__(
        self, sampler: Any, seed: int, *, batch_size: int | None, step_size: int, drop_last: bool, single: bool = False
    ) -> None:
        self._sampler, self._seed, self._single, self._has_begun = sampler, seed, single, False
        self.is_cut_by_lumen = batch_size is not None
        super().__init__(batch_size or 1, step_size, drop_last=drop_last)
        self._kept_generators = KeptGenerators({"sampler": sampler}, by_seed=True)
        self.measure()

    def measure(self, position: Position = START) -> None:
        """Update `length` from the sampler's `__len__`."""
        items = get_length(self._sampler)
        self.length = None if items is None else self._count_batches(items)

    def explain_empty(self) -> str:
        """Return the reason for a pass without batches."""
        if not self.is_cut_by_lumen:
            return f"the {type(self._sampler).__name__} of the loader returns no indices"
        return self._explain_too_few(self._sampler, get_length(self._sampler))

    def iterate_steps(self, epoch: int, position: Position, limit: int | None) -> Iterator[StepRequests]:
        """Yield the requests of each optimizer step, and the order's state."""
        is_repeated, self._has_begun = self._has_begun or epoch > 0, True
        # Draw many items at once, because changing generators costs more than drawing.
        taken, ahead = (position.samples, 1024) if self.is_cut_by_lumen else (position.batches, 64)
        begin = self._seed, epoch, position
        stream = _SeededIterator(
            self._sampler, self._kept_generators, begin, ahead, self._convert_indices, is_repeated=is_repeated
        )
        stream.skip_items(taken)
        start = taken if self._single else position.samples
        left = None if limit is None else max(0, self._count_items(limit) - taken)
        cut = cut_steps(stream.take_items, self._batch_size, self._step_size, drop_last=self._drop_last, limit=left)
        for step in cut:
            requests = []
            for items in step:
                indices = items if self.is_cut_by_lumen else items[0]
                requests.append(BatchRequest(position.get_order_key(epoch), start, indices, by_place=True))
                start += len(indices)
            yield requests, stream.get_state()

    def get_batching(self) -> dict[str, int | None]:
        """Return the sizes of batches and steps, or only the batches of a step for a batch sampler."""
        return super().get_batching() if self.is_cut_by_lumen else {"batches of a step": self.per_step}

    def _convert_indices(self, item: Any) -> Any:
        if self.is_cut_by_lumen:
            return item
        if self._single:
            return [item]
        if not hasattr(item, "__iter__") or not (batch := list(item)):
            raise DataError(f"a batch sampler gave {item!r}. Return lists of at least one index.")
        return batch


def iterate_loader_objects(loader: Any) -> Iterator[Any]:
    """Yield all objects that may have `set_epoch`: the loader, its samplers and data set, and samplers inside these."""
    waiting, met = [loader], set[int]()
    while waiting:
        part = waiting.pop(0)
        if part is None or id(part) in met:
            continue
        met.add(id(part))
        yield part
        waiting += [getattr(part, name, None) for name in ("batch_sampler", "sampler", "dataset")]
        waiting += [value for value in _iterate_held(part) if isinstance(value, Sampler)]


def _iterate_held(part: Any) -> Iterator[Any]:
    """Yield the values of an object's attributes, and of lists and dictionaries among them with at most 64 items."""
    for value in list(getattr(part, "__dict__", {}).values()):
        yield value
        if isinstance(value, (list, tuple, dict)) and len(value) <= 64:
            yield from value.values() if isinstance(value, dict) else value


def begin_epoch(loader: Any, generators: KeptGenerators, seed: int, epoch: int, position: Position) -> None:
    """Call `set_epoch` of the loader and its samplers, and seed every generator that they hold."""
    generators.refresh()
    generators.seed_from_key(make_key(seed, Domain.ORDER, position.get_order_key(epoch)))
    for part in iterate_loader_objects(loader):
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)


_END = object()


@final
class _SeededIterator:
    """Iterator over a sampler with a separate state of the generators, and with a digest of the drawn items."""

    def __init__(
        self,
        sampler: Any,
        generators: KeptGenerators,
        begin: tuple[int, int, Position],
        ahead: int,
        convert: Any,
        *,
        is_repeated: bool,
    ) -> None:
        seed, epoch, position = begin
        self._position, self._kept_generators, self._ahead, self._convert = position, generators, ahead, convert
        self._generators: GeneratorStates | None = None
        self._drawn: list[Any] = []
        self._digest = 0
        with self._swap_generators():
            begin_epoch(sampler, generators, seed, epoch, position)
            seed_generators(make_key(seed, Domain.ORDER, position.get_order_key(epoch)))
            self._iterator = iter(sampler)
        if is_repeated and is_single_pass(sampler, self._iterator):
            raise DataError(
                f"the sampler is a {type(sampler).__name__}, which can be read only once. Use an object whose "
                "__iter__ restarts, such as a list or a Sampler."
            )
        if self._iterator is sampler:
            self._iterator = _iterate_rest(sampler)

    @contextmanager
    def _swap_generators(self) -> Iterator[None]:
        """Return a context with the generators in the sampler's state; on exit the outer state is restored."""
        outside = GeneratorStates(self._kept_generators.generators)
        if self._generators is not None:
            self._generators.restore()
        try:
            yield
        finally:
            self._generators = GeneratorStates(self._kept_generators.generators)
            outside.restore()

    def take_items(self, number: int) -> list[Any]:
        if len(self._drawn) < number:
            with self._swap_generators():
                new_items = islice(self._iterator, max(number - len(self._drawn), self._ahead))
                self._drawn += map(self._convert, new_items)
        taken, self._drawn = self._drawn[:number], self._drawn[number:]
        self._digest = crc32(_make_digest_text(taken).encode(), self._digest)
        return taken

    def skip_items(self, number: int) -> None:
        for first in range(0, number, 1 << 14):
            self.take_items(min(1 << 14, number - first))
        if number and self._position.get_state("sampler") not in ({}, self.get_state()):
            raise DataError(
                "this run resumes in the middle of an epoch, but the sampler now gives a different order. Use the "
                "data and the arguments of the original run. A sampler that changes from epoch to epoch must change "
                "in set_epoch(epoch)."
            )

    def get_state(self) -> dict[str, Any]:
        return {"kind": "sampler", "order": self._digest}


def _iterate_rest(iterator: Iterator[Any]) -> Iterator[Any]:
    """Yield the remaining items of an iterator whose own `__iter__` may restart it."""
    while (item := next(iterator, _END)) is not _END:
        yield item


def _make_digest_text(indices: Any) -> str:
    """Return a text that is equal for equal indices, whether ints, tensors, arrays, or lists of them."""
    if isinstance(indices, (list, tuple)):
        words = map(str if set(map(type, indices)) == {int} else _make_digest_text, indices)
        return ",".join([*words, ""])
    if isinstance(indices, (int, str)):
        return str(indices)
    return str(indices.item()) if hasattr(indices, "item") else type(indices).__name__
