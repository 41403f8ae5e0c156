"""Goodput: the productive part of the time of a run over all its starts, and the use of the rest."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from lumen.internals.compiler import get_compile_time_s

FILE = "goodput.jsonl"
BUCKETS = ("startup", "compile", "data", "step", "evaluation", "checkpoint", "end", "lost", "queue")
_MAX_INTERVAL_S = 30.0
_ACTIVITY_FILES = "metrics.csv", "system.csv", "checkpoints"
_process_state = {"is_age_counted": False}


@final
class Goodput:
    """Measurement of how a run spends its time, written to a file during the run.

    Lumen reads the clock when an activity changes, such as to an evaluation or a save, and not in each step. A line of
    the file is due after 1, 2, 4, ... and then every 30 seconds, and after a save. Measuring never waits for a device.

    Args:
        directory: The directory of the run; None to measure nothing, as on all ranks but 0.
        waited_s: Function that returns how many seconds the run has waited for training data.
        restarted: True if a launcher or SLURM started an earlier attempt of this run, and restarted it.

    Attributes:
        due_s: Time when the next line is due, in seconds of `time.monotonic`.
    """

    def __init__(self, directory: Path | None, waited_s: Callable[[], float], *, restarted: bool = False) -> None:
        self.due_s = math.inf
        self._file = None if directory is None else directory / FILE
        self._waited_s, self._pause_s = waited_s, 1.0
        self._bucket, self._spent = "startup", dict.fromkeys(BUCKETS, 0.0)
        self._notes: dict[str, bool] = {}
        self._read_s, self._before = time.monotonic(), (0.0, 0.0)
        self._line_s = self._read_s
        if directory is None or self._file is None:
            return
        age_s = 0.0 if _process_state["is_age_counted"] else _get_process_age_s()
        _process_state["is_age_counted"] = True
        lines, now_s = _read_lines(self._file), time.time()
        ended_s = max((line["to_s"] for line in lines), default=0.0)
        last_activity_s = max((_get_change_time_s(directory / name) for name in _ACTIVITY_FILES), default=0.0)
        began_s = min(max(now_s - age_s, ended_s), now_s)
        self._attempt = 1 + max((line["life"] for line in lines), default=0)
        # A user who starts a stopped run from a terminal makes a pause; only a job that nobody starts waits in a queue.
        was_preempted = any(line.get("preempted") for line in lines if line["life"] == self._attempt - 1)
        self._notes = {"queued": True} if restarted or (was_preempted and not _is_started_by_hand()) else {}
        if lines and ended_s < min(
            last_activity_s, began_s
        ):  # The run was killed: the time after its last line was lost.
            self._append_line(
                {"life": self._attempt - 1, "from_s": ended_s, "to_s": min(last_activity_s, began_s), "lost": True}
            )
        self._from_s = began_s
        self._line_s = self._read_s = self._read_s - (now_s - began_s)
        self._before = 0.0, get_compile_time_s()

    @property
    def is_enabled(self) -> bool:
        """True if this process measures and writes."""
        return self._file is not None

    def enter_bucket(self, bucket: str) -> str:
        """Count the time from here on to a bucket. Returns the bucket before."""
        before, self._bucket = self._bucket, bucket
        if self._file is None:
            return before
        now, waited, compiled = time.monotonic(), self._waited_s(), get_compile_time_s()
        left = now - self._read_s
        parts = {"compile": compiled - self._before[1], "data": waited - self._before[0] if before == "step" else 0.0}
        for name, seconds in parts.items():
            self._spent[name] += min(max(seconds, 0.0), left)
            left -= min(max(seconds, 0.0), left)
        self._spent[before] += left
        self._read_s, self._before = now, (waited, compiled)
        return before

    @contextmanager
    def measure_bucket(self, bucket: str) -> Iterator[None]:
        """Count the time within the context to a bucket."""
        before = self.enter_bucket(bucket)
        try:
            yield
        finally:
            self.enter_bucket(before)
            if bucket == "checkpoint" and self.due_s < math.inf:
                self.due_s = 0.0  # The next line records the step of the checkpoint, where a restart begins.

    def begin_training(self, step: int) -> None:
        """Note that training begins at a step. The time before was the startup."""
        self.enter_bucket("step")
        self.write_line(step)

    def write_line(self, step: int) -> None:
        """Write a line with the time spent since the line before, up to a step."""
        if self._file is None:
            return
        self.enter_bucket(self._bucket)
        seconds, self._line_s = self._read_s - self._line_s, self._read_s
        spent = {name: round(value, 6) for name, value in self._spent.items() if value}
        self._spent = dict.fromkeys(BUCKETS, 0.0)
        begun, self._from_s = self._from_s, self._from_s + seconds
        place = {"life": self._attempt, "from_s": begun, "to_s": self._from_s, "step": step}
        self._append_line({**place, "spent": spent, **self._notes})
        self._notes = {}
        self.due_s, self._pause_s = self._read_s + self._pause_s, min(2 * self._pause_s, _MAX_INTERVAL_S)

    def note_preemption(self, step: int) -> None:
        """Write a line which says that a signal of a scheduler stops the run: the time up to a restart is a queue."""
        self._notes["preempted"] = True
        self.write_line(step)

    def close(self, step: int) -> None:
        """Write the last line at the end of the run."""
        self.write_line(step)
        self.stop_writing()

    def stop_writing(self) -> None:
        """Write no further line. A start without a line, such as of a finished run, is not counted."""
        self._file, self.due_s = None, math.inf

    def _append_line(self, line: Mapping[str, Any]) -> None:
        assert self._file is not None
        text = json.dumps(line) + "\n"
        # An error here must not end the training. A full disk shows when a checkpoint is written.
        with suppress(OSError), open(self._file, "a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                text = text if file.read(1) == b"\n" else "\n" + text  # A kill may have cut the line before.
            file.write(text.encode())


@final
@dataclass(frozen=True)
class TimeSpent:
    """Time that a run spent on each activity, over all its starts.

    Attributes:
        wall_s: Seconds of all starts, with the bucket `queue`. The time between two starts by hand does not count.
        spent_s: Seconds by bucket: `startup`, `compile`, `data`, `step`, `evaluation`, `checkpoint`, `end`, `lost` and
            `queue`. The bucket `lost` has steps lost by a kill, which a restart computes again. The bucket `queue` has
            the time from a preemption, or from a failure that a launcher handles, to the next start. The seconds of all
            buckets sum to `wall_s`.
        lives: Number of starts of the run that had something to do.
    """

    wall_s: float
    spent_s: dict[str, float]
    lives: int

    @property
    def goodput(self) -> float:
        """Fraction of the time spent on steps that were not lost, 0 to 1."""
        return self.spent_s["step"] / self.wall_s if self.wall_s else 0.0

    def __str__(self) -> str:
        """Return a summary in one line."""
        shares = {name: seconds / self.wall_s if self.wall_s else 0.0 for name, seconds in self.spent_s.items()}
        parts = [f"{name} {share:.0%}" for name, share in shares.items() if name != "step" and share >= 0.005]
        text = f"goodput {self.goodput:.0%} of {self.wall_s:.0f} s{': ' if parts else ''}{', '.join(parts)}"
        return text.replace("%", " %")


def goodput(directory: str | Path) -> TimeSpent:
    """Read how a run spent its time.

    Args:
        directory: The run's directory, with `goodput.jsonl`. An incomplete last line is left out.

    Raises:
        FileNotFoundError: The directory has no `goodput.jsonl`, or the file cannot be read.
    """
    file = Path(directory) / FILE
    if not os.access(file, os.R_OK):
        raise FileNotFoundError(f"there is no {FILE} in {directory}: is it the directory of a run?")
    lines = _read_lines(file)
    spent = dict.fromkeys(BUCKETS, 0.0)
    if not lines:
        return TimeSpent(0.0, spent, 0)
    begins = _find_starts(lines)
    before, step, ended_s = 0, 0, lines[0]["from_s"]
    for line in lines:
        life = line["life"]
        spent["queue"] += max(line["from_s"] - ended_s, 0.0) if line.get("queued") else 0.0
        ended_s = max(ended_s, line["to_s"])
        if "spent" not in line:
            spent["lost"] += line["to_s"] - line["from_s"]
            continue
        step = step if life == before else line["step"]
        before, begun, step = life, step, line["step"]
        kept = min((at for number, at in begins.items() if number > life), default=step)
        lost_share = max(step - max(kept, begun), 0) / (step - begun) if step > begun else 0.0
        for name, seconds in line["spent"].items():
            lost_s = seconds * lost_share if name in ("step", "data") else 0.0
            spent["lost"] += lost_s
            spent[name] += seconds - lost_s
    return TimeSpent(math.fsum(spent.values()), spent, max(line["life"] for line in lines))


def read_starts(directory: str | Path) -> dict[int, int]:
    """Return the step at which training began in each start of a run, by the number of the start; empty if unknown."""
    return _find_starts(_read_lines(Path(directory) / FILE))


def _find_starts(lines: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    found = {line["life"]: line["step"] for line in reversed(lines) if "step" in line}
    return dict(reversed(found.items()))


def _read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a file."""
    lines = []
    with suppress(OSError):
        for text in file.read_text(errors="replace").splitlines():
            with suppress(ValueError):
                if _is_complete_line(line := json.loads(text)):
                    lines.append(line)
    return lines


def _is_complete_line(line: Any) -> bool:
    """Return True if a line has the keys and types that `Goodput` writes."""
    if not isinstance(line, dict) or not isinstance(spent := line.get("spent", {}), dict):
        return False
    integers = [line.get("life"), line.get("step") if "spent" in line else 0]
    numbers = [line.get("from_s"), line.get("to_s"), *spent.values()]
    are_numbers = all(isinstance(each, int | float) for each in numbers) and all(
        isinstance(each, int) for each in integers
    )
    return are_numbers and spent.keys() <= {*BUCKETS}


def _get_change_time_s(path: Path) -> float:
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _is_interactive() -> bool:
    return hasattr(sys, "ps1") or "ipykernel" in sys.modules


def _is_started_by_hand() -> bool:
    """Return True in an interactive session, and if the input of this program is a terminal."""
    return _is_interactive() or (sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty())


def _get_process_age_s() -> float:
    """Return the seconds since this program was started; 0 in an interactive session or if unknown."""
    with suppress(OSError):
        if not _is_interactive():
            started = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
            return max(float(Path("/proc/uptime").read_text().split()[0]) - started / os.sysconf("SC_CLK_TCK"), 0.0)
    return 0.0
