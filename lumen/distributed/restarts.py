"""Restarts of a failed job: notes of its workers, the cause of the failure, the decision, and the message."""

from __future__ import annotations

import json
import os
import signal
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from mmap import mmap
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING, Any, final

from lumen import errors
from lumen.distributed.worker import is_worker
from lumen.errors import ConfigError, ProcessLost, ProcessStuck
from lumen.internals.stop_signals import SIGNALS, STOP_EXIT_CODES

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from lumen.distributed.processes import Processes

NOTES_VARIABLE = "LUMEN_NOTES"  # environment variable: the folder for the workers' notes
RESTART_VARIABLE = "LUMEN_RESTART"  # environment variable: a `Restart` as JSON
_STEP = Struct("q")
_CRASH_SIGNALS = {-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS, -signal.SIGFPE, -signal.SIGILL}
_MAX_FUTILE_ATTEMPTS = 2


@final
@dataclass(frozen=True)
class Failure:
    """Failure of a job.

    Attributes:
        rank: The rank that failed first.
        event: The event, in words that follow the name of the rank: `was killed by SIGKILL`.
        code: Exit code of the process; negative: the signal that killed it.
        kind: Class name of the exception; None: the process reported no exception.
        step: Number of completed steps; None: training had not begun.
    """

    rank: int
    event: str
    code: int
    kind: str | None
    step: int | None


@final
@dataclass(frozen=True)
class Restart:
    """Information that a restarted job reports about its restart.

    Attributes:
        number: Number of the restart, from 1.
        max_restarts: Maximum number of restarts.
        reason: The failed rank and its failure.
        directory: The directory of the run in training; None: no run was in training.
        reached: Number of steps that the run had completed before the failure.
        began_s: Start time of the failed attempt, in seconds since 1970.
    """

    number: int
    max_restarts: int
    reason: str
    directory: str | None
    reached: int
    began_s: float


@final
class JobAttempts:
    """Attempts of one job, counted by its launcher.

    Args:
        max_restarts: Maximum number of restarts.
        folder: Folder of the launch; each attempt gets a subfolder.
    """

    def __init__(self, max_restarts: int, folder: Path) -> None:
        self._max_restarts, self._root = max_restarts, folder
        self._count = self._futile_attempts = 0
        self._last_failure: Failure | None = None
        self._start: tuple[str | None, int] = (None, -1)
        self._farthest_step = -1

    def begin_attempt(self) -> Path:
        """Begin an attempt and return its folder."""
        self.folder = self._root / f"life-{self._count}"
        self.folder.mkdir()
        self._began_s = time.time()
        if self._max_restarts:
            os.environ[NOTES_VARIABLE] = str(self.folder)
        return self.folder

    def find_restart_refusal(self, failures: Mapping[int, ProcessFailure]) -> str | None:
        """Count a failed attempt; return the reason against a restart ("" if no message is due), or None to restart."""
        if not self._max_restarts:
            return ""
        failure = make_failure(failures, self.folder)
        if failure.kind == ConfigError.__name__ or failure.code in STOP_EXIT_CODES or -failure.code in SIGNALS:
            return ""
        before, self._last_failure = self._last_failure, failure
        place, reached = _read_notes(self.folder)
        self._futile_attempts = (
            self._futile_attempts + 1 if self._count and place == self._start and reached <= self._farthest_step else 0
        )
        self._farthest_step = max(reached, self._farthest_step if place[0] == self._start[0] else -1)
        self._start = place
        where = "before its first step" if failure.step is None else f"after step {failure.step}"
        if before is not None and _is_same_failure(before, failure):
            return f"no restart: the task causes the error, not a machine: {failure.event} twice, each time {where}"
        if self._futile_attempts >= _MAX_FUTILE_ATTEMPTS:
            return f"no further restart: {self._futile_attempts} in a row did not get past step {max(reached, 0)}"
        if self._count == self._max_restarts:
            return f"no further restart: {self._count} were made, and max_restarts is {self._max_restarts}"
        self._count += 1
        reason = f"rank {failure.rank} {failure.event}"
        restart = Restart(self._count, self._max_restarts, reason, place[0], max(reached, 0), self._began_s)
        os.environ[RESTART_VARIABLE] = json.dumps(asdict(restart))
        return None

    @property
    def attempt(self) -> int:
        """Number of the attempt in progress, from 0."""
        return self._count


