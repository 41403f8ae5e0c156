"""Base class of loader adapters, which yield one optimizer step after the other, from any position of an epoch on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from operator import attrgetter
from time import perf_counter
from typing import Any, NamedTuple, final

import torch

from lumen.console import logger as _log
from lumen.data.nested import iterate_tensors
from lumen.data.windows import AccumulationWindow, Assigned, LoadedBatch, RankSlice
from lumen.errors import DataError

_BATCH_AND_LOADER = attrgetter("batch", "loader")


class Position(NamedTuple):
    """Consumed part of an epoch, by all processes together.

    Attributes:
        samples: Samples consumed in this epoch.
        batches: Micro-batches consumed in this epoch.
        state: The adapter's state after the last consumed window, in this epoch or the previous one; None before the
            first.
        cycle: Number of times that a shorter loader of several has restarted within the epoch.
        first_step: Number of the first step if processes take whole steps in turn, else None.
    """

    samples: int = 0
    batches: int = 0
    state: Any = None
    cycle: int = 0
    first_step: int | None = None

    def get_state(self, kind: str) -> dict[str, Any]:
        """Return the state if an adapter of this kind has saved it; else an empty dictionary.

        Raises:
            DataError: An adapter of a different kind has saved the state in the middle of this epoch.
        """
        state: dict[str, Any] = self.state or {}
        if state.get("kind", kind) == kind:
            return state
        if self.batches:
            raise DataError(
                f"this run resumes in the middle of an epoch that was read from a {state['kind']}, but the loader is "
                f"now read as a {kind}. Use the loader of the original run."
            )
        return {}

    def get_order_key(self, epoch: int) -> int:
        """Return the key of the random order: the epoch in the low 32 bits, `cycle` above, so each cycle differs."""
        return epoch + (self.cycle << 32)


#: Position before the first sample of an epoch.
START = Position()


class LoaderAdapter(ABC):
    """Base class of adapters, each of which reads one loader for the training or evaluation loop, one pass at a time.

    Attributes:
        length: Micro-batches of an epoch, counted as in a run with one process; None if the loader has no length.
        per_step: Micro-batches of an optimizer step, of all processes together.
        name: Name that the user gave an evaluation loader; "" without a name.
        is_sequential: True if the adapter reads several loaders, one after the other.
    """

    length: int | None
    per_step: int
    name: str = ""
    is_sequential = False

    @abstractmethod
    def measure(self, position: Position = START) -> None:
        """Update `length` for the epoch of `position`: a data set may grow from epoch to epoch."""

    @abstractmethod
    def get_fingerprints(self) -> list[str | None]:
        """Return a fingerprint of the data set of each loader; None for iterable data, which has no fingerprint."""

    @abstractmethod
    def get_batching(self) -> dict[str, int | None]:
        """Return the settings that divide the data into batches and steps, such as `batch_size`, by name."""

    @abstractmethod
    def iterate_windows(self, epoch: int, position: Position, limit: int | None) -> Iterator[AccumulationWindow]:
        """Yield the optimizer steps of an epoch, from a position on. The call ends the previous pass.

        Args:
            epoch: Number of the epoch, from 0: with the seed it decides the order.
            position: The consumed part of the epoch.
            limit: The most micro-batches of the epoch to use, including the consumed ones; None: all.
        """

    @abstractmethod
    def explain_empty(self) -> str:
        """Return why a pass had no batches, as text of an error: no samples, or fewer than a batch."""

    def set_name(self, name: str) -> None:
        """Set the loader's name in messages and logged values."""
        self.name = name

    def set_per_step(self, per_step: int) -> None:
        """Set the number of micro-batches per optimizer step, of all processes together, from the next pass on."""
        self.per_step = per_step

    def count_steps(self, limit: int | None, per_step: int | None = None) -> int | None:
        """Return the number of optimizer steps of an epoch; None if the number of batches is unknown.

        Args:
            limit: The most micro-batches to use; None: all.
            per_step: Micro-batches of a step; None: the present value.
        """
        known = [batches for batches in (self.length, limit) if batches is not None]
        return -(-min(known) // (per_step or self.per_step)) if known else None

    def close(self) -> None:
        """End the loader's workers; `length` can still be read."""


@final
class LoadedStep(NamedTuple):
    """Batches of one optimizer step, read from the loader.

    Attributes:
        items: Batches of this process, including dummy batches.
        sizes: Number of samples of each micro-batch, of all processes.
        assigned: Numbers of the micro-batches that this process takes.
        state: State of the adapter after the step: plain data and tensors, for a checkpoint.
    """

    items: list[LoadedBatch]
    sizes: list[int]
    assigned: Assigned
    state: dict[str, Any]

    def make_window(
        self, index: int, state: dict[str, Any], waited_s: float, rank_slice: RankSlice, *, last: bool
    ) -> AccumulationWindow:
        """Return the step as a window for the loop; dummy batches come last."""
        return AccumulationWindow(
            map(_BATCH_AND_LOADER, self.items).__next__, self.sizes, index, state, waited_s, rank_slice, self.assigned,
            last=last,
        )  # fmt: skip


def read_ahead(
    steps: Iterator[LoadedStep],
    index: int,
    rank_slice: RankSlice,
    at_end: Callable[[dict[str, Any]], dict[str, Any]] = lambda state: state,
) -> Iterator[AccumulationWindow]:
    """Yield the windows of steps whose sizes are only known after reading.

    One step is read ahead of the yielded step, to detect the last step.

    Args:
        steps: Iterator that reads the optimizer steps, one at a time.
        index: Number of the first micro-batch in the epoch, from 0.
        rank_slice: The part of each step that this process takes.
        at_end: Function that converts the state after the last step into one that records the end of the epoch.
    """
    ahead = next(steps, None)
    while ahead is not None:
        start = perf_counter()
        step, ahead = ahead, next(steps, None)
        waited_s = perf_counter() - start
        last = ahead is None
        yield step.make_window(index, at_end(step.state) if last else step.state, waited_s, rank_slice, last=last)
        index += len(step.sizes)


def read_one_by_one(
    steps: Iterator[LoadedStep],
    index: int,
    rank_slice: RankSlice,
    at_end: Callable[[dict[str, Any]], dict[str, Any]],
    length: int | None,
) -> Iterator[AccumulationWindow]:
    """Yield the windows of steps without reading ahead, because the data depends on the trained parameters.

    Args:
        steps: Iterator that reads the optimizer steps, one at a time.
        index: Number of the first micro-batch in the epoch, from 0.
        rank_slice: The part of each step that this process takes.
        at_end: Function that converts the state after the last step into one that records the end of the epoch.
        length: Micro-batches of the epoch, which identify the last step; None: the epoch never ends.

    Raises:
        DataError: The number of batches differs from `length`.
    """
    start = perf_counter()
    for step in steps:
        waited_s, first = perf_counter() - start, index
        index += len(step.sizes)
        last = length is not None and index >= length
        yield step.make_window(first, at_end(step.state) if last else step.state, waited_s, rank_slice, last=last)
        if last:
            return
        start = perf_counter()
    if index or length is not None:
        reason = "the loader has no length" if length is None else f"the length of the loader, or a limit, is {length}"
        raise DataError(
            f"a loader with follows_training = True ended after {index} batches of the epoch, but {reason}. Lumen "
            "does not read such a loader ahead, so the number of batches must be known. Define the exact __len__, "
            "set limit_train_batches, or never end the loader."
        )


@final
class SampleCounter:
    """Counter of samples in batches that Lumen does not draw; logs once per class of batch how it counts.

    Args:
        loader: The loader of these batches; the warning names its class.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._warned_classes: set[type] = set()

    def __call__(self, batch: Any) -> int:
        """Return the size of dimension 0 of the batch's first tensor that has a dimension; 1 without such a tensor."""
        first = batch[0] if type(batch) in (list, tuple) and batch else None  # Most batches need no search.
        if type(first) is torch.Tensor and first.dim():
            samples: int | None = first.shape[0]
        else:
            samples = next((tensor.shape[0] for tensor in iterate_tensors(batch) if tensor.dim() > 0), None)
        if type(batch) not in self._warned_classes:
            self._warned_classes.add(type(batch))
            rule = (
                f"1 sample, because Lumen finds no tensor with a dimension in a {type(batch).__name__}"
                if samples is None
                else "as many samples as dimension 0 of its first tensor"
            )
            _log.warning(
                "%s: Lumen did not draw these batches, so a batch counts %s. Return (loss, weight) from "
"training_step to set the weight yourself.",
                type(self._loader).__name__, rule,
            )  # fmt: skip
        return 1 if samples is None else samples
