"""What `configure_optimizers` returned, in one form."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any, final

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    LambdaLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from lumen.errors import ConfigError, TrainingError
from lumen.internals.optimizers import StepGuard, schedules_in
from lumen.optim import Schedule, Warmup, needs_closure
from lumen.precision import Precision
from lumen.task.references import refer_to_current
from lumen.task.task_module import TaskModule

_log = logging.getLogger("lumen")


@final
@dataclass
class SchedulerConfig:
    """A scheduler and when it steps.

    Attributes:
        scheduler: The learning rates' mover.
        interval: "step", "epoch" or "token". By tokens it does not count, but stands where the run does: at the sum of
            the weights that `training_step` or `batch_weight` gave.
        frequency: Every how many of them.
        monitor: Logged name that a plateau scheduler reads; without a new value of it the scheduler does not move.
        strict: A monitor that has no value yet when it is to move is an error.
        warmup: Until it is over, this scheduler waits.
        unread: The monitor's newest value, if the scheduler has not moved since.
        known: The monitor has had a value, in an earlier part of the run too.
    """

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None
    strict: bool = True
    warmup: Warmup | None = None
    unread: float | None = None
    known: bool = False

    def describe(self, optimizer: Optimizer) -> str:
        """What a saved state must be of to mean the same here: `LambdaLR of groups [1] every 2 epochs`.

        Args:
            optimizer: The one that trains.
        """
        moved = {id(group) for group in getattr(self.scheduler, "optimizer", optimizer).param_groups}
        groups = [number for number, group in enumerate(optimizer.param_groups) if id(group) in moved]
        of = [f"groups {groups}"] if len(groups) < len(optimizer.param_groups) else []
        of += [] if self.monitor is None else [self.monitor]
        when = f"{self.frequency} {self.interval}s" if self.frequency > 1 else self.interval
        return f"{_kind_of(self.scheduler)}{' of ' if of else ''}{' by '.join(of)} every {when}"

    def moves_at(self, step: int) -> bool:
        """Whether it moves when a step is complete."""
        return self.interval == "step" and step % self.frequency == 0

    def take(self, values: Mapping[str, float]) -> None:
        """Keep the monitor's value, if it is among these new ones."""
        if self.monitor is not None and self.monitor in values:
            self.unread, self.known = values[self.monitor], True

    def step(self) -> None:
        """Move the schedule by one, a plateau if there is something new to look at."""
        if self.warmup is not None and not self.warmup.over:
            return
        if self.monitor is None:
            self.scheduler.step()
        elif self.unread is not None:
            self._look(self.unread)
            self.unread = None

    def _look(self, value: float) -> None:
        """Let a plateau look at its monitor's new value, and say so where it lowers the rate."""
        groups = self.scheduler.optimizer.param_groups
        before = [float(group["lr"]) for group in groups]
        self.scheduler.step(value)
        moved = dict.fromkeys(zip(before, (float(group["lr"]) for group in groups), strict=True))
        if rates := ", ".join(f"{old:g} -> {new:g}" for old, new in moved if old != new):
            _log.info("%s %g is no better than %g: learning rate %s", self.monitor, value, self.scheduler.best, rates)

    def move_to(self, tokens: float, *, counted: bool) -> None:
        """Move the schedule to where the run stands.

        Args:
            tokens: Weight of all updates.
            counted: The weights are the user's, not numbers of samples.
        """
        if not counted:
            raise ConfigError(
                'lr_scheduler: interval "token" counts the weights of the steps, but the task gives none. '
                "Return (loss, tokens) from training_step, or define batch_weight."
            )
        self.scheduler.move_to(tokens)


def _kind_of(scheduler: Any) -> str:
    """The class of a scheduler, with those of the ones inside it."""
    many = isinstance(scheduler, (SequentialLR, ChainedScheduler))
    inside = schedules_in(scheduler)[0] if many else [getattr(scheduler, "scheduler", None)]
    kinds = ", ".join(_kind_of(each) for each in inside if each is not None)
    return type(scheduler).__qualname__ + (f"({kinds})" if kinds else "")


