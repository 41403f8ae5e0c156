"""Ray Train: reports metrics and checkpoints during a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, final

from lumen.callbacks.base import Callback
from lumen.callbacks.model_checkpoint import ModelCheckpoint
from lumen.errors import ConfigError
from lumen.errors.arguments import check_arguments, check_at_least
from lumen.internals.optional_packages import import_optional
from lumen.task.task_module import TaskModule
from lumen.trainer.trainer import Trainer


@final
class RayTrainReportCallback(Callback):
    """Callback that reports metrics and checkpoints to Ray Train, in a run that is one of its workers.

    A report contains all values of `trainer.newest_values`, `epoch` (completed epochs) and `step`. If there is a new
    checkpoint on a disk since the last report, the report includes it. Ray copies the checkpoint from the first worker
    to its own storage. The run's own checkpoint is kept, and the run resumes from it. A report waits for a save in
    progress.

    If Ray announces the preemption of a node, the run saves at once and continues training until then.

    Args:
        every_n_train_steps: Report after every n-th optimizer step too, >= 0; 0: only after each epoch and at the end.
        preemption_every_n_steps: Check for announced preemptions after every n-th step, >= 0; 0: never. Each check
            waits for all workers.

    Raises:
        ConfigError: Ray cannot be imported, or this process is not a worker of Ray Train.
    """

    may_stop_at_steps = False

    @check_arguments
    def __init__(self, every_n_train_steps: int = 0, preemption_every_n_steps: int = 100) -> None:
        check_at_least(0, "RayTrainReportCallback", every_n_train_steps=every_n_train_steps)
        check_at_least(0, "RayTrainReportCallback", preemption_every_n_steps=preemption_every_n_steps)
        self.every_n_train_steps, self.preemption_every_n_steps = every_n_train_steps, preemption_every_n_steps

    def setup(self, trainer: Trainer, task: TaskModule, stage: str) -> None:
        """Check that this process is a worker of Ray Train."""
        if stage != "fit":
            return
        self._train = import_optional("ray.train", "RayTrainReportCallback", "ray")
        try:
            workers = self._train.get_context().get_world_size()
        except RuntimeError as error:
            raise ConfigError(
                "RayTrainReportCallback: this process is not a worker of Ray Train. Call fit in the function that a "
                "TorchTrainer runs, or remove the callback."
            ) from error
        if workers != trainer.world_size:
            raise ConfigError(
                f"RayTrainReportCallback: Ray Train has {workers} workers, but this run has {trainer.world_size}. "
                "Remove devices from the Trainer: Lumen finds the devices of Ray."
            )

    def on_train_start(self, trainer: Trainer, task: TaskModule) -> None:
        """Reset the counters of the last report; the resumed checkpoint counts as reported."""
        resumed = trainer.run.checkpoint
        self._reported_step = (trainer.current_epoch, trainer.global_step)  # epoch and step of the last report
        self._checkpoint = "" if resumed is None else str(resumed.path)  # on rank 0: the last reported checkpoint
        self._is_leaving: Any = None  # the last preemption that Ray has announced
        self._saves = False

    def on_before_zero_grad(self, trainer: Trainer, task: TaskModule, optimizer: Any) -> None:
        """Report the end of the previous step, whose checkpoint is saved by now.

        All workers call this hook at each step, also those without a batch, and Ray waits for the reports of all.
        """
        epoch, step = self._reported_step
        every, now = self.every_n_train_steps, trainer.global_step
        if trainer.current_epoch != epoch or (every and now != step and now % every == 0):
            self._report_to_ray(trainer)

    def on_step_end(self, trainer: Trainer, task: TaskModule) -> None:
        """Check if Ray has announced the preemption of a node."""
        every = self.preemption_every_n_steps
        if every and trainer.global_step % every == 0:
            leaving = self._train.get_preemption_info()
            self._saves = self._saves or (leaving is not None and leaving != self._is_leaving)
            self._is_leaving = leaving
        if self._saves:
            trainer.request_stop_vote()

    def on_step_checkpoint(self, trainer: Trainer, task: TaskModule) -> None:
        """Save before an announced preemption."""
        if self._saves and not trainer.run.values.updated:  # With new values, `ModelCheckpoint` notes scores first.
            self._saves = False
            for saver in _get_checkpoint_callbacks(trainer):
                saver.save(trainer, at_once=True)

    def on_fit_end(self, trainer: Trainer, task: TaskModule) -> None:
        """Report the end."""
        if self._reported_step != (trainer.current_epoch, trainer.global_step):
            self._report_to_ray(trainer)

    def _report_to_ray(self, trainer: Trainer) -> None:
        """Report metrics and the newest checkpoint. Collective: every rank must call this."""
        trainer.run.saves.finish_save()
        self._reported_step = trainer.current_epoch, trainer.global_step
        newest, checkpoint = "", None
        if trainer.is_global_zero:
            paths = [
                saver.last_model_path for saver in _get_checkpoint_callbacks(trainer) if isinstance(saver.dirpath, Path)
            ]
            newest = max(paths, key=lambda path: Path(path).name, default="")
        if newest and newest != self._checkpoint:
            self._checkpoint, checkpoint = newest, self._train.Checkpoint.from_directory(os.path.abspath(newest))
        values = {**trainer.newest_values, "epoch": self._reported_step[0], "step": self._reported_step[1]}
        self._train.report(values, checkpoint=checkpoint)


def _get_checkpoint_callbacks(trainer: Trainer) -> list[ModelCheckpoint]:
    return [each for each in trainer.callbacks if isinstance(each, ModelCheckpoint) and each.dirpath is not None]
