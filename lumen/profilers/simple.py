"""A table of where the time of a run goes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, ClassVar, final

import torch

from lumen.console import as_text
from lumen.errors.arguments import checked
from lumen.profilers.base import Profiler, end_part, in_stage, make_table, show

if TYPE_CHECKING:
    from rich.table import Table

    from lumen.run.run import Run

_TINY = 0.001  # share of the whole below which parts are shown as one


@final
@dataclass
class Row:
    """The time that one part of a run took.

    Attributes:
        name: Name of the part, such as `training_step`.
        calls: Number of times it ran.
        total_s: Seconds in all, without those of parts inside of it.
    """

    name: str
    calls: int = 0
    total_s: float = 0.0


@final
class SimpleProfiler(Profiler):
    """Prints at the end of a run how long each part of it took; a run directory keeps it as `profile.txt`.

    The times are exclusive: what is spent in a part inside of another one (a checkpoint in a callback) counts there
    only, so they add up to the whole. `loop` is what is left: the loop itself, its seeding, its metrics. The sanity
    check counts as validation.

    Times are those of the host. On CUDA, which runs behind it, a part holds the time to launch its kernels, and the
    first one that needs a value waits for all others: use `TorchProfiler` for the device's times, or `synchronize`.

    Args:
        dirpath: See `Profiler`.
        filename: See `Profiler`.
        synchronize: Wait for the device at both ends of each part. Each part then shows its device time too, but host
            and device no longer overlap, so the whole takes longer.
    """

    NEUTRAL: ClassVar[Mapping[str, tuple[bool, ...]]] = {"extended": (True, False)}  # the table is one

    @checked
    def __init__(
        self, dirpath: str | Path | None = None, filename: str | None = None, *, synchronize: bool = False
    ) -> None:
        super().__init__(dirpath, filename)
        self.synchronize = synchronize
        self._rows: dict[str, Row] = {}
        self._stack: list[tuple[str, Row]] = []
        self._outer = 0  # parts in progress that began before what is measured
        self._steps, self._waits, self._measuring = 0, False, False
        self._switched_at_s = perf_counter()

    @property
    def rows(self) -> list[Row]:
        """The parts of the last run, the longest first."""
        return sorted(self._rows.values(), key=lambda row: -row.total_s)

    def begin(self, run: Run, directory: Path | None) -> None:
        """See `Profiler.begin`."""
        super().begin(run, directory)
        self._waits = self.synchronize and run.strategy.device.type != "cpu"
        self._rows, self._outer, self._steps, self._measuring = {}, len(self._stack), 0, True
        self._switched_at_s = perf_counter()

    def start(self, action_name: str) -> None:
        """See `Profiler.start`."""
        self._switch()
        self._stack.append((action_name, row := self._row(action_name)))
        row.calls += 1

    def stop(self, action_name: str) -> None:
        """See `Profiler.stop`.

        Raises:
            ConfigError: It is not the part in progress.
        """
        self._switch()
        end_part(self, self._stack, action_name)
        self._outer = min(self._outer, len(self._stack))

    @contextmanager
    def part(self, name: str, calls: int = 1) -> Iterator[None]:
        """See `Profiler.part`."""
        self.start(name)
        self._stack[-1][1].calls += calls - 1
        try:
            yield
        finally:
            self.stop(name)

    def step(self) -> None:
        """See `Profiler.step`."""
        self._steps += 1

    def summary(self) -> str:
        """The table as a text."""
        return as_text(self._table()) if self._rows else ""

    def describe(self) -> None:
        """Print the table, or write it to the file that has a name."""
        if self.filename is not None:
            super().describe()
        elif self._run is None or self._run.processes.is_global_zero:
            show(self._table(), self._directory)

    def end(self) -> None:
        """See `Profiler.end`."""
        self._switch()
        self._measuring = False
        super().end()

    def _switch(self) -> None:
        """Add the seconds since the last call to the part that ran in them."""
        if self._waits:
            assert self._run is not None
            torch.accelerator.synchronize(self._run.strategy.device)
        now = perf_counter()
        if len(self._stack) > self._outer:
            self._stack[-1][1].total_s += now - self._switched_at_s
        elif self._measuring and self._run is not None:
            self._row(in_stage("loop", self._run.stage)).total_s += now - self._switched_at_s
        self._switched_at_s = now

    def _row(self, name: str) -> Row:
        return self._rows.setdefault(name, Row(name))

    def _table(self) -> Table:
        unit, units = ("step", "steps") if self._stage == "fit" else ("batch", "batches")
        total_s = sum(row.total_s for row in self.rows)
        shown = [row for row in self.rows if row.total_s >= _TINY * total_s]
        if rest := self.rows[len(shown) :]:
            shown.append(Row(f"{len(rest)} parts below {_TINY:.1%}", total_s=sum(row.total_s for row in rest)))
        table = make_table("part", "calls", "total s", "mean ms", f"ms/{unit}", "share %")
        is_host = self._waits or self._run is None or self._run.strategy.device.type == "cpu"
        host = "" if is_host else ", as the host saw it"
        table.title = f"{self._stage}: {self._steps} {units} in {total_s:.2f} s{host}"
        for row in [*shown, Row("total", total_s=total_s)]:
            table.add_row(
                row.name,
                f"{row.calls}" if row.calls else "",
                f"{row.total_s:.3f}",
                f"{1e3 * row.total_s / row.calls:.3f}" if row.calls else "",
                f"{1e3 * row.total_s / self._steps:.3f}" if self._steps else "",
                f"{100 * row.total_s / total_s:.1f}" if total_s else "",
            )
        return table
