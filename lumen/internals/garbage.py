"""When Python collects garbage. Only reference cycles need that; all other objects are freed at once, always."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any, Protocol, final

_NEVER = 2**31 - 1  # what a C int holds
_STAGES = {"fit": "fit", "validate": "validation", "test": "test", "predict": "predict"}  # as hooks spell them
_off_for_runs: list[object] = []  # those of this process for which it is off
_young_only: list[tuple[int, int, int]] = []  # thresholds as each context of any thread found them
_changing = Lock()
_frozen_by_python = gc.get_freeze_count()  # Python 3.12 begins with some
_collected_before_fork = True


@contextmanager
def only_young_collected() -> Iterator[None]:
    """The context for code that makes many objects, none of them garbage, such as imports.

    Full collections in it would take a third of an import and half of a save. Several threads may be in it at once.
    """
    with _changing:
        _young_only.append(gc.get_threshold())
        gc.set_threshold(*_young_only[0][:2], _NEVER)
    try:
        yield
    finally:
        with _changing:
            before = _young_only.pop()
            if not _young_only:
                gc.set_threshold(*before)


class HasSteps(Protocol):
    """A run, as far as it is looked at here.

    Attributes:
        stage: "fit", "validate", "test" or "predict".
        hooks: What is called when: tuples of functions, by the names of hooks.
        progress: Has the number of steps that are done.
    """

    stage: str
    hooks: Any
    progress: Any


@contextmanager
def workers_are_begun() -> Iterator[None]:
    """The context in which a loader forks its workers, which begin without a collection until `collect_in_worker`.

    What is garbage in this process is not theirs to free: a CUDA event, freed in a process that was forked, aborts it.
    """
    global _collected_before_fork
    was_on = gc.isenabled()
    _collected_before_fork = was_on or bool(_off_for_runs)
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def collect_in_worker() -> None:
    """Let a loader's worker collect its own garbage as usual: it has no steps. What it was forked with stays."""
    gc.freeze()
    if _collected_before_fork:
        gc.enable()


@final
class GarbageCollection:
    """Collects garbage at every n-th step of a run, until it is closed, instead of whenever Python would.

    Args:
        steps: Optimizer steps (in an evaluation: batches) between two collections, >= 1.
        run: The run, before its first hook; until then Python collects as usual.
    """

    def __init__(self, steps: int, run: HasSteps) -> None:
        self._every = steps
        self._run = run
        self._batches = 0
        self._was_on = self._froze = False
        self._put(f"on_{_STAGES[run.stage]}_start", self._begin, first=True)
        self._put("on_step_checkpoint", self._at_boundary)
        for stage in ("validation", "test", "predict"):
            self._put(f"on_{stage}_batch_end", self._at_batch)
            self._put(f"on_{stage}_start", self._forget_batches)

    def _put(self, name: str, call: Any, *, first: bool = False) -> None:
        calls = getattr(self._run.hooks, name)
        setattr(self._run.hooks, name, (call, *calls) if first else (*calls, call))

    def _begin(self) -> None:
        """Set aside what is there already, most of it torch's: looking through that too would take 0.2 s each time."""
        self._was_on = gc.isenabled()
        _off_for_runs.append(self)
        gc.disable()
        gc.collect()
        self._froze = gc.get_freeze_count() <= _frozen_by_python  # else somebody else has, and would miss it
        if self._froze:
            gc.freeze()

    def close(self) -> None:
        """Let Python collect garbage as it did before."""
        if self not in _off_for_runs:
            return
        _off_for_runs.remove(self)
        if self._froze:
            gc.unfreeze()
        if self._was_on:
            gc.enable()

    def _at_boundary(self) -> None:
        if self._run.progress.step % self._every == 0:
            gc.collect()

    def _forget_batches(self) -> None:
        self._batches = 0

    def _at_batch(self, *_: Any) -> None:
        self._batches += 1
        if self._batches % self._every == 0:
            gc.collect()
