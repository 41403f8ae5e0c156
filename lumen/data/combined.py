"""Combination of several training loaders."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, islice, repeat
from typing import Any, Literal, final

from torch.utils.data import DataLoader

from lumen.data.adapter import START, LoadedStep, LoaderAdapter, Position, read_ahead
from lumen.data.nested import map_leaves
from lumen.data.rank_checks import share_batch
from lumen.data.windows import AccumulationWindow, LoadedBatch, RankSlice
from lumen.errors import ConfigError, DataError
from lumen.internals.loaders import end_persistent_workers

Mode = Literal["max_size_cycle", "max_size", "min_size", "sequential"]
_MODES = ("max_size_cycle", "max_size", "min_size", "sequential")


@final
class CombinedLoader:
    """Combination of several loaders; a batch contains one batch of each.

    If `train_dataloader` returns a list or dictionary of loaders, Lumen combines them with the mode "max_size_cycle".

    Iteration in user code gives `(batch, batch_idx, dataloader_idx)`, each loader in its own order; a run reads in the
    order of its seed. `len` is the number of these tuples, or raises TypeError if the number depends on a loader
    without a length.

    Args:
        iterables: Loaders by name, or in a list, possibly with nested lists and dictionaries of loaders: batches have
            the same structure. The mode applies to all of them.
        mode: "max_size_cycle": until each loader has ended once, shorter loaders restart, in a new order; "min_size":
            until the first ends; "max_size": until all have ended, with None for loaders that have ended; "sequential":
            one loader after the other, each batch is from one loader, `dataloader_idx`.

    Raises:
        ConfigError: The mode is unknown, or there is no loader.
    """

    def __init__(self, iterables: Mapping[str, Any] | Sequence[Any], mode: Mode = "min_size") -> None:
        if mode not in _MODES:
            raise ConfigError(f"CombinedLoader: no mode is named {mode!r}; there are {', '.join(_MODES)}.")
        parts = list(_iterate_leaves(iterables))
        if not parts:
            raise ConfigError("CombinedLoader: no loaders were given. Give at least one.")
        if len({id(part) for _, part in parts}) < len(parts):
            raise ConfigError(
                "CombinedLoader: one loader is given twice. Create two loaders, which may share a data set."
            )
        self.iterables, self.mode = iterables, mode
        self._limits: list[int | None] | None = None

    @property
    def flattened(self) -> list[Any]:
        """All loaders, in order."""
        return [part for _, part in _iterate_leaves(self.iterables)]

    @property
    def limits(self) -> list[int | None] | None:
        """Largest number of batches per loader when iterated in user code; one number applies to all. None: all.

        Raises:
            ConfigError: The number of limits differs from the number of loaders.
        """
        return self._limits

    @limits.setter
    def limits(self, limits: Any) -> None:
        count = len(self.flattened)
        values = list(limits) if isinstance(limits, Sequence) else [limits] * count
        if len(values) != count:
            raise ConfigError(
                f"CombinedLoader: {len(values)} limits are given for {count} loaders. Give one limit for each loader."
            )
        self._limits = None if limits is None else [None if each in (None, math.inf) else int(each) for each in values]

    def __iter__(self) -> Iterator[tuple[Any, int, int]]:
        parts = list(zip(self.flattened, self._limits or repeat(None), strict=False))
        if self.mode == "sequential":
            for number, (part, limit) in enumerate(parts):
                yield from ((batch, index, number) for index, batch in enumerate(_take_batches(part, limit)))
            return
        skeleton, sources, ended = (
            _number_leaves(self.iterables, count()),
            [_take_batches(*part) for part in parts],
            set[int](),
        )
        for index in count():
            batches: list[Any] = []
            for number, part in enumerate(parts):
                batch = next(sources[number], _ENDED)
                ended |= {number} if batch is _ENDED else set()
                if ended and (self.mode == "min_size" or len(ended) == len(parts)):
                    return
                if batch is _ENDED and self.mode == "max_size_cycle":
                    sources[number] = _take_batches(*part)
                    if (batch := next(sources[number], _ENDED)) is _ENDED:
                        raise DataError(
                            f"CombinedLoader: {type(part[0]).__name__}, one of its loaders, returns no batch."
                        )
                batches.append(None if batch is _ENDED else batch)
            yield map_leaves(skeleton, batches.__getitem__), index, 0

    def __len__(self) -> int:
        """Return the number of batches of a pass."""
        lengths: list[int] = []
        for part, limit in zip(self.flattened, self._limits or repeat(None), strict=False):
            if not hasattr(part, "__len__"):
                raise TypeError(f"CombinedLoader: {type(part).__name__}, one of its loaders, has no length.")
            lengths.append(len(part) if limit is None else min(len(part), limit))
        return sum(lengths) if self.mode == "sequential" else min(lengths) if self.mode == "min_size" else max(lengths)

    def reset(self) -> None:
        """End the persistent workers of the loaders."""
        for part in self.flattened:
            if isinstance(part, CombinedLoader):
                part.reset()
            elif isinstance(part, DataLoader):
                end_persistent_workers(part)


_ENDED = object()


def _take_batches(part: Any, limit: int | None) -> Iterator[Any]:
    """Return the first batches of a loader, which may be a combination."""
    return islice((batch for batch, _, _ in part) if isinstance(part, CombinedLoader) else part, limit)


def holds_loaders(loaders: Any) -> bool:
    """Return True for a collection of loaders; False for one loader, which may be a list of batches."""
    return isinstance(loaders, Mapping) or (isinstance(loaders, (list, tuple)) and _has_loader(loaders))


def _has_loader(value: Any) -> bool:
    if isinstance(value, (list, tuple, Mapping)):
        return any(map(_has_loader, value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, (DataLoader, CombinedLoader, Iterator))


def list_loaders(tree: Any, name: str = "") -> list[tuple[str, Any]]:
    """Return the loaders in nested lists, dictionaries and combinations, with their names; "" for a single loader."""
    tree = tree.iterables if isinstance(tree, CombinedLoader) else tree
    if holds_loaders(tree):
        parts = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        return [each for key, part in parts for each in list_loaders(part, f"{name}/{key}".lstrip("/"))]
    return [] if tree is None else [(name, tree)]


def _iterate_leaves(tree: Mapping[Any, Any] | Sequence[Any], path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, Any]]:
    for key, part in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        place = (*path, key)
        yield from _iterate_leaves(part, place) if holds_loaders(part) else [(place, part)]


def _number_leaves(tree: Any, numbers: Iterator[int]) -> Any:
    """Return the same lists and dictionaries, with each loader replaced by its index."""
    if isinstance(tree, Mapping):
        return {
            key: _number_leaves(part, numbers) if holds_loaders(part) else next(numbers) for key, part in tree.items()
        }
    return [_number_leaves(part, numbers) if holds_loaders(part) else next(numbers) for part in tree]


@final
class CombinedAdapter(LoaderAdapter):
    """Adapter of a `CombinedLoader`, with an order, a position and a state for each loader.

    The number of samples of a micro-batch is that of its first loader that has not ended. The processes take
    micro-batches in turn, and each process loads only its own.

    Args:
        loader: The loaders, and the mode in which they are combined.
        adapt: Function that creates the adapter of one loader, given its index, which separates its random numbers.
        accumulate: Micro-batches of an optimizer step, of all processes together.
        rank_slice: The part of each step that this process takes.
    """

    def __init__(
        self, loader: CombinedLoader, adapt: Callable[[Any, int], LoaderAdapter], accumulate: int, rank_slice: RankSlice
    ) -> None:
        if loader.limits is not None:
            raise ConfigError(
                "CombinedLoader: limits apply to iteration in user code only. For a run use limit_train_batches of "
                "the trainer."
            )
        self._mode, self.per_step, self._rank_slice = loader.mode, accumulate, rank_slice
        self.is_sequential = loader.mode == "sequential"
        self._leaf_paths, self._skeleton = (
            [*dict(_iterate_leaves(loader.iterables))],
            _number_leaves(loader.iterables, count()),
        )
        self._adapters = [adapt(part, number) for number, part in enumerate(loader.flattened)]
        self.length = self._compute_length()

    def measure(self, position: Position = START) -> None:
        """Update the lengths of all loaders, and `length`."""
        saved = position.get_state("combination").get("parts") if position.batches else None
        for adapter, part in zip(self._adapters, saved or [None] * len(self._adapters), strict=False):
            adapter.measure(Position() if part is None else Position(part["samples"], part["batches"], part["loader"]))
        self.length = self._compute_length()

    def get_fingerprints(self) -> list[str | None]:
        """Return the fingerprints of all loaders' data sets."""
        return [line for adapter in self._adapters for line in adapter.get_fingerprints()]

    def get_batching(self) -> dict[str, int | None]:
        """Return the batches of a step, and the `batch_size` of each loader."""
        sizes = {
            f"batch_size of {name}": adapter.get_batching().get("batch_size") for name, adapter in self._iterate_named()
        }
        return {"batches of a step": self.per_step} | sizes

    def _iterate_named(self) -> Iterator[tuple[str, LoaderAdapter]]:
        return zip((".".join(map(str, place)) for place in self._leaf_paths), self._adapters, strict=True)

    def _compute_length(self) -> int | None:
        lengths = [adapter.length for adapter in self._adapters]
        known = [length for length in lengths if length is not None]
        if self._mode == "min_size":
            return min(known, default=None)
        if len(known) < len(lengths):
            return None
        return sum(known) if self._mode == "sequential" else max(known)

    def iterate_windows(self, epoch: int, position: Position, limit: int | None) -> Iterator[AccumulationWindow]:
        """Yield the optimizer steps of an epoch, from a position on."""
        layout = {"mode": self._mode, "loaders": self._describe_lengths()}
        saved = position.get_state("combination")
        if saved and layout != {key: saved[key] for key in layout}:
            if position.batches:
                raise DataError(
                    f"this run resumes in the middle of an epoch of {saved['loaders']} loaders combined by "
                    f"{saved['mode']}; now there are {layout['loaders']} by {self._mode}. Use the loaders and the "
                    "mode of the original run."
                )
            saved = {}
        if position.batches and saved.get("ended"):
            return
        states = saved.get("parts") or [None] * len(self._adapters)
        parts = [
            _LoaderInEpoch(adapter, epoch, position, state)
            for adapter, state in zip(self._adapters, states, strict=True)
        ]
        first = position.first_step or 0
        items = self._read_in_turn(parts, first) if self._mode == "sequential" else self._read_together(parts, first)
        if limit is not None:
            items = islice(items, max(0, limit - position.batches))
        steps = self._iterate_steps(items, parts, layout, position.first_step)
        yield from read_ahead(steps, position.batches, self._rank_slice, lambda state: state | {"ended": True})

    def _describe_lengths(self) -> str:
        if self._leaf_paths == [(number,) for number in range(len(self._adapters))]:
            return str(len(self._adapters))
        return ", ".join(name for name, _ in self._iterate_named())

    def _iterate_steps(
        self,
        items: Iterator[LoadedBatch],
        parts: list[_LoaderInEpoch],
        layout: dict[str, Any],
        first_step: int | None,
    ) -> Iterator[LoadedStep]:
        rank_slice, assign, read = self._rank_slice, self._rank_slice.make_assigner(first_step), 0
        newest: LoadedBatch | None = None
        while step := list(islice(items, self.per_step)):
            assigned = assign(len(step))
            taken = [step[number] for number in assigned if number is not None]
            newest = taken[-1] if taken else newest
            read += len(step)
            if rank_slice.needs_dummies and len(step) % rank_slice.world_size:  # True only in the epoch's last step.
                newest = share_batch(rank_slice, 0, newest) if read < rank_slice.world_size else newest
                assert newest is not None
                taken += [newest] * assigned.count(None)
            state = {"kind": "combination", **layout, "parts": [part.get_state() for part in parts]}
            yield LoadedStep(taken, [item.samples for item in step], assigned, state)

    def _read_in_turn(self, parts: list[_LoaderInEpoch], step: int) -> Iterator[LoadedBatch]:
        for number, part in enumerate(parts):
            while (item := part.read_next(step)) is not None:
                yield LoadedBatch(item.batch, item.samples, number)
                step += 1

    def _read_together(self, parts: list[_LoaderInEpoch], first: int) -> Iterator[LoadedBatch]:
        for step in count(first):
            items = [part.read_next(step) for part in parts]
            if all(part.ended for part in parts) or (self._mode == "min_size" and None in items):
                for part in parts:  # Unused batches of the other loaders belong to the next epoch.
                    part.step_back()
                return
            if self._mode == "max_size_cycle":
                items = [item or part.restart(step) for item, part in zip(items, parts, strict=True)]
            batches = [item and item.batch for item in items]
            samples = next(item.samples for item in items if item is not None)
            yield LoadedBatch(map_leaves(self._skeleton, batches.__getitem__), samples)

    def explain_empty(self) -> str:
        """Return the reason for a pass without batches."""
        found = [f"{name}: {adapter.explain_empty()}" for name, adapter in self._iterate_named() if not adapter.length]
        return "; ".join(found) or f"none of the {len(self._adapters)} loaders gave a batch"

    def close(self) -> None:
        """End the workers of all loaders."""
        for adapter in self._adapters:
            adapter.close()


