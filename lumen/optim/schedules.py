"""Learning-rate schedules with warm-up: functions of the step, and a warm-up before any scheduler of torch."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, Literal, final

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lumen.errors import ConfigError
from lumen.internals.optimizers import move_schedule


@final
class Schedule(LRScheduler):
    """Schedule that multiplies each group's learning rate by a function of the step.

    The learning rates of a resumed run are bitwise identical to those of an uninterrupted run. Function and length come
    from the configuration instead of the checkpoint. A run that resumes with a longer schedule follows the longer
    schedule after its first update.

    Args:
        optimizer: The optimizer; the learning rates of its groups are the peaks.
        factor: Function that returns the factor. Its argument is the number of the step, 0 at the first update, or the
            number of tokens so far.
        total_steps: The step at which the schedule ends; None if the schedule never ends.
    """

    def __init__(self, optimizer: Optimizer, factor: Callable[[float], float], total_steps: int | None = None) -> None:
        self.factor, self.total_steps = factor, total_steps
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rates of the groups at this step."""
        return [base * self.factor(self.last_epoch) for base in self.base_lrs]

    def move_to(self, position: float) -> None:
        """Move to a position that the caller counts, in tokens for example, instead of one step further."""
        move_schedule(self, position)

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule's position as plain data."""
        return {key: value for key, value in super().state_dict().items() if key not in ("factor", "total_steps")}


@final
class Warmup(LRScheduler):
    """Linear warm-up before any scheduler (Goyal et al., Accurate, Large Minibatch SGD, 2017).

    Step s of the warm-up has the learning rate `target * (start + (1 - start) * s / steps)`. Here `target` is the
    scheduler's first learning rate. From step `steps` on, the scheduler steps as it would from its step 0.

    A ReduceLROnPlateau is stepped by its owner, with its metric. During the warm-up it is in its cooldown: it notes the
    best value but does not lower the learning rate. In a run these two entries are the same::

        {"scheduler": Warmup(ReduceLROnPlateau(optimizer), 500), "interval": "step", "monitor": "val_loss"}
        {"scheduler": ReduceLROnPlateau(optimizer), "monitor": "val_loss", "warmup_steps": 500}

    The keys `warmup_steps` and `warmup_start` put a warm-up that counts steps before a scheduler of any interval. In
    the first example below, the first of the ten epochs is the first epoch that ends after the warm-up. The key
    `warmup_epochs` counts epochs. Its default start is 1 / (warmup_epochs + 1), because with a start of 0 the first
    epoch would train nothing. `warmup_factor` is this class's `factor`::

        {"scheduler": StepLR(optimizer, 10), "interval": "epoch", "warmup_steps": 500}
        {"scheduler": ReduceLROnPlateau(optimizer), "monitor": "val_loss", "warmup_epochs": 5}

    Args:
        scheduler: A scheduler that has made no step yet. From now on the warm-up steps the scheduler; but see `leads`.
        steps: Length of the warm-up in calls of `step`, at least 1: steps, epochs or tokens as the `interval` says.
        start: The fraction of the target at which the warm-up begins, in [0, 1].
        factor: Function of s, 0 to `steps` - 1, that returns the fraction of the target, instead of the line from
            `start`.

    Attributes:
        leads: True if the warm-up steps the scheduler after its end; False for ReduceLROnPlateau, which needs its
            metric.

    Raises:
        ConfigError: A value is out of range.
    """

    def __init__(
        self, scheduler: LRScheduler, steps: int, start: float = 0.0, factor: Callable[[float], float] | None = None
    ) -> None:
        _check_count("warm-up steps", steps)
        _check_fraction("start", start)
        self.scheduler, self.steps, self.start, self.factor = scheduler, steps, start, factor
        self.leads = not isinstance(scheduler, ReduceLROnPlateau)
        self.targets = scheduler.get_last_lr()
        super().__init__(scheduler.optimizer)

    @property
    def over(self) -> bool:
        """True if the warm-up is over, so that the scheduler sets the learning rates."""
        return self.last_epoch >= self.steps

    def leave_steps(self) -> None:
        """Leave the steps of the scheduler after the warm-up to the run."""
        self.leads = False

    def step(self) -> None:  # type: ignore[override]
        """Step the warm-up, or after its end the scheduler."""
        if not self.over:
            super().step()
            if isinstance(self.scheduler, ReduceLROnPlateau):
                self.scheduler.cooldown_counter = 0 if self.over else sys.maxsize
            return
        self.last_epoch += 1
        if self.leads:
            self.scheduler.step()

    def move_to(self, position: float) -> None:
        """Move to a position that the caller counts, such as tokens. The scheduler must have `move_to` too."""
        if position <= self.steps:
            move_schedule(self, position)
        else:
            self.last_epoch = position  # type: ignore[assignment]
            self.scheduler.move_to(position - self.steps)  # type: ignore[attr-defined]

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rates of the groups at this step of the warm-up."""
        if self.last_epoch == self.steps:  # The formula rounds for some values of `start`.
            return self.targets
        if self.factor is not None:
            return [target * self.factor(self.last_epoch) for target in self.targets]
        share = self.start + (1 - self.start) * self.last_epoch / self.steps
        return [target * share for target in self.targets]

    def get_last_lr(self) -> list[float | Tensor]:
        """Return the learning rates of the groups, set by the warm-up or by the scheduler."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the positions of warm-up and scheduler; plain data if the scheduler's state is plain data."""
        state = {
            key: value
            for key, value in super().state_dict().items()
            if key not in ("steps", "start", "factor", "leads")
        }
        return state | {"scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the positions of warm-up and scheduler."""
        self.scheduler.load_state_dict(state_dict["scheduler"])
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "scheduler"})


