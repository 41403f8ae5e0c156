"""The base of the loader adapters, which give the loop one optimizer step after another, from any position on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from operator import attrgetter
from time import perf_counter
from typing import Any, NamedTuple, final

import torch

from lumen.console import logger as _log
from lumen.data.nested import tensors
from lumen.data.windows import AccumulationWindow, Assigned, LoadedBatch, RankSlice
from lumen.errors import DataError

_FETCHED = attrgetter("batch", "loader")


class Position(NamedTuple):
    """How much of an epoch has been consumed, by all processes together.

    Attributes:
        samples: Samples consumed in this epoch.
        batches: Micro-batches consumed in this epoch.
        state: `state` of the window consumed last, in this epoch or the one before; None before the first one.
        cycle: How often a shorter loader of several has begun again within the epoch.
        first_step: Number of the first step where processes take whole steps in turn, else None.
    """

    samples: int = 0
    batches: int = 0
    state: Any = None
    cycle: int = 0
    first_step: int | None = None

    def state_of(self, kind: str) -> dict[str, Any]:
        """The state, if an adapter of this kind has saved it; else an empty one.

        Raises:
            DataError: An adapter of another kind has saved it in the middle of this epoch.
        """
        state: dict[str, Any] = self.state or {}
        if state.get("kind", kind) == kind:
            return state
        if self.batches:
            raise DataError(
                f"this run goes on in the middle of an epoch that was read from a {state['kind']}, but now there is a "
                f"{kind}. Give it the loader that it had."
            )
        return {}

    def key(self, epoch: int) -> int:
        """The key of the random order: the epoch, in the low 32 bits, and `cycle`, so that each cycle has its own."""
        return epoch + (self.cycle << 32)


#: The position before the first sample of an epoch.
START = Position()


class LoaderAdapter(ABC):
    """Reads one loader for the loop, one pass over it at a time.

    Attributes:
        length: Micro-batches of an epoch as a single process would count them; None if the loader has no length.
        per_step: Micro-batches of an optimizer step, of all processes together.
        name: Name that the user gave an evaluation loader; "" if none.
        in_turn: It reads several loaders, one after the other.
    """

    length: int | None
    per_step: int
    name: str = ""
    in_turn = False

    @abstractmethod
    def measure(self, position: Position = START) -> None:
        """Update `length` for the epoch that `position` is in: a data set may grow from epoch to epoch."""

    @abstractmethod
    def identity(self) -> list[str | None]:
        """A fingerprint of the data set of each loader; None for iterable data, which has none."""

    @abstractmethod
    def cut(self) -> dict[str, int | None]:
        """The settings that cut the data into batches and steps, such as `batch_size`, by name."""

    @abstractmethod
    def windows(self, epoch: int, position: Position, limit: int | None) -> Iterator[AccumulationWindow]:
        """The optimizer steps of an epoch, from a position on. Ends the pass before this one.

        Args:
            epoch: Number of the epoch, from 0: with the seed it decides the order.
            position: What has been consumed of the epoch already.
            limit: The most micro-batches of the epoch to use, those consumed already included; None: all.
        """

    @abstractmethod
    def nothing(self) -> str:
        """The reason why there is no batch, for an error: what is empty, or smaller than a batch."""

    def call(self, name: str) -> None:
        """Give the loader the name that messages and logged values have."""
        self.name = name

    def regroup(self, per_step: int) -> None:
        """From the next pass on, make an optimizer step of so many micro-batches, of all processes together."""
        self.per_step = per_step

    def steps(self, limit: int | None, per_step: int | None = None) -> int | None:
        """Optimizer steps of an epoch; None if nothing says how many batches it has.

        Args:
            limit: The most micro-batches to use; None: all.
            per_step: Micro-batches of a step; None: as many as now.
        """
        known = [batches for batches in (self.length, limit) if batches is not None]
        return -(-min(known) // (per_step or self.per_step)) if known else None

    def close(self) -> None:
        """End the loader's workers; `length` can still be read."""