def find_first_failure(failures: Mapping[int, ProcessFailure]) -> tuple[int, Mapping[str, Any] | None]:
    """Return the rank that failed first, and its report; None if the rank left no report."""
    reports = {rank: each.error_file_data for rank, each in failures.items() if "text" in each.error_file_data}
    causes = {rank: report for rank, report in reports.items() if report["kind"] != ProcessLost.__name__}
    silent = [rank for rank in failures if rank not in reports]
    if causes or not silent:
        rank = min(causes or reports, key=lambda rank: (causes or reports)[rank]["time_s"])
        return rank, reports[rank]
    return min(silent, key=lambda rank: failures[rank].exitcode), None


def make_failure(failures: Mapping[int, ProcessFailure], notes: Path) -> Failure:
    """Return the failure of a job."""
    rank, report = find_first_failure(failures)
    code = failures[rank].exitcode
    if report is not None:
        return Failure(rank, f"failed: {report['message']['message'].partition(chr(10))[0]}", code, report["kind"],
                       report["step"])  # fmt: skip
    place, reached = _read_notes(notes, rank)
    return Failure(rank, describe_exit(code), code, None, None if place[1] < 0 else reached)


def describe_exit(code: int) -> str:
    """Describe the end of a process that left no report."""
    if code >= 0:
        return f"ended with exit code {code}"
    names = {each.value: each.name for each in signal.Signals}  # signals of real time have no names
    return f"was killed by {names.get(-code, f'signal {-code}')}"


def _is_same_failure(before: Failure, now: Failure) -> bool:
    """Return True if two failures are the same error at the same step, of any rank.

    The cause is then the task, not a machine, so a restart would not help.
    """
    if (before.kind, before.step) != (now.kind, now.step) or now.kind in (ProcessLost.__name__, ProcessStuck.__name__):
        return False
    if now.kind is None:
        return now.code == before.code and (now.code > 0 or now.code in _CRASH_SIGNALS) and now.rank == before.rank
    return now.event == before.event or not hasattr(errors, now.kind)


def _read_notes(folder: Path, rank: int = 0) -> tuple[tuple[str | None, int], int]:
    """Return the run and the step at which an attempt began, and the step that a rank reached; -1 for no step."""
    try:
        began = json.loads((folder / "began").read_text())
        return (began["directory"], began["step"]), _STEP.unpack((folder / f"step-{rank}").read_bytes())[0]
    except (OSError, ValueError, struct.error):  # also if the process was killed while it wrote them
        return (None, -1), -1


# ---------------------------------------------------------------------- in a worker


def needs_launcher(processes: Processes, max_restarts: int) -> bool:
    """Return True if a training needs a launcher that is not running."""
    return processes.must_be_started or (max_restarts > 0 and processes.started_by is None)


def can_be_restarted() -> bool:
    """Return True if the launcher that started this process would restart it."""
    return is_worker() and NOTES_VARIABLE in os.environ


def is_restarted() -> bool:
    """Return True if a launcher has started this program again."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def make_step_recorder(rank: int, directory: Path, step: int) -> Callable[[int], None]:
    """Note that a run is in training; return a function that notes each completed step for the launcher."""
    folder = Path(os.environ[NOTES_VARIABLE])
    file = folder / f"step-{rank}"
    file.write_bytes(_STEP.pack(step))
    if rank == 0:
        (folder / "began").write_text(json.dumps({"directory": str(directory), "step": step}))
    with open(file, "r+b") as opened_file:
        step_memory = mmap(opened_file.fileno(), _STEP.size)
    return lambda step: _STEP.pack_into(step_memory, 0, step)


def get_restart() -> Restart | None:
    """Return the information about the restart, if this process was restarted."""
    return (
        Restart(**json.loads(os.environ[RESTART_VARIABLE])) if is_worker() and RESTART_VARIABLE in os.environ else None
    )
