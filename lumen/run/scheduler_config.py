"""Learning-rate schedulers of a run with their intervals, and a check that their lengths fit the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from torch.optim import Optimizer, lr_scheduler

from lumen.console import logger as _log
from lumen.errors import ConfigError
from lumen.internals.optimizers import get_inner_schedules
from lumen.optim import Schedule, Warmup
from lumen.run.plan import EpochLengths, Plan

#: Schedulers with a rate for each group present when built, which fail with more groups; others change all groups.
_LAMBDA_SCHEDULERS = (
    lr_scheduler.CyclicLR,
    lr_scheduler.LambdaLR,
    lr_scheduler.MultiplicativeLR,
    lr_scheduler.OneCycleLR,
    Schedule,
    Warmup,
)


@final
@dataclass
class SchedulerConfig:
    """A scheduler with the interval of its steps.

    Attributes:
        scheduler: The learning-rate scheduler.
        interval: "step", "epoch", "token" or "hand". With "token" the scheduler's position is the sum of the weights
            from `training_step` or `batch_weight`. With "hand" the task steps the scheduler.
        frequency: Number of steps or epochs between two steps of the scheduler.
        monitor: Logged name that a ReduceLROnPlateau reads; without a new value the scheduler does not step.
        strict: True to raise an error if the monitor has no value when the scheduler must step.
        warmup: The warm-up that this scheduler waits for, or None.
        unread: The monitor's newest value, if the scheduler has not stepped since.
        has_value: True if the monitor has had a value, in an earlier part of the run too.
        mover: The task's `lr_scheduler_step`, called with the scheduler and the monitor's value or None.
        name: The name that `configure_optimizers` gave the scheduler, or None.
    """

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None
    strict: bool = True
    warmup: Warmup | None = None
    unread: float | None = None
    has_value: bool = False
    mover: Callable[[Any, float | None], None] | None = None
    name: str | None = None

    @property
    def reduce_on_plateau(self) -> bool:
        """True if the scheduler reads the values of its monitor."""
        return isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau)

    def __post_init__(self) -> None:
        """Count the groups of a scheduler that was built for a fixed number of groups."""
        self._groups = len(self.scheduler.optimizer.param_groups) if _has_lambda_per_group(self.scheduler) else None

    def describe(self, optimizer: Optimizer) -> str:
        """Describe class, groups and interval, such as `LambdaLR of groups [1] every 2 epochs`.

        A saved state fits this scheduler if their descriptions are equal.

        Args:
            optimizer: The optimizer that trains the task.
        """
        moved = {*map(id, getattr(self.scheduler, "optimizer", optimizer).param_groups)}
        groups = [number for number, group in enumerate(optimizer.param_groups) if id(group) in moved]
        qualifiers = [f"groups {groups}"] if len(groups) < len(optimizer.param_groups) else []
        qualifiers += [] if self.monitor is None else [self.monitor]
        when = f"{self.frequency} {self.interval}s" if self.frequency > 1 else self.interval
        return f"{_describe_kind(self.scheduler)}{' of ' if qualifiers else ''}{' by '.join(qualifiers)} every {when}"

    def moves_at(self, step: int) -> bool:
        """Return True if the scheduler steps after a completed optimizer step."""
        return self.interval == "step" and step % self.frequency == 0

    def store_monitor_value(self, values: Mapping[str, float]) -> None:
        """Keep the monitor's value if `values` has a new one."""
        if self.monitor is not None and self.monitor in values:
            self.unread, self.has_value = values[self.monitor], True

    def restore(self, state: dict[str, Any], monitor: tuple[bool, float | None]) -> None:
        """Load the state of the scheduler, and set `has_value` and `unread` of its monitor."""
        self.has_value, self.unread = monitor
        self.scheduler.load_state_dict(state)

    def step(self) -> None:
        """Step the scheduler, or a ReduceLROnPlateau only if its monitor has a new value."""
        if self.warmup is not None and not self.warmup.over:
            return
        if self.monitor is None:
            self._step_scheduler()
        elif self.unread is not None:
            self._step_plateau(self.unread)
            self.unread = None

    def _step_scheduler(self, *value: float) -> None:
        if self._groups is not None and len(self.scheduler.optimizer.param_groups) > self._groups:
            with _show_first_groups(self.scheduler.optimizer, self._groups):
                self._step_scheduler(*value)
        elif self.mover is not None:
            self.mover(self.scheduler, next(iter(value), None))
        else:
            self.scheduler.step(*value)

    def _step_plateau(self, value: float) -> None:
        """Step a ReduceLROnPlateau with its monitor's new value, and log a change of the learning rate."""
        groups = self.scheduler.optimizer.param_groups
        before = [float(group["lr"]) for group in groups]
        self._step_scheduler(value)
        moved = dict.fromkeys(zip(before, (float(group["lr"]) for group in groups), strict=True))
        if rates := ", ".join(f"{old:g} -> {new:g}" for old, new in moved if old != new):
            _log.info("%s %g is not better than %g: learning rate %s", self.monitor, value, self.scheduler.best, rates)

    def move_to(self, tokens: float, *, counted: bool) -> None:
        """Move the schedule to the position of the run.

        Args:
            tokens: Weight of all updates.
            counted: True if the weights come from the user, False if they are numbers of samples.
        """
        if not counted:
            raise ConfigError(
                'lr_scheduler: interval "token" sums the weights of the steps, but the task returns no weights. '
                "Return (loss, tokens) from training_step, or define batch_weight."
            )
        with _show_first_groups(self.scheduler.optimizer, self._groups):
            self.scheduler.move_to(tokens)


