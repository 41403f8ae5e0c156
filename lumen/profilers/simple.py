"""A table of where the time of a run goes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, final

import torch

from lumen.profilers.base import Profiler, in_stage, make_table, show

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
        synchronize: Wait for the device at both ends of each part. Each part then shows its device time too, but host
            and device no longer overlap, so the whole takes longer.
    """

    def __init__(self, *, synchronize: bool = False) -> None:
        self.synchronize = synchronize
        self._rows: dict[str, Row] = {}
        self._stack: list[Row] = []
        self._steps = 0

    @property
    def rows(self) -> list[Row]:
        """The parts of the last run, the longest first."""
        return sorted(self._rows.values(), key=lambda row: -row.total_s)

    def start(self, run: Run, directory: Path | None) -> None:
        """See `Profiler.start`."""
        self._run, self._directory, self._stage = run, directory, run.stage
        self._waits = self.synchronize and run.strategy.device.type != "cpu"
        self._rows, self._stack, self._steps = {}, [], 0
        self._switched_at_s = perf_counter()

    @contextmanager
    def part(self, name: str, calls: int = 1) -> Iterator[None]:
        """See `Profiler.part`."""
        self._switch()
        row = self._row(name)
        row.calls += calls
        self._stack.append(row)
        try:
            yield
        finally:
            self._switch()
            self._stack.pop()

    def step(self) -> None:
        """See `Profiler.step`."""
        self._steps += 1

    def stop(self) -> None:
        """Print the table."""
        self._switch()
        if self._run.processes.is_global_zero:
            show(self._table(), self._directory)

    def _switch(self) -> None:
        """Add the seconds since the last call to the part that ran in them."""
        if self._waits:
            torch.accelerator.synchronize(self._run.strategy.device)
        now = perf_counter()
        row = self._stack[-1] if self._stack else self._row(in_stage("loop", self._run.stage))
        row.total_s += now - self._switched_at_s
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
        host = "" if self._waits or self._run.strategy.device.type == "cpu" else ", as the host saw it"
        table.title = f"{self._stage}: {self._steps} {units} in {total_s:.2f} s{host}"
        for row in [*shown, Row("total", total_s=total_s)]:
            table.add_row(
                row.name,
                f"{row.calls}" if row.calls else "",
                f"{row.total_s:.3f}",
                f"{1e3 * row.total_s / row.calls:.3f}" if row.calls else "",
                f"{1e3 * row.total_s / self._steps:.3f}" if self._steps else "",
                f"{100 * row.total_s / total_s:.1f}",
            )
        return table
