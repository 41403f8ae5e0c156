"""Which ranks are slow: how long each one takes for its steps until it waits for the others."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import final

from lumen.distributed.processes import Processes

_log = logging.getLogger("lumen")
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
        self._processes = processes
        self._since_s = math.nan
        self.seconds, self.steps = 0.0, 0

    def start(self) -> None:
        """The data of the next step is asked for."""
        self._since_s = self._now_s()

    def begin_sum(self, numbers: Sequence[float]) -> Callable[[], list[float]]:
        """Begin a sum over the processes where the last backward of a step begins. Collective."""
        if not math.isnan(self._since_s):
            self.seconds += self._now_s() - self._since_s
            self.steps += 1
            self._since_s = math.nan
        return self._processes.begin_sum(numbers)

    def _now_s(self) -> float:
        return perf_counter() - self._processes.waited_s


@final
@dataclass(frozen=True)
class Spent:
    """What a rank has spent so far.

    Attributes:
        steps: That were measured.
        own_s: Seconds until it waited for the others, in all of them.
        data_s: Seconds for which it waited for training data.
    """

    steps: float
    own_s: float
    data_s: float


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
        self._before: list[Spent] = []
        self._before_s = 0.0
        self._suspects: set[int] = set()
        self._quiet_until_s: dict[int, float] = {}
        self._quiet_s: dict[int, float] = {}

    def hear(self, ranks: Sequence[Spent]) -> None:
        """Look at what all ranks have spent so far, in rank order."""
        now_s = perf_counter()
        if not self._before:
            self._before, self._before_s = [*ranks], now_s
        steps, took_s = ranks[0].steps - self._before[0].steps, now_s - self._before_s
        if steps < _LEAST_STEPS or took_s < _LEAST_S:
            return
        own_s = [(now.own_s - then.own_s) / steps for now, then in zip(ranks, self._before, strict=True)]
        data_s = [(now.data_s - then.data_s) / steps for now, then in zip(ranks, self._before, strict=True)]
        slow = {rank: usual_s for rank in range(len(ranks)) if (usual_s := _exceeds(own_s, rank, took_s / steps))}
        for rank, usual_s in slow.items():
            if rank in self._suspects and now_s >= self._quiet_until_s.get(rank, 0.0):
                self._quiet_s[rank] = 2 * self._quiet_s.get(rank, _QUIET_S / 2)
                self._quiet_until_s[rank] = now_s + self._quiet_s[rank]
                self._say(rank, own_s[rank], usual_s, min(data_s[rank], own_s[rank]))
        self._suspects = {*slow}
        self._before, self._before_s = [*ranks], now_s

    def _say(self, rank: int, own_s: float, usual_s: float, data_s: float) -> None:
        _log.warning(
            "rank %d (host %s) is slow, and the others wait for it: %.2g s a step where the median of the others is "
            "%.2g s, %.2g s of it waiting for data",
            rank, self._processes.host_of(rank), own_s, usual_s, data_s,
        )  # fmt: skip


def _exceeds(own_s: Sequence[float], rank: int, step_s: float) -> float | None:
    """What is usual, in seconds a step, if a rank takes so much longer that it is slow; None: it is not."""
    usual_s = median(each for other, each in enumerate(own_s) if other != rank)
    excess_s = own_s[rank] - usual_s
    is_slow = own_s[rank] > _TIMES * usual_s and excess_s > max(_PART * step_s, _LEAST_EXCESS_S)
    return usual_s if is_slow else None
