"""When a run ends: its limits, what callbacks and the user ask for, signals; and the clock of it."""

from __future__ import annotations

from typing import final

from lumen.distributed.processes import Processes
from lumen.run.plan import Plan
from lumen.run.progress import Progress
from lumen.run.stop_vote import StopVote

_STOPPED = "stopped early"


@final
class Ending:
    """Whether a run is over, as all of its processes know.

    Args:
        plan: Limits of the run, by epochs, steps and time.
        progress: Counters of the run.
        processes: Those of the run, which agree.

    Attributes:
        vote: The time and the stop request that all processes act on.
        finished: The run is over.
        ends_epoch: All batches of the epoch are done.
        is_asked: A callback has asked on all ranks, in `on_step_end`, to agree on the end at this boundary.
        asks_each_step: A rank has hooks between the last backward of a step and its end, in which it may wish to stop.
        is_decided: Whether the run ends here is decided, as callbacks that save have to know.
        rolls_back: The run is to go back to a checkpoint after this step; how many steps before and after it are to be
            left out with it then. None: it goes on.
        validated_at_s: When the last validation was complete, or training began; as `vote.now_s`.
    """

    def __init__(self, plan: Plan, progress: Progress, processes: Processes) -> None:
        self._plan, self._progress, self._processes = plan, progress, processes
        self.vote = StopVote(processes)
        self.finished = self.ends_epoch = False
        self._stop_agreed = True  # all know of the wish: one that comes from a checkpoint is that of all
        self.is_asked = self.asks_each_step = False
        self.is_decided = False
        self.rolls_back: tuple[int, int] | None = None
        self._clock_s = self.validated_at_s = self.vote.now_s

    def start_clock(self) -> None:
        """Training begins now; what came before does not count."""
        self._clock_s = self.validated_at_s = self.vote.now_s
        self.tick()

    def tick(self) -> None:
        """Read the clock, at boundaries only. Collective."""
        self.vote.poll()
        now_s = self.vote.now_s
        self._progress.elapsed_s += now_s - self._clock_s
        self._clock_s = now_s

    def agree(self, *wishes: bool) -> list[bool]:
        """Vote now, and look at the clocks, for signals, and whether a callback wants to end the run.

        Collective: at the start, after a validation or an epoch, and where a checkpoint is due.

        Args:
            wishes: What this process says to each question.

        Returns:
            For each question whether some process said True.
        """
        wants_to_stop, *others = self.vote.agree(self._progress.should_stop, *wishes)
        self.hear(wants_to_stop)
        return others

    def hear(self, wants_to_stop: bool) -> None:
        """Take over what the processes have agreed on: whether some process wishes to stop."""
        self._stop_agreed = wants_to_stop
        if wants_to_stop:
            self._progress.should_stop = True

    @property
    def limit_reached(self) -> str | None:
        """Why the run is over, or None; a step whose validation is due is not done."""
        plan, progress = self._plan, self._progress
        if progress.validation_due:
            return None
        if plan.max_steps is not None and progress.step >= plan.max_steps:
            return f"max_steps={plan.max_steps} reached"
        if plan.max_epochs is not None and progress.epoch >= plan.max_epochs:
            return f"max_epochs={plan.max_epochs} reached"
        if plan.max_time_s is not None and progress.elapsed_s >= plan.max_time_s:
            return f"max_time of {plan.max_time_s:g} s reached"
        wishes = progress.should_stop and (self._stop_agreed or self._processes.world_size == 1)
        return _STOPPED if wishes and self.may_stop else None

    @property
    def may_stop(self) -> bool:
        """The minimum of steps and epochs is reached, so that a callback's or the user's wish to stop is granted."""
        return self._progress.step >= self._plan.min_steps and self._progress.epoch >= self._plan.min_epochs

    @property
    def is_here(self) -> bool:
        """This step is the last one, as all know in `on_step_checkpoint`: the run is over, or was asked to leave."""
        return self.finished or self.vote.stop_signal is not None
