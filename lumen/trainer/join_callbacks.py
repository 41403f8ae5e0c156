"""The callbacks that a task configures join those of the trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lumen.callbacks import Callback, ModelCheckpoint, joined, listed, scheduled
from lumen.errors import ConfigError
from lumen.task.hooks import overrides
from lumen.task.task_module import TaskModule

if TYPE_CHECKING:
    from lumen.trainer.trainer import Trainer


def join_callbacks(trainer: Trainer, stage: str, task: TaskModule) -> list[Callback]:
    """Ask a task for its callbacks, before anything looks at the trainer's, which they join and where they stay.

    A run that goes back to a checkpoint keeps those that it has. An evaluation after `fit` keeps what has saved there,
    which knows the best checkpoint.

    Returns:
        Those of the trainer that have lost their place.

    Raises:
        ConfigError: What the task gives are no callbacks, or they contradict the trainer's settings.
    """
    goes_back = stage == "fit" and trainer.origin.rolled_back is not None
    replaced: list[Callback] = []
    if trainer._asks_task and not goes_back and overrides(task, "configure_callbacks"):
        where = f"{type(task).__name__}.configure_callbacks"
        with task._opened_by(trainer):
            given = listed(where, task.configure_callbacks())
        saving = any(isinstance(each, ModelCheckpoint) for each in given)
        if saving and stage == "fit" and not (trainer.enable_checkpointing or trainer.fast_dev_run):
            raise ConfigError(
                f"enable_checkpointing is False, but {where} has a ModelCheckpoint. Remove one of the two."
            )
        if not trainer.enable_checkpointing or (stage != "fit" and trainer.run_directory is not None):
            given = [each for each in given if not isinstance(each, ModelCheckpoint)]
        trainer.callbacks, replaced = joined(trainer.callbacks, given)
    trainer.plan = scheduled(trainer.plan, trainer.callbacks, replaced)  # one may have joined by hand, too
    return replaced
