"""Records of runs, read from the files in their directories."""

from __future__ import annotations

import csv
import json
import math
import re
import reprlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, pairwise, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, final

import numpy as np
import numpy.typing as npt
import yaml

from lumen.cli.yaml_text import load_yaml
from lumen.data.nested import flatten_leaves
from lumen.internals.masking import mask_text
from lumen.run.goodput import FILE, TimeSpent, goodput, read_starts

if TYPE_CHECKING:
    from lumen.tools.runs.find import ShownRun


Numbers = npt.NDArray[np.float64]


@final
@dataclass
class Series:
    """The values of one name.

    Attributes:
        steps: The step of each value, in non-decreasing order.
        values: The value at each step, finite or not.
    """

    steps: Numbers
    values: Numbers

    @property
    def finite(self) -> npt.NDArray[np.bool_]:
        """Mask of the finite values."""
        return np.isfinite(self.values)

    @property
    def finite_values(self) -> Numbers:
        """The values, with NaN in place of infinite values."""
        return np.where(self.finite, self.values, np.nan)


@final
class ValueTable:
    """Contents of a CSV file of values.

    Args:
        path: The file. None or an unreadable file gives an empty table. Cells that hold no number are left out.

    Attributes:
        series: The series by name, in the order of the columns. Names without a value are left out.
        epochs: The step of the first row of each epoch but the first, by the number of completed epochs.
        last_step: The highest step, or None if there are no values.
        last_epoch: Number of the newest epoch, which is the number of epochs completed before it, or None.
    """

    def __init__(self, path: Path | None) -> None:
        header: list[str] = []
        columns: dict[str, tuple[array[float], array[float]]] = {}
        epochs: dict[str, float] = {}
        if path is not None:
            with suppress(OSError, csv.Error), path.open(newline="", encoding="utf-8", errors="replace") as file:
                rows = csv.reader(_iterate_complete_lines(file))
                header = next(rows, [])
                for row in rows:
                    _add_row(dict(zip(header, row, strict=False)), columns, epochs)
        self.series: dict[str, Series] = {}
        for name in filter(columns.get, header):
            steps, values = map(np.array, columns[name])
            order = np.argsort(steps, kind="stable")
            self.series[name] = Series(steps[order], values[order])
        self.epochs = {int(epoch): int(step) for epoch, step in epochs.items() if epoch.isdecimal()}
        self.last_epoch = max(self.epochs, default=None)
        self.epochs.pop(min(self.epochs, default=0), None)
        self.last_step = max((int(each.steps[-1]) for each in self.series.values()), default=None)


def _iterate_complete_lines(file: TextIO) -> Iterator[str]:
    """Yield the lines of a file, except a last line without newline: its last number may lack digits."""
    line = next(file, "")
    for following in file:
        yield line
        line = following
    if line.endswith("\n"):
        yield line


def _add_row(
    cells: dict[str, str], columns: dict[str, tuple[array[float], array[float]]], epochs: dict[str, float]
) -> None:
    """Add the values of a row, unless its step is missing or not exact as a double."""
    step = np.nan
    with suppress(ValueError):
        step = float(cells.pop("step", ""))
    if not abs(step) < 2**53:  # `not <` also rejects NaN.
        return
    epochs.setdefault(cells.pop("epoch", ""), step)
    for name, cell in cells.items():
        if cell:
            with suppress(ValueError):
                value = float(cell)
                steps, values = columns.setdefault(name, (array("d"), array("d")))
                steps.append(step)
                values.append(value)


@final
@dataclass
class ThinnedSeries:
    """Series with no more points than a chart can show.

    Attributes:
        steps: The steps of the points.
        values: The lowest and highest value of each bucket, in order of steps; NaN for a bucket without finite values.
        mean_steps: The mean step of each bucket, or empty if no point was left out.
        means: The mean of the finite values of each bucket, one for each mean step.
    """

    steps: Numbers
    values: Numbers
    mean_steps: Numbers
    means: Numbers


