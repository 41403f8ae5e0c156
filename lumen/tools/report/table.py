"""Reads `metrics.csv` and `system.csv`, as a run may have left them."""

from __future__ import annotations

import csv
from array import array
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TextIO, final

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]


@final
@dataclass
class Series:
    """The values of one name.

    Attributes:
        steps: The step of each value, which never falls.
        values: As many; what is not finite, too.
    """

    steps: Numbers
    values: Numbers

    @property
    def finite(self) -> npt.NDArray[np.bool_]:
        """Which of the values are finite."""
        return np.isfinite(self.values)


@final
@dataclass
class Table:
    """What a file of values holds.

    Attributes:
        series: By name, in the file's order; names without a value are left out.
        epochs: The step of the first row of each epoch but the first, by the number of epochs completed.
        last_step: The highest step, or None.
        last_epoch: Number of the newest epoch, or None: as many were completed before it.
    """

    series: dict[str, Series] = field(default_factory=dict)
    epochs: dict[int, int] = field(default_factory=dict)
    last_step: int | None = None
    last_epoch: int | None = None


def read_table(path: Path | None) -> Table:
    """Read all rows; None, and what cannot be read, is an empty table. Cells that are no numbers are passed over."""
    table = Table()
    with suppress(OSError, csv.Error):
        if path is not None:
            with path.open(newline="", encoding="utf-8", errors="replace") as file:
                _read(csv.reader(_whole_lines(file)), table)
    return table


def _whole_lines(file: TextIO) -> Iterator[str]:
    """The lines of a file but for a torn last one, whose last number may lack digits."""
    line = next(file, "")
    for following in file:
        yield line
        line = following
    if line.endswith("\n"):
        yield line


def _read(rows: Iterator[list[str]], table: Table) -> None:
    header = next(rows, [])
    if "step" not in header:
        return
    step_place, epoch_place = header.index("step"), header.index("epoch") if "epoch" in header else None
    columns = {place: (array("d"), array("d")) for place, name in enumerate(header) if name not in ("step", "epoch")}
    epochs: dict[str, float] = {}
    try:
        for row in rows:
            _take(row, step_place, columns)
            if epoch_place is not None and len(row) > epoch_place and row[epoch_place] not in epochs:
                epochs[row[epoch_place]] = _number(row[step_place])
    except csv.Error:
        pass  # what came before it counts
    for place, (steps, values) in columns.items():
        if steps:
            table.series[header[place]] = _in_order(np.array(steps), np.array(values))
    table.epochs = {int(epoch): int(step) for epoch, step in epochs.items() if epoch.isdecimal() and np.isfinite(step)}
    table.last_epoch = max(table.epochs, default=None)
    table.epochs.pop(min(table.epochs, default=0), None)
    table.last_step = max((int(each.steps[-1]) for each in table.series.values()), default=None)


def _take(row: list[str], step_place: int, columns: dict[int, tuple[array[float], array[float]]]) -> None:
    try:
        step = float(row[step_place])
    except (ValueError, IndexError):
        return
    if not abs(step) < 2**53:  # NaN, too
        return
    for place, cell in enumerate(row):
        if cell and place in columns:
            with suppress(ValueError):
                value = float(cell)
                columns[place][0].append(step)
                columns[place][1].append(value)


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return float("nan")


def _in_order(steps: Numbers, values: Numbers) -> Series:
    if (np.diff(steps) < 0).any():
        order = np.argsort(steps, kind="stable")
        steps, values = steps[order], values[order]
    return Series(steps, values)


@final
@dataclass
class Thinned:
    """A series with as many points as can be told apart.

    Attributes:
        steps: The steps of the points.
        values: Of each bucket of the series the lowest and the highest value, in their order; NaN where none is finite.
        mean_steps: The mean step of each bucket; empty if all points are there.
        means: The mean of each bucket's finite values, as many.
    """

    steps: Numbers
    values: Numbers
    mean_steps: Numbers
    means: Numbers


def thin(series: Series, most: int) -> Thinned:
    """At most so many points of a series, peaks included, with its first and last point.

    Args:
        series: One with at least one value.
        most: Points to keep, at least 4.
    """
    values = np.where(series.finite, series.values, np.nan)
    empty = np.empty(0)
    if len(values) <= most:
        return Thinned(series.steps, values, empty, empty)
    edges = np.linspace(0, len(values), most // 2, dtype=np.int64)  # one bucket less than half: the ends are kept too
    kept, mean_steps, means = [0], [], []
    for begin, end in pairwise(edges.tolist()):
        bucket = values[begin:end]
        finite = np.isfinite(bucket)
        if not finite.any():
            kept.append(begin)
            continue
        kept += sorted((begin + int(np.nanargmin(bucket)), begin + int(np.nanargmax(bucket))))
        mean_steps.append(series.steps[begin:end][finite].mean())
        means.append(float(np.mean(bucket[finite], dtype=np.longdouble)))
    places = np.unique([*kept, len(values) - 1])
    return Thinned(series.steps[places], values[places], np.array(mean_steps), np.array(means))
