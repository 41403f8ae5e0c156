"""Saves of a run's checkpoints, synchronous or in a thread during training."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any, Protocol, final

import torch

from lumen.checkpoint.format.codec import Tensors
from lumen.checkpoint.format.folder import read_info, remove_checkpoints
from lumen.checkpoint.format.storage import Storage, get_storage
from lumen.checkpoint.optimizer_state import keeps_unknown_state
from lumen.checkpoint.save.collect import (
    INFO_COUNTERS,
    CheckpointContents,
    check_savable,
    collect_contents,
    get_trained_tensors,
    refuse_non_finite,
)
from lumen.checkpoint.save.snapshot import Snapshot
from lumen.checkpoint.save.writer import Sections, WritePlan, plan_writes, write_checkpoint
from lumen.checkpoint.settings import Setting
from lumen.console import logger as _log
from lumen.distributed.processes import Processes
from lumen.errors import CheckpointDamaged, CheckpointError
from lumen.internals.garbage import collect_young_only
from lumen.run.run import Run

_CGROUP = "/sys/fs/cgroup"  # memory limits of this process in a container
_NO_MEMORY = re.compile("can't allocate memory|out of memory", re.I)  # torch's messages for host and CUDA memory
_OVERHEAD_PER_TENSOR_BYTES = 16 << 10  # fixed cost of writing a tensor, as the number of bytes with the same cost


class SaveCallback(Protocol):
    """Function that `save` calls on every rank once a save has ended."""

    def __call__(self, *, committed: bool) -> Iterable[PurePath]:
        """Return the paths of the checkpoints to remove, the same on every rank."""


def _remove_nothing(*, committed: bool) -> Iterable[PurePath]:
    return ()


@final
class CheckpointSaver:
    """Checkpoint saves of a run: written immediately, or copied immediately and written in a thread during training.

    At most one save is in progress. Every process copies its blocks and writes them in its thread. The threads
    communicate over their own process groups, and the thread of rank 0 commits. When the threads have ended, a vote
    informs all ranks at the end of the same step. An error in any thread therefore ends the run on each rank. When
    Python exits, it waits for the thread. A kill leaves an incomplete directory, as with any save.

    Args:
        run: The run whose state is saved.
        check_run_directory: Function that raises an error if the run's directory was removed; None: no check on this
            rank.
        is_enabled: The trainer saves checkpoints.
        continues_run: True if the run continues the run of its checkpoint, in the same directory.
        numerics: Arguments of the trainer that change the computed values; checkpoints record them.

    Attributes:
        is_enabled: The trainer saves checkpoints.
        continues_run: True if the run continues the run of its checkpoint, in the same directory.
        numerics: Arguments of the trainer that change the computed values; checkpoints record them.
        path: Directory of the save in progress, the same on every rank; None if there is no such save or `finish_save`
            ended it.
        moment: The `moment` of the save in progress, as given to `save`.
        checks_update: The optimizer is of a class that neither torch nor Lumen defines, and has made no update yet.
    """

    def __init__(
        self,
        run: Run,
        *,
        check_run_directory: Callable[[], None] | None,
        is_enabled: bool,
        continues_run: bool,
        numerics: Mapping[str, Setting],
    ) -> None:
        self.is_enabled, self.continues_run, self.numerics = is_enabled, continues_run, numerics
        self.path: PurePath | None = None
        self._check_run_directory = check_run_directory or (lambda: None)
        self.moment: Any = None
        self.checks_update = False
        self._on_save_end: SaveCallback = _remove_nothing
        self._run = run
        self._processes = run.processes
        self._thread = ThreadPoolExecutor(
            1, "lumen-save", torch.cuda.set_device, (_get_cuda_index(run.strategy.device),)
        )
        self._writing: Future[None] | None = None
        self._removals: list[Future[None]] = []  # removals and memory reservations in the thread
        self._snapshot = Snapshot()
        self._is_reserved = False

    def save(
        self,
        path: PurePath,
        info: Mapping[str, Any],
        *,
        asynchronous: bool | None = False,
        moment: Any = None,
        on_save_end: SaveCallback = _remove_nothing,
    ) -> None:
        """Save the run at the end of this step. Collective: every rank must call this.

        Args:
            path: The directory of the complete checkpoint; it must not exist.
            info: Plain data that a listing of runs shows.
            asynchronous: True: copy now and write in a thread; False: write now; None: choose the faster way.
            moment: An identifier of the current moment; the attribute `moment` holds it while the save is in progress.
            on_save_end: Function called on every rank once the save has ended, with `committed`. The function returns
                the paths of the checkpoints to remove, the same on every rank.

        Raises:
            CheckpointError: The save, or the previous one, failed; existing checkpoints are unchanged.
            NonFiniteLoss: A loss that was not yet on the host, or a parameter, is not finite; no checkpoint is
                committed.
        """
        try:
            self.finish_save()
            self.check_run_directory()
            self._run.records.write_pending_row()  # records end with this step
            with self._run.records.goodput.measure_bucket("checkpoint"), collect_young_only():
                in_progress = self._write_or_submit(path, collect_contents(self._run, info), asynchronous=asynchronous)
        except BaseException:
            on_save_end(committed=False)
            raise
        if in_progress:
            self.path, self.moment, self._on_save_end = path, moment, on_save_end
        else:
            self._processes.run_on_rank_zero(partial(remove_checkpoints, on_save_end(committed=True)))

    def save_once(self, path: PurePath, info: Mapping[str, Any]) -> None:
        """Save, unless this restarted run already saved this moment at the path. Collective; arguments as in `save`."""
        run = self._run
        is_restarted = run.checkpoint is not None and self.continues_run
        if not (is_restarted and self._processes.run_on_rank_zero(partial(_has_counts, path, vars(run.progress)))):
            self.save(path, info)

    def check_first_save(self) -> None:
        """Check before training that Lumen's own data can be saved; the first update is checked later. Collective.

        Raises:
            CheckpointError: An entry cannot be saved; the message names the entry.
        """
        check_savable(self._run)
        self.checks_update = keeps_unknown_state(self._run.optim.optimizer)

    def check_run_directory(self) -> None:
        """Check that the run's directory still exists. Collective: every rank must call this.

        Raises:
            RunDirectoryError: The directory was removed or replaced.
        """
        self._processes.run_on_rank_zero(self._check_run_directory)

    def _write_or_submit(self, path: PurePath, collected: CheckpointContents, *, asynchronous: bool | None) -> bool:
        """Write a checkpoint, or begin writing; return True if the save is in progress. Collective."""
        processes = self._processes
        processes.run_on_all(self.wait)
        plan = plan_writes(collected.sections, processes, collected.trained)
        min_bytes = get_storage(path).quick_bytes
        in_thread = self._should_write_in_thread(plan, min_bytes, asynchronous=asynchronous)
        copies = self._copy_tensors(path, plan, asynchronous=asynchronous) if in_thread else None
        if copies is None:
            _write_checkpoint(path, collected, plan, processes)
            return False
        copy, thread_processes = replace(plan, tensors=copies), processes.for_thread()

        def write() -> None:
            thread_processes.run_on_all(self._snapshot.wait)
            _write_checkpoint(path, collected, copy, thread_processes)
            self._run.ending.vote.note_save()

        self._writing = self._submit(write)
        return True

    def _should_write_in_thread(
        self, plan: WritePlan, min_bytes: int = Storage.quick_bytes, *, asynchronous: bool | None
    ) -> bool:
        """Return True if a thread should write the save. Collective unless `asynchronous` is given.

        Default: if writing is slow, and the copies need at most half of the free memory.
        """
        if asynchronous is not None:
            return asynchronous
        available = sys.maxsize if self._is_reserved else _get_available_bytes()
        sizes = [tensor.nbytes for tensors in plan.tensors.values() for tensor in tensors.values()]
        shares = self._processes.all_gather((self._processes.node, sum(sizes), len(sizes), available))
        taken = Counter[int]()
        for node, nbytes, _, _ in shares:
            taken[node] += nbytes
        has_room = all(taken[node] <= available / 2 for node, _, _, available in shares)
        cost_bytes = taken.total() + _OVERHEAD_PER_TENSOR_BYTES * sum(count for _, _, count, _ in shares)
        return has_room and cost_bytes >= min_bytes

    def _copy_tensors(self, path: PurePath, plan: WritePlan, *, asynchronous: bool | None) -> dict[str, Tensors] | None:
        """Return copies of this process's blocks; None if some process lacks memory for its copies. Collective."""

        def try_copy() -> dict[str, Tensors] | None:
            try:
                return self._snapshot.start_copy(plan.tensors)
            except (RuntimeError, MemoryError) as error:
                if not (isinstance(error, MemoryError) or _NO_MEMORY.search(str(error))):
                    raise
                if asynchronous:
                    raise CheckpointError(
                        f"{path.name}: not enough memory for the copy that is written during training: {error} Set "
                        "asynchronous=False in ModelCheckpoint."
                    ) from error
                return None

        copies = self._processes.run_on_all(try_copy)
        (missing,) = self._processes.all_reduce_sum([float(copies is None)])
        if not missing:
            return copies
        _log.warning("%s: not enough memory for a copy, so training waits until the checkpoint is written", path.name)
        self._snapshot.close()
        self._is_reserved = False
        return None

    def reserve_memory(self, *, asynchronous: bool | None) -> None:
        """Allocate the memory for copies in a thread, because the allocation is slower than a copy. Collective."""
        sections, trained = self._processes.run_on_all(partial(get_trained_tensors, self._run))
        plan = plan_writes(sections, self._processes, trained)
        if self._should_write_in_thread(plan, asynchronous=asynchronous):
            self._processes.for_thread()
            self._removals.append(self._thread.submit(self._reserve_memory, plan.tensors))

    def _reserve_memory(self, tensors: Sections) -> None:
        with suppress(RuntimeError, MemoryError):  # `_copy_tensors` handles the error
            self._snapshot.reserve_memory(tensors)
            self._is_reserved = True

    def _submit(self, work: Callable[[], None]) -> Future[None]:
        def work_and_note() -> None:
            try:
                work()
            except BaseException:
                self._run.ending.vote.note_save()
                raise

        return self._thread.submit(work_and_note)

    @property
    def has_ended(self) -> bool:
        """True if all ranks know that the save in progress ended on a rank; `finish_save` then completes the save."""
        return self._run.ending.vote.save_ended

    @property
    def is_writing(self) -> bool:
        """True if this process's thread is writing a save."""
        return self._writing is not None and not self._writing.done()

    def wait(self) -> None:
        """Wait until this process's thread has ended.

        Raises:
            CheckpointError: The save in progress failed, or a checkpoint could not be removed.
            NonFiniteLoss: A parameter is NaN or infinite, so it was not saved.
        """
        if (writing := self._writing) is not None:
            wait([writing])  # a signal may interrupt this line: the next call waits again
            self._writing = None
            writing.result()
        self.wait_for_removals()

    def wait_for_removals(self) -> None:
        """Wait until this process has removed its checkpoints.

        Raises:
            CheckpointError: A checkpoint could not be removed.
        """
        wait(self._removals)
        removals, self._removals = self._removals, []
        for removal in removals:
            removal.result()

    def finish_save(self) -> None:
        """Wait for the save in progress, and call its `on_save_end`. Collective: every rank must call this.

        Raises:
            CheckpointError: The save failed, or a checkpoint could not be removed.
            NonFiniteLoss: A parameter is NaN or infinite, so it was not saved.
        """
        if self.path is None and not self._run.ending.vote.save_ended:
            return
        on_save_end, self._on_save_end = self._on_save_end, _remove_nothing
        try:
            with self._run.records.goodput.measure_bucket("checkpoint"):
                self._processes.run_on_all(self.wait)
        except BaseException:
            on_save_end(committed=False)
            raise
        finally:
            self.path = self.moment = None
            self._run.ending.vote.acknowledge_save()
        paths = on_save_end(committed=True)
        if self._processes.rank == 0:
            self._removals.append(self._submit(partial(remove_checkpoints, paths)))

    def close(self) -> None:
        """Wait for the save in progress, log its error if any, and free the memory of the copies."""
        try:
            with self._processes.explain_lost_ranks():
                self.wait()
        except Exception as error:  # the run has already ended with another error, which must stay visible
            _log.error("the save in progress failed: %s", error)
        self._thread.shutdown()
        self._snapshot.close()


