"""Instrumentation that wraps methods of a run's objects to time its parts, and unwraps them afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, final

from lumen.console import logger as _log
from lumen.data.windows import AccumulationWindow
from lumen.internals.attributes import replaced_attribute
from lumen.precision import Precision
from lumen.profilers.base import Profiler, format_with_stage, get_hook_stage
from lumen.run.run import Run
from lumen.task.hooks import HOOKS

#: Hooks that run before or after the measurement.
_OUTSIDE = ("setup", "on_exception", "teardown")
_LOGGER_METHODS = ("log_metrics", "log_system", "log_image", "log_histogram", "log_text", "save")


def profile_run(run: Run, profiler: Profiler, directory: Path | None) -> AbstractContextManager[Any]:
    """Return a context in which a profiler measures a run, and reports at the end, also after an error.

    Args:
        run: The run that has just been built; its loaders and optimizer may be built later.
        profiler: The profiler; one that measures nothing is not called.
        directory: The run directory, or None.
    """
    return Instrumentation(run, profiler, directory) if profiler.measures else nullcontext()


@final
class Instrumentation:
    """Context that wraps every part of a run in `profiler.part`."""

    def __init__(self, run: Run, profiler: Profiler, directory: Path | None) -> None:
        self._run = run
        self._profiler = profiler
        self._directory = directory
        self._undo = ExitStack()
        self._began = False

    def __enter__(self) -> None:
        hooks, stage = self._run.hooks, self._run.stage
        for name in HOOKS:
            if name not in _OUTSIDE:
                calls = getattr(hooks, name)
                self._replace_attribute(
                    hooks, name, tuple(self._time_call(f"{_get_owner_name(call)}.{name}", call) for call in calls)
                )
        name = "fit" if stage == "fit" else get_hook_stage(stage)
        first, last = f"on_{name}_start", "on_step_checkpoint" if stage == "fit" else f"on_{name}_batch_end"
        self._replace_attribute(hooks, first, (self._begin_profile, *getattr(hooks, first)))
        self._replace_attribute(hooks, "on_train_epoch_start", (self._wrap_loaders, *hooks.on_train_epoch_start))
        self._replace_attribute(hooks, last, (*getattr(hooks, last), self._count_step))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._undo.close()
        if self._began:
            try:
                self._profiler.end()
            except Exception:
                if error is None:
                    raise
                _log.exception("the profiler's report failed too")  # the caller raises the first error

    def _begin_profile(self) -> None:
        """Wrap the methods and start the profiler, after everything is built."""
        run, precision, strategy = self._run, self._run.precision, self._run.strategy
        self._wrap_method("backward", precision, "backward")
        if type(precision).unscale is not Precision.unscale:
            self._wrap_method("unscale", precision, "unscale")
        self._wrap_method("optimizer.step", precision, "step")
        for method in ("scale_gradients", "clip_grad_norm", "clip_grad_value"):
            self._wrap_method(method, run.optim, method)
        self._replace_attribute(strategy, "call", partial(self._time_step_call, strategy.call))
        self._replace_attribute(run.calls, "move_to_device", partial(self._time_receive, run.calls.move_to_device))
        self._wrap_method("logging", run.records, "write_values")
        for logger in run.records.loggers:
            for method in _LOGGER_METHODS:
                self._wrap_method(f"{type(logger).__name__}.{method}", logger, method)
        self._wrap_method("save_checkpoint", run.saves, "save")
        if run.stage == "fit":
            self._wrap_method("optimizer.zero_grad", run.optim.optimizer, "zero_grad")
            for config in run.optim.schedulers:
                for method in ("step", "move_to"):
                    self._wrap_method(f"{type(config.scheduler).__name__}.step", config, method)
        self._wrap_loaders()
        self._began = True
        self._profiler.begin(run, self._directory)

    def _wrap_loaders(self) -> None:
        """Wrap the loaders' adapters, and again in an epoch that has opened new adapters."""
        run = self._run
        waiting = format_with_stage("data wait", "validate" if run.stage == "fit" else run.stage)
        for name, adapters in (("data wait", [run.loaders.train]), (waiting, run.loaders.evaluation)):
            for adapter in adapters:
                if adapter is not None and "iterate_windows" not in vars(adapter):
                    self._replace_attribute(
                        adapter, "iterate_windows", partial(self._time_windows, name, adapter.iterate_windows)
                    )

    def _wrap_method(self, name: str, owner: Any, method: str) -> None:
        self._replace_attribute(owner, method, self._time_call(name, getattr(owner, method)))

    def _replace_attribute(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of one object, hiding the attribute of its class, until this context is closed."""
        self._undo.enter_context(replaced_attribute(owner, name, value))

    def _time_call(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        return partial(self._run_inside, name, call)

    def _run_inside(self, name: str, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        with self._profiler.part(name):
            return call(*args, **kwargs)

    def _time_step_call(self, call: Callable[..., Any], step: str, *args: Any) -> Any:
        with self._profiler.part(step):
            return call(step, *args)

    def _time_receive(self, receive: Callable[..., Any], /, *args: Any) -> Any:
        with self._profiler.part(format_with_stage("transfer", self._run.stage)):
            return receive(*args)

    def _time_windows(
        self, name: str, windows: Callable[..., Iterator[AccumulationWindow]], /, *args: Any
    ) -> Iterator[AccumulationWindow]:
        found = windows(*args)
        while True:
            with self._profiler.part(name, calls=0):  # workers start here, and streams are read here
                window = next(found, None)
            if window is None:
                return
            window.wrap_fetch(partial(self._time_call, name))
            yield window

    def _count_step(self, *_: Any) -> None:
        self._profiler.step()


def _get_owner_name(call: Callable[..., Any]) -> str:
    """Return the name of the class that defines a hook."""
    method = call.func if isinstance(call, partial) else call
    return type(getattr(method, "__self__", method)).__name__
