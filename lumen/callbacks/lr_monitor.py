"""Logs the learning rate, and momentum and weight decay if asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, final

from lumen.callbacks.base import Callback
from lumen.errors import ConfigError
from lumen.errors.arguments import checked

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from lumen.task.task_module import TaskModule
    from lumen.trainer.trainer import Trainer


@final
class LearningRateMonitor(Callback):
    """Logs the learning rate that each update uses, as `lr`, or with several parameter groups as `lr/group_N`.

    A group's own "name" is used instead of `group_N`, as those of `decay_groups` have one: `lr/no decay`.

    Args:
        logging_interval: "step": at every step whose metrics are logged; "epoch": at the first step of every epoch.
        log_momentum: Log `momentum` too; of an optimizer without one the first of its `betas`.
        log_weight_decay: Log `weight_decay` too.
    """

    NONE_IS_DEFAULT = True

    @checked
    def __init__(
        self,
        logging_interval: Literal["step", "epoch"] = "step",
        log_momentum: bool = False,
        log_weight_decay: bool = False,
    ) -> None:
        self.logging_interval = logging_interval
        self._wanted = ["lr", *["momentum"] * log_momentum, *["weight_decay"] * log_weight_decay]

    def on_train_start(self, trainer: Trainer, task: TaskModule) -> None:
        """Refuse to log what the optimizer does not have."""
        for optimizer in trainer.optimizers:
            missing = [name for name in self._wanted for group in optimizer.param_groups if _value(group, name) is None]
            if missing:
                raise ConfigError(
                    f"LearningRateMonitor: {type(optimizer).__name__} has no {missing[0]}. Leave log_{missing[0]} out."
                )

    def on_before_zero_grad(self, trainer: Trainer, task: TaskModule, optimizer: Optimizer) -> None:
        """Log the values of the update in progress, once for all its micro-batches."""
        by_epoch = self.logging_interval == "epoch"
        if by_epoch and trainer.progress.batches:
            return
        groups = optimizer.param_groups
        suffixes = [""] if len(groups) == 1 else [f"/{name}" for name in _names(groups)]
        for suffix, group in zip(suffixes, groups, strict=True):
            for name in self._wanted:
                task.log(f"{name}{suffix}", float(_value(group, name)), on_step=not by_epoch, on_epoch=by_epoch)


def _names(groups: list[dict[str, Any]]) -> list[str]:
    """The groups' names; a group that has none, or shares one, is named by its number."""
    names = [str(group.get("name", f"group_{number}")) for number, group in enumerate(groups)]
    return [name if names.count(name) == 1 else f"{name} {number}" for number, name in enumerate(names)]


def _value(group: dict[str, Any], name: str) -> Any:
    if name == "momentum" and "momentum" not in group:
        return group.get("betas", (None,))[0]
    return group.get(name)
