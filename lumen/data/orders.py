"""Orders: which samples make which micro-batch of an epoch, from a position on, without loading any.

There are three kinds: each sample of the data set once, in its order or shuffled; a user's sampler, cut into batches;
a user's batch sampler. A user's sampler is iterated with every generator seeded from (seed, epoch), so every process
draws the same list, and a resumed run skips what was consumed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from itertools import islice
from typing import Any, final
from zlib import crc32

import numpy as np
import torch
from torch.utils.data import Sampler

from lumen.data.adapter import START, Position
from lumen.data.fingerprint import known_length, reads_once
from lumen.data.generators import OwnGenerators
from lumen.data.permutation import LARGE, cut_steps, epoch_order
from lumen.data.seeded_dataset import BatchRequest
from lumen.errors import DataError
from lumen.random import Domain, GeneratorStates, make_key, seed_generators

#: The micro-batches of one optimizer step, of all processes, and the state of the order after it.
StepRequests = tuple[list[BatchRequest], dict[str, Any]]


class Order(ABC):
    """Which samples make which micro-batch.

    Attributes:
        length: Micro-batches of an epoch, of all processes; None if it is known only at the epoch's end.
        per_step: Micro-batches of an optimizer step, of all processes.
        is_known: The steps depend on (seed, epoch) alone, so they may be asked for long before they are run.
        is_cut_here: Batches are as large as Lumen makes them, not as a user's batch sampler does.
    """

    length: int | None
    per_step: int
    is_known = False
    is_cut_here = True
    _batch_size = 1
    _step_size: int

    @abstractmethod
    def measure(self, position: Position = START) -> None:
        """Update `length` for the epoch that `position` is in."""

    @abstractmethod
    def steps(self, epoch: int, position: Position, limit: int | None) -> Iterator[StepRequests]:
        """The requests of each optimizer step from a position on, and the order's state after the step.

        Raises:
            DataError: The position was saved by another order, or over other data.
        """

    @abstractmethod
    def nothing(self) -> str:
        """See `LoaderAdapter.nothing`."""

    @abstractmethod
    def cut(self) -> dict[str, int | None]:
        """See `LoaderAdapter.cut`."""

    def regroup(self, per_step: int) -> None:
        """See `LoaderAdapter.regroup`."""
        self.per_step, self._step_size = per_step, per_step * self._batch_size


@final
class PlainOrder(Order):
    """Each sample once: in the data set's order, or shuffled by (seed, epoch).

    An epoch has the samples that the data set has when it begins, also for a run that is resumed in its middle.

    Args:
        dataset: A data set with a length, which may change between epochs.
        seed: Seed of the shuffling: the run's, or that of the loader's own generator.
        shuffle: Shuffle the samples anew in every epoch.
        batch_size: Number of samples in a micro-batch.
        step_size: Number of samples in an optimizer step, of all processes together.
        drop_last: Leave out the epoch's last micro-batch if it is not full.
    """

    is_known = True

    def __init__(
        self, dataset: Sized, seed: int, *, shuffle: bool, batch_size: int, step_size: int, drop_last: bool
    ) -> None:
        self._dataset, self._seed, self._shuffle = dataset, seed, shuffle
        self._batch_size, self._step_size, self._drop_last = batch_size, step_size, drop_last
        self.per_step = -(-step_size // batch_size)
        self.measure()

    def measure(self, position: Position = START) -> None:
        """See `Order.measure`."""
        here = len(self._dataset)
        self._samples = position.state_of("data set").get("samples", here) if position.samples else here
        if here < self._samples:
            raise DataError(
                f"this run goes on in the middle of an epoch of {self._samples} samples, but the "
                f"{type(self._dataset).__name__} now has {here}. Give it the data it had."
            )
        self.length = _batches(self._samples, self._batch_size, self._step_size, drop_last=self._drop_last)

    def nothing(self) -> str:
        """See `Order.nothing`."""
        return _too_few(self._dataset, self._samples, self._batch_size, drop_last=self._drop_last)

    def steps(self, epoch: int, position: Position, limit: int | None) -> Iterator[StepRequests]:
        """See `Order.steps`."""
        self.measure(position)
        how = "in order" if not self._shuffle else "in pieces" if self._samples > LARGE else "at once"
        state = {"kind": "data set", "samples": self._samples, "shuffled": how, "seed": self._seed}
        if position.samples and position.state_of("data set") not in ({}, state):
            raise DataError(
                "this run goes on in the middle of an epoch, whose order belongs to other data: "
                f"then {position.state}, now {state}. Give it the data and the shuffling it had."
            )
        key, end = position.key(epoch), self._samples
        order = epoch_order(self._samples, self._seed, key, shuffle=self._shuffle)
        rows = order.numpy() if isinstance(order, torch.Tensor) else order  # cut faster
        if limit is not None:
            steps, batches = divmod(limit, self.per_step)
            end = min(end, steps * self._step_size + batches * self._batch_size)
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

    def cut(self) -> dict[str, int | None]:
        """See `Order.cut`."""
        return {"batch_size": self._batch_size, "global_batch_size": self._step_size}


@final
class SampledOrder(Order):
    """The order of a user's sampler, which may leave samples out, repeat them, or never end.

    Args:
        sampler: An iterable of indices, such as a `WeightedRandomSampler`.
        seed: The run's seed, which keys everything random.
        batch_size: Number of samples in a micro-batch.
        step_size: Number of samples in an optimizer step, of all processes together.
        drop_last: Leave out the epoch's last micro-batch if it is not full.
    """

    def __init__(self, sampler: Any, seed: int, *, batch_size: int, step_size: int, drop_last: bool) -> None:
        self._sampler, self._seed, self._begun = sampler, seed, False
        self._own = OwnGenerators({"sampler": sampler}, by_seed=True)
        self._batch_size, self._step_size, self._drop_last = batch_size, step_size, drop_last
        self.per_step = -(-step_size // batch_size)
        self.measure()

    def measure(self, position: Position = START) -> None:
        """See `Order.measure`."""
        samples, cut = known_length(self._sampler), (self._batch_size, self._step_size)
        self.length = None if samples is None else _batches(samples, *cut, drop_last=self._drop_last)

    def nothing(self) -> str:
        """See `Order.nothing`."""
        return _too_few(self._sampler, known_length(self._sampler), self._batch_size, drop_last=self._drop_last)

    def steps(self, epoch: int, position: Position, limit: int | None) -> Iterator[StepRequests]:
        """See `Order.steps`."""
        again, self._begun = self._begun or epoch > 0, True
        stream = _SeededIterator(self._sampler, self._own, self._seed, epoch, position, _SAMPLES_AHEAD, again=again)
        stream.skip(position.samples)
        start = position.samples
        samples = None
        if limit is not None:
            steps, batches = divmod(limit, self.per_step)
            samples = max(0, steps * self._step_size + batches * self._batch_size - start)
        cut = cut_steps(stream.take, self._batch_size, self._step_size, drop_last=self._drop_last, limit=samples)
        for step in cut:
            requests = []
            for indices in step:
                requests.append(BatchRequest(position.key(epoch), start, indices, by_place=True))
                start += len(indices)
            yield requests, stream.state()

    def cut(self) -> dict[str, int | None]:
        """See `Order.cut`."""
        return {"batch_size": self._batch_size, "global_batch_size": self._step_size}


@final
class BatchedOrder(Order):
    """The batches of a user's batch sampler, or single samples where a loader has `batch_size=None`.

    Args:
        sampler: An iterable of lists of indices; with `single`, of indices.
        seed: The run's seed, which keys everything random.
        accumulate: Batches of an optimizer step, of all processes together.
        single: The sampler gives single indices instead of lists.
    """

    is_cut_here = False

    def __init__(self, sampler: Any, seed: int, accumulate: int, *, single: bool = False) -> None:
        self._sampler, self._seed, self._single, self._begun = sampler, seed, single, False
        self.regroup(accumulate)
        self._own = OwnGenerators({"sampler": sampler}, by_seed=True)
        self.measure()

    def measure(self, position: Position = START) -> None:
        """See `Order.measure`."""
        self.length = known_length(self._sampler)

    def nothing(self) -> str:
        """See `Order.nothing`."""
        return f"the {type(self._sampler).__name__} of the loader gives nothing"

    def steps(self, epoch: int, position: Position, limit: int | None) -> Iterator[StepRequests]:
        """See `Order.steps`."""
        again, self._begun = self._begun or epoch > 0, True
        given = self._sampler, self._own, self._seed, epoch, position
        stream = _SeededIterator(*given, _BATCHES_AHEAD, self._as_batch, again=again)
        stream.skip(position.batches)
        start = position.batches if self._single else position.samples
        left = None if limit is None else max(0, limit - position.batches)
        for (batches,) in cut_steps(stream.take, self.per_step, self.per_step, drop_last=False, limit=left):
            requests = []
            for indices in batches:
                requests.append(BatchRequest(position.key(epoch), start, indices, by_place=True))
                start += len(indices)
            yield requests, stream.state()

    def cut(self) -> dict[str, int | None]:
        """See `Order.cut`."""
        return {"batches of a step": self.per_step}

    def _as_batch(self, given: Any) -> list[Any]:
        if self._single:
            return [given]
        if not hasattr(given, "__iter__") or not (batch := list(given)):
            raise DataError(f"a batch sampler gave {given!r}. It must give lists of at least one index.")
        return batch


def _too_few(source: Any, samples: int | None, batch_size: int, *, drop_last: bool) -> str:
    """The reason, for an error, why the samples of an epoch fill no batch."""
    name = type(source).__name__
    if not (samples or drop_last) or samples == 0:
        return f"{name} has no samples"
    has = "gives fewer samples" if samples is None else f"has {samples} samples, fewer"
    return f"{name} {has} than the batch_size {batch_size}, and drop_last=True leaves out a batch that is not full"


def _batches(samples: int, batch_size: int, step_size: int, *, drop_last: bool) -> int:
    """Number of micro-batches in an epoch of `samples`."""
    steps, rest = divmod(samples, step_size)
    return steps * -(-step_size // batch_size) + (rest // batch_size if drop_last else -(-rest // batch_size))


def loader_objects(loader: Any) -> Iterator[Any]:
    """The loader, its samplers and its data set, and the samplers that these hold: all that may have `set_epoch`."""
    waiting, met = [loader], set[int]()
    while waiting:
        part = waiting.pop(0)
        if part is None or id(part) in met:
            continue
        met.add(id(part))
        yield part
        waiting += [getattr(part, name, None) for name in ("batch_sampler", "sampler", "dataset")]
        waiting += [value for value in _held_by(part) if isinstance(value, Sampler)]


def _held_by(part: Any) -> Iterator[Any]:
    """The values of an object's attributes, and of lists and dictionaries among them that are too short to be data."""
    for value in list(getattr(part, "__dict__", {}).values()):
        yield value
        if isinstance(value, (list, tuple, dict)) and len(value) <= 64:
            yield from value.values() if isinstance(value, dict) else value


