"""Control of garbage collection, which frees reference cycles only; Python frees all other objects immediately."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any, Protocol, final

_NEVER = 2**31 - 1  # the largest C int
_HOOK_STAGES = {"fit": "fit", "validate": "validation", "test": "test", "predict": "predict"}  # in names of hooks
_runs_without_collection: list[object] = []  # the runs of this process that have disabled collection
_found_thresholds: list[tuple[int, int, int]] = []  # the thresholds that each open context has found, in any thread
_threshold_lock = Lock()
_initially_frozen = gc.get_freeze_count()  # Python 3.12 starts with some frozen objects
_was_collecting_before_fork = True


@contextmanager
def collect_young_only() -> Iterator[None]:
    """Skip full collections within the context, for code that makes many objects but no garbage, such as imports.

    Full collections would take a third of an import and half of a save. Several threads may use the context at once.
    """
    with _threshold_lock:
        _found_thresholds.append(gc.get_threshold())
        gc.set_threshold(*_found_thresholds[0][:2], _NEVER)
    try:
        yield
    finally:
        with _threshold_lock:
            before = _found_thresholds.pop()
            if not _found_thresholds:
                gc.set_threshold(*before)


@contextmanager
def pause_automatic_collection() -> Iterator[None]:
    """Begin no automatic collection within the context, which must be short, in any thread."""
    with _threshold_lock:
        _found_thresholds.append(gc.get_threshold())
        gc.set_threshold(0)
        try:
            yield
        finally:
            gc.set_threshold(*_found_thresholds.pop())


class CollectedRun(Protocol):
    """Attributes of a run that garbage collection uses.

    Attributes:
        stage: "fit", "validate", "test" or "predict".
        hooks: The hooks of the run: tuples of functions, by the names of hooks.
        progress: The counters of the run, with the number of completed steps.
    """

    stage: str
    hooks: Any
    progress: Any


@contextmanager
def pause_collection_for_fork() -> Iterator[None]:
    """Disable collection within the context, in which a loader forks workers, until they call `collect_in_worker`.

    A worker must not free garbage of this process: a CUDA event freed in a forked process aborts that process.
    """
    global _was_collecting_before_fork
    was_enabled = gc.isenabled()
    _was_collecting_before_fork = was_enabled or bool(_runs_without_collection)
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def collect_in_worker() -> None:
    """Let a loader's worker, which has no steps, collect its own garbage as usual; objects from before fork stay."""
    global _threshold_lock
    gc.freeze()
    _threshold_lock = Lock()  # another thread may have held it during the fork, and is not in this process
    if _found_thresholds:
        gc.set_threshold(*_found_thresholds[0])
        _found_thresholds.clear()
    if _was_collecting_before_fork:
        gc.enable()


@final
class GarbageCollector:
    """Garbage collection at every n-th step of a run, until it is closed, instead of Python's automatic collection.

    Args:
        steps: The number of optimizer steps (in an evaluation: batches) between two collections, >= 1.
        run: The run, before its first hook; until then Python collects as usual.
    """

    def __init__(self, steps: int, run: CollectedRun) -> None:
        self._interval = steps
        self._run = run
        self._batches = 0
        self._was_enabled = self._has_frozen = False
        self._add_hook(f"on_{_HOOK_STAGES[run.stage]}_start", self._begin_run, first=True)
        self._add_hook("on_step_checkpoint", self._on_boundary)
        for stage in ("validation", "test", "predict"):
            self._add_hook(f"on_{stage}_batch_end", self._on_batch)
            self._add_hook(f"on_{stage}_start", self._reset_batches)

    def _add_hook(self, name: str, hook: Any, *, first: bool = False) -> None:
        hooks = getattr(self._run.hooks, name)
        setattr(self._run.hooks, name, (hook, *hooks) if first else (*hooks, hook))

    def _begin_run(self) -> None:
        """Freeze existing objects, mostly torch's: a collection that looks through them would take 0.2 s longer."""
        self._was_enabled = gc.isenabled()
        _runs_without_collection.append(self)
        gc.disable()
        gc.collect()
        # Otherwise other code has frozen objects, and needs them frozen.
        self._has_frozen = gc.get_freeze_count() <= _initially_frozen
        if self._has_frozen:
            gc.freeze()

    def close(self) -> None:
        """Restore Python's garbage collection."""
        if self not in _runs_without_collection:
            return
        _runs_without_collection.remove(self)
        if self._has_frozen:
            gc.unfreeze()
        if self._was_enabled:
            gc.enable()

    def _on_boundary(self) -> None:
        if self._run.progress.step % self._interval == 0:
            gc.collect()

    def _reset_batches(self) -> None:
        self._batches = 0

    def _on_batch(self, *_: Any) -> None:
        self._batches += 1
        if self._batches % self._interval == 0:
            gc.collect()
