"""RunView: what callbacks and tasks may read of a run."""

from __future__ import annotations

from typing import Any

import torch

from lumen.checkpoint import Checkpoint, Saves
from lumen.errors import ConfigError, TrainingError
from lumen.loggers import Logger
from lumen.run.progress import Progress
from lumen.run.step_context import Counters
from lumen.trainer.view_of_loaders import ViewOfLoaders
from lumen.trainer.view_of_processes import ViewOfProcesses
from lumen.trainer.view_of_values import ViewOfValues


class RunView(ViewOfValues, ViewOfLoaders, ViewOfProcesses):
    """What callbacks and tasks read of a trainer; nothing here changes a run, but for `should_stop`.

    It is apart from `Trainer`, its one child: what a callback may use is in one place, how a run is made in another.
    Here is how far the run is; its values, its data and its processes have a file each beside this one.
    """

    @property
    def global_step(self) -> int:
        """Optimizer updates completed."""
        return self.run.progress.step

    @property
    def current_epoch(self) -> int:
        """Epochs completed."""
        return self.run.progress.epoch

    @property
    def max_steps(self) -> int | None:
        """The limit, or None."""
        return self.plan.max_steps

    @property
    def max_epochs(self) -> int | None:
        """The limit, or None."""
        return self.plan.max_epochs

    @property
    def should_stop(self) -> bool:
        """Set it to True, on one rank or on all, to end training at the end of the step in progress.

        That holds in every hook and step of the task and of callbacks. Elsewhere (in a thread, in the hooks of a
        callback that says `stops_at_steps = False`), several processes hear of it in the step after it.
        """
        return self.run.progress.should_stop

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
        return self.run.stage == "sanity"

    @property
    def training(self) -> bool:
        """True during training steps."""
        return self.run.stage == "fit"

    @property
    def validating(self) -> bool:
        """True during validation."""
        return self.run.stage == "validate"

    @property
    def testing(self) -> bool:
        """True during a test."""
        return self.run.stage == "test"

    @property
    def predicting(self) -> bool:
        """True during prediction."""
        return self.run.stage == "predict"

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
