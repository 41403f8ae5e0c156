"""When a run ends: its limits, what callbacks and the user ask for, signals; and the clock of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import final

from lumen.data.windows import AccumulationWindow
from lumen.distributed.processes import Processes
from lumen.run.loaders import Loaders
from lumen.run.log_context import LogContext
from lumen.run.plan import Plan, Progress

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
        self._processes, self.polls = processes, 0
        self._every = self._left = 1
        self._answer: Callable[[], list[float]] | None = None  # under way
        self.requested: int | None = None
        self.stop_signal: int | None = None
        self.save_ended_here = self.save_ended = self._is_stale = False
        self.now_s = self._processes.broadcast(time.monotonic())  # how often to look is told by agreed times alone

    def request(self, number: int) -> None:
        """Note a signal that asks this process to end. To be called in its handler."""
        self.requested = number

    def note_save(self) -> None:
        """Note that a save of this process has ended. To be called in its thread."""
        self.save_ended_here = True

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
        self._answer = self._processes.begin_sum([*map(float, told)])

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


@final
class Ending:
    """Whether a run is over, as all of its processes know.

    Args:
        plan: Limits of the run, by epochs, steps and time.
        progress: Counters of the run.
        processes: Those of the run, which agree.
        log: Where the values of the run are collected.

    Attributes:
        vote: The time and the stop request that all processes act on.
        finished: The run is over.
        ends_epoch: All batches of the epoch are done.
        is_asked: A callback has asked on all ranks, in `on_step_end`, to agree on the end at this boundary.
        asks_each_step: A rank has hooks between the last backward of a step and its end, in which it may wish to stop.
        is_decided: Whether the run ends here is decided, as callbacks that save have to know.
        stop_agreed: All processes know of the request to stop, if there is one.
        rolls_back: The run is to go back to a checkpoint after this step; how many steps before and after it are to be
            left out with it then. None: it goes on.
        validated_at_s: When the last validation was complete, or training began; as `vote.now_s`.
    """

    def __init__(self, plan: Plan, progress: Progress, processes: Processes, log: LogContext) -> None:
        self._plan, self._progress, self._processes, self._log = plan, progress, processes, log
        self.vote = StopVote(processes)
        self.finished = self.ends_epoch = self.is_asked = self.asks_each_step = self.is_decided = False
        self.stop_agreed = True  # a request that a checkpoint holds is that of all
        self.rolls_back: tuple[int, int] | None = None
        self._clock_s = self.validated_at_s = self.vote.now_s

    def request_stop(self, *, value: bool = True) -> None:
        """Note that this process asks the run to end once its minimum is reached; False: it does so no longer."""
        self._progress.should_stop = value

    def request_agreement(self) -> None:
        """Let all processes agree on the end after `on_step_end`. To be called in it, on every rank."""
        self.is_asked = True

    def roll_back(self, before: int, after: int) -> None:
        """Go back to a checkpoint after this step.

        Args:
            before: Steps before this one that are left out then.
            after: Steps after it, likewise.
        """
        self.rolls_back = before, after

    def start_clock(self) -> None:
        """Training begins now; what came before does not count."""
        self._clock_s = self.validated_at_s = self.vote.now_s
        self.tick()
        self.finished = self.limit_reached is not None

    def tick(self) -> None:
        """Read the clock, at boundaries only, where what is logged belongs to no step. Collective."""
        self._log.stage = None
        self.vote.poll()
        self._progress.elapsed_s += self.vote.now_s - self._clock_s
        self._clock_s = self.vote.now_s

    def decide(self) -> bool:
        """Decide whether the run ends at this boundary. Returns True if it does."""
        self.finished, self.is_asked, self.is_decided = self.limit_reached is not None, False, True
        return self.finished

    def decide_validation(self, window: AccumulationWindow, loaders: Loaders, *, updated: bool) -> None:
        """Decide whether a validation follows the step that has just ended.

        Args:
            window: The micro-batches of the step.
            loaders: The loaders of the run.
            updated: The step has updated the parameters.
        """
        self.ends_epoch = window.last
        plan, progress = self._plan, self._progress
        progress.validation_due = False
        if not loaders.evaluation or (progress.epoch + 1) % plan.val_every_n_epochs:
            return
        fraction = plan.val_every_epoch_fraction
        if plan.val_every_n_steps is not None:
            progress.validation_due = updated and progress.step % plan.val_every_n_steps == 0
        elif plan.val_every_s is not None:
            progress.validation_due = self.vote.now_s - self.validated_at_s >= plan.val_every_s
        elif fraction == 1.0:
            progress.validation_due = window.last
        elif fraction is not None:
            assert loaders.train is not None
            batches = plan.batches("train", loaders.train)
            assert batches is not None  # Plan.check_validation
            done, each = progress.batches, batches * fraction
            progress.validation_due = int(done / each + 1e-9) > int((done - window.batches) / each + 1e-9)

    def validation_done(self) -> None:
        """Note that the validation of this step is complete."""
        self._progress.validation_due = False
        self.validated_at_s = self.vote.now_s

    def end_epoch(self, *, complete: bool) -> None:
        """Note that all batches of the epoch are done, or that the run ends in its middle."""
        self.ends_epoch = complete

    def agree(self, *wishes: bool) -> list[bool]:
        """Vote now, and look at the clocks, for signals, and whether a callback wants to end the run.

        Collective: at the start, after a validation or an epoch, and where a checkpoint is due.

        Args:
            wishes: What this process says to each question.

        Returns:
            For each question whether some process said True.
        """
        wants_to_stop, *others = self.vote.agree(self._progress.should_stop, *wishes)
        self.hear(wants_to_stop=wants_to_stop)
        return others

    def hear(self, *, wants_to_stop: bool) -> None:
        """Take over what the processes have agreed on: whether some process wishes to stop."""
        self.stop_agreed = wants_to_stop
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
        wishes = progress.should_stop and (self.stop_agreed or self._processes.world_size == 1)
        return "stopped early" if wishes and self.may_stop else None

    @property
    def may_stop(self) -> bool:
        """The minimum of steps and epochs is reached, so that a callback's or the user's wish to stop is granted."""
        return self._progress.step >= self._plan.min_steps and self._progress.epoch >= self._plan.min_epochs

    @property
    def is_here(self) -> bool:
        """This step is the last one, as all know in `on_step_checkpoint`: the run is over, or was asked to leave."""
        return self.finished or self.vote.stop_signal is not None
