"""`validate`, `test` and `predict`: what they evaluate, and their run from its opening to its end."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lumen.checkpoint import Weights
from lumen.errors import ConfigError
from lumen.loop.evaluate import evaluate
from lumen.loop.fit import StopRequested
from lumen.run.open_loaders import open_evaluation_loaders
from lumen.run.run import Run
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
    keeps_outputs: bool = True,
) -> Run:
    """Open a run of a stage, evaluate every loader of it, and close it. Collective: every rank must call this.

    Args:
        trainer: Not in a run.
        stage: "validate", "test" or "predict".
        model: None: that of the run before.
        data: A loader, several, or a data module; None: the task's, or those of the run before.
        ckpt_path: Parameters to load first.
        keeps_outputs: Keep what `predict_step` returns.

    Returns:
        The run, with its values.
    """
    task, data, ckpt_path = _of_last_run(trainer, stage, model, data, ckpt_path)
    if (step := _STEPS.get(stage)) and not overrides(task, step):
        raise ConfigError(f"{type(task).__name__} has no {step}. Define `{step}(self, batch)`.")
    with opened(trainer, stage, task, data, data) as run:
        prepare(run, ckpt_path)
        run.loaders.evaluation = open_evaluation_loaders(run, stage)
        run.calls.bind(run.loaders)
        run.values.keeps_predictions = keeps_outputs
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
