"""Profiler: the base of what measures the parts of a run, and how its table is printed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, final

from lumen import console as terminal
from lumen.errors import ConfigError
from lumen.errors.arguments import local_path

if TYPE_CHECKING:
    from rich.table import Table

    from lumen.run.run import Run

T = TypeVar("T")
_STAGES = {"validate": "validation", "sanity": "validation", "test": "test", "predict": "predict"}


class Profiler(ABC):
    """Is told when each part of a run begins and ends; `Trainer(profiler=...)` takes a subclass of your own too.

    One that has `start` and `stop` is whole; `summary` makes what is shown at the end. What is measured begins with the
    first hook of `fit` (after model, data and optimizer are built) or of an evaluation and ends before `teardown`. A
    run without a profiler has no trace of one in its loop.

    A task measures a part of its own by `with self.trainer.profiler.profile("encoder"):`, which costs next to nothing
    where there is no profiler.

    Args:
        dirpath: Where files go. Default: the run directory.
        filename: The summary goes to `STAGE-filename.txt` there. Default: it is printed, and appended to `profile.txt`
            and `run.log` of the run directory.
    """

    #: False: nothing is measured, and no part of a run is wrapped.
    measures: bool = True

    dirpath: Path | None = None
    filename: str | None = None
    _run: Run | None = None
    _directory: Path | None = None
    _stage = ""

    def __init__(self, dirpath: str | Path | None = None, filename: str | None = None) -> None:
        self.dirpath = None if dirpath is None else local_path(dirpath)
        self.filename = filename

    @abstractmethod
    def start(self, action_name: str) -> None:
        """A part begins.

        Args:
            action_name: Name of the part, such as `training_step`, `data wait (validation)` or
                `EarlyStopping.on_step_end`. Parts nest: a callback saves a checkpoint, which flushes a logger.
        """

    @abstractmethod
    def stop(self, action_name: str) -> None:
        """The part that was started last is over."""

    def summary(self) -> str:
        """What was measured, as a text; "" shows nothing."""
        return ""

    def profile(self, action_name: str) -> AbstractContextManager[None]:
        """The context in which a part runs."""
        return self._profiled(action_name)

    @contextmanager
    def _profiled(self, action_name: str) -> Iterator[None]:
        self.start(action_name)
        try:
            yield
        finally:
            self.stop(action_name)

    def part(self, name: str, calls: int = 1) -> AbstractContextManager[Any]:
        """The context in which a part of the run itself runs: that of `profile`.

        Args:
            name: Name of the part.
            calls: By how much to raise the count of its calls; 0 for time that belongs to another call.
        """
        return self.profile(name)

    def step(self) -> None:
        """An optimizer step is over, with its callbacks and validation; in an evaluation: a batch."""

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Prepare for a run: "fit", "validate", "test" or "predict"."""

    def teardown(self, stage: str | None = None) -> None:
        """Clean up after a run; called after errors and stop requests too."""

    def begin(self, run: Run, directory: Path | None) -> None:
        """Start to measure a run; called once for each.

        Args:
            run: The run that is measured; `run.stage` is "fit", "validate", "test" or "predict".
            directory: The run directory; None where there is none, as in evaluations: then nothing is to be written.
        """
        self._run, self._directory, self._stage = run, directory, run.stage
        self.setup(run.stage, run.processes.local_rank, None if directory is None else str(directory))

    def end(self) -> None:
        """End the measurement and report it. Called after errors and stop requests too."""
        try:
            self.describe()
        finally:
            self.teardown(self._stage)

    def describe(self) -> None:
        """Show the summary, in the first process."""
        text = self.summary().rstrip()
        if not text or (self._run is not None and not self._run.processes.is_global_zero):
            return
        folder = self._folder
        if self.filename is None or folder is None:
            show_text(f"{text}\n", self._directory)
            return
        folder.mkdir(parents=True, exist_ok=True)
        name = "-".join(filter(None, (self._stage, self.filename)))
        (folder / f"{name}.txt").write_text(f"{text}\n", encoding="utf-8")

    @property
    def local_rank(self) -> int:
        """Number of this process on its node."""
        return 0 if self._run is None else self._run.processes.local_rank

    @property
    def _folder(self) -> Path | None:
        """Where files go, if anywhere."""
        return self._directory if self.dirpath is None else self.dirpath


@final
class PassThroughProfiler(Profiler):
    """Measures nothing: what `trainer.profiler` is where none was asked for."""

    measures = False

    def start(self, action_name: str) -> None:
        """Do nothing."""

    def stop(self, action_name: str) -> None:
        """Do nothing."""

    def profile(self, action_name: str) -> AbstractContextManager[None]:
        """A context that does nothing."""
        return nullcontext()


def end_part(profiler: Profiler, parts: list[tuple[str, T]], name: str) -> T:
    """Remove the part in progress from the parts that have begun. Returns what was kept of it.

    Args:
        profiler: The profiler whose part ends.
        parts: Name of each part that has begun, and what the profiler keeps of it; the innermost last.
        name: The part that ends.

    Raises:
        ConfigError: The part is not the one in progress.
    """
    within = parts[-1][0] if parts else None
    if within == name:
        return parts.pop()[1]
    found = "nothing is in progress" if within is None else f"{within!r} is in progress"
    raise ConfigError(
        f"{type(profiler).__name__}.stop: {name!r} cannot end here, {found}. Start it first, and end what was started "
        "last; `with profiler.profile(...)` does both."
    )


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

    text, console = terminal.as_text(table), terminal.console
    if console.is_terminal:
        table.box = box.SIMPLE_HEAD
        console.print(table, highlight=False)
    else:
        console.print(text, end="", markup=False, highlight=False)
    _record(text, directory)


def show_text(text: str, directory: Path | None) -> None:
    """Print a text, and append it to `profile.txt` and `run.log` of a run directory."""
    terminal.console.print(text, end="", markup=False, highlight=False)
    _record(text, directory)


def _record(text: str, directory: Path | None) -> None:
    for name in ("profile.txt", "run.log") if directory is not None else ():
        with open(directory / name, "a", encoding="utf-8") as record:  # type: ignore[operator]
            record.write(text)