def constant(optimizer: Optimizer, *, warmup: int = 0, start: float = 0.0) -> LRScheduler:
    """Return a schedule that keeps the optimizer's learning rates, after a warm-up.

    Args:
        optimizer: The optimizer; the learning rates of its groups are the peaks.
        warmup: Steps of linear warm-up; 0 for none.
        start: The fraction of the peak at which the warm-up begins, in [0, 1].

    Raises:
        ConfigError: A value is out of range.
    """
    return _add_warmup(Schedule(optimizer, lambda step: 1.0), warmup, start)


def linear(optimizer: Optimizer, steps: int, *, floor: float = 0.0, warmup: int = 0, start: float = 0.0) -> LRScheduler:
    """Return a linear decay, as in BERT (Devlin et al., 2018): `1 - (1 - floor) * x` with x from 0 to 1.

    Args:
        optimizer: The optimizer; the learning rates of its groups are the peaks.
        steps: Length of the schedule in steps, warm-up included; normally the length of the run.
        floor: The fraction of the peak at which the schedule ends and stays, in [0, 1].
        warmup: Steps of linear warm-up; 0 for none.
        start: The fraction of the peak at which the warm-up begins, in [0, 1].

    Raises:
        ConfigError: A value is out of range.
    """
    length = _count_decay_steps(steps, warmup, floor)
    return _add_warmup(
        Schedule(optimizer, lambda step: 1 - (1 - floor) * min(1.0, step / length), length), warmup, start
    )


def cosine(optimizer: Optimizer, steps: int, *, floor: float = 0.0, warmup: int = 0, start: float = 0.0) -> LRScheduler:
    """Return a cosine decay: `floor + (1 - floor) * (1 + cos(pi * x)) / 2` with x from 0 to 1.

    Loshchilov & Hutter, SGDR, 2017, without restarts. The arguments and errors are the same as for `linear`.
    """
    length = _count_decay_steps(steps, warmup, floor)

    def factor(step: float) -> float:
        return floor + (1 - floor) * (1 + math.cos(math.pi * min(1.0, step / length))) / 2

    return _add_warmup(Schedule(optimizer, factor, length), warmup, start)


def inverse_sqrt(optimizer: Optimizer, warmup: int, *, start: float = 0.0) -> LRScheduler:
    """Return a decay by `sqrt(warmup / s)` at step s, after the warm-up.

    Vaswani et al., Attention Is All You Need, 2017. The optimizer's learning rate is the peak: that of the paper is
    `(d_model * warmup) ** -0.5`.

    Args:
        optimizer: The optimizer; the learning rates of its groups are the peaks.
        warmup: Steps of linear warm-up, at least 1.
        start: The fraction of the peak at which the warm-up begins, in [0, 1].

    Raises:
        ConfigError: A value is out of range.
    """
    _check_count("warm-up steps", warmup)
    return Warmup(Schedule(optimizer, lambda step: math.sqrt(warmup / (warmup + step))), warmup, start)


def wsd(
    optimizer: Optimizer,
    steps: int,
    decay: int,
    *,
    shape: Literal["sqrt", "linear"] = "sqrt",
    floor: float = 0.0,
    warmup: int = 0,
    start: float = 0.0,
) -> LRScheduler:
    """Return a schedule of warm-up, stable phase and decay (Hu et al., MiniCPM, 2024).

    In the last `decay` steps the learning rate falls to the floor by `1 - sqrt(x)` or `1 - x`, with x from 0 to 1.
    Source of `1 - sqrt(x)`: Hägele et al., Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations,
    2024.

    Args:
        optimizer: The optimizer; the learning rates of its groups are the peaks.
        steps: Length of the schedule in steps, warm-up included; normally the length of the run.
        decay: Number of steps of the decay, at least 1. If fewer steps follow the warm-up, the decay has all of them.
        shape: The shape of the decay: "sqrt" for `1 - sqrt(x)`, "linear" for `1 - x`.
        floor: The fraction of the peak at which the schedule ends and stays, in [0, 1].
        warmup: Steps of linear warm-up; 0 for none.
        start: The fraction of the peak at which the warm-up begins, in [0, 1].

    Raises:
        ConfigError: A value is out of range.
    """
    length = _count_decay_steps(steps, warmup, floor)
    _check_count("decay", decay)
    _check_value(f"shape = {shape!r}", '"sqrt" or "linear"', holds=shape in ("sqrt", "linear"))
    falling = min(decay, length)

    def factor(step: float) -> float:
        x = min(1.0, max(0, step - (length - falling)) / falling)
        return 1 - (1 - floor) * (math.sqrt(x) if shape == "sqrt" else x)

    return _add_warmup(Schedule(optimizer, factor, length), warmup, start)


def _add_warmup(schedule: Schedule, warmup: int, start: float) -> LRScheduler:
    return Warmup(schedule, warmup, start) if warmup else schedule


def _count_decay_steps(steps: int, warmup: int, floor: float) -> int:
    """Return the number of steps after the warm-up, at least 1, because a trial run may be shorter than its warm-up."""
    _check_count("steps", steps)
    _check_fraction("floor", floor)
    return max(1, steps - warmup)


def _check_count(name: str, value: int) -> None:
    _check_value(f"{name} = {value}", "at least 1", holds=value >= 1)


def _check_fraction(name: str, value: float) -> None:
    expected = "a fraction of the highest learning rate, from 0 to 1"
    _check_value(f"{name} = {value}", expected, holds=0 <= value <= 1)


def _check_value(found: str, expected: str, *, holds: bool) -> None:
    if not holds:
        raise ConfigError(f"{found}: expected {expected}.")
