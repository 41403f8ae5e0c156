"""Learning-rate schedules with warm-up: functions of the step, and warm-up around any scheduler of torch."""

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
    """Each group's learning rate times a function of the step alone.

    A resumed run repeats it bit for bit. The function and the length are the configuration's, not the checkpoint's: a
    run that goes on with a longer schedule follows the longer one after its first update.

    Args:
        optimizer: The optimizer; the learning rates of its groups are the peaks.
        factor: Called with the step, 0 at the first update (or with the tokens so far); returns the factor.
        total_steps: The step at which the schedule ends; None if it never does.
    """

    def __init__(self, optimizer: Optimizer, factor: Callable[[float], float], total_steps: int | None = None) -> None:
        self.factor, self.total_steps = factor, total_steps
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """Learning rates of the groups at this step."""
        return [base * self.factor(self.last_epoch) for base in self.base_lrs]

    def move_to(self, position: float) -> None:
        """Go to a position that the caller counts, in tokens for example, instead of one step further."""
        move_schedule(self, position)

    def state_dict(self) -> dict[str, Any]:
        """The schedule's position, as plain data."""
        return {key: value for key, value in super().state_dict().items() if key not in ("factor", "total_steps")}


@final
class Warmup(LRScheduler):
    """Linear warm-up before any scheduler (Goyal et al., Accurate, Large Minibatch SGD, 2017).

    Step s of the warm-up has the learning rate `target * (start + (1 - start) * s / steps)`, where `target` is what the
    scheduler begins with. From step `steps` on the scheduler moves as it would have from its own step 0.

    A ReduceLROnPlateau is stepped by its owner, with its metric; until the warm-up is over it is in its cooldown, so
    that it notes the best value but does not act. In a run these two are the same::

        {"scheduler": Warmup(ReduceLROnPlateau(optimizer), 500), "interval": "step", "monitor": "val_loss"}
        {"scheduler": ReduceLROnPlateau(optimizer), "monitor": "val_loss", "warmup_steps": 500}

    `warmup_steps` (and `warmup_start`) put a warm-up that counts steps before any scheduler, whatever that counts: here
    the first epoch whose end comes after the warm-up is the first of the ten. `warmup_epochs` counts epochs, and begins
    at 1 / (warmup_epochs + 1) where `warmup_start` is not given, since at 0 the first epoch would train nothing;
    `warmup_factor` is this class's `factor`::

        {"scheduler": StepLR(optimizer, 10), "interval": "epoch", "warmup_steps": 500}
        {"scheduler": ReduceLROnPlateau(optimizer), "monitor": "val_loss", "warmup_epochs": 5}

    Args:
        scheduler: A scheduler that has made no step yet. From now on this one steps it; but see `leads`.
        steps: Length of the warm-up in calls of `step`, at least 1: steps, epochs or tokens as the `interval` says.
        start: Where the warm-up begins, as a fraction of the target, in [0, 1].
        factor: Called with s, 0 to `steps` - 1; returns the fraction of the target, in place of the line from `start`.

    Attributes:
        leads: This one steps the scheduler after the warm-up; False for ReduceLROnPlateau, which needs its metric.

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
        """Whether the warm-up is over, so that the learning rates are those of the scheduler."""
        return self.last_epoch >= self.steps

    def leave_steps(self) -> None:
        """Step the scheduler no longer after the warm-up: the run does, with its metric."""
        self.leads = False

    def step(self) -> None:  # type: ignore[override]
        """Move by one: the warm-up, or the scheduler after it."""
        if not self.over:
            super().step()
            if isinstance(self.scheduler, ReduceLROnPlateau):
                self.scheduler.cooldown_counter = 0 if self.over else sys.maxsize
            return
        self.last_epoch += 1
        if self.leads:
            self.scheduler.step()

    def move_to(self, position: float) -> None:
        """Go to a position that the caller counts, such as tokens; only with a scheduler that has `move_to` too."""
        if position <= self.steps:
            move_schedule(self, position)
        else:
            self.last_epoch = position  # type: ignore[assignment]
            self.scheduler.move_to(position - self.steps)  # type: ignore[attr-defined]

    def get_lr(self) -> list[float | Tensor]:
        """Learning rates of the groups at this step of the warm-up."""
        if self.last_epoch == self.steps:  # exactly, which the formula is not for every start
            return self.targets
        if self.factor is not None:
            return [target * self.factor(self.last_epoch) for target in self.targets]
        share = self.start + (1 - self.start) * self.last_epoch / self.steps
        return [target * share for target in self.targets]

    def get_last_lr(self) -> list[float | Tensor]:
        """Learning rates of the groups, be they set by the warm-up or by the scheduler."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """The positions of warm-up and scheduler; plain data if the scheduler's state is."""
        own = {
            key: value
            for key, value in super().state_dict().items()
            if key not in ("steps", "start", "factor", "leads")
        }
        return own | {"scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the positions of warm-up and scheduler."""
        self.scheduler.load_state_dict(state_dict["scheduler"])
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "scheduler"})


