"""Profiler: the base of what measures the parts of a run, and how its table is printed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lumen import console as terminal

if TYPE_CHECKING:
    from rich.table import Table

    from lumen.run.run import Run

_WIDE = 200  # columns of a table that goes to a file
_STAGES = {"validate": "validation", "sanity": "validation", "test": "test", "predict": "predict"}


class Profiler(ABC):
    """Is told when each part of a run begins and ends; `Trainer(profiler=...)` takes a subclass of your own too.

    What is measured begins with the first hook of `fit` (after model, data and optimizer are built) or of an
    evaluation and ends before `teardown`. A run without a profiler has no trace of one in its loop.
    """

    @abstractmethod
    def start(self, run: Run, directory: Path | None) -> None:
        """Start to measure a run; called once for each.

        Args:
            run: The run that is measured; `run.stage` is "fit", "validate", "test" or "predict".
            directory: The run directory; None where there is none, as in evaluations: then nothing is to be written.
        """

    @abstractmethod
    def part(self, name: str, calls: int = 1) -> AbstractContextManager[Any]:
        """The context in which a part runs. Parts nest: a callback saves a checkpoint, which flushes a logger.

        Args:
            name: Name of the part, such as `training_step`, `data wait (validation)` or `EarlyStopping.on_step_end`.
            calls: By how much to raise the count of its calls; 0 for time that belongs to another call.
        """

    @abstractmethod
    def step(self) -> None:
        """An optimizer step is over, with its callbacks and validation; in an evaluation: a batch."""

    @abstractmethod
    def stop(self) -> None:
        """End the measurement and report it. Called after errors and stop requests too."""


def in_stage(name: str, stage: str) -> str:
    """The name of a part with its stage in brackets, where that is an evaluation."""
    return f"{name} ({_STAGES[stage]})" if stage in _STAGES else name


def hook_stage(stage: str) -> str:
    """The name of a stage in the names of its hooks: "validation" for "validate"."""
    return _STAGES[stage]


def make_table(name: str, *numbers: str) -> Table:
    """An empty table: a column of names, then columns of numbers."""
    from rich.table import Table

    table = Table(box=None, show_edge=False, pad_edge=False, header_style="bold", title_justify="left", title_style="")
    table.add_column(name, overflow="fold")
    for number in numbers:
        table.add_column(number, justify="right", no_wrap=True)
    return table


def show(table: Table, directory: Path | None) -> None:
    """Print a table, and append it to `profile.txt` and `run.log` of a run directory."""
    from rich import box
    from rich.console import Console

    file = StringIO()
    Console(file=file, width=_WIDE, color_system=None, force_terminal=False, force_jupyter=False).print(table)
    text = "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())
    console = terminal.console
    if console.is_terminal:
        table.box = box.SIMPLE_HEAD
        console.print(table, highlight=False)
    else:
        console.print(text, end="", markup=False, highlight=False)
    for name in ("profile.txt", "run.log") if directory is not None else ():
        with open(directory / name, "a", encoding="utf-8") as record:  # type: ignore[operator]
            record.write(text)