_ABSOLUTE = (Schedule, LambdaLR, OneCycleLR, CyclicLR, CosineAnnealingWarmRestarts)
_KEYS = ("scheduler", "interval", "frequency", "monitor", "strict", "name")
_WARMUP = ("warmup_steps", "warmup_epochs", "warmup_start", "warmup_factor")
_ACCEPTED = {*_KEYS, *_WARMUP, "reduce_on_plateau"}


def build_optimizers(
    task: TaskModule, configure: Callable[[], Any], precision: Precision
) -> tuple[Optimizer, list[SchedulerConfig]]:
    """Call the user's function and check what it returned.

    Raises:
        ConfigError: Not an optimizer, one without parameters or with another model's, one that the precision cannot
            serve, or a scheduler or an entry of it that cannot work.
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
    if strangers := [type(each).__name__ for each in optimizers if not isinstance(each, Optimizer)]:
        raise ConfigError(
            f"configure_optimizers returned {strangers[0]}; expected a torch.optim.Optimizer, "
            '([optimizer], [scheduler]), or {"optimizer": ..., "lr_scheduler": ...}.'
        )
    if len(optimizers) != 1:
        raise ConfigError(
            f"configure_optimizers returned {len(optimizers)} optimizers; a training has exactly one. If several shall "
            "step together, return lumen.optim.MultiOptimizer([...]) of them; several learning rates are parameter "
            "groups of one optimizer."
        )
    optimizer = optimizers[0]
    if precision.handles_overflow and needs_closure(optimizer):
        raise ConfigError(
            f"{type(optimizer).__name__} evaluates the loss several times in one step, which a gradient scaler cannot "
            "follow: no scaled step can be skipped halfway. Use precision: bf16 or fp32."
        )
    check_held(task, optimizer)
    _warn_of_left_out(task, optimizer)
    configs = _paired([config for given in schedulers for config in _configs(given)])
    for config in configs:
        moved = getattr(config.scheduler, "optimizer", optimizer)
        if not {*map(id, moved.param_groups)} <= {*map(id, optimizer.param_groups)}:
            raise ConfigError(
                f"lr_scheduler: the {type(config.scheduler).__name__} moves the learning rates of another optimizer "
                f"than the {type(optimizer).__name__} that trains. Build it with that one."
            )
    _refuse_overwriting([config.scheduler for config in configs])
    return optimizer, configs


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
        if len(returned) == 2 and isinstance(returned[0], (list, tuple)):
            return returned[0], returned[1] if isinstance(returned[1], (list, tuple)) else [returned[1]]
        if len(returned) == 1 and isinstance(returned[0], Mapping):
            return _unpack(returned[0])
        return returned, []
    return [returned], []


def _configs(given: Any) -> list[SchedulerConfig]:
    """An entry of the user's: one scheduler, or two where a warm-up counts steps and what follows it does not."""
    options = dict(given) if isinstance(given, Mapping) else {"scheduler": given}
    if unknown := set(options) - _ACCEPTED:
        raise ConfigError(
            f"lr_scheduler: unknown key {', '.join(sorted(unknown))}; there are {', '.join((*_KEYS, *_WARMUP))}."
        )
    if "scheduler" not in options:
        raise ConfigError(f"lr_scheduler: the key 'scheduler' is missing; found {', '.join(options) or 'no key'}.")
    options.pop("name", None)
    reduces = options.pop("reduce_on_plateau", None)  # which Lightning has to be told
    warmup = {key: options.pop(key) for key in _WARMUP if options.get(key) is not None}
    options = {key: value for key, value in options.items() if key not in _WARMUP}
    config = SchedulerConfig(**options)
    _check_config(config)
    scheduler = config.scheduler
    followed = scheduler.scheduler if isinstance(scheduler, Warmup) else scheduler
    if reduces and not isinstance(followed, ReduceLROnPlateau):
        raise ConfigError(
            f"lr_scheduler: reduce_on_plateau is set for {type(followed).__name__}, but only a ReduceLROnPlateau is "
            "given values of its monitor. Leave it out, or derive the scheduler from ReduceLROnPlateau."
        )
    if not isinstance(followed, ReduceLROnPlateau):
        config.monitor = None
    if first := _warmup(config, **warmup):
        return [first, config]
    if isinstance(scheduler, Warmup) and config.monitor:
        plateau = SchedulerConfig(followed, "epoch", config.frequency, config.monitor, config.strict)
        return [SchedulerConfig(scheduler, config.interval), plateau]
    return [config]


