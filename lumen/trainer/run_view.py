"""RunView: what callbacks and tasks may read of a run."""

from __future__ import annotations

from signal import SIGTERM
from typing import Any

import torch

from lumen.callbacks import EarlyStopping, ModelCheckpoint, ProgressBar, savers_of
from lumen.errors import ConfigError, TrainingError
from lumen.errors.arguments import at_least
from lumen.loggers import Logger
from lumen.metrics.step_values import for_the_bar
from lumen.run.gradients import total_norm
from lumen.run.plan import Progress
from lumen.task.task_module import TaskModule
from lumen.trainer.view_base import TrainerState, stage_name
from lumen.trainer.view_of_settings import ViewOfSettings


class RunView(ViewOfSettings):
    """What callbacks and tasks read of a trainer; nothing here changes a run, but for `should_stop`.

    It is apart from `Trainer`, its one child: what a callback may use is in one place, how a run is made in another.
    Here is how far the run is, and its values; its settings, data and processes are in `ViewOfSettings`. The names are
    Lightning's, but for those that docs/site/trainer.md lists as Lumen's own.
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
        self.run.ending.request_stop(value=value)

    def skip_update(self) -> None:
        """Make no update of the step in progress: its batches are used, but no step is counted, no schedule moves.

        To be called in `on_before_optimizer_step`, on every rank; elsewhere it is a `TrainingError`.
        """
        if not self.run.log.in_train_step or self.run.step.is_updating:
            raise TrainingError("skip_update: no update is about to be made. Call it in on_before_optimizer_step.")
        self.run.step.skip_update()

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
        if not self.run.log.in_train_step or self.run.step.is_updating:
            raise TrainingError("roll_back: no step is in progress. Call it in on_before_optimizer_step.")
        self.run.step.skip_update()
        self.run.ending.roll_back(before, after)

    @property
    def progress(self) -> Progress:
        """How far the run is; to be read only."""
        return self.run.progress

    def request_agreement(self) -> None:
        """Have all processes agree, after `on_step_end`, whether the run ends at this boundary: before it is saved.

        To be called in `on_step_end`, on every rank.
        """
        self.run.ending.request_agreement()

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

    # ------------------------------------------------------------------ values

    @property
    def callback_metrics(self) -> dict[str, torch.Tensor]:
        """The newest value of every logged name: a tensor without dimensions, on the CPU. Waits for the device.

        Tensors are float64 if a parameter of the task is, else float32; `newest_values` has all digits.
        """
        if self._run is None:
            return {}
        is_double = any(parameter.dtype is torch.float64 for parameter in self._run.task.parameters())
        dtype = torch.float64 if is_double else torch.float32
        return {name: torch.tensor(value, dtype=dtype) for name, value in self.newest_values.items()}

    @property
    def newest_values(self) -> dict[str, float]:
        """The newest value of every logged name, with all digits. Waits for the device.

        Values of an epoch or a validation are the same on every rank, of what all ranks have seen; values of the step
        in progress are of this rank's micro-batches. A name logged as `x_step` and `x_epoch` is there as `x` too: the
        newest of both.
        """
        run, steps = self.run, dict[str, Any](self.run.log.train.step_values())
        values = run.values.newest | steps if run.log.in_train_step else steps | run.values.newest
        for name, (of_step, of_epoch) in run.values.forks(run.log.train).items():
            ended = of_epoch in run.values.updated or not (run.progress.in_epoch and of_step in steps)
            if newest := [each for each in (of_epoch, of_step) if each in values]:
                values[name] = values[newest[0] if ended else newest[-1]]
        return {name: float(value) for name, value in values.items()}

    @property
    def logged_metrics(self) -> dict[str, torch.Tensor]:
        """Those of `callback_metrics` that loggers are given, under the names that they have there."""
        if self._run is None:
            return {}
        train = self._run.log.train
        left_out = self._run.values.unlogged(train) | self._run.values.forks(train).keys()
        return {name: value for name, value in self.callback_metrics.items() if name not in left_out}

    @property
    def progress_bar_metrics(self) -> dict[str, float | torch.Tensor]:
        """What the newest training step has logged with `prog_bar=True`, else its loss. Waits for no device.

        Tensors have no dimensions, and lie where the step has put them; values are of this rank.
        """
        values: dict[str, float | torch.Tensor] = self.run.log.train.step_values(for_the_bar)
        if not values and self.run.step.loss is not None:
            values = {"loss": self.run.step.loss}
        return values

    def step_loss(self) -> torch.Tensor:
        """The mean loss of the step over all processes, in `on_before_optimizer_step`: a scalar tensor. Collective.

        Raises:
            ConfigError: No callback has `reads_step_loss = True`, so it was not kept; or the task optimizes by hand.
        """
        if self.run.optim.manual is not None:
            raise ConfigError(
                f"trainer.step_loss(): {type(self.run.task).__name__} optimizes by hand, so that Lumen does not know "
                "which of its losses is the step's. Log that one, and read trainer.callback_metrics."
            )
        parts = self.run.step.weighting.losses
        if parts is None:
            raise ConfigError(
                "trainer.step_loss(): the losses of a step are kept for callbacks that say so. Write reads_step_loss = "
                "True in the class of yours."
            )
        own = torch.stack(parts).sum() if parts else torch.zeros((), device=self.strategy.device)
        return self.run.step.weighting.mean(own, self.strategy.reduce)

    def gradient_norm(self) -> torch.Tensor:
        """The norm of the step's gradient, in `on_before_optimizer_step` that before clipping: a scalar. Collective."""
        return total_norm(dict.fromkeys(self.run.optim.parameters))  # optimizers by hand may share some