def constant(optimizer: Optimizer, *, warmup: int = 0, start: float = 0.0) -> LRScheduler:
    """The optimizer's learning rates, after a warm-up.

    Args:
        optimizer: The optimizer; the learning rates of its groups are the peaks.
        warmup: Steps of linear warm-up; 0 for none.
        start: Where the warm-up begins, as a fraction of the peak, in [0, 1].

    Raises:
        ConfigError: A value is out of range.
    """
    return _warmed(Schedule(optimizer, lambda step: 1.0), warmup, start)


def linear(optimizer: Optimizer, steps: int, *, floor: float = 0.0, warmup: int = 0, start: float = 0.0) -> LRScheduler:
    """Straight down, as in BERT (Devlin et al., 2018): `1 - (1 - floor) * x` with x from 0 to 1.

    Args:
        optimizer: The optimizer; the learning rates of its groups are the peaks.
        steps: Length of the schedule, its warm-up included: that of the run.
        floor: Where it ends and stays, as a fraction of the peak, in [0, 1].
        warmup: Steps of linear warm-up; 0 for none.
        start: Where the warm-up begins, as a fraction of the peak, in [0, 1].

    Raises:
        ConfigError: A value is out of range.
    """
    length = _length(steps, warmup, floor)
    return _warmed(Schedule(optimizer, lambda step: 1 - (1 - floor) * min(1.0, step / length), length), warmup, start)


def cosine(optimizer: Optimizer, steps: int, *, floor: float = 0.0, warmup: int = 0, start: float = 0.0) -> LRScheduler:
    """Half a cosine down: `floor + (1 - floor) * (1 + cos(pi * x)) / 2` with x from 0 to 1.

    Loshchilov & Hutter, SGDR, 2017, without restarts. The arguments and errors are those of `linear`.
    """
    length = _length(steps, warmup, floor)

    def factor(step: float) -> float:
        return floor + (1 - floor) * (1 + math.cos(math.pi * min(1.0, step / length))) / 2

    return _warmed(Schedule(optimizer, factor, length), warmup, start)


def inverse_sqrt(optimizer: Optimizer, warmup: int, *, start: float = 0.0) -> LRScheduler:
    """`sqrt(warmup / s)` at step s, after the warm-up (Vaswani et al., Attention Is All You Need, 2017).

    The optimizer's learning rate is the peak: the paper's is `(d_model * warmup) ** -0.5`.

    Args:
        optimizer: The optimizer; the learning rates of its groups are the peaks.
        warmup: Steps of linear warm-up, at least 1.
        start: Where the warm-up begins, as a fraction of the peak, in [0, 1].

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
    """Warm-up, stable, decay (Hu et al., MiniCPM, 2024).

    The last `decay` steps fall to the floor as `1 - sqrt(x)` (Hägele et al., Scaling Laws and Compute-Optimal Training
    Beyond Fixed Training Durations, 2024) or as `1 - x`, with x from 0 to 1.

    Args:
        optimizer: The optimizer; the learning rates of its groups are the peaks.
        steps: Length of the schedule, its warm-up included: that of the run.
        decay: How many of the steps decay, at least 1; in a shorter run all after the warm-up.
        shape: The function by which the rate falls, named by x: see above.
        floor: Where it ends and stays, as a fraction of the peak, in [0, 1].
        warmup: Steps of linear warm-up; 0 for none.
        start: Where the warm-up begins, as a fraction of the peak, in [0, 1].

    Raises:
        ConfigError: A value is out of range.
    """
    length = _length(steps, warmup, floor)
    _check_count("decay", decay)
    _check(f"shape = {shape!r}", '"sqrt" or "linear"', holds=shape in ("sqrt", "linear"))
    falling = min(decay, length)

    def factor(step: float) -> float:
        x = min(1.0, max(0, step - (length - falling)) / falling)
        return 1 - (1 - floor) * (math.sqrt(x) if shape == "sqrt" else x)

    return _warmed(Schedule(optimizer, factor, length), warmup, start)


def _warmed(schedule: Schedule, warmup: int, start: float) -> LRScheduler:
    return Warmup(schedule, warmup, start) if warmup else schedule


def _length(steps: int, warmup: int, floor: float) -> int:
    """Number of steps after the warm-up, at least 1: a trial run may be shorter than its warm-up."""
    _check_count("steps", steps)
    _check_fraction("floor", floor)
    return max(1, steps - warmup)


def _check_count(name: str, value: int) -> None:
    _check(f"{name} = {value}", "at least 1", holds=value >= 1)


def _check_fraction(name: str, value: float) -> None:
    expected = "a fraction of the highest learning rate, from 0 to 1"
    _check(f"{name} = {value}", expected, holds=0 <= value <= 1)


def _check(found: str, expected: str, *, holds: bool) -> None:
    if not holds:
        raise ConfigError(f"{found}: it must be {expected}.")