def _warmup(
    config: SchedulerConfig,
    warmup_steps: int = 0,
    warmup_epochs: int = 0,
    warmup_start: float | None = None,
    warmup_factor: Callable[[float], float] | None = None,
) -> SchedulerConfig | None:
    """The warm-up before a scheduler; None if none is asked for."""
    name, length = ("warmup_steps", warmup_steps) if warmup_steps else ("warmup_epochs", warmup_epochs)
    if warmup_steps and warmup_epochs:
        raise ConfigError(
            f"lr_scheduler: warmup_steps = {warmup_steps} and warmup_epochs = {warmup_epochs} both say how long the "
            "warm-up is. Leave one out."
        )
    if warmup_factor is not None and not length:
        raise ConfigError("lr_scheduler: warmup_factor is for a warm-up. Set warmup_steps or warmup_epochs too.")
    if warmup_factor is not None and warmup_start is not None:
        raise ConfigError("lr_scheduler: warmup_start and warmup_factor both say where the warm-up begins. Set one.")
    if not length:
        return None
    if isinstance(config.scheduler, Warmup) or config.interval == "token":
        raise ConfigError(
            f"lr_scheduler: {name} = {length}, but this {type(config.scheduler).__name__} "
            + ("warms up itself. " if isinstance(config.scheduler, Warmup) else "counts tokens. ")
            + f"Leave {name} out; lumen.optim.Warmup counts as its interval says."
        )
    if warmup_start is None:  # at 0 a whole first epoch would train nothing
        warmup_start = 1 / (length + 1) if warmup_epochs > 0 else 0.0
    warmup = Warmup(config.scheduler, length, warmup_start, warmup_factor)
    return SchedulerConfig(warmup, "step" if warmup_steps else "epoch")


def _check_config(config: SchedulerConfig) -> None:
    scheduler = config.scheduler
    if not isinstance(scheduler, (LRScheduler, ReduceLROnPlateau)) and not hasattr(scheduler, "step"):
        raise ConfigError(f"lr_scheduler: expected a scheduler, found {type(scheduler).__name__}.")
    if config.interval not in ("step", "epoch", "token"):
        raise ConfigError(f'lr_scheduler: interval must be "step", "epoch" or "token", found {config.interval!r}.')
    if not isinstance(config.frequency, int) or config.frequency < 1:
        raise ConfigError(f"lr_scheduler: frequency must be an integer >= 1, found {config.frequency!r}.")
    if isinstance(scheduler, ReduceLROnPlateau) and config.monitor is None:
        raise _no_monitor()
    if config.interval == "token":
        rest = scheduler.scheduler if isinstance(scheduler, Warmup) else scheduler
        if not isinstance(rest, Schedule):
            raise ConfigError(
                f'lr_scheduler: {type(rest).__name__} counts its steps, so its interval cannot be "token". '
                "Use a schedule of lumen.optim (linear, cosine, inverse_sqrt, wsd), whose lengths are then tokens."
            )
        if config.frequency != 1:
            raise ConfigError(
                f'lr_scheduler: interval "token" moves at every step; found frequency {config.frequency}.'
            )