@contextmanager
def _show_first_groups(optimizer: Optimizer, count: int | None) -> Iterator[None]:
    """Show only the first groups of an optimizer within the context, or all for None."""
    groups, optimizer.param_groups = optimizer.param_groups, optimizer.param_groups[:count]
    try:
        yield
    finally:
        optimizer.param_groups = groups


def _has_lambda_per_group(scheduler: Any) -> bool:
    return isinstance(scheduler, _LAMBDA_SCHEDULERS) or any(map(_has_lambda_per_group, _list_inner(scheduler)))


def _list_inner(scheduler: Any) -> list[Any]:
    """Return the schedulers inside a SequentialLR or ChainedScheduler."""
    return (
        get_inner_schedules(scheduler)[0]
        if isinstance(scheduler, (lr_scheduler.SequentialLR, lr_scheduler.ChainedScheduler))
        else []
    )


def _describe_kind(scheduler: Any) -> str:
    """Return the class name of a scheduler, with the class names of the schedulers inside it."""
    inside = _list_inner(scheduler) or [getattr(scheduler, "scheduler", None)]
    kinds = ", ".join(_describe_kind(each) for each in inside if each is not None)
    return type(scheduler).__qualname__ + (f"({kinds})" if kinds else "")


_LENGTH_ATTRIBUTES = {
    Schedule: "total_steps", lr_scheduler.OneCycleLR: "total_steps", lr_scheduler.CosineAnnealingLR: "T_max",
    **dict.fromkeys((lr_scheduler.PolynomialLR, lr_scheduler.LinearLR, lr_scheduler.ConstantLR), "total_iters"),
}  # fmt: skip
_FIRST_CHANGE = {
    lr_scheduler.StepLR: "step_size",
    lr_scheduler.CyclicLR: "total_size",
    lr_scheduler.CosineAnnealingWarmRestarts: "T_0",
}
_NEARLY_ENDED_SHARE = 0.9
_ADVICE = "If you did not intend this, change the schedule's length or its interval."


@final
class Horizon(NamedTuple):
    """Length of a run, in steps and epochs; None if unknown."""

    steps: int | None
    epochs: int | None
    lengths: EpochLengths | None
    max_epochs: int | None
    resumed: bool


def check_horizons(schedulers: list[SchedulerConfig], horizon: Horizon) -> None:
    """Compare the length of every schedule with the number of its steps in the run.

    A mismatch that is surely a mistake is an error. One that may be intended, such as a trial run of a long schedule,
    is a warning. A run or schedule of unknown length is not checked.

    Raises:
        ConfigError: A OneCycleLR steps more often than it can; a schedule as long as the run has optimizer steps steps
            once per epoch; or the learning rates of a per-step schedule vanish within the first of many epochs.
    """
    for config in schedulers:
        moves = _count_moves(config, schedulers, horizon)
        parts = [] if moves is None else _iterate_parts(config.scheduler, 0)
        if reason := next(filter(None, (_describe_misfit(*part, moves or 0, config, horizon) for part in parts)), None):
            _log.warning("lr_scheduler: %s", reason)