@final
class LoadedStep(NamedTuple):
    """The batches of one optimizer step, which have been read.

    Attributes:
        items: Batches of this process, dummies included.
        sizes: Number of samples of each micro-batch, of all processes.
        assigned: Numbers of the micro-batches that this process takes.
        state: Where the adapter stands after the step: plain data and tensors, for a checkpoint.
    """

    items: list[LoadedBatch]
    sizes: list[int]
    assigned: Assigned
    state: dict[str, Any]

    def window(
        self, index: int, state: dict[str, Any], waited_s: float, rank_slice: RankSlice, *, last: bool
    ) -> AccumulationWindow:
        """The step for the loop; dummies stand behind all other items."""
        return AccumulationWindow(
            map(_FETCHED, self.items).__next__, self.sizes, index, state, waited_s, rank_slice, self.assigned, last=last
        )  # fmt: skip


def read_ahead(
    steps: Iterator[LoadedStep],
    index: int,
    rank_slice: RankSlice,
    at_end: Callable[[dict[str, Any]], dict[str, Any]] = lambda state: state,
) -> Iterator[AccumulationWindow]:
    """The windows of steps whose sizes are known only once they have been read.

    One step is read ahead of the one that is yielded, to know which is the last.

    Args:
        steps: Reads the optimizer steps, one at a time.
        index: Number of the first micro-batch in the epoch, from 0.
        rank_slice: The part of each step that this process takes.
        at_end: Converts the state after the last step into one that records the end of the epoch.
    """
    ahead = next(steps, None)
    while ahead is not None:
        start = perf_counter()
        step, ahead = ahead, next(steps, None)
        waited_s = perf_counter() - start
        last = ahead is None
        yield step.window(index, at_end(step.state) if last else step.state, waited_s, rank_slice, last=last)
        index += len(step.sizes)


def one_by_one(
    steps: Iterator[LoadedStep],
    index: int,
    rank_slice: RankSlice,
    at_end: Callable[[dict[str, Any]], dict[str, Any]],
    length: int | None,
) -> Iterator[AccumulationWindow]:
    """The windows of steps, each of which is read when the one before is done: what it holds follows from training.

    Args:
        steps: Reads the optimizer steps, one at a time.
        index: Number of the first micro-batch in the epoch, from 0.
        rank_slice: The part of each step that this process takes.
        at_end: Converts the state after the last step into one that records the end of the epoch.
        length: Micro-batches of the epoch, since the last step has to be known as such; None: it never ends.

    Raises:
        DataError: The epoch ends elsewhere.
    """
    start = perf_counter()
    for step in steps:
        waited_s, first = perf_counter() - start, index
        index += len(step.sizes)
        last = length is not None and index >= length
        yield step.window(first, at_end(step.state) if last else step.state, waited_s, rank_slice, last=last)
        if last:
            return
        start = perf_counter()
    if index or length is not None:
        said = "it has no length" if length is None else f"its length, or a limit, says {length}"
        raise DataError(
            f"a loader with follows_training = True ended after {index} batches of the epoch, but {said}. It is not "
            "read ahead, so its end has to be known: give it the __len__ that it keeps to, set limit_train_batches, or "
            "let it go on for ever."
        )


@final
class SampleCounter:
    """Counts the samples of batches that are not drawn by Lumen, and logs once per class of batch how it counts.

    Args:
        loader: The loader of these batches; its class is named in the warning.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._known: set[type] = set()

    def __call__(self, batch: Any) -> int:
        """Return the size of dimension 0 of the batch's first tensor that has a dimension; 1 without such a tensor."""
        first = batch[0] if type(batch) in (list, tuple) and batch else None  # Most batches need no search.
        if type(first) is torch.Tensor and first.dim():
            samples: int | None = first.shape[0]
        else:
            samples = next((tensor.shape[0] for tensor in tensors(batch) if tensor.dim() > 0), None)
        if type(batch) not in self._known:
            self._known.add(type(batch))
            counted = (
                f"1 sample, because Lumen finds no tensor with a dimension in a {type(batch).__name__}"
                if samples is None
                else "as many samples as dimension 0 of its first tensor"
            )
            _log.warning(
                "%s: Lumen did not draw these batches, so a batch counts %s. Return (loss, weight) from training_step "
                "to say it yourself.",
                type(self._loader).__name__, counted,
            )  # fmt: skip
        return 1 if samples is None else samples
