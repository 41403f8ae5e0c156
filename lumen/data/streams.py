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
from lumen.data.workers import end_workers
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
        self._stateful = _stateful_part(loader)
        self._count = SampleCounter(loader)
        self._iterator: Iterator[Any] | None = None
        self._opened = self._exhausted = False
        part_of_loader = self._stateful is not None and self._stateful is not loader
        self._beginning = self.live_state() if rewinds and part_of_loader else {}
        self.length = known_length(loader)

    def windows(self, epoch: int, position: Position, limit: int | None) -> Iterator[Window]:
        """See `Feed.windows`."""
        saved = position.state or self._beginning
        resumed, self._opened = not self._opened, True
        if position.batches and saved.get("ended"):
            if resumed:
                self._load(saved)
            return
        batches = self._batches(epoch, position, saved if resumed else self._beginning)
        if limit is not None:
            batches = islice(batches, max(0, limit - position.batches))
        yield from read_ahead(self._steps(batches), position.batches, lambda state: self.live_state() | {"ended": True})

    def _steps(self, batches: Iterator[Any]) -> Iterator[Step]:
        while items := [Item(batch, self._count(batch)) for batch in islice(batches, self._accumulate)]:
            yield items, self.live_state()

    def _batches(self, epoch: int, position: Position, saved: dict[str, Any]) -> Iterator[Any]:
        if not position.batches and (self._stateful is not self._loader or saved.get("exhausted")):
            self._load(saved)  # a loader, unlike a data set, begins anew where a limit ended its epoch
        begin_epoch(self._loader, self._seed, epoch)
        loaded = position.batches > 0 and self._load(saved)  # only now: its generators are not those of the beginning
        seed_generators(make_key(self._seed, Domain.ORDER, epoch))
        self._iterator = iter(self._loader)
        if self._iterator is self._loader and self._exhausted:
            raise DataError(
                f"the loader is a {type(self._loader).__name__}, which can be read only once, and an epoch has read "
                "it. Give an object whose __iter__ begins anew: a DataLoader, a list, or a class of your own."
            )
        self._exhausted = False
        number = position.batches
        if number and not loaded:
            _log.warning(
                "%s has no state_dict to go on from: %d batches of this epoch are read once more. Give it (or its data "
                "set, with num_workers=0) state_dict and load_state_dict, or use torchdata's StatefulDataLoader.",
                type(self._loader).__name__,
                number,
            )
            for again in range(number):
                self._next(epoch, again)
        while not self._exhausted:
            batch = self._next(epoch, number)
            if not self._exhausted:
                yield batch
            number += 1

    def _next(self, epoch: int, number: int) -> Any:
        assert self._iterator is not None
        seed_generators(make_key(self._seed, Domain.SAMPLE, epoch, number))
        batch = next(self._iterator, _END)
        self._exhausted = batch is _END
        return batch

    def live_state(self) -> dict[str, Any]:
        """See `Feed.live_state`."""
        if self._stateful is None:
            return {}
        return {"loader": deepcopy(self._stateful.state_dict()), "exhausted": self._exhausted}

    def _load(self, saved: dict[str, Any]) -> bool:
        if self._stateful is None or "loader" not in saved:
            return False
        self._stateful.load_state_dict(saved["loader"])
        self._exhausted = saved["exhausted"]
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
