"""What all ranks must have alike is compared at logged steps, without waiting; so is how long each one takes."""

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

_LEAST_S, _LEAST_STEPS = 3.0, 10  # of one look, so that a moment's noise does not count
_TIMES, _PART, _LEAST_EXCESS_S = 1.5, 0.2, 0.01
_QUIET_S = 600.0


@final
class OwnTime:
    """Time that this process takes for its steps by itself, on the host.

    It is what passes from where the data of a step is asked for to its last backward, in which processes wait for each
    other; without waiting for what they say before that. What a device computes meanwhile is not seen.

    Args:
        processes: Those of the run.

    Attributes:
        seconds: Sum over all steps that were measured; not the first one of an epoch.
        steps: How many these are.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes, self._since_s = processes, math.nan
        self.seconds, self.steps = 0.0, 0

    def start(self) -> None:
        """The data of the next step is asked for."""
        self._since_s = perf_counter() - self._processes.waited_s

    def begin_sum(self, numbers: Sequence[float]) -> Callable[[], list[float]]:
        """Begin a sum over the processes where the last backward of a step begins. Collective."""
        if not math.isnan(self._since_s):
            self.seconds += perf_counter() - self._processes.waited_s - self._since_s
            self.steps += 1
            self._since_s = math.nan
        return self._processes.begin_sum(numbers)


@final
class SlowRanks:
    """Warns of ranks that hold up the others, on rank 0.

    A rank is slow if it takes 1.5 times as long as the median of the others, that is 10 ms and a fifth of a step more,
    in two looks after each other; a look is of 10 steps and 3 seconds at least. It is told once, and again after 10
    minutes, after 20, 40, ...

    Args:
        processes: Those of the run.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._before: Sequence[Mapping[str, float]] = ()
        self._before_s, self._suspects = 0.0, set[int]()
        self._quiet_until_s: dict[int, float] = {}
        self._quiet_s: dict[int, float] = {}

    def hear(self, ranks: Sequence[Mapping[str, float]]) -> None:
        """Look at what all ranks have spent so far.

        Args:
            ranks: For each rank the steps that were measured (`steps`), the seconds in them until it waited for the
                others (`own_s`), and the seconds for which it waited for training data (`data_s`).
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
    """What is usual, in seconds a step, if a rank takes so much longer that it is slow; None: it is not."""
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
    """Finds out whether the ranks of a run still agree, and which are slow.

    Of a logged step each rank tells the others its numbers once its device has computed them, a step later, and hears
    theirs one more step later, when they have long arrived. On a single process nothing is done.

    Args:
        strategy: Knows which numbers all ranks must have alike.
        progress: Counters of the run.
        step: The step in progress, with the newest gradient norm and the time that was waited for data.

    Attributes:
        is_on: There are several processes.
        own_time: How long this process takes for its steps until it waits for the others.
    """

    def __init__(self, strategy: Strategy, progress: Progress, step: StepContext) -> None:
        self._strategy, self._processes = strategy, strategy.processes
        self._progress, self._step = progress, step
        self.is_on = strategy.processes.world_size > 1
        self._slow = SlowRanks(strategy.processes)
        self.own_time = OwnTime(strategy.processes)
        self._own: HostCopy[str] | None = None  # on its way to the host
        self._all: Callable[[], list[list[float]]] | None = None  # on its way to all ranks

    def begin(self) -> None:
        """Begin to compare the newest step."""
        if not self.is_on:
            return
        progress, step, own = self._progress, self._step, self.own_time
        spent, counted = (own.steps, own.seconds, step.counters.waited_s), (progress.step, progress.micro_batches)
        values: dict[str, float | torch.Tensor] = dict(zip(_SPENT + _COUNTED, spent + counted, strict=True))
        self._own = HostCopy(values | dict.fromkeys(_NORMS, math.nan) | self._strategy.alike(step.grad_norm))

    def look(self) -> None:
        """Go on with what was begun in a step before. Collective: every rank must call this after each step.

        Raises:
            TrainingError: Ranks do not agree; it is raised on all.
        """
        if self._all is not None:
            found, self._all = self._all(), None
            self._compare([dict(zip(_SPENT + _COUNTED + _NORMS, each, strict=True)) for each in found])
        if self._own is not None:
            own, self._own = self._own, None
            self._all = self._processes.begin_gather([*own.read().values()])

    def settle(self) -> None:
        """Wait for what was begun, before anything is saved of it. Collective: every rank must call this.

        Raises:
            TrainingError: Ranks do not agree; it is raised on all.
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
        """Say on all ranks what differs. Collective."""
        headline = f"the ranks no longer agree, found after step {ranks[0][_COUNTED[0]]:.0f}"
        if name == _PARAMETERS:
            try:
                with self._strategy.evaluation(inference_mode=False):  # it looks at each parameter first
                    pass
            except TrainingError as error:
                raise TrainingError(f"{headline}: {error}") from None
        found = ", ".join(f"{ranks[rank][name]:.9g} on rank {rank}" for rank in others[:_TOLD])
        more = f", and another one on {len(others) - _TOLD} ranks more" if len(others) > _TOLD else ""
        raise TrainingError(f"{headline}: the {name} is {ranks[0][name]:.9g} on rank 0 and {found}{more}. {_WHY[name]}")


def _same(one: float, other: float, tolerance: float) -> bool:
    """Of two numbers that may both be NaN, or infinite."""
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return one == other or abs(one - other) <= tolerance * max(abs(one), abs(other)) < math.inf
