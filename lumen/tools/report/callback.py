"""The report that a run writes at its end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, final

from lumen.callbacks.base import Callback
from lumen.console import logger as _log
from lumen.errors.arguments import optional
from lumen.tools.runs.find import ShownRun, list_checkpoints

if TYPE_CHECKING:
    from lumen.task.task_module import TaskModule
    from lumen.trainer.trainer import Trainer


@final
class Report(Callback):
    """Writes `report.html` into the run's directory whenever `fit` ends, by an error too; see `lumen report`.

    It takes a second or two at the end (four after a million rows), on the first process alone, and nothing in a step.
    A fault in it becomes a warning and fails no run.

    Raises:
        ConfigError: Bokeh is not installed.
    """

    stops_at_steps = False

    def __init__(self) -> None:
        optional("bokeh", "Report", "report")

    def setup(self, trainer: Trainer, task: TaskModule, stage: str) -> None:
        """Nothing is known of the end yet."""
        self._status, self._error = "failed", ""

    def on_fit_end(self, trainer: Trainer, task: TaskModule) -> None:
        """Note the success."""
        self._status = "finished"

    def on_exception(self, trainer: Trainer, task: TaskModule, exception: BaseException) -> None:
        """Keep the error, or note that the run was stopped."""
        if isinstance(exception, Exception):
            self._status, self._error = "failed", f"{type(exception).__name__}: {exception}".partition("\n")[0]
        else:
            self._status = "stopped"

    def teardown(self, trainer: Trainer, task: TaskModule, stage: str) -> None:
        """Write the report of a training."""
        directory = trainer.run_directory
        if stage != "fit" or directory is None or not trainer.is_global_zero:
            return
        begun = time.monotonic()
        try:
            from lumen.tools.report.page import write_report  # with bokeh, which a training need not wait for

            shown = ShownRun(directory, status=self._status, error=self._error or None)
            if (directory / "checkpoints").is_dir():
                shown.checkpoints = list_checkpoints(directory / "checkpoints")
            write_report([shown], directory / "report.html")
        except Exception as error:  # whatever it is, the training is worth more than its report
            _log.warning("no report was written: %s: %s", type(error).__name__, error)
        else:
            _log.info("report: %s (%.1f s)", directory / "report.html", time.monotonic() - begun)
