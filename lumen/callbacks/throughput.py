"""Measures the speed of a run by its counters, and its memory."""

from __future__ import annotations

import os
import resource
import sys
from collections import deque
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple, final

import torch

if TYPE_CHECKING:
    from lumen.trainer.run_view import RunView


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


class _Mark(NamedTuple):
    time_s: float
    steps: int
    batches: int
    samples: int
    units: float
    waited_s: float


@final
class Throughput:
    """Measures the speed of a run between two readings of its counters.

    Args:
        window_s: Seconds to average over; 0: since the last reading.
    """

    def __init__(self, window_s: float = 0.0) -> None:
        self._window_s = window_s
        self._marks: deque[_Mark] = deque()
        self._paused_s = 0.0
        self._paused_at_s = 0.0

    def start(self, trainer: RunView) -> None:
        """Begin anew."""
        self._marks = deque([self._mark(trainer)])

    def pause(self) -> None:
        """Stop the clock: an evaluation begins."""
        self._paused_at_s = perf_counter()

    def resume(self) -> None:
        """Start the clock again: the evaluation is over."""
        self._paused_s += perf_counter() - self._paused_at_s

    def measure(self, trainer: RunView) -> Rates:
        """The speed up to now; after `start` and not during a pause."""
        marks, now = self._marks, self._mark(trainer)
        marks.append(now)
        while len(marks) > 2 and marks[1].time_s <= now.time_s - self._window_s:
            marks.popleft()
        then = marks[0]
        seconds = max(now.time_s - then.time_s, 1e-9)
        rates = Rates._make((end - start) / seconds for end, start in zip(now[1:], then[1:], strict=True))
        return rates._replace(data_wait_share=min(rates.data_wait_share, 1.0))

    def _mark(self, trainer: RunView) -> _Mark:
        progress, counters = trainer.progress, trainer.counters
        return _Mark(
            perf_counter() - self._paused_s,
            progress.step,
            progress.micro_batches,
            counters.samples,
            progress.units,
            counters.waited_s,
        )


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
