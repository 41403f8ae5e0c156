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
from lumen.strategies.strategy import SAME, Alike, Strategy

_LEAST_S, _LEAST_STEPS = 3.0, 10  # A comparison spans at least this, so that short noise does not count.
_TIMES, _PART, _LEAST_EXCESS_S = 1.5, 0.2, 0.01
_QUIET_S = 600.0


@final
class OwnTime:
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

    def begin_sum(self, numbers: Sequence[float]) -> Callable[[], list[float]]:
        """Begin a sum over the processes at the last backward of a step. Collective."""
        if not math.isnan(self._since_s):
            self.seconds += perf_counter() - self._processes.waited_s - self._since_s
            self.steps += 1
            self._since_s = math.nan
        return self._processes.begin_sum(numbers)


@final
class SlowRanks:
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
        self._quiet_until_s: dict[int, float] = {}
        self._quiet_s: dict[int, float] = {}

    def hear(self, ranks: Sequence[Mapping[str, float]]) -> None:
        """Compare the times of all ranks, and warn of slow ranks.

        Args:
            ranks: Totals of each rank: measured steps (`steps`), seconds in these steps until it waited for the others
                (`own_s`), and seconds of waiting for training data (`data_s`).
        """
        now_s = perf_counter()
        if not self._before:
            self._before, self._before_s = ranks, now_s
        steps, took_s = ranks[0]["steps"] - self._before[0]["steps"], now_s - self._before_s
        if steps < _LEAST_STEPS or took_s < _LEAST_S:
            return
        own_s, data_s = (
            [(now[name] - then[name]) / steps for now, then in zip(ranks, self._before, strict=True)]
            for name in ("own_s", "data_s")
        )
        slow = {rank: usual_s for rank in range(len(ranks)) if (usual_s := _exceeds(own_s, rank, took_s / steps))}
        for rank, usual_s in slow.items():
            if rank in self._suspects and now_s >= self._quiet_until_s.get(rank, 0.0):
                self._quiet_s[rank] = 2 * self._quiet_s.get(rank, _QUIET_S / 2)
                self._quiet_until_s[rank] = now_s + self._quiet_s[rank]
                _log.warning(
                    "rank %d (host %s) is slow, and the others wait for it: %.2g s a step where the median of the "
                    "others is %.2g s, %.2g s of it waiting for data",
                    rank, self._processes.host_of(rank), own_s[rank], usual_s, min(data_s[rank], own_s[rank]),
                )  # fmt: skip
        self._suspects = {*slow}
        self._before, self._before_s = ranks, now_s


def _exceeds(own_s: Sequence[float], rank: int, step_s: float) -> float | None:
    """Return the median of the other ranks, in seconds per step, if a rank is slow; None if the rank is not slow."""
    usual_s = median(each for other, each in enumerate(own_s) if other != rank)
    excess_s = own_s[rank] - usual_s
    is_slow = own_s[rank] > _TIMES * usual_s and excess_s > max(_PART * step_s, _LEAST_EXCESS_S)
    return usual_s if is_slow else None


_SPENT, _COUNTED = ("steps", "own_s", "data_s"), ("number of the step", "number of micro-batches")
_NORMS: tuple[Alike, Alike] = ("gradient norm", "sum of the parameters' norms")
_GRADIENTS, _PARAMETERS = _NORMS
_TOLD = 8
_WHY = {
    **dict.fromkeys(_COUNTED, "What counts steps and batches, as trainer.progress, is to be read only."),
    _GRADIENTS: "Something has written gradients on one of them after they were averaged, or a device or the network "
    "makes errors. Write gradients in on_before_optimizer_step, on all ranks alike.",
    _PARAMETERS: "Something has written parameters on one of them only, or a device makes errors. Write parameters in "
    "on_before_zero_grad, which every rank calls once a step.",
}


@final
class AgreementGuard:
    """Check that the ranks of a run still agree, and detection of slow ranks.

    Each rank sends its numbers of a logged step to the others one step later, when its device has computed them. It
    reads the numbers of the others another step later, when these have arrived. A single process does nothing.

    Args:
        strategy: Strategy of the run, which lists the numbers that must be equal on all ranks.
        progress: Counters of the run.
        step: The step in progress, with the newest gradient norm and the time spent waiting for data.

    Attributes:
        is_on: True if there are several processes.
        own_time: Time that this process takes for its steps until it waits for the others.
    """

    def __init__(self, strategy: Strategy, progress: Progress, step: StepContext) -> None:
        self._strategy, self._processes = strategy, strategy.processes
        self._progress, self._step = progress, step
        self.is_on = strategy.processes.world_size > 1
        self._slow = SlowRanks(strategy.processes)
        self.own_time = OwnTime(strategy.processes)
        self._own: HostCopy[str] | None = None  # the numbers of this rank, during their copy to the host
        self._all: Callable[[], list[list[float]]] | None = None  # waits for the numbers of all ranks

    def begin(self) -> None:
        """Begin to compare the newest step."""
        if not self.is_on:
            return
        progress, step, own = self._progress, self._step, self.own_time
        spent, counted = (own.steps, own.seconds, step.counters.waited_s), (progress.step, progress.micro_batches)
        values: dict[str, float | torch.Tensor] = dict(zip(_SPENT + _COUNTED, spent + counted, strict=True))
        self._own = HostCopy(values | dict.fromkeys(_NORMS, math.nan) | self._strategy.alike(step.grad_norm))

    def look(self) -> None:
        """Continue the comparison that an earlier step began. Collective: every rank must call this after each step.

        Raises:
            TrainingError: The ranks do not agree. All ranks raise this error.
        """
        if self._all is not None:
            found, self._all = self._all(), None
            self._compare([dict(zip(_SPENT + _COUNTED + _NORMS, each, strict=True)) for each in found])
        if self._own is not None:
            own, self._own = self._own, None
            self._all = self._processes.begin_gather([*own.read().values()])

    def settle(self) -> None:
        """Finish all comparisons before a checkpoint is saved. Collective: every rank must call this.

        Raises:
            TrainingError: The ranks do not agree. All ranks raise this error.
        """
        self.look()
        self.look()

    def _compare(self, ranks: Sequence[dict[str, float]]) -> None:
        for name in (*_COUNTED, *_NORMS):
            tolerance = SAME if name in _NORMS else 0.0
            if others := [rank for rank, each in enumerate(ranks) if not _same(each[name], ranks[0][name], tolerance)]:
                self._refuse(name, others, ranks)
        if self._processes.is_global_zero:
            self._slow.hear(ranks)

    def _refuse(self, name: str, others: Sequence[int], ranks: Sequence[dict[str, float]]) -> None:
        """Raise an error on all ranks that names what differs. Collective."""
        headline = f"the ranks no longer agree, found after step {ranks[0][_COUNTED[0]]:.0f}"
        if name == _PARAMETERS:
            try:
                with self._strategy.evaluation(inference_mode=False):  # This context compares each parameter first.
                    pass
            except TrainingError as error:
                raise TrainingError(f"{headline}: {error}") from None
        found = ", ".join(f"{ranks[rank][name]:.9g} on rank {rank}" for rank in others[:_TOLD])
        more = f", and another one on {len(others) - _TOLD} ranks more" if len(others) > _TOLD else ""
        raise TrainingError(f"{headline}: the {name} is {ranks[0][name]:.9g} on rank 0 and {found}{more}. {_WHY[name]}")


def _same(one: float, other: float, tolerance: float) -> bool:
    """Return True if two numbers are equal within a relative tolerance; NaN equals NaN."""
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return one == other or abs(one - other) <= tolerance * max(abs(one), abs(other)) < math.inf
