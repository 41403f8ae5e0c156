"""Iterables of batches, read as they are: what comes next is known only to them."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from itertools import islice
from typing import Any, final

from torch.utils.data import DataLoader, IterableDataset

from lumen.console import logger as _log
from lumen.data.feed import Feed, Position, SampleCounter, Step, count_steps, read_ahead
from lumen.data.samplers import begin_epoch, known_length
from lumen.data.windows import Item, Window
from lumen.data.workers import end_workers, prepared_workers
from lumen.errors import DataError
from lumen.random import Domain, make_key, seed_generators


@final
class StreamFeed(Feed):
    """An iterable of batches.

    Where it has `state_dict` and `load_state_dict` (the loader; or its data set, when it is loaded in this process) a
    run goes on from its state. Otherwise the epoch is read again up to where the run stood. The global generators are
    keyed before every batch, so what is drawn in this process is the same then; what workers draw is repeated only by
    reading again.

    Args:
        loader: Gives a fresh iterator of batches for every epoch.
        seed: Of the run.
        accumulate: Batches of an optimizer step.
        rewinds: Every pass begins where the first one did, as evaluations do.
    """

    def __init__(self, loader: Any, seed: int, accumulate: int = 1, *, rewinds: bool = False) -> None:
        self._loader = loader
        self._seed = seed
        self._accumulate = accumulate
        self._rewinds = rewinds
        self._stateful = _stateful_part(loader)
        self._count = SampleCounter(loader)
        self._iterator: Iterator[Any] | None = None
        self._opened = self._exhausted = False
        self._stands_at: dict[str, Any] | None = None  # the state that the loader itself is in, if it is in one
        part_of_loader = self._stateful is not None and self._stateful is not loader
        self._beginning = self._state() if rewinds and part_of_loader else {"kind": "stream"}
        self.length = known_length(loader)

    def windows(self, epoch: int, position: Position, limit: int | None) -> Iterator[Window]:
        """See `Feed.windows`."""
        state = self._beginning if self._rewinds and not position.batches else position.state_of("stream")
        if position.batches and state.get("ended"):
            self._go_to(state)
            return
        batches = self._batches(epoch, position, state)
        if limit is not None:
            batches = islice(batches, max(0, limit - position.batches))
        yield from read_ahead(self._steps(batches), position.batches, lambda state: self._last_state())

    def _steps(self, batches: Iterator[Any]) -> Iterator[Step]:
        while items := [Item(batch, self._count(batch)) for batch in islice(batches, self._accumulate)]:
            yield items, self._state()

    def _batches(self, epoch: int, position: Position, state: dict[str, Any]) -> Iterator[Any]:
        fresh, number = not position.batches, position.batches
        stands_there = state is self._stands_at
        if fresh:
            self._go_to(state)
        begin_epoch(self._loader, self._seed, epoch, position)
        found = not fresh and self._go_to(state)  # only now: its generators are not those of the epoch's beginning
        seed_generators(make_key(self._seed, Domain.ORDER, position.key(epoch)))
        self._begin(epoch)
        if number and not found:
            _log.warning(
                "%s has no state_dict to go on from: %d batches of this epoch are read once more. Give it (or its data "
                "set, with num_workers=0) state_dict and load_state_dict, or use torchdata's StatefulDataLoader.",
                type(self._loader).__name__,
                number,
            )
            for again in range(number):
                self._next(position.key(epoch), again)
        batch = self._next(position.key(epoch), number)
        if batch is _END and fresh and "loader" in state and not (stands_there and state["exhausted"]):
            self._begin(epoch)  # the epoch before was cut exactly where the data ends, or its end was loaded just now
            batch = self._next(position.key(epoch), number)
        while batch is not _END:
            yield batch
            number += 1
            batch = self._next(position.key(epoch), number)

    def _begin(self, epoch: int) -> None:
        if isinstance(self._loader, DataLoader) and self._loader.persistent_workers:
            end_workers(self._loader._iterator)  # theirs are seeded once: an epoch would depend on the ones before
            self._loader._iterator = None
        with prepared_workers(self._loader):
            self._iterator = iter(self._loader)
        was_read = self._exhausted or (self._opened and self._rewinds) or (epoch and not self._opened)
        if self._iterator is self._loader and was_read:
            raise DataError(
                f"the loader is a {type(self._loader).__name__}, which can be read only once, and it has been read. "
                "Give an object whose __iter__ begins anew: a DataLoader, a list, or a class of your own."
            )
        self._opened, self._exhausted = True, False

    def _next(self, key: int, number: int) -> Any:
        assert self._iterator is not None
        seed_generators(make_key(self._seed, Domain.SAMPLE, key, number))
        batch = next(self._iterator, _END)
        self._exhausted = batch is _END
        return batch

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"kind": "stream"}
        if self._stateful is not None:  # a copy: it may be made of what the next batch changes
            state |= {"loader": deepcopy(self._stateful.state_dict()), "exhausted": self._exhausted}
        return state

    def _last_state(self) -> dict[str, Any]:
        state = self._state() | {"ended": True}
        if self._exhausted or self._stateful is not self._loader:  # a loader forgets its place when it begins anew
            self._stands_at = state
        return state

    def _go_to(self, state: dict[str, Any]) -> bool:
        """Bring the loader to where a state says it stood. Returns whether it could be."""
        if self._stateful is None or "loader" not in state:
            return False
        if state is not self._stands_at:
            self._stateful.load_state_dict(deepcopy(state["loader"]))
        self._stands_at, self._exhausted = None, state["exhausted"]
        return True

    def steps(self, limit: int | None) -> int | None:
        """See `Feed.steps`."""
        return count_steps(self.length, limit, self._accumulate)

    def close(self) -> None:
        """See `Feed.close`. A loader of the user's own can be iterated again."""
        end_workers(self._iterator)
        self._iterator = None
        if isinstance(self._loader, DataLoader):
            self._loader._iterator = None


_END = object()


def _stateful_part(loader: Any) -> Any:
    """What holds the state of an iterable, or None."""
    dataset = getattr(loader, "dataset", None) if isinstance(loader, DataLoader) else None
    here = isinstance(dataset, IterableDataset) and loader.num_workers == 0
    candidates = [dataset, loader] if here else [loader]
    return next((part for part in candidates if hasattr(part, "load_state_dict")), None)
