"""Saves the checkpoints of a run, before training goes on or beside it."""

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
from lumen.checkpoint.format.storage import Storage, storage_of
from lumen.checkpoint.optimizer_state import keeps_unknown_state
from lumen.checkpoint.save.collect import COUNTS, Collected, check_savable, collect, moving_tensors, refuse_non_finite
from lumen.checkpoint.save.snapshot import Snapshot
from lumen.checkpoint.save.writer import Sections, WritePlan, plan_writes, write_checkpoint
from lumen.checkpoint.settings import Setting
from lumen.console import logger as _log
from lumen.distributed.processes import Processes
from lumen.errors import CheckpointDamaged, CheckpointError
from lumen.internals.garbage import only_young_collected
from lumen.run.run import Run

_CGROUP = "/sys/fs/cgroup"  # of this process, in a container
_NO_MEMORY = re.compile("can't allocate memory|out of memory", re.I)  # torch's, of the host and of CUDA
_TENSOR_BYTES = 16 << 10  # that take as long as a tensor does whatever its size


class Account(Protocol):
    """The function that `save` calls on every rank once a save has ended."""

    def __call__(self, *, committed: bool) -> Iterable[PurePath]:
        """Return the paths of the checkpoints to remove then, the same on every rank."""


def _keep_all(*, committed: bool) -> Iterable[PurePath]:
    return ()


