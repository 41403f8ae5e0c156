"""Log the learning rate."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from lumen.callbacks.base import Callback

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from lumen.task import TaskModule
    from lumen.trainer import Trainer


@final
class LearningRateMonitor(Callback):
    """Logs the learning rate that each update uses, as `lr`, or `lr/group_N` with several parameter groups."""

    def on_before_zero_grad(self, trainer: Trainer, task: TaskModule, optimizer: Optimizer) -> None:
        """Log the rates of the update in progress, once for all its micro-batches."""
        groups = optimizer.param_groups
        for number, group in enumerate(groups):
            task.log(
                "lr" if len(groups) == 1 else f"lr/group_{number}", float(group["lr"]), on_step=True, on_epoch=False
            )
