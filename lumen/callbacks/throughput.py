"""Measurement of a run's speed and memory, and the estimate of its remaining time."""

from __future__ import annotations

import os
import resource
import sys
from collections import deque
from time import perf_counter
from typing import NamedTuple, final

import torch

from lumen.callbacks.callback_trainer import CallbackTrainer


class Rates(NamedTuple):
    """Speed of training over some time, evaluations excluded.

    Attributes:
        steps_per_s: Optimizer updates per second.
        batches_per_s: Micro-batches per second, of all processes.
        samples_per_s: Training samples per second, of all processes.
        units_per_s: Sums of the updates' weights per second: tokens, boxes; samples if the task gives no weights.
        data_wait_share: Fraction of the time spent waiting for the loader, 0 to 1.
    """

    steps_per_s: float
    batches_per_s: float
    samples_per_s: float
    units_per_s: float
    data_wait_share: float


@final
class Throughput:
    """Meter of a run's speed between two readings of its counters.

    Args:
        window_s: Seconds to average over; 0: since the last reading.
    """

    def __init__(self, window_s: float = 0.0) -> None:
        self._window_s = window_s
        self._paused_s = 0.0

    def start(self, trainer: CallbackTrainer) -> None:
        """Start the measurement."""
        self._marks = deque([self._read_counters(trainer)])

    def pause(self, trainer: CallbackTrainer) -> None:
        """Stop the clock when an evaluation begins."""
        self._paused_at_s = _read_clock(trainer)

    def resume(self, trainer: CallbackTrainer) -> None:
        """Start the clock again after an evaluation."""
        self._paused_s += _read_clock(trainer) - self._paused_at_s

    def measure(self, trainer: CallbackTrainer) -> Rates:
        """Return the speed up to now; call after `start` and not during a pause."""
        marks, now = self._marks, self._read_counters(trainer)
        marks.append(now)
        while len(marks) > 2 and marks[1][0] <= now[0] - self._window_s:
            marks.popleft()
        seconds, *moved = (end - start for end, start in zip(now, marks[0], strict=True))
        rates = Rates._make(each / max(seconds, 1e-9) for each in moved)
        return rates._replace(data_wait_share=min(rates.data_wait_share, 1.0))

    def _read_counters(self, trainer: CallbackTrainer) -> tuple[float, ...]:
        """Return the time without pauses, and the counters in the order of `Rates`."""
        progress, counters = trainer.progress, trainer.run.step.counters
        counted = progress.step, progress.micro_batches, counters.samples, progress.units, counters.waited_s
        return _read_clock(trainer) - self._paused_s, *counted


def _read_clock(trainer: CallbackTrainer) -> float:
    """Return the time in seconds, without the time in which a debugger or a signal held the process."""
    return perf_counter() - trainer.run.step.counters.held_s


def measure_memory_mb(device: torch.device) -> float:
    """Return megabytes (10^6 bytes): on CUDA the peak of allocated tensors in this run, else the process's RAM."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    except FileNotFoundError:  # Outside Linux, return the highest value so far.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / 1e6 if sys.platform == "darwin" else peak / 1e3


@final
class TimeEstimator:
    """Estimator of a run's remaining time, from the mean time of its steps and the time of its newest validation.

    Validations are timed separately: otherwise the mean time of a step would include the last validation.
    """

    def __init__(self) -> None:
        self._has_rate = False
        self._evaluated_s = 0.0  # seconds of validations since the start
        self._newest_s = 0.0  # seconds of the newest validation
        self._paused_at_s: float | None = None

    def start(self, trainer: CallbackTrainer) -> None:
        """Begin to measure when training begins."""
        self._started_at = _read_clock(trainer), trainer.global_step
        self._evaluated_s = self._newest_s = 0.0

    def pause(self, trainer: CallbackTrainer) -> None:
        """Record the beginning of a validation."""
        self._paused_at_s = _read_clock(trainer)

    def resume(self, trainer: CallbackTrainer) -> None:
        """Note that a validation ends."""
        if self._paused_at_s is not None:
            self._newest_s = _read_clock(trainer) - self._paused_at_s
            self._evaluated_s += self._newest_s
            self._paused_at_s = None

    def estimate(self, trainer: CallbackTrainer, total_steps: int | None) -> float | None:
        """Return the seconds left, or None if the length of the run is unknown.

        Args:
            trainer: The trainer, with its step and its planned validations.
            total_steps: Number of steps of the run, including the completed ones; None: unknown.
        """
        now, step = _read_clock(trainer) if self._paused_at_s is None else self._paused_at_s, trainer.global_step
        began_at_s, began_step = self._started_at
        trained_s = now - began_at_s - self._evaluated_s
        if step > began_step and not self._has_rate:  # Leave out the first step: it compiles and starts workers.
            self._started_at, self._has_rate, self._evaluated_s = (now, step), True, 0.0
        estimates = []
        if total_steps is not None and step > began_step:
            steps_s = (total_steps - step) * trained_s / (step - began_step)
            due = _count_validations(trainer, steps_s, step, total_steps) + (self._paused_at_s is not None)
            estimates.append(steps_s + due * self._newest_s)
        if trainer.plan.max_time_s is not None:
            estimates.append(trainer.plan.max_time_s - trainer.progress.elapsed_s)
        return max(min(estimates), 0.0) if estimates else None


def _count_validations(trainer: CallbackTrainer, steps_s: float, step: int, total_steps: int) -> int:
    """Return the number of validations due after this step.

    Args:
        trainer: The trainer with the planned validations.
        steps_s: Seconds left for the steps.
        step: Number of completed steps.
        total_steps: Number of steps of the run.
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