def _no_monitor() -> ConfigError:
    return ConfigError(
        "lr_scheduler: ReduceLROnPlateau needs the name of a logged value. "
        'Return {"scheduler": ..., "monitor": "val_loss"} for it.'
    )


def _paired(configs: list[SchedulerConfig]) -> list[SchedulerConfig]:
    """Let a scheduler that has an entry of its own wait for the warm-up around it, and move as its entry says.

    It comes before its warm-up, so that the update that ends the warm-up does not move it yet. A plateau comes as it
    was given: during the warm-up it watches.
    """
    by_scheduler = {id(config.scheduler): config for config in configs}
    if len(by_scheduler) < len(configs):
        raise ConfigError("lr_scheduler: a scheduler has two entries and would move twice. Leave one out.")
    for config in list(configs):
        warmup = config.scheduler
        if not isinstance(warmup, Warmup):
            continue
        rest = by_scheduler.get(id(warmup.scheduler))
        if isinstance(warmup.scheduler, ReduceLROnPlateau):
            if rest is None:
                raise _no_monitor()
        elif rest is not None:
            warmup.leads, rest.warmup = False, warmup
            configs.remove(rest)
            configs.insert(configs.index(config), rest)
    return configs


def _refuse_overwriting(schedulers: Sequence[Any]) -> None:
    """Refuse a schedule that sets rates anew, whatever they are, where another one changes the same ones."""
    for one, other in permutations(schedulers, 2):
        if not isinstance(one, _ABSOLUTE) or getattr(other, "scheduler", None) is one:
            continue
        if {*map(id, one.optimizer.param_groups)} & {*map(id, getattr(other, "optimizer", one.optimizer).param_groups)}:
            raise ConfigError(
                f"lr_scheduler: each move of the {type(one).__name__} sets the learning rates anew, which undoes what "
                f"the {type(other).__name__} does to them. For a warm-up before another scheduler give that one "
                "warmup_steps or warmup_epochs, with a warmup_factor; for others one after the other use SequentialLR."
            )


def check_held(task: nn.Module, optimizer: Optimizer) -> None:
    """Check that an optimizer holds the task's parameters alone, and as they are now if it was given earlier ones.

    Raises:
        ConfigError: Others would be neither saved nor, on several processes, trained alike; or it holds some twice.
    """
    refer_to_current(optimizer)
    if strangers := len(_held(optimizer) - {id(parameter) for parameter in task.parameters()}):
        raise ConfigError(
            f"the optimizer holds {strangers} parameters that are not the task's. Build it in configure_optimizers, "
            "from self.parameters(), so that it sees the parameters that are trained; what a hook adds to it has to be "
            "an attribute of the task, or of a module in it."
        )


def _held(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _warn_of_left_out(task: nn.Module, optimizer: Optimizer) -> None:
    held = _held(optimizer)
    left_out = [name for name, each in task.named_parameters() if each.requires_grad and id(each) not in held]
    if left_out:
        _log.warning(
            "the optimizer does not hold %d trainable parameters, which will not change: %s. Give them to it, or set "
            "requires_grad of them to False, which saves their gradients",
            len(left_out),
            ", ".join(left_out[:8]) + (", ..." if len(left_out) > 8 else ""),
        )


def guard(optimizer: Optimizer, is_allowed: Callable[[], bool]) -> StepGuard:
    """Refuse steps of an optimizer that nobody is to make.

    Args:
        optimizer: The one that trains.
        is_allowed: Asked where somebody else than the run may be calling it.
    """

    def refuse() -> None:
        if not is_allowed():
            raise TrainingError(
                f"{type(optimizer).__name__}.step was called in a training step, where Lumen calls it once: the "
                "parameters would move twice. Leave step, zero_grad and backward out of training_step and the hooks, "
                "and return the loss. Change gradients in on_before_optimizer_step; for several micro-batches in one "
                "step set accumulate_grad_batches; an optimizer that steps otherwise is a subclass with such a step."
            )

    return StepGuard(optimizer, refuse)
