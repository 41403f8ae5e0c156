"""`validate`, `test` and `predict`: what they evaluate, and their run from its opening to its end."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from lumen.checkpoint import Weights
from lumen.errors import ConfigError
from lumen.loop.evaluate import evaluate
from lumen.loop.fit import StopRequested
from lumen.run.open_loaders import open_evaluation_loaders
from lumen.run.run import Run
from lumen.task.given import check_task
from lumen.task.hooks import overrides
from lumen.task.task_module import TaskModule
from lumen.trainer.open_run import opened
from lumen.trainer.prepare import prepare

if TYPE_CHECKING:
    from lumen.trainer.trainer import Trainer

_log = logging.getLogger("lumen")
_STEPS = {"validate": "validation_step", "test": "test_step"}


def evaluate_all(
    trainer: Trainer,
    stage: str,
    model: TaskModule | None,
    data: Any,
    ckpt_path: Weights | str | Path | None,
    *,
    average: str | Sequence[str | PurePath] | None = None,
    keeps_outputs: bool = True,
    verbose: bool = True,
) -> Run:
    """Open a run of a stage, evaluate every loader of it, and close it. Collective: every rank must call this.

    Args:
        trainer: Not in a run.
        stage: "validate", "test" or "predict".
        model: None: that of the run before.
        data: A loader, several, or a data module; None: the task's, or those of the run before.
        ckpt_path: Parameters to load first.
        average: Averages to load in their place.
        keeps_outputs: Keep what `predict_step` returns.
        verbose: Let the progress bar show the values at the end.

    Returns:
        The run, with its values.
    """
    task, data, ckpt_path = _of_last_run(trainer, stage, model, data, ckpt_path)
    check_task(task, data)
    if (step := _STEPS.get(stage)) and not overrides(task, step):
        raise ConfigError(f"{type(task).__name__} has no {step}. Define `{step}(self, batch)`.")
    if average is not None and ckpt_path is None:
        raise ConfigError(
            f"{stage}: average={average!r} is of a checkpoint, and none is given. Set ckpt_path too, as in "
            "ckpt_path='last'; after fit with EMA or SWA the task itself holds the average."
        )
    with opened(trainer, stage, task, data, data) as run:
        run.checkpoint = prepare(run, ckpt_path, average=average)
        run.loaders.evaluation = open_evaluation_loaders(run, stage)
        run.calls.bind(run.loaders)
        run.values.keeps_predictions, run.values.are_shown = keeps_outputs, verbose
        if not evaluate(run, stage):
            raise StopRequested
    return run


def _of_last_run(
    trainer: Trainer, stage: str, task: TaskModule | None, data: Any, ckpt_path: Weights | str | Path | None
) -> tuple[TaskModule, Any, Weights | str | Path | None]:
    """What to evaluate, where a call leaves that to the run before it."""
    if task is not None:
        return task, data, ckpt_path
    if trainer._run is None:
        raise ConfigError(f"{stage}: there is no model, and no run before this one. Give one: {stage}(model, ...).")
    if data is None:
        data = trainer._run.loaders.datamodule
    best = trainer.checkpoint_callback
    if ckpt_path is None and best is not None and best.monitor is not None and best.best_model_path:
        ckpt_path = best.best_model_path
        _log.info("%s: with the best parameters of the run before, %s", stage, ckpt_path)
    return trainer._run.task, data, ckpt_path