def iterate_unfinished(schedulers: list[SchedulerConfig], horizon: Horizon) -> Iterator[tuple[str, int, int]]:
    """Yield the decaying schedules that end after the run, but too early for a warning by `check_horizons`.

    Yields:
        The scheduler's class, the number of its steps until its end, and the number of its steps in the run.
    """
    for config in schedulers:
        moves = _count_moves(config, schedulers, horizon)
        for part, begin in [] if moves is None else _iterate_parts(config.scheduler, 0):
            length = _get_length(part, _LENGTH_ATTRIBUTES) if _ends_at_minimum(part) else None
            if (
                length is not None
                and moves is not None
                and moves < _NEARLY_ENDED_SHARE * (begin + length) <= 2 * _NEARLY_ENDED_SHARE * moves
            ):
                yield type(part).__name__, begin + length, moves


def can_move_further(schedulers: list[SchedulerConfig]) -> bool:
    """Return True if no scheduler fails when the run becomes longer."""
    return not any(
        isinstance(part, lr_scheduler.OneCycleLR)
        for each in schedulers
        for part, _ in _iterate_parts(each.scheduler, 0)
    )


def get_schedule_lengths(schedulers: list[SchedulerConfig]) -> dict[str, int]:
    """Return the step at which each schedule of `lumen.optim` ends: that of the configuration, not of a checkpoint."""
    return {
        f"lengths[{number}]": begin + part.total_steps
        for number, each in enumerate(schedulers)
        for part, begin in _iterate_parts(each.scheduler, 0)
        if isinstance(part, Schedule) and part.total_steps is not None
    }


def make_horizon(plan: Plan, lengths: EpochLengths | None, *, resumed: bool) -> Horizon:
    """Return the length of a run whose loader gives epochs of these lengths."""
    if lengths is not None and not lengths.get_length(0):  # Then no epoch has steps.
        lengths = None
    steps, epochs = plan.max_steps, plan.max_epochs
    if plan.max_time_s is not None or (lengths is None and None not in (steps, epochs)):
        steps = epochs = None
    elif lengths is not None:
        steps = plan.count_total_steps(lengths)
        epochs = lengths.count_complete_epochs(steps)
    return Horizon(steps, epochs, lengths, plan.max_epochs, resumed)


def _count_moves(config: SchedulerConfig, schedulers: list[SchedulerConfig], horizon: Horizon) -> int | None:
    """Return the number of a scheduler's steps in the run; None if it is unknown."""
    count = {"step": horizon.steps, "epoch": horizon.epochs}.get(config.interval)
    if count is not None and config.warmup is not None:
        first = next(each for each in schedulers if each.scheduler is config.warmup)
        waited = config.warmup.steps * first.frequency
        if first.interval != config.interval:
            if horizon.lengths is None:
                return None
            convert = (
                horizon.lengths.count_complete_epochs
                if config.interval == "epoch"
                else horizon.lengths.count_steps_before
            )
            waited = convert(waited)
        count = max(0, count - waited)
    return None if count is None else count // config.frequency


def _iterate_parts(scheduler: Any, begin: int) -> Iterator[tuple[Any, int]]:
    """Yield the schedulers in effect at the end of the run, each with the step at which it begins."""
    if isinstance(scheduler, Warmup):
        if scheduler.leads:
            yield from _iterate_parts(scheduler.scheduler, begin + scheduler.steps)
    elif isinstance(scheduler, lr_scheduler.SequentialLR):
        parts, milestones = get_inner_schedules(scheduler)
        for part in parts[-1:]:
            yield from _iterate_parts(part, begin + (milestones or [0])[-1])
    elif isinstance(scheduler, lr_scheduler.ChainedScheduler):
        for part in _list_inner(scheduler):
            yield from _iterate_parts(part, begin)
    else:
        yield scheduler, begin


