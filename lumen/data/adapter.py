"""Feed: one loader as the loop reads it, from any position of any epoch on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from operator import attrgetter
from time import perf_counter
from typing import Any, NamedTuple, final

from lumen.console import logger as _log
from lumen.data.nested import count_samples
from lumen.data.windows import Dealt, Item, Shard, Window
from lumen.errors import DataError

_FETCHED = attrgetter("batch", "loader")


class Position(NamedTuple):
    """Where an epoch stands.

    Attributes:
        samples: Consumed of it.
        batches: Consumed of it.
        state: What the feed gave with the window consumed last, of this epoch or of the one before; None at the start.
        round: How often the loader has begun again within the epoch, beside longer ones.
        turn: See `Shard.dealer`.
    """

    samples: int = 0
    batches: int = 0
    state: Any = None
    round: int = 0
    turn: int | None = None

    def state_of(self, kind: str) -> dict[str, Any]:
        """The state, if a feed of this kind gave it.

        Raises:
            DataError: Another kind of feed was in the middle of this epoch.
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
        """What keys an epoch: one of its own for every round."""
        return epoch + (self.round << 32)


#: Before the first sample of an epoch.
START = Position()


class Feed(ABC):
    """One loader as the loop reads it, in one pass at a time.

    Attributes:
        length: Micro-batches of an epoch as one process would count them; None if the loader does not know.
        name: Of an evaluation loader that was given one.
        in_turn: It reads several loaders, one after the other.
    """

    length: int | None
    name: str = ""
    in_turn = False

    @abstractmethod
    def measure(self, position: Position = START) -> None:
        """Take the length anew, as of an epoch that is read from a position on: data may grow from epoch to epoch."""

    @abstractmethod
    def identity(self) -> list[str | None]:
        """What is read now, a line for each loader; None of a stream, which does not tell."""

    @abstractmethod
    def cut(self) -> dict[str, int | None]:
        """How it is cut into batches and steps, by the names of the settings that say so."""

    @abstractmethod
    def windows(self, epoch: int, position: Position, limit: int | None) -> Iterator[Window]:
        """The optimizer steps of an epoch, from a position on. The pass before is over, even if it was not read out.

        Args:
            epoch: Decides the order.
            position: What was consumed of the epoch before.
            limit: Micro-batches of the epoch to use at most.
        """

    @abstractmethod
    def nothing(self) -> str:
        """Why there is no batch, as far as can be told: what is empty, or smaller than a batch."""

    @abstractmethod
    def steps(self, limit: int | None) -> int | None:
        """Optimizer steps of an epoch; None if the loader has no length."""

    def close(self) -> None:
        """End the workers; the lengths stay known."""


def count_steps(length: int | None, limit: int | None, accumulate: int) -> int | None:
    """Optimizer steps of an epoch of a length in micro-batches; None if neither length nor limit is known."""
    known = [number for number in (length, limit) if number is not None]
    return -(-min(known) // accumulate) if known else None


@final
class Step(NamedTuple):
    """The micro-batches of an optimizer step that were read already.

    Attributes:
        items: Those of this process, with those that stand in.
        sizes: Samples of each, of all processes.
        dealt: Which are this process's.
        state: Where the feed stands after it.
    """

    items: list[Item]
    sizes: list[int]
    dealt: Dealt
    state: dict[str, Any]


def read_ahead(
    steps: Iterator[Step],
    index: int,
    shard: Shard,
    at_end: Callable[[dict[str, Any]], dict[str, Any]] = lambda state: state,
) -> Iterator[Window]:
    """Optimizer steps out of micro-batches whose sizes are known only once they are read.

    One step is read ahead, to know which is the last.

    Args:
        steps: What was read.
        index: Number of the first micro-batch in the epoch.
        shard: Which of them are this process's.
        at_end: Makes of the state after the last step one that knows of the end.
    """
    ahead = next(steps, None)
    while ahead is not None:
        start = perf_counter()
        (items, sizes, dealt, state), ahead = ahead, next(steps, None)
        waited_s = perf_counter() - start
        last = ahead is None
        state = at_end(state) if last else state
        yield Window(map(_FETCHED, items).__next__, sizes, index, last, state, waited_s, shard, dealt)
        index += len(sizes)


@final
class SampleCounter:
    """Counts the samples of batches that Lumen did not draw, and says once what it counts.

    Args:
        loader: Where they come from.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._said = False

    def __call__(self, batch: Any) -> int:
        """Samples of a batch."""
        if not self._said:
            self._said = True
            _log.warning(
                "%s: Lumen did not draw these batches, so a batch counts as many samples as dimension 0 of its first "
                "tensor. Return (loss, weight) from training_step to say it yourself.",
                type(self._loader).__name__,
            )
        return count_samples(batch)