@final
class Saves:
    """The checkpoints of a run: written at once, or copied at once and written in a thread while the run goes on.

    At most one save is under way. Every process copies its blocks and writes it in its thread; the threads agree among
    themselves, and rank 0's commits. When they have ended, a vote tells all ranks at one boundary, so that an error
    in any thread ends the run on each of them. A Python that exits waits for the thread; a kill leaves what it leaves
    of any save, a directory that is not committed.

    Args:
        run: The run whose state is saved.
        check_home: Raises if the run's directory is no longer there; None: there is none, or another rank checks it.
        are_on: The trainer saves checkpoints.
        stays: A resumed run stays in the directory of the run that it resumes.
        switches: Arguments of the trainer that change what is computed, which checkpoints record.

    Attributes:
        are_on: The trainer saves checkpoints.
        stays: A resumed run stays in the directory of the run that it resumes.
        switches: Arguments of the trainer that change what is computed, which checkpoints record.
        path: Directory of the save under way, the same on every rank; None if there is none, or it was settled.
        moment: The moment of the run that was saved last, as given to `save`.
        checks_update: The optimizer is of a class that neither torch nor Lumen defines, and has made no update yet.
    """

    def __init__(
        self,
        run: Run,
        *,
        check_home: Callable[[], None] | None,
        are_on: bool,
        stays: bool,
        switches: Mapping[str, Setting],
    ) -> None:
        self.are_on, self.stays, self.switches = are_on, stays, switches
        self.path: PurePath | None = None
        self._check_home = check_home or (lambda: None)
        self.moment: Any = None
        self.checks_update = False
        self._account: Account = _keep_all
        self._run = run
        self._processes = run.processes
        self._thread = ThreadPoolExecutor(1, "lumen-save", torch.cuda.set_device, (_cuda_index(run.strategy.device),))
        self._writing: Future[None] | None = None
        self._chores: list[Future[None]] = []  # of the thread beside writing
        self._snapshot = Snapshot()
        self._is_reserved = False

    def save(
        self,
        path: PurePath,
        info: Mapping[str, Any],
        *,
        asynchronous: bool | None = False,
        moment: Any = None,
        account: Account = _keep_all,
    ) -> None:
        """Save the run as it is at this boundary. Collective: every rank must call this.

        Args:
            path: The directory to commit; it must not exist.
            info: Plain data that a listing of runs shows.
            asynchronous: True: copy now and write in a thread; False: write now; None: choose what is faster.
            moment: An identifier of the present moment, to be found in `moment` afterwards.
            account: Called on every rank once the save has ended, with whether it was committed. Returns the paths of
                the checkpoints to remove then, the same on every rank.

        Raises:
            CheckpointError: This save, or the one before it, could not be written; what existed before is unchanged.
            NonFiniteLoss: A loss that was still on its way, or a parameter, is not finite: nothing is committed.
        """
        try:
            self.settle()
            self.check_home()
            self._run.records.write_row()  # records end with this step
            with self._run.records.goodput.within("checkpoint"), only_young_collected():
                under_way = self._write_or_begin(path, collect(self._run, info), asynchronous=asynchronous)
        except BaseException:
            account(committed=False)
            raise
        if under_way:
            self.path, self.moment, self._account = path, moment, account
        else:
            self._processes.on_rank_zero(partial(remove_checkpoints, account(committed=True)))

    def save_once(self, path: PurePath, info: Mapping[str, Any]) -> None:
        """Save, unless this run saved this moment at the path before it was started again. Collective; see `save`."""
        run = self._run
        started_again = run.checkpoint is not None and self.stays
        if not (started_again and self._processes.on_rank_zero(partial(_has_counts, path, vars(run.progress)))):
            self.save(path, info)

    def check_begin(self) -> None:
        """Check before training what Lumen saves; the first update is checked later. Collective.

        Raises:
            CheckpointError: Something cannot be saved; the message names it.
        """
        check_savable(self._run)
        self.checks_update = keeps_unknown_state(self._run.optim.optimizer)

    def check_home(self) -> None:
        """Check that the run's directory is still there. Collective: every rank must call this.

        Raises:
            RunDirectoryError: It was removed, or another one is in its place.
        """
        self._processes.on_rank_zero(self._check_home)

    def _write_or_begin(self, path: PurePath, collected: Collected, *, asynchronous: bool | None) -> bool:
        """Write a checkpoint, or begin to. Returns whether it is under way. Collective: every rank must call this."""
        processes = self._processes
        processes.together(self.wait)
        plan = plan_writes(collected.sections, processes, collected.trained)
        at_least = storage_of(path).quick_bytes
        pays = self._pays(plan, at_least, asynchronous=asynchronous)
        copies = self._copied(path, plan, asynchronous=asynchronous) if pays else None
        if copies is None:
            _write(path, collected, plan, processes)
            return False
        copy, others = replace(plan, tensors=copies), processes.beside()

        def write() -> None:
            others.together(self._snapshot.wait)
            _write(path, collected, copy, others)
            self._run.ending.vote.note_save()

        self._writing = self._submit(write)
        return True

    def _pays(self, plan: WritePlan, at_least: int = Storage.quick_bytes, *, asynchronous: bool | None) -> bool:
        """Whether to write in a thread. By default: if writing takes time and the copies fit well into free memory."""
        if asynchronous is not None:
            return asynchronous
        available = sys.maxsize if self._is_reserved else _available_bytes()
        sizes = [tensor.nbytes for tensors in plan.tensors.values() for tensor in tensors.values()]
        shares = self._processes.gather((self._processes.node, sum(sizes), len(sizes), available))
        taken = Counter[int]()
        for node, nbytes, _, _ in shares:
            taken[node] += nbytes
        fits = all(taken[node] <= available / 2 for node, _, _, available in shares)
        return fits and taken.total() + _TENSOR_BYTES * sum(count for _, _, count, _ in shares) >= at_least

    def _copied(self, path: PurePath, plan: WritePlan, *, asynchronous: bool | None) -> dict[str, Tensors] | None:
        """Copies of what this process writes; None if some process has no memory for them. Collective."""

        def take() -> dict[str, Tensors] | None:
            try:
                return self._snapshot.take(plan.tensors)
            except (RuntimeError, MemoryError) as error:
                if not (isinstance(error, MemoryError) or _NO_MEMORY.search(str(error))):
                    raise
                if asynchronous:
                    raise CheckpointError(
                        f"{path.name}: there is no memory for the copy that is written while training goes on: {error} "
                        "Set asynchronous=False in ModelCheckpoint."
                    ) from error
                return None

        copies = self._processes.together(take)
        (missing,) = self._processes.sum([float(copies is None)])
        if not missing:
            return copies
        _log.warning("%s: there is no memory for a copy, so training waits until it is written", path.name)
        self._snapshot.close()
        self._is_reserved = False
        return None

    def reserve(self, *, asynchronous: bool | None) -> None:
        """Have threads allocate the memory for copies, which takes longer than a copy. Collective."""
        sections, trained = self._processes.together(partial(moving_tensors, self._run))
        plan = plan_writes(sections, self._processes, trained)
        if self._pays(plan, asynchronous=asynchronous):
            self._processes.beside()
            self._chores.append(self._thread.submit(self._reserve, plan.tensors))

    def _reserve(self, tensors: Sections) -> None:
        with suppress(RuntimeError, MemoryError):  # taking the copies will find out again, and know what to do
            self._snapshot.reserve(tensors)
            self._is_reserved = True

    def _submit(self, work: Callable[[], None]) -> Future[None]:
        def watched() -> None:
            try:
                work()
            except BaseException:
                self._run.ending.vote.note_save()
                raise

        return self._thread.submit(watched)

    @property
    def has_ended(self) -> bool:
        """The save under way has ended on some process, as all know: `settle` accounts for it."""
        return self._run.ending.vote.save_ended

    @property
    def is_writing(self) -> bool:
        """Whether this process's thread is writing a save."""
        return self._writing is not None and not self._writing.done()

    def wait(self) -> None:
        """Wait until this process's thread has ended.

        Raises:
            CheckpointError: The save under way could not be written, or a checkpoint could not be removed.
            NonFiniteLoss: A parameter is NaN or infinite, so it was not saved.
        """
        if (writing := self._writing) is not None:
            wait([writing])  # which a signal may interrupt: then it is waited for again
            self._writing = None
            writing.result()
        self.wait_for_removals()

    def wait_for_removals(self) -> None:
        """Wait until the checkpoints that this process removes are gone.

        Raises:
            CheckpointError: A checkpoint could not be removed.
        """
        wait(self._chores)
        chores, self._chores = self._chores, []
        for chore in chores:
            chore.result()

    def settle(self) -> None:
        """Wait for the save under way, and call its `account`. Collective: every rank must call this.

        Raises:
            CheckpointError: The save could not be written, or a checkpoint could not be removed.
            NonFiniteLoss: A parameter is NaN or infinite, so it was not saved.
        """
        if self.path is None and not self._run.ending.vote.save_ended:
            return
        account, self._account = self._account, _keep_all
        try:
            with self._run.records.goodput.within("checkpoint"):
                self._processes.together(self.wait)
        except BaseException:
            account(committed=False)
            raise
        finally:
            self.path = self.moment = None
            self._run.ending.vote.acknowledge()
        doomed = account(committed=True)
        if self._processes.rank == 0:
            self._chores.append(self._submit(partial(remove_checkpoints, doomed)))

    def close(self) -> None:
        """Wait for what is under way, ignoring its errors, and free the memory of the copies."""
        try:
            with self._processes.explained():
                self.wait()
        except Exception as error:  # the run has ended already, by a failure that is to be seen
            _log.error("the save under way failed: %s", error)
        self._thread.shutdown()
        self._snapshot.close()


