"""CSV logger: `metrics.csv` and `system.csv`."""

from __future__ import annotations

import csv
import errno
import os
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import IO, Any, ClassVar, Literal, final

import numpy as np
import torch

from lumen.errors import ConfigError
from lumen.errors.arguments import check_arguments, check_column
from lumen.errors.lightning_names import INSTEAD_IN_LOGGERS, NEUTRAL_IN_LOGGERS
from lumen.internals.atomic_files import explain_write_errors, replace_file
from lumen.loggers.base import RunDirectoryLogger, explain_wrong_calls

_MAX_COPIES_PER_ROW = 8
_PLACES = ("step", "epoch")


def _open_csv(path: Path, mode: Literal["r", "a", "w"]) -> IO[str]:
    """Open a CSV file; bytes that are not UTF-8 are preserved."""
    return path.open(mode, encoding="utf-8", errors="surrogateescape", newline="")


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the step and the values of each row of a `metrics.csv` or `system.csv`; no rows without the file."""
    if path.exists():
        with _open_csv(path, "r") as file:
            for row in csv.DictReader(file):
                yield int(row["step"]), {name: text for name, text in row.items() if text and name not in _PLACES}


@final
class _CsvTable:
    """CSV file that gains columns as new names appear; its header is always complete."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = 0
        path.with_name(f".{path.name}.tmp").unlink(missing_ok=True)  # left by a killed process
        self.columns: dict[str, None] = {}  # an ordered set, for fast look-ups
        self._width = 0  # number of columns in the file
        self._pending_rows: list[Mapping[str, Any]] = []
        self._copies = 0  # number of rows that may be copied
        self._file: IO[str] | None = None
        if path.exists():
            with explain_write_errors(path), _open_csv(path, "r") as file:
                reader = csv.reader(file)
                self.columns = dict.fromkeys(next(reader, []))
                self._width = len(self.columns)
                self.rows = self._copies = sum(1 for _ in reader)

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row; a new name copies the file, with one more column.

        If new names come so often that copies of the file would cost more than the rows, rows wait in memory.
        """
        for name in row.keys() - self.columns.keys():
            check_column(str(name), f"a logged value is named {name!r}")
        self.columns.update(dict.fromkeys(row))
        self._pending_rows.append(row)
        self._copies += _MAX_COPIES_PER_ROW
        if len(self.columns) == self._width or self._copies >= self.rows:
            self.write_pending()

    def write_pending(self) -> None:
        """Write the waiting rows."""
        waiting, self._pending_rows = self._pending_rows, []
        if not waiting:
            return
        with explain_write_errors(self.path):
            if len(self.columns) > self._width:
                self._copies = 0
                self.rewrite([*self.columns], self.rows)
            if self._file is None:
                self._file = _open_csv(self.path, "a")
            if os.fstat(self._file.fileno()).st_nlink == 0:
                raise FileNotFoundError(errno.ENOENT, "removed")
            csv.writer(self._file).writerows([row.get(name, "") for name in self.columns] for row in waiting)
            self._file.flush()
        self.rows += len(waiting)

    def rewrite(self, columns: list[str], rows: int) -> None:
        """Keep the first `rows` rows and the given columns, by writing a new file that replaces this one.

        Only one row is in memory at a time.
        """
        self.close()
        with explain_write_errors(self.path), replace_file(self.path) as new_path, _open_csv(new_path, "w") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(self._read_rows(columns, rows))
            file.flush()
            os.fsync(file.fileno())
        self.columns, self.rows = dict.fromkeys(columns), min(rows, self.rows)
        self._width = len(columns)

    def _read_rows(self, columns: list[str], rows: int) -> Iterator[list[str]]:
        """Yield the first `rows` rows with the given columns; missing cells are empty."""
        if not self._width:
            return
        with _open_csv(self.path, "r") as file:
            for row in islice(csv.DictReader(file, restval=""), rows):
                yield [row.get(name, "") for name in columns]

    def flush(self) -> None:
        """Write buffered rows to the disk."""
        self.write_pending()
        if self._file is not None:
            with explain_write_errors(self.path):
                self._file.flush()
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; `append` opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


@final
class CSVLogger(RunDirectoryLogger):
    """Logger that writes `metrics.csv` and `system.csv` in the run directory.

    `metrics.csv` is bitwise identical in a repeated run. Each logged event is one row: `step`, `epoch`, then one column
    per name in order of first appearance. Numbers are written with all digits. If every step has new names, rows wait
    in memory, at most until the next checkpoint. Images, histograms, text and hyperparameters do not fit into a table
    and are ignored.

    Args:
        save_dir: Parent of the run directory, if `Trainer(default_root_dir=...)` does not set it.
        name: Name of the run, if `Trainer(name=...)` does not set it; the names of further runs are `name-2`, ...
        version: Name of the run within the directory `name`; a number N means "version_N".
        flush_logs_every_n_steps: Accepted for compatibility with Lightning; Lumen writes every row at once.
    """

    INSTEAD: ClassVar[Mapping[str, str]] = INSTEAD_IN_LOGGERS
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = NEUTRAL_IN_LOGGERS

    @check_arguments
    def __init__(
        self,
        save_dir: str | Path | None = None,
        name: str | None = None,
        version: int | str | None = None,
        *,
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        super().__init__(save_dir, name, version)
        self._tables: dict[str, _CsvTable] = {}  # by file name; empty outside of `fit` and in other processes

    def open(self, directory: Path, *, resumed: bool) -> None:
        """Open both files; remove old ones unless the run is resumed."""
        paths = [directory / name for name in ("metrics.csv", "system.csv")]
        for path in paths if not resumed else ():
            with explain_write_errors(path):
                path.unlink(missing_ok=True)
        self._tables = {path.name: _CsvTable(path) for path in paths}

    @explain_wrong_calls
    def log_metrics(self, metrics: Mapping[str, float], step: int, epoch: int | str = "") -> None:
        """Write a row to `metrics.csv`; rows of user code may omit the epoch."""
        if self._tables:
            numbers = {name: _as_number(name, value) for name, value in metrics.items()}
            self._tables["metrics.csv"].append({"step": step, "epoch": epoch, **numbers})

    def log_system(self, values: Mapping[str, float], step: int) -> None:
        """Write a row to `system.csv`."""
        if self._tables:
            self._tables["system.csv"].append({"step": step, **values})

    def save(self) -> None:
        """Write both files to the disk."""
        for table in self._tables.values():
            table.flush()

    def state_dict(self) -> dict[str, Any]:
        """Return the rows and columns of each file."""
        for table in self._tables.values():
            table.write_pending()
        return {name: {"rows": each.rows, "columns": [*each.columns]} for name, each in self._tables.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Cut both files back to the saved rows and columns."""
        for name, table in self._tables.items():
            saved = state[name]
            if (table.rows, [*table.columns]) != (saved["rows"], saved["columns"]):
                table.rewrite(list(saved["columns"]), saved["rows"])

    def finalize(self, status: str) -> None:
        """Close both files."""
        for table in self._tables.values():
            table.write_pending()
            table.close()
        self._tables = {}


def _as_number(name: str, value: Any) -> Any:
    """Return the number in a tensor or an array of one element; other values as they are.

    Raises:
        ConfigError: The name is that of a column of Lumen's, or the value has several elements.
    """
    if name in _PLACES:
        raise ConfigError(f"CSVLogger.log_metrics: {name} is a column of its own. Rename the value, or pass step=...")
    if not isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return value
    if np.prod(value.shape) != 1:
        raise ConfigError(
            f"CSVLogger.log_metrics: {name} has shape {tuple(value.shape)}; expected one number. Log value.mean(), or "
            "each element under a name of its own."
        )
    return value.item()