@final
class _LoaderInEpoch:
    """One of several loaders, within an epoch of the combination."""

    def __init__(self, adapter: LoaderAdapter, epoch: int, position: Position, saved: Mapping[str, Any] | None) -> None:
        self._adapter, self._epoch, self._outer_cycle = adapter, epoch, position.cycle << 16
        self.ended, self._cycle, self._position = False, 0, Position(state=saved and saved["loader"])
        if saved is not None and position.batches:
            self.ended, self._cycle = saved["ended"], saved["round"]
            self._position = Position(saved["samples"], saved["batches"], saved["loader"])
        self._before = self._position
        self._windows: Iterator[AccumulationWindow] | None = None

    def read_next(self, step: int) -> LoadedBatch | None:
        """Return the loader's next batch; without data if a different process takes the batch; None at the end."""
        if self._windows is None:
            self._position = self._position._replace(cycle=self._outer_cycle + self._cycle, first_step=step)
            self._windows = self._adapter.iterate_windows(self._epoch, self._position, None)
        self._before = self._position
        window = next(self._windows, None)
        if window is None:
            self.ended = True
            return None
        read = self._position
        self._position = read._replace(
            samples=read.samples + window.samples, batches=read.batches + 1, state=window.state
        )
        return next((LoadedBatch(micro.batch, micro.samples) for micro in window), LoadedBatch(None, window.samples))

    def step_back(self) -> None:
        """Return the newest batch unused: the next epoch begins with it."""
        self._position = self._before

    def restart(self, step: int) -> LoadedBatch:
        self._cycle += 1
        self._position = Position(state=self._position.state)
        self._windows = None
        item = self.read_next(step)
        if item is None:
            raise DataError(
                "one of several training loaders is empty, so the loader cannot restart while longer loaders "
                f"continue: {self._adapter.explain_empty()}. Remove the empty loader."
            )
        return item

    def get_state(self) -> dict[str, Any]:
        samples, batches, loader, *_ = self._position
        return {"round": self._cycle, "ended": self.ended, "samples": samples, "batches": batches, "loader": loader}
