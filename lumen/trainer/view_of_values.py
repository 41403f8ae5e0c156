"""What callbacks and tasks may read of the values that a run has logged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from lumen.callbacks import ModelCheckpoint
from lumen.errors import ConfigError
from lumen.metrics.log_call import LogOptions
from lumen.run.gradients import total_norm
from lumen.trainer.view_base import ViewBase

T = TypeVar("T")

_UNASKED_VALUES = 3


class ViewOfValues(ViewBase):
    """The newest values of a run, those of the step in progress, and what is given to loggers."""

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
    def epoch_metrics(self) -> dict[str, float]:
        """The newest values of epochs and validations, by name; the same on every rank."""
        return self.run.values.newest

    @property
    def progress_bar_metrics(self) -> dict[str, float | torch.Tensor]:
        """What the newest training step has logged with `prog_bar=True`, else its loss. Waits for no device.

        Tensors have no dimensions, and lie where the step has put them; values are of this rank.
        """
        values: dict[str, float | torch.Tensor] = self.run.log.train.step_values(_for_the_bar)
        if not values and self.run.step.loss is not None:
            values = {"loss": self.run.step.loss}
        return values

    @property
    def progress_bar_names(self) -> list[str]:
        """Names of the training epoch in progress that were logged with `prog_bar=True`."""
        return self.run.log.train.epoch_names(_for_the_bar)

    @property
    def evaluation_names(self) -> list[str]:
        """Names of the evaluation that ends, of those logged with `prog_bar=True`; if none was, the first three.

        With `verbose=False` none is to be shown.
        """
        metrics = self.run.log.stage
        if metrics is None:
            raise ConfigError("evaluation_names: there is no evaluation; they are known when it ends.")
        if not self.run.values.are_shown:
            return []
        return metrics.epoch_names(_for_the_bar) or metrics.epoch_names()[:_UNASKED_VALUES]

    @property
    def fresh_metrics(self) -> set[str]:
        """Names with a value since the last boundary: from an epoch's end or a validation, not from single steps."""
        return self.run.values.updated

    def require_logged(self, who: str, monitor: str) -> None:
        """Refuse a monitor that has no value although everything that logs has had its turn since the run went on.

        Raises:
            ConfigError: It was never logged; names what was.
        """
        self.run.values.require(who, monitor)

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

    def log_system(self, values: Mapping[str, float]) -> None:
        """Give every logger values that no two runs share: times, speeds, memory."""
        for logger in self.run.records.loggers:
            logger.log_system(values, self.global_step)

    def tell_loggers(self, saver: ModelCheckpoint, account: Callable[[bool], T], committed: bool) -> T:
        """Tell every logger of a checkpoint that has been committed, after its saver has accounted for it."""
        doomed = account(committed)
        for logger in self.run.records.loggers if committed else ():
            logger.after_save_checkpoint(saver)
        return doomed


def _for_the_bar(options: LogOptions) -> bool:
    return options.prog_bar