def _write(path: PurePath, collected: Collected, plan: WritePlan, processes: Processes) -> None:
    refuse_non_finite(collected, plan.tensors["model"], processes)
    with only_young_collected():
        write_checkpoint(
            path, plan, collected.state, aliases=collected.aliases, info=collected.info, processes=processes
        )


def _has_counts(path: PurePath, progress: Mapping[str, Any]) -> bool:
    """Return True if a checkpoint at a path was saved at this step, epoch and micro-batch."""
    with suppress(CheckpointDamaged):
        info = read_info(path)
        return all(info[name] == progress[name] for name in COUNTS)
    return False


def _cuda_index(device: torch.device) -> int:
    """Index of a CUDA device, for `set_device` in a thread; -1, which changes nothing, for any other device."""
    if device.type != "cuda":
        return -1
    return torch.cuda.current_device() if device.index is None else device.index


def _available_bytes() -> int:
    """Memory in bytes that processes on this machine can still take; a huge number where the system does not tell."""
    machine = _number_in("/proc/meminfo", r"^MemAvailable: +([0-9]+) kB$")
    limit = _number_in(f"{_CGROUP}/memory.max", "^([0-9]+)$")
    used = _number_in(f"{_CGROUP}/memory.stat", "^anon ([0-9]+)$")
    container = sys.maxsize if limit is None or used is None else limit - used
    return min(container, sys.maxsize if machine is None else machine << 10)


def _number_in(file: str, pattern: str) -> int | None:
    try:
        found = re.search(pattern, Path(file).read_text(), re.M)
    except OSError:
        return None
    return int(found[1]) if found else None