def begin_epoch(loader: Any, own: OwnGenerators, seed: int, epoch: int, position: Position) -> None:
    """Call `set_epoch` wherever a loader or sampler has it, and seed every generator that it keeps for the epoch."""
    own.look()
    own.seed(make_key(seed, Domain.ORDER, position.key(epoch)))
    for part in loader_objects(loader):
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)


_SAMPLES_AHEAD, _BATCHES_AHEAD = 1024, 64  # drawn at once, because changing generators costs more than drawing
_END = object()


@final
class _SeededIterator:
    """Iterates over a sampler with the generators in a state of its own, and keeps a digest of what was drawn."""

    def __init__(
        self,
        sampler: Any,
        own: OwnGenerators,
        seed: int,
        epoch: int,
        position: Position,
        ahead: int,
        convert: Callable[[Any], Any] = lambda given: given,
        *,
        again: bool,
    ) -> None:
        self._position, self._ahead, self._convert = position, ahead, convert
        self._own = own
        self._generators: GeneratorStates | None = None
        self._drawn: list[Any] = []
        self._digest = 0
        with self._as_if_alone():
            begin_epoch(sampler, own, seed, epoch, position)
            seed_generators(make_key(seed, Domain.ORDER, position.key(epoch)))
            self._iterator = iter(sampler)
        if again and reads_once(sampler, self._iterator):
            raise DataError(
                f"the sampler is a {type(sampler).__name__}, which can be read only once. "
                "Give an object whose __iter__ begins anew: a list, or a Sampler."
            )
        if self._iterator is sampler:
            self._iterator = _rest_of(sampler)

    @contextmanager
    def _as_if_alone(self) -> Iterator[None]:
        """Within it every generator is where the sampler left it; afterwards where it was before."""
        outside = GeneratorStates(self._own.generators)
        if self._generators is not None:
            self._generators.restore()
        try:
            yield
        finally:
            self._generators = GeneratorStates(self._own.generators)
            outside.restore()

    def take(self, number: int) -> list[Any]:
        if len(self._drawn) < number:
            with self._as_if_alone():
                more = islice(self._iterator, max(number - len(self._drawn), self._ahead))
                self._drawn += [self._convert(given) for given in more]
        taken, self._drawn = self._drawn[:number], self._drawn[number:]
        self._digest = crc32(_word(taken).encode(), self._digest)
        return taken

    def skip(self, number: int) -> None:
        begun, saved = number > 0, self._position.state_of("sampler")
        while number > 0:
            piece = min(number, 1 << 14)
            self.take(piece)
            number -= piece
        if begun and saved not in ({}, self.state()):
            raise DataError(
                "this run goes on in the middle of an epoch, and the sampler now gives another order than it gave "
                "before. Give it the data and the arguments it had. A sampler that changes itself from epoch to epoch "
                "must do so in set_epoch(epoch)."
            )

    def state(self) -> dict[str, Any]:
        return {"kind": "sampler", "order": self._digest}


def _rest_of(iterator: Iterator[Any]) -> Iterator[Any]:
    """The items that are left of an iterator whose own `__iter__` may begin anew."""
    while (given := next(iterator, _END)) is not _END:
        yield given


def _word(given: Any) -> str:
    """A text that is equal for equal indices, be they ints, tensors, arrays, or lists of them."""
    if isinstance(given, (list, tuple)):
        words = map(str if set(map(type, given)) == {int} else _word, given)
        return ",".join([*words, ""])
    if isinstance(given, (int, str)):
        return str(given)
    return str(given.item()) if hasattr(given, "item") else type(given).__name__
