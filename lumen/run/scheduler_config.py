"""A learning rate schedule of a run: when it moves, and by what."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CyclicLR,
    LambdaLR,
    MultiplicativeLR,
    OneCycleLR,
    SequentialLR,
)

from lumen.console import logger as _log
from lumen.errors import ConfigError
from lumen.internals.optimizers import schedules_in
from lumen.optim import Warmup
from lumen.optim.schedules import Schedule

#: What has a rate for each group that it was built for, and fails where there are more; others move all that there are.
_BY_GROUP = (CyclicLR, LambdaLR, MultiplicativeLR, OneCycleLR, Schedule, Warmup)


@final
@dataclass
class SchedulerConfig:
    """A scheduler and when it steps.

    Attributes:
        scheduler: The learning rates' mover.
        interval: "step", "epoch" or "token". By tokens it does not count, but stands where the run does: at the sum of
            the weights that `training_step` or `batch_weight` gave. "hand": the task moves it.
        frequency: Every how many of them.
        monitor: Logged name that a plateau scheduler reads; without a new value of it the scheduler does not move.
        strict: A monitor that has no value yet when it is to move is an error.
        warmup: Until it is over, this scheduler waits.
        unread: The monitor's newest value, if the scheduler has not moved since.
        known: The monitor has had a value, in an earlier part of the run too.
        mover: The task's own way to move it, given the scheduler and a plateau's value or None.
    """

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None
    strict: bool = True
    warmup: Warmup | None = None
    unread: float | None = None
    known: bool = False
    mover: Callable[[Any, float | None], None] | None = None

    def __post_init__(self) -> None:
        """Count the groups of a schedule that moves those it was built for."""
        self._groups = len(self.scheduler.optimizer.param_groups) if _is_by_group(self.scheduler) else None

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
            self._move()
        elif self.unread is not None:
            self._look(self.unread)
            self.unread = None

    def _move(self, *value: float) -> None:
        if self._groups is not None and len(self.scheduler.optimizer.param_groups) > self._groups:
            with _first_groups(self.scheduler.optimizer, self._groups):
                self._move(*value)
        elif self.mover is not None:
            self.mover(self.scheduler, next(iter(value), None))
        else:
            self.scheduler.step(*value)

    def _look(self, value: float) -> None:
        """Let a plateau look at its monitor's new value, and say so where it lowers the rate."""
        groups = self.scheduler.optimizer.param_groups
        before = [float(group["lr"]) for group in groups]
        self._move(value)
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
        with _first_groups(self.scheduler.optimizer, self._groups):
            self.scheduler.move_to(tokens)


@contextmanager
def _first_groups(optimizer: Optimizer, count: int | None) -> Iterator[None]:
    """The context in which an optimizer shows so many groups alone; None: all."""
    groups = optimizer.param_groups
    optimizer.param_groups = groups[:count]
    try:
        yield
    finally:
        optimizer.param_groups = groups


def _is_by_group(scheduler: Any) -> bool:
    inside = schedules_in(scheduler)[0] if isinstance(scheduler, (SequentialLR, ChainedScheduler)) else []
    return isinstance(scheduler, _BY_GROUP) or any(map(_is_by_group, inside))


def _kind_of(scheduler: Any) -> str:
    """The class of a scheduler, with those of the ones inside it."""
    many = isinstance(scheduler, (SequentialLR, ChainedScheduler))
    inside = schedules_in(scheduler)[0] if many else [getattr(scheduler, "scheduler", None)]
    kinds = ", ".join(_kind_of(each) for each in inside if each is not None)
    return type(scheduler).__qualname__ + (f"({kinds})" if kinds else "")
