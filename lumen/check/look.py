"""The check itself: a run is begun, looked at, and forgotten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lumen.check.data import look_at_data
from lumen.check.leaks import look_for_leaks
from lumen.check.monitors import look_at_monitors
from lumen.check.report import Report
from lumen.check.saving import look_at_checkpoints, look_at_time
from lumen.check.schedule import course_of, look_at_schedule
from lumen.check.step import look_at_model, look_at_step
from lumen.check.trial import Trial
from lumen.errors import NonFiniteLoss
from lumen.run.run import Run
from lumen.task.task_module import TaskModule
from lumen.trainer.trainer import Trainer

#: No mistake, or said by a look of its own.
_ONLY_TOLD = (
    "Lumen did not draw these batches",
    "the optimizer does not hold",
)


def look(
    report: Report,
    trainer: Trainer,
    task: TaskModule,
    data: Any,
    configure: Callable[[], Any] | None = None,
    *,
    processes: int = 1,
    samples: int = 1000,
) -> None:
    """Look at a training before it begins. Writes nothing; the task, the data and the trainer are of no use afterwards.

    Args:
        report: Where findings go, those too that were made before an error.
        trainer: Of one process, not in a run.
        task: What is to be trained.
        data: A data module, a loader or several; None: the task's.
        configure: Used instead of the task's `configure_optimizers`.
        processes: How many the run is to have, which are looked at as one.
        samples: Of training and validation each to compare at most; 0: none.

    Raises:
        LumenError: `fit` would raise it too.
        Exception: The user's own code has failed.
    """
    trial = Trial(trainer, task, data, processes)
    try:
        with trial.opened(configure) as run:
            try:
                trial.begin(run, configure)
            except NonFiniteLoss:
                if run.step.loss is not None:
                    trial.witness.losses[:1] = [float(run.step.loss.detach())]
                _look_at_beginning(report, trial, run, samples)
                raise
            except Exception:
                if trial.witness.batch is not None or trial.witness.validation:
                    look_at_data(report, trial, run)
                raise
            if trial.witness.batch is None:
                report.add("first steps", "note", "finished", "the run is finished: there is nothing to do")
                return
            _look_at_beginning(report, trial, run, samples)
            _look_ahead(report, trial, run)
    finally:
        _repeat_warnings(report, trial)


def _look_at_beginning(report: Report, trial: Trial, run: Run, samples: int) -> None:
    look_at_data(report, trial, run)
    if samples:
        look_for_leaks(report, run, samples)
    look_at_model(report, trial, run)
    look_at_step(report, trial, run)


def _look_ahead(report: Report, trial: Trial, run: Run) -> None:
    course = course_of(trial, run)
    look_at_schedule(report, trial, run, course)
    look_at_monitors(report, trial, run)
    estimate = look_at_time(report, trial, run, course)
    look_at_checkpoints(report, trial, run, course, estimate)
    if trial.finders:
        report.add(
            "schedule", "note", "finders", f"{' and '.join(trial.finders)} searches first; that is not done here"
        )


def _repeat_warnings(report: Report, trial: Trial) -> None:
    for text in trial.said:
        if not any(each in text for each in _ONLY_TOLD):
            report.add("what fit warns of", "suspicious", "warning", text)
