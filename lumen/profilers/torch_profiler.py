"""Profiler that traces operators and kernels with `torch.profiler`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, final

from torch.profiler import (
    ProfilerAction,
    ProfilerActivity,
    profile,
    record_function,
    schedule as make_schedule,
    tensorboard_trace_handler,
)

from lumen.console import logger as _log, render_table
from lumen.errors.arguments import check_arguments, check_at_least
from lumen.profilers.base import Profiler, end_part, make_table, print_table

if TYPE_CHECKING:
    from rich.table import Table

    from lumen.run.run import Run


@final
class TorchProfiler(Profiler):
    """Profiler that records every operator, and on CUDA every kernel, of a few steps with `torch.profiler`.

    Each cycle of `wait`, `warmup` and `active` steps writes a Chrome trace and prints the operators that took longest.
    The trace labels the parts of the run (`training_step`, `backward`, `data wait`, callbacks, ...). Open the trace in
    ui.perfetto.dev or chrome://tracing, or give its directory to TensorBoard's profiler plugin. A step includes a
    validation that follows, so a validation in an active step is recorded in full.

    Args:
        dirpath: The directory of the traces. Default: `profile` in the run directory; without a run directory
            (evaluations, `fast_dev_run`) no trace is written.
        filename: Write the table to `STAGE-filename.txt` too, in `dirpath` or the run directory.
        wait: Steps without recording: the first steps are slower than the rest.
        warmup: Steps whose recording is discarded, because recording is slow at first.
        active: Steps that are recorded. A trace takes megabytes for each.
        repeat: The number of cycles; 0: until the run ends.
        record_shapes: Record the shapes of the operators' inputs.
        profile_memory: Record the memory that operators allocate.
        with_stack: Record where in the source each operator was called; slow.
        row_limit: The number of operators in the printed table.
        schedule: Replaces `wait`, `warmup`, `active` and `repeat`: `torch.profiler.schedule(...)`.
        on_trace_ready: Function that gets torch's profiler at the end of each cycle, and writes the trace in place of
            this profiler: `torch.profiler.tensorboard_trace_handler(...)`.
    """

    INSTEAD: ClassVar[Mapping[str, str]] = {
        "activities": "Leave it out: the profiler records the host and, on CUDA, the device.",
        "emit_nvtx": "Call fit in torch.autograd.profiler.emit_nvtx().",
        "export_to_chrome": "Leave it out: each cycle writes a trace, if the run has a directory.",
        "group_by_input_shapes": "Use record_shapes.",
        "record_functions": "Leave it out: the profiler labels the parts of a run.",
        "record_module_names": "Use with_stack.",
        "sort_by_key": "Leave it out: operators are sorted by their self time.",
        "table_kwargs": "Use row_limit.",
    }
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "emit_nvtx": (False,), "export_to_chrome": (True,), "group_by_input_shapes": (False,),
        "record_module_names": (True, False), "sort_by_key": (None,), "table_kwargs": (None,),
    }  # fmt: skip

    @check_arguments
    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        *,
        wait: int = 5,
        warmup: int = 2,
        active: int = 3,
        repeat: int = 1,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
        row_limit: int = 20,
        schedule: Callable[[int], ProfilerAction] | None = None,
        on_trace_ready: Callable[[Any], Any] | None = None,
    ) -> None:
        check_at_least(0, "TorchProfiler", wait=wait, repeat=repeat)
        check_at_least(1, "TorchProfiler", warmup=warmup, active=active)
        self.wait = wait
        self.warmup = warmup
        self.active = active
        self.repeat = repeat
        self.record_shapes = record_shapes
        self.profile_memory = profile_memory
        self.with_stack = with_stack
        self.row_limit = row_limit
        self.schedule = schedule or make_schedule(wait=wait, warmup=warmup, active=active, repeat=repeat)
        self.on_trace_ready = on_trace_ready
        super().__init__(dirpath, filename)
        self._stack: list[tuple[str, record_function]] = []
        self._newest = ""

    def start(self, action_name: str) -> None:
        """Begin a part, and label it in the trace."""
        label = record_function(action_name)
        label.__enter__()  # type: ignore[no-untyped-call]
        self._stack.append((action_name, label))

    def stop(self, action_name: str) -> None:
        """End the part that was started last.

        Raises:
            ConfigError: The part is not the one in progress.
        """
        end_part(self, self._stack, action_name).__exit__(None, None, None)

    def summary(self) -> str:
        """Return the latest table of operators, printed at the end of its cycle; "" before the first cycle ends."""
        return self._newest

    def describe(self) -> None:
        """Write the latest table to the file if `filename` is set; each cycle has been printed."""
        if self.filename is not None:
            super().describe()

    def begin(self, run: Run, directory: Path | None) -> None:
        """Start recording a run."""
        super().begin(run, directory)
        self._steps = self._traces = 0
        self._newest = ""
        activities = [ProfilerActivity.CPU]
        if run.strategy.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(
            activities=activities,
            schedule=self.schedule,
            on_trace_ready=self._report_cycle,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
        )
        with _ignore_cleared_events():
            self._profile.start()

    def part(self, name: str, calls: int = 1) -> AbstractContextManager[Any]:
        """Return a context that labels a part in the trace."""
        return record_function(name)

    def step(self) -> None:
        """Move to the next step of the cycle."""
        self._steps += 1
        with _ignore_cleared_events():
            self._profile.step()

    def end(self) -> None:
        """Report an unfinished cycle, and warn if no steps were recorded."""
        with _ignore_cleared_events():
            self._profile.stop()
        super().end()
        if not self._traces:
            _log.warning(
                "TorchProfiler recorded no step, because %s ended after %d steps, before the end of the first wait and "
                "warmup. Lower wait.",
                self._stage, self._steps,
            )  # fmt: skip

    def _report_cycle(self, done: profile) -> None:
        """Write the trace of a cycle and print its operators."""
        run, directory = self._run, self.dirpath
        assert run is not None
        if directory is None and self._directory is not None:
            directory = self._directory / "profile"
        unit, number = ("step", run.progress.step) if self._stage == "fit" else ("batch", self._steps)
        if self.on_trace_ready is not None:
            self.on_trace_ready(done)
        elif directory is not None:
            worker = f"{self._stage}-{unit}-{number:08d}-rank{run.processes.rank}"
            tensorboard_trace_handler(str(directory), worker, use_gzip=True)(done)
            _log.info("wrote the trace up to %s %d to %s", unit, number, directory)
        if run.processes.is_global_zero:
            table = self._make_table(done)
            table.title = f"{self._stage}: operators until {unit} {number}"
            self._newest = render_table(table)
            print_table(table, self._directory)
        self._traces += 1

    def _make_table(self, done: profile) -> Table:
        """Return a table of operators, sorted by their own time; on CUDA, by the time of the kernels they launched."""
        assert self._run is not None
        kind = "device" if self._run.strategy.device.type == "cuda" else "cpu"
        self_us = attrgetter(f"self_{kind}_time_total")
        operators = sorted(self._select_operators(done), key=self_us, reverse=True)
        total_us = sum(map(self_us, operators)) or 1
        columns: dict[str, Callable[[Any], str]] = {
            "calls": lambda each: str(each.count),
            "self %": lambda each: f"{100 * self_us(each) / total_us:.1f}",
            f"self {kind} ms": lambda each: f"{self_us(each) / 1e3:.3f}",
            f"{kind} ms": lambda each: f"{getattr(each, f'{kind}_time_total') / 1e3:.3f}",
        }
        if kind == "device":
            columns["cpu ms"] = lambda each: f"{each.cpu_time_total / 1e3:.3f}"
        if self.profile_memory:
            columns["self MB"] = lambda each: f"{getattr(each, f'self_{kind}_memory_usage') / 1e6:z.3f}"
        if self.record_shapes:
            columns["input shapes"] = lambda each: str([shape for shape in each.input_shapes if shape])
        table = make_table("operator", *columns)
        for each in operators[: self.row_limit]:
            table.add_row(each.key, *(cell(each) for cell in columns.values()))
        return table

    def _select_operators(self, done: profile) -> list[Any]:
        """Return operators and parts, without device kernels and the Python functions of `with_stack`."""
        events: Iterable[Any] = done.events() if self.with_stack else ()  # type: ignore[no-untyped-call]
        # Torch 2.11 lacks the attribute.
        python = {event.name for event in events if getattr(event, "is_python_function", False)}
        averages = done.key_averages(group_by_input_shape=self.record_shapes)
        return [each for each in averages if each.device_type.name == "CPU" and each.key not in python]


@contextmanager
def _ignore_cleared_events() -> Iterator[None]:
    """Ignore torch's warning that a cycle clears the events of the last, since each cycle is reported before."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning: Profiler clears events")
        yield