def _write_checkpoint(path: PurePath, collected: CheckpointContents, plan: WritePlan, processes: Processes) -> None:
    refuse_non_finite(collected, plan.tensors["model"], processes)
    with collect_young_only():
        write_checkpoint(
            path, plan, collected.state, aliases=collected.aliases, info=collected.info, processes=processes
        )


def _has_counts(path: PurePath, progress: Mapping[str, Any]) -> bool:
    """Return True if a checkpoint at a path was saved at this step, epoch and micro-batch."""
    with suppress(CheckpointDamaged):
        info = read_info(path)
        return all(info[name] == progress[name] for name in INFO_COUNTERS)
    return False


def _get_cuda_index(device: torch.device) -> int:
    """Return the index of a CUDA device for `set_device` in a thread; -1 for other devices, which changes nothing."""
    if device.type != "cuda":
        return -1
    return torch.cuda.current_device() if device.index is None else device.index


def _get_available_bytes() -> int:
    """Return the memory in bytes that processes on this machine can still allocate; a huge number if it is unknown."""
    machine = _read_number("/proc/meminfo", r"^MemAvailable: +([0-9]+) kB$")
    limit = _read_number(f"{_CGROUP}/memory.max", "^([0-9]+)$")
    used = _read_number(f"{_CGROUP}/memory.stat", "^anon ([0-9]+)$")
    container = sys.maxsize if limit is None or used is None else limit - used
    return min(container, sys.maxsize if machine is None else machine << 10)


def _read_number(file: str, pattern: str) -> int | None:
    try:
        found = re.search(pattern, Path(file).read_text(), re.M)
    except OSError:
        return None
    return int(found[1]) if found else None