def _describe_misfit(scheduler: Any, begin: int, moves: int, config: SchedulerConfig, horizon: Horizon) -> str | None:
    """Return the reason why a schedule does not fit the run, in a sentence; None if it may fit.

    Raises:
        ConfigError: The mismatch is surely a mistake.
    """
    name, every = type(scheduler).__name__, f"{config.frequency} {config.interval}s"
    frequency = f"moves once every {config.interval if config.frequency == 1 else every}, {moves} times in all"
    if (length := _get_length(scheduler, _LENGTH_ATTRIBUTES)) is not None:
        end = begin + length
        if isinstance(scheduler, lr_scheduler.OneCycleLR) and moves > end:
            by_epoch = config.interval == "step" and horizon.epochs is not None and horizon.epochs <= end
            advice = f"Set its total_steps to {moves - begin}" + (', or its interval to "epoch".' if by_epoch else ".")
            if horizon.resumed:
                advice = f"A resumed {name} keeps its length: end the run there, or use a schedule of lumen.optim, "
                advice += "whose length may grow."
            raise ConfigError(
                f"lr_scheduler: {name} ends after {end} moves and fails at the next, but {frequency}. {advice}"
            )
        # A schedule as long as the epochs of a longer run may count epochs.
        may_count_epochs = horizon.max_epochs is not None and end <= 2 * horizon.max_epochs
        is_early = config.interval == "epoch" and end == horizon.steps and end > 2 * moves
        if is_early and _ends_at_minimum(scheduler) and not may_count_epochs:
            raise ConfigError(
                f"lr_scheduler: {name} ends after {end} moves, as many as the run has steps, but "
                f'{frequency}. Set its interval to "step". If the scheduler counts epochs, set max_epochs too.'
            )
        if end > 2 * moves and not (begin and isinstance(scheduler, lr_scheduler.ConstantLR)):
            return f"{name} ends after {end} moves, but {frequency}: the run has only its beginning. {_ADVICE}"
        if isinstance(scheduler, lr_scheduler.CosineAnnealingLR) and moves > 1.1 * end:
            return f"{name} reaches its minimum after {end} moves, but {frequency}: the rate rises again. {_ADVICE}"
        if moves > 2 * end and _ends_at_minimum(scheduler):
            return f"{name} ends after {end} moves, but {frequency}: the rate stays at its minimum. {_ADVICE}"
        return None
    has_milestones = isinstance(scheduler, lr_scheduler.MultiStepLR)
    first = min(scheduler.milestones, default=None) if has_milestones else _get_length(scheduler, _FIRST_CHANGE)
    if first is not None and begin + first > 2 * moves:
        return f"{name} changes first after {begin + first:.0f} moves, but {frequency}. {_ADVICE}"
    if config.interval == "step" and (reason := _describe_too_early(scheduler, begin, moves, horizon)):
        return f'{name} {frequency}: {reason}. If the scheduler counts epochs, set its interval to "epoch".'
    return None


def _describe_too_early(scheduler: Any, begin: int, moves: int, horizon: Horizon) -> str | None:
    """Return the effect that comes too early if a schedule that counts epochs moves at every optimizer step."""
    epochs, per_epoch = horizon.epochs or 0, math.inf if horizon.lengths is None else horizon.lengths.get_length(0)
    if isinstance(scheduler, (lr_scheduler.StepLR, lr_scheduler.ExponentialLR)) and 0 < scheduler.gamma < 1:
        size = getattr(scheduler, "step_size", 1)
        tiny, vanishing = (begin + size * math.ceil(math.log(x) / math.log(scheduler.gamma)) for x in (1e-6, 1e-12))
        if vanishing < per_epoch and epochs >= 10:
            raise ConfigError(
                f"lr_scheduler: {type(scheduler).__name__} moves once every step, {per_epoch} times an "
                f"epoch. After {vanishing} moves, in the first of {epochs} epochs, the learning rate is 1e-12 of its "
                'first value. Set the interval to "epoch".'
            )
        return f"after {tiny} moves the learning rate is 1e-6 of its first value" if 2 * tiny < moves else None
    if isinstance(scheduler, lr_scheduler.MultiStepLR) and 0 < max(scheduler.milestones, default=0) <= epochs:
        last = begin + max(scheduler.milestones)
        return f"its last milestone comes after {last} moves" if 10 * last < moves else None
    if (
        isinstance(scheduler, lr_scheduler.CosineAnnealingWarmRestarts)
        and scheduler.T_mult == 1
        and epochs >= scheduler.T_0
    ):
        return f"it restarts {moves // scheduler.T_0} times" if moves > 100 * scheduler.T_0 else None
    return None


def _get_length(scheduler: Any, names: dict[type, str]) -> int | None:
    """Return the length of a schedule, from the attribute that its class has for it; None if it has no length."""
    return next((getattr(scheduler, name) for kind, name in names.items() if isinstance(scheduler, kind)), None)


def _ends_at_minimum(scheduler: Any) -> bool:
    """Return True if a schedule ends with a low learning rate, False for a warm-up or a constant."""
    rising = isinstance(scheduler, lr_scheduler.LinearLR) and scheduler.end_factor >= scheduler.start_factor
    return not rising and not isinstance(scheduler, lr_scheduler.ConstantLR)
