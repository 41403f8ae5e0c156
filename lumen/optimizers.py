"""What `configure_optimizers` returned, in one form."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lumen.errors import ConfigError
from lumen.task import TaskModule


@final
@dataclass
class SchedulerConfig:
    """A scheduler and when it steps.

    Attributes:
        interval: "step" or "epoch".
        frequency: Every how many of them.
        monitor: Logged name that a plateau scheduler reads.
        strict: A missing monitor is an error.
    """

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None
    strict: bool = True

    def step(self, metrics: Mapping[str, float]) -> None:
        """Move the schedule by one."""
        if self.monitor is None:
            self.scheduler.step()
        elif self.monitor in metrics:
            self.scheduler.step(metrics[self.monitor])
        elif self.strict:
            raise ConfigError(
                f"lr_scheduler: the monitor {self.monitor!r} was never logged; logged so far: "
                f"{', '.join(metrics) or 'nothing'}. Log it, or set strict: false."
            )


_KEYS = ("scheduler", "interval", "frequency", "monitor", "strict", "name")


def build_optimizers(task: TaskModule, configure: Callable[[], Any]) -> tuple[Optimizer, list[SchedulerConfig]]:
    """Call the user's function and check what it returned.

    Raises:
        ConfigError: Not an optimizer, one without parameters or with another model's, or an unknown scheduler key.
    """
    try:
        returned = configure()
    except ValueError as error:
        if "empty parameter list" not in str(error):
            raise
        raise ConfigError(
            f"configure_optimizers of {type(task).__name__} built an optimizer without parameters. "
            "Give it self.parameters(); if layers are built in configure_model, build the optimizer from them."
        ) from error
    optimizers, schedulers = _unpack(returned)
    if len(optimizers) != 1:
        raise ConfigError(
            f"configure_optimizers returned {len(optimizers)} optimizers; this version trains with exactly one. "
            "Put several learning rates into parameter groups of one optimizer."
        )
    optimizer = optimizers[0]
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"configure_optimizers returned {type(optimizer).__name__}; expected a torch.optim.Optimizer, "
            '([optimizer], [scheduler]), or {"optimizer": ..., "lr_scheduler": ...}.'
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ConfigError(
            f"{type(optimizer).__name__}.step needs a closure that computes the loss again; this version gives none. "
            "Use an optimizer that does without."
        )
    _check_parameters(task, optimizer)
    return optimizer, [_scheduler(scheduler) for scheduler in schedulers]


def _unpack(returned: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    if isinstance(returned, Mapping):
        if "optimizer" not in returned or set(returned) - {"optimizer", "lr_scheduler", "monitor"}:
            raise ConfigError(
                f"configure_optimizers returned a dictionary with the keys {', '.join(map(str, returned))}; "
                'expected "optimizer" and optionally "lr_scheduler".'
            )
        scheduler = returned.get("lr_scheduler")
        if scheduler is not None and "monitor" in returned and not isinstance(scheduler, Mapping):
            scheduler = {"scheduler": scheduler, "monitor": returned["monitor"]}
        return [returned["optimizer"]], [] if scheduler is None else [scheduler]
    if isinstance(returned, (list, tuple)):
        if len(returned) == 2 and all(isinstance(part, (list, tuple)) for part in returned):
            return returned[0], returned[1]
        return returned, []
    return [returned], []


def _scheduler(given: Any) -> SchedulerConfig:
    options = dict(given) if isinstance(given, Mapping) else {"scheduler": given}
    if unknown := set(options) - set(_KEYS):
        raise ConfigError(f"lr_scheduler: unknown key {', '.join(sorted(unknown))}; there are {', '.join(_KEYS)}.")
    if "scheduler" not in options:
        raise ConfigError(f"lr_scheduler: the key 'scheduler' is missing; found {', '.join(options) or 'no key'}.")
    options.pop("name", None)
    config = SchedulerConfig(**options)
    if not isinstance(config.scheduler, (LRScheduler, ReduceLROnPlateau)) and not hasattr(config.scheduler, "step"):
        raise ConfigError(f"lr_scheduler: expected a scheduler, found {type(config.scheduler).__name__}.")
    if config.interval not in ("step", "epoch"):
        raise ConfigError(f'lr_scheduler: interval must be "step" or "epoch", found {config.interval!r}.')
    if not isinstance(config.frequency, int) or config.frequency < 1:
        raise ConfigError(f"lr_scheduler: frequency must be an integer >= 1, found {config.frequency!r}.")
    if isinstance(config.scheduler, ReduceLROnPlateau) and config.monitor is None:
        raise ConfigError(
            "lr_scheduler: ReduceLROnPlateau needs the name of a logged value. "
            'Return {"scheduler": ..., "monitor": "val_loss"} for it.'
        )
    if not isinstance(config.scheduler, ReduceLROnPlateau):
        config.monitor = None
    return config


def _check_parameters(task: nn.Module, optimizer: Optimizer) -> None:
    own = {id(parameter) for parameter in task.parameters()}
    strangers = sum(id(parameter) not in own for group in optimizer.param_groups for parameter in group["params"])
    if strangers:
        raise ConfigError(
            f"the optimizer holds {strangers} parameters that are not the task's. Build it in configure_optimizers, "
            "from self.parameters(), so that it sees the parameters that are trained."
        )
