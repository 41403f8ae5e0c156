"""Comparison of the ranks at logged steps, without waiting: of numbers that must be equal, and of times per step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from time import perf_counter
from typing import final

import torch

from lumen.console import logger as _log
from lumen.distributed.processes import Processes
from lumen.errors import TrainingError
from lumen.metrics.step_values import HostCopy
from lumen.run.plan import Progress
from lumen.run.step_context import StepContext
from lumen.strategies.strategy import NORM_TOLERANCE, RankInvariant, Strategy

_MIN_S, _MIN_STEPS = 3.0, 10  # A comparison spans at least this, so that short noise does not count.
_MIN_RATIO, _MIN_SHARE, _MIN_EXCESS_S = 1.5, 0.2, 0.01
_MIN_WARNING_INTERVAL_S = 600.0


@final
class LocalStepTime:
    """Host time that this process takes for its steps, without waiting for other processes.

    A measurement begins when Lumen requests the data of a step. It ends at the last backward, in which processes wait
    for each other. Waits for collectives before that backward do not count. Device time is not measured.

    Args:
        processes: The processes of the run.

    Attributes:
        seconds: Sum over all measured steps. The first step of an epoch is not measured.
        steps: Number of measured steps.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes, self._since_s = processes, math.nan
        self.seconds, self.steps = 0.0, 0

    def start(self) -> None:
        """Start to measure, because the data of the next step is requested now."""
        self._since_s = perf_counter() - self._processes.waited_s

    def start_sum(self, numbers: Sequence[float]) -> Callable[[], list[float]]:
        """Begin a sum over the processes at the last backward of a step. Collective."""
        if not math.isnan(self._since_s):
            self.seconds += perf_counter() - self._processes.waited_s - self._since_s
            self.steps += 1
            self._since_s = math.nan
        return self._processes.start_sum(numbers)


