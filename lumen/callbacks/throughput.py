"""Measures the speed of a run by its counters, and its memory."""

from __future__ import annotations

import os
import resource
import sys
from collections import deque
from time import perf_counter
from typing import NamedTuple, final

import torch

from lumen.callbacks.used_trainer import UsedTrainer


class Rates(NamedTuple):
    """Speed of training over some time, evaluations left out.

    Attributes:
        steps_per_s: Optimizer updates per second.
        batches_per_s: Micro-batches per second, of all processes.
        samples_per_s: Training samples per second, of all processes.
        units_per_s: Sums of the updates' weights per second: tokens, boxes; samples where the task gives no weights.
        data_wait_share: Fraction of the time spent waiting for the loader, 0 to 1.
    """

    steps_per_s: float
    batches_per_s: float
    samples_per_s: float
    units_per_s: float
    data_wait_share: float


@final
class Throughput:
    """Measures the speed of a run between two readings of its counters.

    Args:
        window_s: Seconds to average over; 0: since the last reading.
    """

    def __init__(self, window_s: float = 0.0) -> None:
        self._window_s = window_s
        self._paused_s = 0.0

    def start(self, trainer: UsedTrainer) -> None:
        """Begin anew."""
        self._marks = deque([self._mark(trainer)])

    def pause(self) -> None:
        """Stop the clock: an evaluation begins."""
        self._paused_at_s = perf_counter()

    def resume(self) -> None:
        """Start the clock again: the evaluation is over."""
        self._paused_s += perf_counter() - self._paused_at_s

    def measure(self, trainer: UsedTrainer) -> Rates:
        """The speed up to now; after `start` and not during a pause."""
        marks, now = self._marks, self._mark(trainer)
        marks.append(now)
        while len(marks) > 2 and marks[1][0] <= now[0] - self._window_s:
            marks.popleft()
        seconds, *moved = (end - start for end, start in zip(now, marks[0], strict=True))
        rates = Rates._make(each / max(seconds, 1e-9) for each in moved)
        return rates._replace(data_wait_share=min(rates.data_wait_share, 1.0))

    def _mark(self, trainer: UsedTrainer) -> tuple[float, ...]:
        """Return the time without pauses, and the counters of the rates, in their order."""
        progress, counters = trainer.progress, trainer.run.step.counters
        counted = progress.step, progress.micro_batches, counters.samples, progress.units, counters.waited_s
        return perf_counter() - self._paused_s, *counted


def memory_mb(device: torch.device) -> float:
    """Megabytes (10^6 bytes): on CUDA the peak of allocated tensors in this run, else the RAM of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    except FileNotFoundError:  # no Linux: the highest value so far
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / 1e6 if sys.platform == "darwin" else peak / 1e3


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

    def estimate(self, trainer: UsedTrainer, total_steps: int | None) -> float | None:
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


def _validations(trainer: UsedTrainer, steps_s: float, step: int, total_steps: int) -> int:
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
