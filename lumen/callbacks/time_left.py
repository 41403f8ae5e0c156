"""How long a run takes yet."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from lumen.trainer.trainer import Trainer


@final
class TimeLeft:
    """Estimates how long a run takes yet: its steps by their mean time so far, its validations by the newest one.

    The time of validations is kept apart: after one, a mean over all time would let the steps pay for it once more.

    Args:
        step: The run begins to train now, at this step.
    """

    def __init__(self, step: int = 0) -> None:
        self._began = perf_counter(), step
        self._is_rated = False
        self._evaluated_s = 0.0  # since it began
        self._newest_s = 0.0  # what the newest validation took
        self._paused_at_s: float | None = None

    def pause(self) -> None:
        """A validation begins."""
        self._paused_at_s = perf_counter()

    def resume(self) -> None:
        """The validation is over."""
        if self._paused_at_s is not None:
            self._newest_s = perf_counter() - self._paused_at_s
            self._evaluated_s += self._newest_s
            self._paused_at_s = None

    def estimate(self, trainer: Trainer, total_steps: int | None) -> float | None:
        """Seconds left; None if the length is not known.

        Args:
            trainer: The one that counts the steps and knows the validations that are planned.
            total_steps: How many the run makes, those that are done included; None: unknown.
        """
        now, step = perf_counter() if self._paused_at_s is None else self._paused_at_s, trainer.global_step
        began_at_s, began_step = self._began
        trained_s = now - began_at_s - self._evaluated_s
        if step > began_step and not self._is_rated:  # the first step compiled, started workers: rate from its end
            self._began, self._is_rated, self._evaluated_s = (now, step), True, 0.0
        estimates = []
        if total_steps is not None and step > began_step:
            steps_s = (total_steps - step) * trained_s / (step - began_step)
            due = _validations(trainer, steps_s, step, total_steps) + (self._paused_at_s is not None)
            estimates.append(steps_s + due * self._newest_s)
        if trainer.plan.max_time_s is not None:
            estimates.append(trainer.plan.max_time_s - trainer.progress.elapsed_s)
        return max(min(estimates), 0.0) if estimates else None


def _validations(trainer: Trainer, steps_s: float, step: int, total_steps: int) -> int:
    """How many validations are due after this step.

    Args:
        trainer: The one that knows the validations that are planned.
        steps_s: Seconds that the steps take yet.
        step: Steps that are done.
        total_steps: How many the run makes.
    """
    plan, per_epoch = trainer.plan, trainer.steps_per_epoch
    if plan.val_every_s is not None:
        return int(steps_s / plan.val_every_s)
    if plan.val_every_n_steps is not None:
        every = float(plan.val_every_n_steps)
    elif per_epoch and plan.val_every_epoch_fraction is not None:
        every = per_epoch * plan.val_every_epoch_fraction
    else:
        return 0
    every *= plan.val_every_n_epochs
    return int(total_steps / every + 1e-9) - int(step / every + 1e-9)
