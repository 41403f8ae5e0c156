"""Profiler that prints a table of the time of each part of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, ClassVar, final

import torch

from lumen.console import render_table
from lumen.errors.arguments import check_arguments
from lumen.profilers.base import Profiler, end_part, format_with_stage, make_table, print_table

if TYPE_CHECKING:
    from rich.table import Table

    from lumen.run.run import Run

_MIN_SHARE = 0.001  # share of the total below which parts are shown as one


@final
@dataclass
class ProfileRow:
    """Time that one part of a run took.

    Attributes:
        name: The name of the part, such as `training_step`.
        calls: The number of times it ran.
        total_s: The total time in seconds, without the time of parts inside.
    """

    name: str
    calls: int = 0
    total_s: float = 0.0


@final
class SimpleProfiler(Profiler):
    """Profiler that prints the time of each part of a run at its end; a run directory keeps it as `profile.txt`.

    Times are exclusive: time in a part inside another part (a checkpoint in a callback) counts for the inner part only.
    The times therefore add up to the total. `loop` is the remaining time: the loop itself, its seeding, its metrics.
    The sanity check counts as validation.

    Times are host times. On CUDA, which runs asynchronously, a part contains the time to launch its kernels. The first
    part that needs a value waits for all earlier kernels. For device times use `TorchProfiler` or `synchronize`.

    Args:
        dirpath: The directory of the files. Default: the run directory.
        filename: The name of the summary's file, `STAGE-filename.txt`. Default: the table is printed, and appended to
            `profile.txt` and `run.log` of the run directory.
        synchronize: Wait for the device at both ends of each part. Each part then includes its device time, but host
            and device no longer overlap, so the total takes longer.

    Attributes:
        recorded_durations: Seconds of each call of a part in the last run, by name, with the time of parts inside.
    """

    NEUTRAL: ClassVar[Mapping[str, tuple[bool, ...]]] = {"extended": (True, False)}  # the profiler has only one table

    @check_arguments
    def __init__(
        self, dirpath: str | Path | None = None, filename: str | None = None, *, synchronize: bool = False
    ) -> None:
        super().__init__(dirpath, filename)
        self.synchronize = synchronize
        self._rows: dict[str, ProfileRow] = {}
        self._stack: list[tuple[str, tuple[ProfileRow, float]]] = []  # the row, and the start in seconds
        self.recorded_durations: dict[str, list[float]] = {}
        self._outer = 0  # parts in progress that began before the measurement
        self._steps, self._waits, self._measuring = 0, False, False
        self._switched_at_s = perf_counter()

    @property
    def rows(self) -> list[ProfileRow]:
        """Parts of the last run, longest first."""
        return sorted(self._rows.values(), key=lambda row: -row.total_s)

    def begin(self, run: Run, directory: Path | None) -> None:
        """Reset the times and start the measurement."""
        super().begin(run, directory)
        self._waits = self.synchronize and run.strategy.device.type != "cpu"
        self.recorded_durations = {}
        self._rows, self._outer, self._steps, self._measuring = {}, len(self._stack), 0, True
        self._switched_at_s = perf_counter()

    def start(self, action_name: str) -> None:
        """Begin a part, and count a call."""
        self._add_elapsed()
        self._stack.append((action_name, (row := self._get_row(action_name), self._switched_at_s)))
        row.calls += 1

    def stop(self, action_name: str) -> None:
        """End the part that was started last.

        Raises:
            ConfigError: The part is not the one in progress.
        """
        self._add_elapsed()
        _, started_at_s = end_part(self, self._stack, action_name)
        self.recorded_durations.setdefault(action_name, []).append(self._switched_at_s - started_at_s)
        self._outer = min(self._outer, len(self._stack))

    @contextmanager
    def part(self, name: str, calls: int = 1) -> Iterator[None]:
        """Measure a part within the context, with a number of calls to count."""
        with self._profiled(name):
            self._stack[-1][1][0].calls += calls - 1
            yield

    def step(self) -> None:
        """Count a step; in an evaluation, a batch."""
        self._steps += 1

    def summary(self) -> str:
        """Return the table as a text."""
        return render_table(self._make_table()) if self._rows else ""

    def describe(self) -> None:
        """Print the table, or write it to the file if `filename` is set."""
        if self.filename is not None:
            super().describe()
        elif self._run is None or self._run.processes.is_global_zero:
            print_table(self._make_table(), self._directory)

    def end(self) -> None:
        """Stop the measurement and report it."""
        self._add_elapsed()
        self._measuring = False
        super().end()

    def _add_elapsed(self) -> None:
        """Add the seconds since the last call to the part in progress."""
        if self._waits:
            assert self._run is not None
            torch.accelerator.synchronize(self._run.strategy.device)
        now = perf_counter()
        if len(self._stack) > self._outer:
            self._stack[-1][1][0].total_s += now - self._switched_at_s
        elif self._measuring and self._run is not None:
            self._get_row(format_with_stage("loop", self._run.stage)).total_s += now - self._switched_at_s
        self._switched_at_s = now

    def _get_row(self, name: str) -> ProfileRow:
        return self._rows.setdefault(name, ProfileRow(name))

    def _make_table(self) -> Table:
        unit, units = ("step", "steps") if self._stage == "fit" else ("batch", "batches")
        total_s = sum(row.total_s for row in self.rows)
        shown = [row for row in self.rows if row.total_s >= _MIN_SHARE * total_s]
        if rest := self.rows[len(shown) :]:
            shown.append(
                ProfileRow(f"{len(rest)} parts below {_MIN_SHARE:.1%}", total_s=sum(row.total_s for row in rest))
            )
        table = make_table("part", "calls", "total s", "mean ms", f"ms/{unit}", "share %")
        is_host = self._waits or self._run is None or self._run.strategy.device.type == "cpu"
        host = "" if is_host else ", host time"
        table.title = f"{self._stage}: {self._steps} {units} in {total_s:.2f} s{host}"
        for row in [*shown, ProfileRow("total", total_s=total_s)]:
            table.add_row(
                row.name,
                f"{row.calls}" if row.calls else "",
                f"{row.total_s:.3f}",
                f"{1e3 * row.total_s / row.calls:.3f}" if row.calls else "",
                f"{1e3 * row.total_s / self._steps:.3f}" if self._steps else "",
                f"{100 * row.total_s / total_s:.1f}" if total_s else "",
            )
        return table
