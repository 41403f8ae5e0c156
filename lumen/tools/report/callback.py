"""Callback that writes the report of a run at its end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, final

from lumen.callbacks.base import Callback
from lumen.console import logger as _log
from lumen.internals.optional_packages import import_optional
from lumen.tools.runs.find import ShownRun, list_checkpoints

if TYPE_CHECKING:
    from lumen.task.task_module import TaskModule
    from lumen.trainer.trainer import Trainer


@final
class Report(Callback):
    """Callback that writes `report.html` into the run's directory when `fit` ends, also after an error.

    `lumen report` writes the same report. Global rank 0 writes the file in one to two seconds, or four after a million
    rows. Steps take no longer. An error while writing becomes a warning and does not fail the run.

    Raises:
        ConfigError: Bokeh is not installed.
    """

    may_stop_at_steps = False

    def __init__(self) -> None:
        import_optional("bokeh", "Report", "report")

    def setup(self, trainer: Trainer, task: TaskModule, stage: str) -> None:
        """Set the status to failed, until the run ends otherwise."""
        self._status, self._error = "failed", ""

    def on_fit_end(self, trainer: Trainer, task: TaskModule) -> None:
        """Set the status to finished."""
        self._status = "finished"

    def on_exception(self, trainer: Trainer, task: TaskModule, exception: BaseException) -> None:
        """Record the error, or set the status to stopped."""
        if isinstance(exception, Exception):
            self._status, self._error = "failed", f"{type(exception).__name__}: {exception}".partition("\n")[0]
        else:
            self._status = "stopped"

    def teardown(self, trainer: Trainer, task: TaskModule, stage: str) -> None:
        """Write the report, if the stage is `fit`."""
        directory = trainer.run_directory
        if stage != "fit" or directory is None or not trainer.is_global_zero:
            return
        begun = time.monotonic()
        try:
            from lumen.tools.report.page import write_report  # imported here, because bokeh is slow to import

            shown = ShownRun(directory, status=self._status, error=self._error or None)
            if (directory / "checkpoints").is_dir():
                shown.checkpoints = list_checkpoints(directory / "checkpoints")
            write_report([shown], directory / "report.html")
        except Exception as error:  # A failed report must not fail the training.
            _log.warning("no report was written: %s: %s", type(error).__name__, error)
        else:
            _log.info("report: %s (%.1f s)", directory / "report.html", time.monotonic() - begun)
