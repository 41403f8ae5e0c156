"""What callbacks and tasks may read of the values that a run has logged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lumen.errors import ConfigError
from lumen.metrics.log_call import LogOptions
from lumen.run.gradients import total_norm
from lumen.trainer.view_base import ViewBase

_UNASKED_VALUES = 3


class ViewOfValues(ViewBase):
    """The newest values of a run, those of the step in progress, and what is given to loggers."""

    @property
    def callback_metrics(self) -> dict[str, torch.Tensor]:
        """The newest value of every logged name: float64 without dimensions, on the CPU. Waits for the device.

        Those of an epoch or a validation are the same on every rank, of what all have seen; those of the step in
        progress are of this rank's micro-batches.
        """
        steps: dict[str, Any] = self.run.log.train.step_values()
        values = self.run.values.newest | steps if self.run.log.in_train_step else steps | self.run.values.newest
        return {name: torch.tensor(float(value), dtype=torch.float64) for name, value in values.items()}

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
        """Names of the evaluation that ends, of those logged with `prog_bar=True`; if none was, the first three."""
        metrics = self.run.log.stage
        if metrics is None:
            raise ConfigError("evaluation_names: there is no evaluation; they are known when it ends.")
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

    def step_loss(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The mean loss of the step over all processes, in `on_before_optimizer_step`: a scalar tensor. Collective.

        Args:
            parts: What `on_before_backward` was given on this process in this step, detached.
        """
        own = torch.stack([*parts]).sum() if parts else torch.zeros((), device=self.strategy.device)
        return self.run.step.weighting.mean(own, self.strategy.reduce)

    def gradient_norm(self) -> torch.Tensor:
        """The norm of the step's gradient, in `on_before_optimizer_step` that before clipping: a scalar. Collective."""
        return total_norm(self.run.optim.parameters)

    def log_system(self, values: Mapping[str, float]) -> None:
        """Give every logger values that no two runs share: times, speeds, memory."""
        for logger in self.run.records.loggers:
            logger.log_system(values, self.global_step)


def _for_the_bar(options: LogOptions) -> bool:
    return options.prog_bar