def thin_series(series: Series, most: int) -> ThinnedSeries:
    """Return at most `most` points of a series, with its peaks, its first and its last point.

    Args:
        series: A series with at least one value.
        most: Number of points to keep, at least 4.
    """
    values = series.finite_values
    empty = np.empty(0)
    if len(values) <= most:
        return ThinnedSeries(series.steps, values, empty, empty)
    edges = np.linspace(0, len(values), most // 2, dtype=np.int64)  # one bucket less than half: both ends are kept
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
    return ThinnedSeries(series.steps[places], values[places], np.array(mean_steps), np.array(means))


_MAX_SETTINGS = 2000  # settings of one run
_ABSENT = "–"
_NAMES = ("trainer.name", "trainer.resume", "trainer.resume_parts")  # These differ in every run.
_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = 300
_BRIEF.maxlist = _BRIEF.maxtuple = _BRIEF.maxdict = 20


@lru_cache(maxsize=64)  # Reading 200 kB takes a second, and a page needs the newest config of a run twice.
def parse_settings(text: str) -> Mapping[str, str]:
    """Return the settings of a config by path, such as `model.init_args.lr`; empty if it cannot be read."""
    try:
        read = load_yaml(text)
        found = islice(flatten_leaves(read), _MAX_SETTINGS) if isinstance(read, dict) else ()
        return {path: value[:300] if isinstance(value, str) else _BRIEF.repr(value) for path, value in found}
    except (yaml.YAMLError, RecursionError, ValueError):
        return {}


def find_differences(settings: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """Return the settings that differ between runs, by path: the value in each run, or a dash."""
    paths = dict.fromkeys(path for each in settings for path in each if path not in _NAMES)
    found = {path: [each.get(path, _ABSENT) for each in settings] for path in paths}
    return {path: values for path, values in found.items() if len(set(values)) > 1}


_CONTROLS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|[^\n\t\x20-\x7e\x85\xa0-\U0010ffff]")
_MAX_CONFIG_BYTES = 200_000
_MAX_LABEL = 24  # characters of a name that fit next to a chart
KNOWN = ("metrics.csv", "system.csv", "config.yaml", "script.yaml", "run.log", "environment.json", FILE)


@final
class RunContents:
    """Data of one run for a report.

    Args:
        shown: The status and the checkpoints of the run.
        name: Name of the run in the report.
        label: Name of the run next to its values.
        log_bytes: The most bytes to read from the end of the run's log.

    Attributes:
        shown: The status and the checkpoints of the run, as given.
        name: The name of the run, as given.
        label: The label of the run, as given.
        metrics: Values that the run logged.
        system: Speed and memory while the run trained.
        spent: Time of the run by activity, or None if unknown.
        restarts: The step of each start but the first.
        configs: Texts of the run's configs by file name, oldest first, or the settings that a script recorded.
        environment: Versions, host and devices of the run.
        log: The end of the run's log.
        log_left_out: Number of bytes of the log before `log`.
    """

    def __init__(self, shown: ShownRun, name: str, label: str, log_bytes: int) -> None:
        self.shown, self.name, self.label, directory = shown, name, label, Path(shown.path)
        self.metrics, self.system = (
            ValueTable(find_file_inside(directory, each)) for each in ("metrics.csv", "system.csv")
        )
        has_time = find_file_inside(directory, FILE) is not None
        self.spent = _read_time_spent(directory) if has_time else None
        self.restarts = [step for number, step in read_starts(directory).items() if number > 1] if has_time else []
        self.configs = _read_configs(directory)
        self.environment = _read_environment(find_file_inside(directory, "environment.json"))
        self.log, self.log_left_out = _read_tail(find_file_inside(directory, "run.log"), log_bytes)

    @property
    def epochs(self) -> int | None:
        """Number of completed epochs, or None. Rows of an epoch in progress do not count."""
        known = [each for each in (self.metrics.last_epoch, self.shown.newest_info.get("epoch")) if each is not None]
        return max(known, default=None)

    @property
    def last_step(self) -> int | None:
        """The highest step with a value, or None."""
        return max(
            (each for table in (self.metrics, self.system) if (each := table.last_step) is not None), default=None
        )

    @property
    def settings(self) -> Mapping[str, str]:
        """The settings of the newest config by path, or the settings that a script recorded."""
        return parse_settings(next(reversed(self.configs.values()), ""))


def find_file_inside(directory: Path, name: str | Path) -> Path | None:
    """Return a file of a run, or None if it is missing or a link to outside: a report must not contain other files."""
    path = directory / name
    with suppress(OSError, RuntimeError):
        if path.is_file() and path.resolve().is_relative_to(directory.resolve()):
            return path
    return None


def is_recorded(directory: Path) -> bool:
    """Return True if a directory holds any of the files that a report reads."""
    return any(find_file_inside(directory, name) for name in KNOWN)


def make_names(paths: Sequence[Path]) -> list[str]:
    """Return a unique name for each run: the last parts of its path, as few as possible."""
    parts = [path.absolute().parts for path in paths]
    count = 1
    while len({each[-count:] for each in parts}) < len({*parts}) and count < max(map(len, parts)):
        count += 1
    return ["/".join(each[-count:]) for each in parts]


def shorten_names(names: Sequence[str]) -> list[str]:
    """Return the names; if some are long, without the words that begin or end all: `…width-8…`.

    One common word stays in front, because it often says what differs: `width-` of `width-8`.
    """
    words = [re.split(r"(?<=[-_/ ])", name) for name in names]
    if len(names) == 1 or max(map(len, names)) <= _MAX_LABEL:
        return [*names]
    begin = max(_count_equal(words) - 1, 0)
    rest = [each[begin:] for each in words]
    end = min(_count_equal([each[::-1] for each in rest]), min(map(len, rest)) - 1)
    labels = ["".join(each[: len(each) - end]).rstrip("-_/ ") for each in rest]
    return ["…" * (begin > 0) + label + "…" * (end > 0) for label in labels]


def _count_equal(words: Sequence[Sequence[str]]) -> int:
    """Return the number of words with which all names begin."""
    return sum(1 for _ in takewhile(lambda each: len({*each}) == 1, zip(*words, strict=False)))


def _read_time_spent(directory: Path) -> TimeSpent | None:
    with suppress(OSError):
        spent = goodput(directory)
        return spent if spent.lives and math.isfinite(sum(spent.spent_s.values()) + spent.wall_s) else None
    return None


def _read_tail(file: Path | None, most: int) -> tuple[str, int]:
    """Return the last lines of a file without control characters, and the number of bytes before these lines."""
    if file is None:
        return "", 0
    with suppress(OSError), file.open("rb") as opened:
        begin = max(0, opened.seek(0, 2) - most)
        opened.seek(begin)
        if begin:
            begin += len(opened.readline())
        return _CONTROLS.sub("", opened.read(most).decode(errors="replace").replace("\r\n", "\n")), begin
    return "", 0


def _read_configs(directory: Path) -> dict[str, str]:
    earlier = [path.name for path in directory.glob("config-*.yaml") if path.stem.partition("-")[2].isdecimal()]
    names = [*sorted(earlier, key=lambda name: int(Path(name).stem.partition("-")[2])), "config.yaml"]
    if find_file_inside(directory, "config.yaml") is None:
        names = ["script.yaml"]
    files = {name: find_file_inside(directory, name) for name in names}
    texts = {
        name: mask_text(_read_tail(file, _MAX_CONFIG_BYTES)[0]) for name, file in files.items() if file is not None
    }
    return {name: text for name, text in texts.items() if text}


def _read_environment(file: Path | None) -> dict[str, Any]:
    with suppress(OSError, ValueError, RecursionError):
        read = json.loads(_read_tail(file, _MAX_CONFIG_BYTES)[0])
        return read if isinstance(read, dict) else {}
    return {}