@final
class SlowRankMonitor:
    """Detector of ranks that the other ranks wait for. Rank 0 logs the warnings.

    A rank is slow if its time exceeds 1.5 times the median of the others in two successive comparisons. The excess must
    also be more than 10 ms and a fifth of a step. A comparison spans at least 10 steps and 3 seconds. A warning is
    repeated after 10 minutes at the earliest, then after 20, 40, ...

    Args:
        processes: The processes of the run.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._before: Sequence[Mapping[str, float]] = ()
        self._before_s, self._suspects = 0.0, set[int]()
        self._next_warning_s: dict[int, float] = {}
        self._warning_interval_s: dict[int, float] = {}

    def compare_ranks(self, ranks: Sequence[Mapping[str, float]]) -> None:
        """Compare the times of all ranks, and warn of slow ranks.

        Args:
            ranks: Totals of each rank: measured steps (`steps`), seconds in these steps until it waited for the others
                (`local_s`), and seconds of waiting for training data (`data_s`).
        """
        now_s = perf_counter()
        if not self._before:
            self._before, self._before_s = ranks, now_s
        steps, took_s = ranks[0]["steps"] - self._before[0]["steps"], now_s - self._before_s
        if steps < _MIN_STEPS or took_s < _MIN_S:
            return
        local_s, data_s = (
            [(now[name] - then[name]) / steps for now, then in zip(ranks, self._before, strict=True)]
            for name in ("local_s", "data_s")
        )
        slow = {
            rank: usual_s
            for rank in range(len(ranks))
            if (usual_s := _find_usual_if_slow(local_s, rank, took_s / steps))
        }
        for rank, usual_s in slow.items():
            if rank in self._suspects and now_s >= self._next_warning_s.get(rank, 0.0):
                self._warning_interval_s[rank] = 2 * self._warning_interval_s.get(rank, _MIN_WARNING_INTERVAL_S / 2)
                self._next_warning_s[rank] = now_s + self._warning_interval_s[rank]
                _log.warning(
                    "rank %d (host %s) is slow, and the other ranks wait for it: %.2g s a step, where their median is "
                    "%.2g s; it waits %.2g s a step for data",
                    rank, self._processes.get_host(rank), local_s[rank], usual_s, min(data_s[rank], local_s[rank]),
                )  # fmt: skip
        self._suspects = {*slow}
        self._before, self._before_s = ranks, now_s


def _find_usual_if_slow(local_s: Sequence[float], rank: int, step_s: float) -> float | None:
    """Return the median of the other ranks, in seconds per step, if a rank is slow; None if the rank is not slow."""
    usual_s = median(each for other, each in enumerate(local_s) if other != rank)
    excess_s = local_s[rank] - usual_s
    is_slow = local_s[rank] > _MIN_RATIO * usual_s and excess_s > max(_MIN_SHARE * step_s, _MIN_EXCESS_S)
    return usual_s if is_slow else None


_TIMINGS, _COUNTERS = ("steps", "local_s", "data_s"), ("number of the step", "number of micro-batches")
_NORMS: tuple[RankInvariant, RankInvariant] = ("gradient norm", "sum of the parameters' norms")
_GRADIENTS, _PARAMETERS = _NORMS
_MAX_LISTED_RANKS = 8
_LIKELY_CAUSES = {
    **dict.fromkeys(_COUNTERS, "Never change counters of steps and batches, such as trainer.progress."),
    _GRADIENTS: "Code on one rank has changed gradients after they were averaged, or a device or the network makes "
    "errors. Change gradients in on_before_optimizer_step, equally on all ranks.",
    _PARAMETERS: "Code on one rank has changed parameters, or a device makes errors. Change parameters in "
    "on_before_zero_grad, which every rank calls once a step.",
}


@final
class ConsistencyGuard:
    """Check that the ranks of a run still agree, and detection of slow ranks.

    Each rank sends its numbers of a logged step to the others one step later, when its device has computed them. It
    reads the numbers of the others another step later, when these have arrived. A single process does nothing.

    Args:
        strategy: Strategy of the run, which lists the numbers that must be equal on all ranks.
        progress: Counters of the run.
        step: The step in progress, with the newest gradient norm and the time spent waiting for data.

    Attributes:
        is_enabled: True if there are several processes.
        local_time: Time that this process takes for its steps until it waits for the others.
    """

    def __init__(self, strategy: Strategy, progress: Progress, step: StepContext) -> None:
        self._strategy, self._processes = strategy, strategy.processes
        self._progress, self._step = progress, step
        self.is_enabled = strategy.processes.world_size > 1
        self._slow_ranks = SlowRankMonitor(strategy.processes)
        self.local_time = LocalStepTime(strategy.processes)
        self._local_values: HostCopy[str] | None = None  # the numbers of this rank, during their copy to the host
        self._rank_values: Callable[[], list[list[float]]] | None = None  # waits for the numbers of all ranks

    def start_comparison(self) -> None:
        """Begin to compare the newest step."""
        if not self.is_enabled:
            return
        progress, step, local_time = self._progress, self._step, self.local_time
        spent, counted = (
            (local_time.steps, local_time.seconds, step.counters.waited_s),
            (progress.step, progress.micro_batches),
        )
        values: dict[str, float | torch.Tensor] = dict(zip(_TIMINGS + _COUNTERS, spent + counted, strict=True))
        self._local_values = HostCopy(
            values | dict.fromkeys(_NORMS, math.nan) | self._strategy.collect_rank_invariants(step.grad_norm)
        )

    def finish_pending_comparison(self) -> None:
        """Continue the comparison that an earlier step began. Collective: every rank must call this after each step.

        Raises:
            TrainingError: The ranks do not agree. All ranks raise this error.
        """
        if self._rank_values is not None:
            found, self._rank_values = self._rank_values(), None
            self._compare_ranks([dict(zip(_TIMINGS + _COUNTERS + _NORMS, each, strict=True)) for each in found])
        if self._local_values is not None:
            copied, self._local_values = self._local_values, None
            self._rank_values = self._processes.start_all_gather([*copied.read().values()])

    def wait_for_comparison(self) -> None:
        """Finish all comparisons before a checkpoint is saved. Collective: every rank must call this.

        Raises:
            TrainingError: The ranks do not agree. All ranks raise this error.
        """
        self.finish_pending_comparison()
        self.finish_pending_comparison()

    def _compare_ranks(self, ranks: Sequence[dict[str, float]]) -> None:
        for name in (*_COUNTERS, *_NORMS):
            tolerance = NORM_TOLERANCE if name in _NORMS else 0.0
            if differing := [
                rank for rank, each in enumerate(ranks) if not _is_same_number(each[name], ranks[0][name], tolerance)
            ]:
                self._raise_difference(name, differing, ranks)
        if self._processes.is_global_zero:
            self._slow_ranks.compare_ranks(ranks)

    def _raise_difference(self, name: str, differing: Sequence[int], ranks: Sequence[dict[str, float]]) -> None:
        """Raise an error on all ranks that names what differs. Collective."""
        headline = f"the ranks no longer agree, found after step {ranks[0][_COUNTERS[0]]:.0f}"
        if name == _PARAMETERS:
            try:
                with self._strategy.evaluation(inference_mode=False):  # This context compares each parameter first.
                    pass
            except TrainingError as error:
                raise TrainingError(f"{headline}: {error}") from None
        found = ", ".join(f"{ranks[rank][name]:.9g} on rank {rank}" for rank in differing[:_MAX_LISTED_RANKS])
        unlisted = len(differing) - _MAX_LISTED_RANKS
        rest = f", and different on {unlisted} more ranks" if unlisted > 0 else ""
        raise TrainingError(
            f"{headline}: the {name} is {ranks[0][name]:.9g} on rank 0 and {found}{rest}. {_LIKELY_CAUSES[name]}"
        )


def _is_same_number(one: float, other: float, tolerance: float) -> bool:
    """Return True if two numbers are equal within a relative tolerance; NaN equals NaN."""
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return one == other or abs(one - other) <= tolerance * max(abs(one), abs(other)) < math.inf
