"""Checkpoint on exception: saves the progress since the last checkpoint when training fails."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, final

from torch.optim import Optimizer

from lumen.callbacks.base import Callback
from lumen.callbacks.callback_trainer import CallbackTrainer
from lumen.callbacks.checkpoint_names import locate_checkpoint
from lumen.checkpoint.format.storage import as_path_or_url, path_exists
from lumen.console import logger as _log
from lumen.errors import NonFiniteLoss
from lumen.errors.arguments import check_arguments
from lumen.run.plan import Progress
from lumen.task.task_module import TaskModule


@final
class OnExceptionCheckpoint(Callback):
    """Callback that saves a checkpoint when training fails with an exception.

    A stop request is not an exception: the run then saves a checkpoint anyway. The content depends on the place of the
    exception:

    * Between two steps, during loading of the next batch or a validation: the state after the last step, or at the
      start of that validation. The checkpoint is exact and is stored with the run's checkpoints, as `step-N`, so
      `resume: auto` can resume from it.
    * Inside a step, but before or after the update: parameters, optimizer and position are the state of the last
      update. Buffers, metrics and counters of your code may be ahead by a part of a step. The checkpoint is named
      `exception-step-N`. `auto` never uses it: give its path to `resume` or to `load_from_checkpoint`.
    * Inside `optimizer.step`: no checkpoint, because the parameters may be half updated. A loss that is not finite
      saves no checkpoint either, nor does a run with several processes, because the others are at a different place.

    Args:
        dirpath: Directory for all these checkpoints, as `exception-step-N`. Default: the directory of the run's
            checkpoints.
    """

    INSTEAD: ClassVar[Mapping[str, str]] = {
        "filename": "Lumen names the checkpoint by its step: step-N, or exception-step-N."
    }
    NEUTRAL: ClassVar[Mapping[str, tuple[str, ...]]] = {"filename": ("on_exception",)}

    @check_arguments
    def __init__(self, dirpath: str | Path | None = None) -> None:
        self.dirpath = None if dirpath is None else as_path_or_url(dirpath)
        self._boundary: Progress | None = None
        self._is_updating = False
        self._hook_handles: list[Any] = []

    def setup(self, trainer: CallbackTrainer, task: TaskModule, stage: str) -> None:
        """Reset the callback."""
        self._boundary, self._is_updating = None, False

    def on_train_start(self, trainer: CallbackTrainer, task: TaskModule) -> None:
        """Record the progress, and every optimizer step from now on."""

        def note(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            self._is_updating = True

        self._hook_handles = [optimizer.register_step_pre_hook(note) for optimizer in trainer.optimizers]
        self._boundary = replace(trainer.progress)

    def on_step_checkpoint(self, trainer: CallbackTrainer, task: TaskModule) -> None:
        """Record the progress after a complete step."""
        self._boundary = replace(trainer.progress)
        self._is_updating = False

    def on_exception(self, trainer: CallbackTrainer, task: TaskModule, exception: BaseException) -> None:
        """Save the state that is safe to save."""
        if self._boundary is None or not isinstance(exception, Exception) or not trainer.is_global_zero:
            return
        now = replace(trainer.progress)
        counted = (now.epoch, now.batches) != (self._boundary.epoch, self._boundary.batches)
        reason = None
        if trainer.world_size > 1:
            reason = "the other processes are at a different place of the run"
        elif isinstance(exception, NonFiniteLoss):
            reason = "the loss is not finite"
        elif self._is_updating and not counted:
            reason = "the exception was raised inside optimizer.step, so the parameters may be half updated"
            if not task.automatic_optimization:
                reason = "the exception was raised in a step after an optimizer's update, so the step may be incomplete"
        if reason is not None:
            _log.warning("no checkpoint is saved on this exception: %s", reason)
            return
        if not counted:
            trainer.progress.copy_from(self._boundary)  # A resumed run repeats the interrupted step.
        validates = now.validation_due and not trainer.run.log.in_train_step
        untouched = validates or _get_counters(now) == _get_counters(self._boundary)
        try:
            self._save(trainer, exact=untouched, may_exist=untouched or not counted)
        finally:
            trainer.progress.copy_from(now)

    def teardown(self, trainer: CallbackTrainer, task: TaskModule, stage: str) -> None:
        """Remove the hooks."""
        for handle in self._hook_handles:
            handle.remove()
        self._hook_handles = []

    def _save(self, trainer: CallbackTrainer, *, exact: bool, may_exist: bool) -> None:
        saver = trainer.checkpoint_callback
        folder = trainer.run_directory and trainer.run_directory / "checkpoints" if saver is None else saver.dirpath
        if folder is None or trainer.global_step == 0:
            return
        trainer.run.saves.finish_save()
        path, saved = locate_checkpoint(trainer, folder)
        if not (saved and may_exist):
            if not exact or self.dirpath is not None:
                name = f"exception-step-{trainer.global_step:08d}"
                names = (name if number == 0 else f"{name}-{number}" for number in count())
                path = next(free for each in names if not path_exists(free := (self.dirpath or folder) / each))
            if exact and self.dirpath is None and saver is not None:
                saver.save(trainer, at_once=True)
            else:
                trainer.save_checkpoint(path)
        _log.info("saved %s, which contains the progress before this exception", path)


def _get_counters(progress: Progress) -> tuple[Any, ...]:
    """Return counters, at least one of which changes once an epoch, a step or a validation has begun."""
    return progress.epoch, progress.in_epoch, progress.micro_batches, progress.validation_due
