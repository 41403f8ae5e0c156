"""RunView: what callbacks and tasks may read of a run."""

from __future__ import annotations

from signal import SIGTERM
from typing import Any

import torch

from lumen.callbacks import EarlyStopping, ModelCheckpoint, ProgressBar, savers_of
from lumen.checkpoint import Checkpoint, Saves
from lumen.errors import ConfigError, TrainingError
from lumen.errors.arguments import at_least
from lumen.loggers import Logger
from lumen.run.progress import Progress
from lumen.run.step_context import Counters
from lumen.task.task_module import TaskModule
from lumen.trainer.view_base import TrainerState, stage_name
from lumen.trainer.view_of_loaders import ViewOfLoaders
from lumen.trainer.view_of_settings import ViewOfSettings
from lumen.trainer.view_of_values import ViewOfValues


class RunView(ViewOfSettings, ViewOfValues, ViewOfLoaders):
    """What callbacks and tasks read of a trainer; nothing here changes a run, but for `should_stop`.

    It is apart from `Trainer`, its one child: what a callback may use is in one place, how a run is made in another.
    Here is how far the run is; its settings, values, data and processes have a file each beside this one.
    """

    @property
    def global_step(self) -> int:
        """Optimizer updates completed by the newest `fit`, which an evaluation leaves as they are; 0 before it."""
        return 0 if self._counted is None else self._counted.step

    @property
    def current_epoch(self) -> int:
        """Epochs completed, likewise."""
        return 0 if self._counted is None else self._counted.epoch

    @property
    def state(self) -> TrainerState:
        """What the trainer does: `status`, `fn` and `stage`, `finished` and `stopped`."""
        return TrainerState(self._status, self._fn, stage_name("" if self._run is None else self._run.stage))

    @property
    def interrupted(self) -> bool:
        """The last run has ended by an error, or because it was asked to."""
        return self._status == "interrupted"

    @property
    def lightning_module(self) -> TaskModule | None:
        """The task of the run in progress, or of the last one; None before it. Nothing is wrapped around it."""
        return None if self._run is None else self._run.task

    @property
    def model(self) -> TaskModule | None:
        """The same as `lightning_module`."""
        return self.lightning_module

    @property
    def ckpt_path(self) -> str | None:
        """Path of the checkpoint whose parameters the run has read; None: of none."""
        checkpoint = None if self._run is None else self._run.checkpoint
        return None if checkpoint is None else str(checkpoint.path)

    @property
    def should_stop(self) -> bool:
        """Set it to True, on one rank or on all, to end training at the end of the step in progress.

        That holds in every hook and step of the task and of callbacks. Elsewhere (in a thread, in the hooks of a
        callback that says `stops_at_steps = False`), several processes hear of it in the step after it.
        """
        return self._run is not None and self._run.progress.should_stop

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        if value and self.run.ending.is_decided and not self.should_stop:
            raise TrainingError(
                "should_stop was set in on_step_checkpoint, where it is decided whether the run ends here. "
                "Set it in on_step_end."
            )
        self.run.progress.should_stop = value

    @property
    def may_stop(self) -> bool:
        """The minimum of steps and epochs is reached: `should_stop` ends the run."""
        return self.run.ending.may_stop

    @property
    def end_reason(self) -> str | None:
        """Why the run is over, in words; None: it is not, or it was interrupted."""
        return self.run.ending.limit_reached

    @property
    def stop_requested(self) -> bool:
        """A signal has asked this process to end: the run leaves once all know of it."""
        return self.run.ending.vote.requested is not None

    @property
    def is_ending(self) -> bool:
        """The boundary in progress is the run's last one; decided when `on_step_checkpoint` begins."""
        return self.run.ending.is_here

    def skip_update(self) -> None:
        """Make no update of the step in progress: its batches are used, but no step is counted, no schedule moves.

        To be called in `on_before_optimizer_step`, on every rank; elsewhere it is a `TrainingError`.
        """
        if not self.in_training_step or self.run.optim.is_updating:
            raise TrainingError("skip_update: no update is about to be made. Call it in on_before_optimizer_step.")
        self.run.step.skips_update = True

    def roll_back(self, before: int = 0, after: int = 0) -> None:
        """Undo the step in progress, and go on from a checkpoint without it and so many steps around it.

        The run is closed and opened again, as one that goes on after a kill, from its newest checkpoint that is older
        than all that is left out; newer ones are removed. The batches left out count as used and as no step. Where
        there is no such checkpoint, the run ends with a `TrainingError`. To be called within a training step, on every
        rank; elsewhere it is a `TrainingError`.

        Args:
            before: Steps before this one that are left out too, >= 0; each as many micro-batches as this one.
            after: Steps after it, likewise.
        """
        at_least(0, before=before, after=after)
        if not self.in_training_step or self.run.optim.is_updating:
            raise TrainingError("roll_back: no step is in progress. Call it in on_before_optimizer_step.")
        self.run.step.skips_update, self.run.ending.rolls_back = True, (before, after)

    @property
    def progress(self) -> Progress:
        """How far the run is; to be read only."""
        return self.run.progress

    @property
    def counters(self) -> Counters:
        """Samples and waiting of this part of the run; to be read only."""
        return self.run.step.counters

    @property
    def clock_s(self) -> float:
        """The time in seconds, the same on every rank at the end of a step: what may be decided by."""
        return self.run.ending.vote.now_s

    @property
    def checkpoints(self) -> Saves:
        """The checkpoints that the run writes: `save`, `settle`, and the one under way."""
        return self.run.saves

    @property
    def resumed_from(self) -> Checkpoint | None:
        """The checkpoint that `fit` goes on from; None: it began anew."""
        return self.run.checkpoint

    def request_agreement(self) -> None:
        """Have all processes agree, after `on_step_end`, whether the run ends at this boundary: before it is saved.

        To be called in `on_step_end`, on every rank.
        """
        self.run.ending.is_asked = True

    @property
    def validation_due(self) -> bool:
        """The step in progress has a validation that is not complete."""
        return self.run.progress.validation_due

    @property
    def in_training_step(self) -> bool:
        """A training step is not complete."""
        return self.run.log.in_train_step

    @property
    def sanity_checking(self) -> bool:
        """True during the sanity check."""
        return self._is_in("sanity")

    @property
    def training(self) -> bool:
        """True during training steps."""
        return self._is_in("fit")

    @property
    def validating(self) -> bool:
        """True during validation."""
        return self._is_in("validate")

    @property
    def testing(self) -> bool:
        """True during a test."""
        return self._is_in("test")

    @property
    def predicting(self) -> bool:
        """True during prediction."""
        return self._is_in("predict")

    @property
    def evaluating(self) -> bool:
        """True during validation, the sanity check and a test."""
        return self._is_in("validate", "sanity", "test")

    def _is_in(self, *stages: str) -> bool:
        return self._run is not None and self._run.stage in stages

    @property
    def received_sigterm(self) -> bool:
        """This process was sent SIGTERM: the run leaves once all know of it."""
        return self._run is not None and self._run.ending.vote.requested == SIGTERM

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizer, in a list; of a task that optimizes by hand all that it has."""
        if not hasattr(self.run.optim, "optimizer"):
            raise ConfigError("there is no optimizer: it exists during fit, once configure_optimizers has returned.")
        return list(self.run.optim.optimizers)

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        """The schedulers and when they step."""
        return list(self.run.optim.schedulers)

    @property
    def logger(self) -> Logger | None:
        """The first logger."""
        return next(iter(self.loggers), None)

    @property
    def log_dir(self) -> str | None:
        """The run directory."""
        return None if self.run_directory is None else str(self.run_directory)

    @property
    def checkpoint_callbacks(self) -> list[ModelCheckpoint]:
        """Every `ModelCheckpoint`; the first is `checkpoint_callback`."""
        return savers_of(self.callbacks)

    @property
    def early_stopping_callbacks(self) -> list[EarlyStopping]:
        """Every `EarlyStopping`, in their order."""
        return [callback for callback in self.callbacks if isinstance(callback, EarlyStopping)]

    @property
    def early_stopping_callback(self) -> EarlyStopping | None:
        """The first of them."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def progress_bar_callback(self) -> ProgressBar | None:
        """The progress bar."""
        return next((callback for callback in self.callbacks if isinstance(callback, ProgressBar)), None)
