"""Goodput: which part of the time since a run was first started was productive, and where the rest went."""

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

from lumen.internals.compiler import compiled_for_s

FILE = "goodput.jsonl"
BUCKETS = ("startup", "compile", "data", "step", "evaluation", "checkpoint", "end", "lost", "queue")
_LONGEST_S = 30.0
_SIGNS_OF_LIFE = "metrics.csv", "system.csv", "checkpoints"
_of_process = {"is_told": False}


@final
class Goodput:
    """Measures where the time of a run goes, and writes it down as the run goes on.

    The clock is read where something else begins: an evaluation, a save. A step reads nothing; a line of the file is
    due after 1, 2, 4, ... and then every 30 seconds, and after a save. Nothing waits for a device.

    Args:
        directory: The run's; None: nothing is measured, as on all ranks but 0.
        waited_s: Tells how many seconds the run has waited for training data.

    Attributes:
        due_s: When the next line is due, in seconds of `time.monotonic`.
    """

    def __init__(self, directory: Path | None, waited_s: Callable[[], float]) -> None:
        self.due_s = math.inf
        self._file = None if directory is None else directory / FILE
        self._waited_s, self._pause_s = waited_s, 1.0
        self._bucket, self._spent = "startup", dict.fromkeys(BUCKETS, 0.0)
        self._read_s, self._before = time.monotonic(), (0.0, 0.0)
        self._line_s = self._read_s
        if directory is None or self._file is None:
            return
        age_s = 0.0 if _of_process["is_told"] else _age_of_process_s()
        _of_process["is_told"] = True
        lines, now = _lines(self._file), time.time()
        ended = max((line["to_s"] for line in lines), default=0.0)
        alive = max((_changed_s(directory / name) for name in _SIGNS_OF_LIFE), default=0.0)
        began = min(max(now - age_s, ended), now)
        self._life = 1 + max((line["life"] for line in lines), default=0)
        if lines and ended < min(alive, began):  # it was killed: what came after its last line was lost
            self._append({"life": self._life - 1, "from_s": ended, "to_s": min(alive, began), "lost": True})
        self._from_s = began
        self._line_s = self._read_s = self._read_s - (now - began)
        self._before = 0.0, compiled_for_s()

    @property
    def is_on(self) -> bool:
        """Whether this process writes it down."""
        return self._file is not None

    def enter(self, bucket: str) -> str:
        """From here on time belongs to another bucket. Returns the one before."""
        before, self._bucket = self._bucket, bucket
        if self._file is None:
            return before
        now, waited, compiled = time.monotonic(), self._waited_s(), compiled_for_s()
        left = now - self._read_s
        parts = {"compile": compiled - self._before[1], "data": waited - self._before[0] if before == "step" else 0.0}
        for name, seconds in parts.items():
            self._spent[name] += min(max(seconds, 0.0), left)
            left -= min(max(seconds, 0.0), left)
        self._spent[before] += left
        self._read_s, self._before = now, (waited, compiled)
        return before

    @contextmanager
    def within(self, bucket: str) -> Iterator[None]:
        """The context of what is no step."""
        before = self.enter(bucket)
        try:
            yield
        finally:
            self.enter(before)
            if bucket == "checkpoint" and self.due_s < math.inf:
                self.due_s = 0.0  # what a kill takes away is known from here on

    def train(self, step: int) -> None:
        """Training begins at a step: what came before was the start."""
        self.enter("step")
        self.write(step)

    def write(self, step: int) -> None:
        """Write down what was spent since the line before, up to a step."""
        if self._file is None:
            return
        self.enter(self._bucket)
        seconds, self._line_s = self._read_s - self._line_s, self._read_s
        spent = {name: round(value, 6) for name, value in self._spent.items() if value}
        self._spent = dict.fromkeys(BUCKETS, 0.0)
        begun, self._from_s = self._from_s, self._from_s + seconds
        self._append({"life": self._life, "from_s": begun, "to_s": self._from_s, "step": step, "spent": spent})
        self.due_s, self._pause_s = self._read_s + self._pause_s, min(2 * self._pause_s, _LONGEST_S)

    def close(self, step: int) -> None:
        """Write the last line: the run is left."""
        self.write(step)
        self._file, self.due_s = None, math.inf

    def _append(self, line: Mapping[str, Any]) -> None:
        assert self._file is not None
        text = json.dumps(line) + "\n"
        # training does not end over it: a full disk is told by what has to be written
        with suppress(OSError), open(self._file, "a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                text = text if file.read(1) == b"\n" else "\n" + text  # a kill has torn the line before
            file.write(text.encode())


@final
@dataclass(frozen=True)
class TimeSpent:
    """Where the time of a run went, since it was first started.

    Attributes:
        wall_s: Seconds from the first start to the last record, over all restarts.
        spent_s: Seconds by bucket: `startup`, `compile`, `data`, `step`, `evaluation`, `checkpoint`, `end`, `lost`
            (steps that a kill took away, and that were or are to be computed again) and `queue` (between an end and the
            next start). They sum to `wall_s`.
        lives: How often it was started.
    """

    wall_s: float
    spent_s: dict[str, float]
    lives: int

    @property
    def goodput(self) -> float:
        """Part of the time in which steps were made that were kept, 0 to 1."""
        return self.spent_s["step"] / self.wall_s if self.wall_s else 0.0

    def __str__(self) -> str:
        """In one line."""
        shares = {name: seconds / self.wall_s if self.wall_s else 0.0 for name, seconds in self.spent_s.items()}
        others = [f"{name} {share:.0%}" for name, share in shares.items() if name != "step" and share >= 0.005]
        text = f"goodput {self.goodput:.0%} of {self.wall_s:.0f} s{': ' if others else ''}{', '.join(others)}"
        return text.replace("%", " %")


def goodput(directory: str | Path) -> TimeSpent:
    """Read where the time of a run went.

    Args:
        directory: The run's directory, with `goodput.jsonl`. A torn last line is left out.

    Raises:
        FileNotFoundError: There is none, or it cannot be read.
    """
    file = Path(directory) / FILE
    if not os.access(file, os.R_OK):
        raise FileNotFoundError(f"there is no {FILE} in {directory}: is it the directory of a run?")
    lines = _lines(file)
    spent = dict.fromkeys(BUCKETS, 0.0)
    if not lines:
        return TimeSpent(0.0, spent, 0)
    begins = _starts(lines)
    before, step, ended = 0, 0, lines[0]["from_s"]
    for line in lines:
        life = line["life"]
        spent["queue"] += max(line["from_s"] - ended, 0.0)
        ended = max(ended, line["to_s"])
        if "spent" not in line:
            spent["lost"] += line["to_s"] - line["from_s"]
            continue
        step = step if life == before else line["step"]
        before, begun, step = life, step, line["step"]
        kept = min((at for number, at in begins.items() if number > life), default=step)
        lost = max(step - max(kept, begun), 0) / (step - begun) if step > begun else 0.0
        for name, seconds in line["spent"].items():
            gone = seconds * lost if name in ("step", "data") else 0.0
            spent["lost"] += gone
            spent[name] += seconds - gone
    return TimeSpent(ended - lines[0]["from_s"], spent, max(line["life"] for line in lines))


def starts(directory: str | Path) -> dict[int, int]:
    """The step at which a run began to train, each time it was started, by the number of the start; empty: not told."""
    return _starts(_lines(Path(directory) / FILE))


def _starts(lines: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    found = {line["life"]: line["step"] for line in reversed(lines) if "step" in line}
    return dict(reversed(found.items()))


def _lines(file: Path) -> list[dict[str, Any]]:
    """What was written whole."""
    lines = []
    with suppress(OSError):
        for text in file.read_text(errors="replace").splitlines():
            with suppress(ValueError):
                if _is_whole(line := json.loads(text)):
                    lines.append(line)
    return lines


def _is_whole(line: Any) -> bool:
    """Return True if a line is one that was written here."""
    if not isinstance(line, dict) or not isinstance(spent := line.get("spent", {}), dict):
        return False
    whole = [line.get("life"), line.get("step") if "spent" in line else 0]
    numbers = [line.get("from_s"), line.get("to_s"), *spent.values()]
    are_numbers = all(isinstance(each, int | float) for each in numbers) and all(
        isinstance(each, int) for each in whole
    )
    return are_numbers and spent.keys() <= {*BUCKETS}


def _changed_s(path: Path) -> float:
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _age_of_process_s() -> float:
    """Seconds since this program was started; 0 where a person types, or where the system does not tell."""
    with suppress(OSError):
        if not hasattr(sys, "ps1") and "ipykernel" not in sys.modules:
            started = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
            return max(float(Path("/proc/uptime").read_text().split()[0]) - started / os.sysconf("SC_CLK_TCK"), 0.0)
    return 0.0
