"""The vote of all processes of a run on what their clocks and signals say: the time, and whether to stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import final

from lumen.distributed.processes import Processes

_INTERVAL_S = 0.5


@final
class StopVote:
    """The time and the stop request that all processes of a run act on.

    Clocks differ and signals arrive on one process before another, but what is decided by them must be decided alike:
    so every process takes rank 0's clock and the first rank's signal, at moments that all of them reach. Several
    processes ask about twice a second, and read the answer a step later, when it has long arrived, or at once where
    steps are that slow; one alone looks at every moment.

    Args:
        processes: Those of the run, which agree.

    Attributes:
        requested: Number of the signal that asked this process to end; set by a signal handler.
        stop_signal: Number of the signal that the run obeys.
        save_ended_here: This process has done something beside the run that all are to look at; set by its thread.
        save_ended: A process has, as all know.
        now_s: The time, in seconds of rank 0's `time.monotonic`.
        polls: How often it was looked at: each step and each batch of an evaluation is one.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._every = self._left = 1
        self._answer: Callable[[], list[float]] | None = None  # under way
        self.polls = 0
        self.requested: int | None = None
        self.stop_signal: int | None = None
        self.save_ended_here = self.save_ended = self._is_stale = False
        self.now_s = self._processes.broadcast(time.monotonic())  # how often to look is told by agreed times alone

    def poll(self) -> None:
        """Look at the clock and for signals, if it is time to. Collective: every rank must call this."""
        self.polls += 1
        if self._processes.world_size == 1:
            self.stop_signal, self.save_ended, self.now_s = self.requested, self.save_ended_here, time.monotonic()
            return
        self._read()
        self._left -= 1
        if self._left == 0:
            self._ask()
            if self._every == 1:  # the next step may take so long that it has to know before
                self._read()

    def agree(self, *wishes: bool) -> list[bool]:
        """Look now. Collective: every rank must call this.

        Args:
            wishes: One bool for each question: what this process wishes.

        Returns:
            Of each whether some process has it.
        """
        self._read()
        self._ask(*wishes)
        return self._read()

    def change_pace(self) -> None:
        """What is done between two looks takes another time from here on. To be called on every rank."""
        self._every = self._left = 1

    def _ask(self, *wishes: bool) -> None:
        clock_s = time.monotonic() if self._processes.rank == 0 else 0.0
        self._is_stale = False
        told = clock_s, self.requested is not None, self.save_ended_here, *wishes
        self._answer = self._processes.begin_sum(list(map(float, told)))

    def _read(self) -> list[bool]:
        if self._answer is None:
            return []
        (clock_s, requests, save_ended_here, *wishes), self._answer = self._answer(), None
        before_s, self.now_s = self.now_s, clock_s
        if requests and self.stop_signal is None:
            signals = self._processes.gather(self.requested)
            self.stop_signal = next(signal for signal in signals if signal is not None)
        self.save_ended = save_ended_here > 0 and not self._is_stale
        took_s = max(self.now_s - before_s, 1e-6) / max(self._every - self._left, 1)
        self._every = self._left = max(1, min(2 * self._every, int(_INTERVAL_S / took_s)))
        return [wish > 0 for wish in wishes]

    def acknowledge(self) -> None:
        """All have looked at what was save_ended; what is under way says it once more. To be called on every rank."""
        self.save_ended_here = self.save_ended = False
        self._is_stale = True
