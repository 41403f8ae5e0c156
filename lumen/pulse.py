"""Pulse: what clocks and signals say, agreed by all processes of a run."""

from __future__ import annotations

import time
from typing import final

from lumen.strategies import Strategy

_INTERVAL_S = 0.5


@final
class Pulse:
    """The time and the stop request that all processes of a run act on.

    Clocks differ and signals arrive on one process before another, but what is decided by them must be decided alike:
    so every process takes rank 0's clock and the first rank's signal, at moments that all of them reach. Several
    processes look about twice a second, one alone at every moment.

    Args:
        strategy: Whose processes agree.

    Attributes:
        requested: Number of the signal that asked this process to end; set by a signal handler.
        stop_signal: Number of the signal that the run obeys.
        announces: This process has done something beside the run that all are to look at; set by its thread.
        announced: A process has, as all know.
        now_s: The time, in seconds of rank 0's `time.monotonic`.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._processes = strategy.processes
        self._every = self._left = 1
        self.requested: int | None = None
        self.stop_signal: int | None = None
        self.announces = self.announced = False
        self.now_s = self._processes.broadcast(time.monotonic())  # how often to look is told by agreed times alone

    def beat(self) -> None:
        """Look at the clock and for signals, if it is time to. Collective: every rank must call this."""
        if self._processes.world_size == 1:
            self.stop_signal, self.announced, self.now_s = self.requested, self.announces, time.monotonic()
            return
        self._left -= 1
        if self._left == 0:
            self.agree()

    def agree(self) -> None:
        """Look now. Collective: every rank must call this."""
        before, beats = self.now_s, self._every - self._left
        answers = self._processes.gather((time.monotonic(), self.requested, self.announces))
        self.now_s = answers[0][0]
        self.stop_signal = next((signal for _, signal, _ in answers if signal is not None), None)
        self.announced = any(announces for _, _, announces in answers)
        took_s = max(self.now_s - before, 1e-6) / max(beats, 1)
        self._every = self._left = max(1, min(2 * self._every, int(_INTERVAL_S / took_s)))

    def dismiss(self) -> None:
        """All have looked at what was announced."""
        self.announces = self.announced = False
