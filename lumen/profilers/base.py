"""Base class of profilers, and functions that print their tables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, final

from lumen import console as terminal
from lumen.errors import ConfigError
from lumen.errors.arguments import expand_path

if TYPE_CHECKING:
    from rich.table import Table

    from lumen.run.run import Run

T = TypeVar("T")
_STAGES = {"validate": "validation", "sanity": "validation", "test": "test", "predict": "predict"}


class Profiler(ABC):
    """Base class of profilers, called when each part of a run begins and ends.

    `Trainer(profiler=...)` accepts your own subclass too. A subclass must define `start` and `stop`; `summary` returns
    the text shown at the end. The measurement begins with the first hook of `fit` (after model, data and optimizer are
    built) or of an evaluation, and ends before `teardown`. A run without a profiler has no code of a profiler in its
    loop.

    A task measures its own part by `with self.trainer.profiler.profile("encoder"):`, which costs almost no time without
    a profiler.

    Args:
        dirpath: The directory of the files. Default: the run directory.
        filename: The name of the summary's file, `STAGE-filename.txt` in the directory. Default: the summary is
            printed, and appended to `profile.txt` and `run.log` of the run directory.
    """

    #: False if the profiler measures nothing; then no part of a run is wrapped.
    measures: bool = True

    dirpath: Path | None = None
    filename: str | None = None
    _run: Run | None = None
    _directory: Path | None = None
    _stage = ""
    _stack: Sequence[tuple[str, Any]] = ()  # name and data of each part in progress, innermost last

    def __init__(self, dirpath: str | Path | None = None, filename: str | None = None) -> None:
        self.dirpath = None if dirpath is None else expand_path(dirpath)
        self.filename = filename

    @abstractmethod
    def start(self, action_name: str) -> None:
        """Begin a part.

        Args:
            action_name: The name of the part, such as `training_step`, `data wait (validation)` or
                `EarlyStopping.on_step_end`. Parts nest: a callback saves a checkpoint, which flushes a logger.
        """

    @abstractmethod
    def stop(self, action_name: str) -> None:
        """End the part that was started last."""

    def summary(self) -> str:
        """Return the measurement as a text; "" shows nothing."""
        return ""

    def profile(self, action_name: str) -> AbstractContextManager[None]:
        """Return a context that measures a part."""
        return self._profiled(action_name)

    @contextmanager
    def _profiled(self, action_name: str) -> Iterator[None]:
        depth = len(self._stack)
        self.start(action_name)
        try:
            yield
        except BaseException:
            for name, _ in reversed(self._stack[depth + 1 :]):  # The code has failed before it ended these parts.
                self.stop(name)
            raise
        finally:
            self.stop(action_name)

    def part(self, name: str, calls: int = 1) -> AbstractContextManager[Any]:
        """Return a context that measures a part of the run itself; the default is `profile`.

        Args:
            name: The name of the part.
            calls: The number of calls to count; 0 for time that belongs to another call.
        """
        return self.profile(name)

    def step(self) -> None:
        """Handle the end of an optimizer step, after its callbacks and validation; in an evaluation, of a batch."""

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Prepare for a run with stage "fit", "validate", "test" or "predict"."""

    def teardown(self, stage: str | None = None) -> None:
        """Clean up after a run, also after errors and stop requests."""

    def begin(self, run: Run, directory: Path | None) -> None:
        """Start the measurement of a run; called once per run.

        Args:
            run: The run to measure; `run.stage` is "fit", "validate", "test" or "predict".
            directory: The run directory; None if the run has no directory, as in evaluations: then no file is written.
        """
        self._run, self._directory, self._stage = run, directory, run.stage
        self.setup(run.stage, run.processes.local_rank, None if directory is None else str(directory))

    def end(self) -> None:
        """End the measurement and report it, also after errors and stop requests."""
        try:
            self.describe()
        finally:
            self.teardown(self._stage)

    def describe(self) -> None:
        """Show the summary, in the first process only."""
        text = self.summary().rstrip()
        if not text or (self._run is not None and not self._run.processes.is_global_zero):
            return
        folder = self._folder
        if self.filename is None or folder is None:
            print_text(f"{text}\n", self._directory)
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
        """Directory of the files, or None."""
        return self._directory if self.dirpath is None else self.dirpath


@final
class PassThroughProfiler(Profiler):
    """Profiler that measures nothing: the value of `trainer.profiler` without a profiler."""

    measures = False

    def start(self, action_name: str) -> None:
        """Do nothing."""

    def stop(self, action_name: str) -> None:
        """Do nothing."""

    def profile(self, action_name: str) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()


def end_part(profiler: Profiler, parts: list[tuple[str, T]], name: str) -> T:
    """Remove the part in progress from the parts that have begun, and return the profiler's data of the part.

    Args:
        profiler: The profiler whose part ends.
        parts: The name and the profiler's data of each part that has begun, innermost last.
        name: The name of the part that ends.

    Raises:
        ConfigError: The part is not the one in progress.
    """
    innermost = parts[-1][0] if parts else None
    if innermost == name:
        return parts.pop()[1]
    found = "no part is in progress" if innermost is None else f"{innermost!r} is in progress"
    raise ConfigError(
        f"{type(profiler).__name__}.stop: {name!r} cannot end here, {found}. Start each part before its end, and end "
        "the newest part first; `with profiler.profile(...)` does both."
    )


def format_with_stage(name: str, stage: str) -> str:
    """Return the name of a part, with the stage in brackets for an evaluation."""
    return f"{name} ({_STAGES[stage]})" if stage in _STAGES else name


def get_hook_stage(stage: str) -> str:
    """Return the name of a stage in the names of its hooks: "validation" for "validate"."""
    return _STAGES[stage]


def make_table(name: str, *numbers: str) -> Table:
    """Return an empty table with a column of names, then columns of numbers."""
    from rich.table import Table

    table = Table(box=None, show_edge=False, pad_edge=False, header_style="bold", title_justify="left", title_style="")
    table.add_column(name, overflow="fold")
    for number in numbers:
        table.add_column(number, justify="right", no_wrap=True)
    return table


def print_table(table: Table, directory: Path | None) -> None:
    """Print a table, and append it to `profile.txt` and `run.log` of a run directory."""
    from rich import box

    text, console = terminal.render_table(table), terminal.console
    if console.is_terminal:
        table.box = box.SIMPLE_HEAD
        console.print(table, highlight=False)
    else:
        console.print(text, end="", markup=False, highlight=False)
    _append_to_files(text, directory)


def print_text(text: str, directory: Path | None) -> None:
    """Print a text, and append it to `profile.txt` and `run.log` of a run directory."""
    terminal.console.print(text, end="", markup=False, highlight=False)
    _append_to_files(text, directory)


def _append_to_files(text: str, directory: Path | None) -> None:
    for name in ("profile.txt", "run.log") if directory is not None else ():
        with open(directory / name, "a", encoding="utf-8") as record:  # type: ignore[operator]
            record.write(text)
