"""What all ranks must have alike is compared at logged steps, without waiting; so is how long each one takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import final

import torch

from lumen.errors import TrainingError
from lumen.metrics.host_copy import HostCopy
from lumen.run.progress import Progress
from lumen.run.slow_ranks import OwnTime, SlowRanks, Spent
from lumen.run.step_context import StepContext
from lumen.strategies.strategy import SAME, Alike, Strategy

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
            ranks, self._all = self._all(), None
            self._hear([dict(zip(_SPENT + _COUNTED + _NORMS, each, strict=True)) for each in ranks])
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

    def _hear(self, ranks: Sequence[dict[str, float]]) -> None:
        for name in (*_COUNTED, *_NORMS):
            tolerance = SAME if name in _NORMS else 0.0
            if others := [rank for rank, each in enumerate(ranks) if not _same(each[name], ranks[0][name], tolerance)]:
                self._refuse(name, others, ranks)
        if self._processes.is_global_zero:
            self._slow.hear([Spent(each["steps"], each["own_s"], each["data_s"]) for each in ranks])

    def _refuse(self, name: str, others: Sequence[int], ranks: Sequence[dict[str, float]]) -> None:
        """Say on all ranks what differs. Collective."""
        headline = f"the ranks no longer agree, found after step {ranks[0][_COUNTED[0]]:.0f}"
        if name == _PARAMETERS:
            try:
                with self._strategy.evaluation(False):  # it looks at each parameter first
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
