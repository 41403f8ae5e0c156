"""End of a run: limits, stop requests of callbacks and the user, signals, and the clock that all processes share."""

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

    Clocks differ, and signals arrive on one process before another, but all processes must decide alike. So every
    process uses rank 0's clock and the signal of the first rank that has one, at moments that all processes reach.
    Several processes exchange them about twice a second. They read the result a step later, when it has arrived, or at
    once if steps take that long. A single process looks at every moment.

    Args:
        processes: The processes of the run.

    Attributes:
        requested_signal: Number of the signal that asked this process to end; set by a signal handler.
        stop_signal: Number of the signal that the run obeys.
        local_save_ended: True if a save of this process has ended; set by the thread that saves.
        save_ended: True if a save of some process has ended; equal on all processes.
        now_s: The time, in seconds of rank 0's `time.monotonic`.
        polls: Number of polls: one for each step and each batch of an evaluation.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes, self.polls = processes, 0
        self._poll_every_n = self._steps_to_poll = 1
        self._pending_sum: Callable[[], list[float]] | None = None  # waits for the result of the last exchange
        self.requested_signal: int | None = None
        self.stop_signal: int | None = None
        self.local_save_ended = self.save_ended = self._is_stale = False
        self.now_s = self._processes.broadcast(time.monotonic())  # The interval of polls follows from shared times.

    def request_stop(self, number: int) -> None:
        """Note a signal that asks this process to end. The signal handler calls this."""
        self.requested_signal = number

    def note_save(self) -> None:
        """Note that a save of this process has ended. The thread that saves calls this."""
        self.local_save_ended = True

    def poll_when_due(self) -> None:
        """Exchange the clock and signals if the interval is over. Collective: every rank must call this."""
        self.polls += 1
        if self._processes.world_size == 1:
            self.stop_signal, self.save_ended, self.now_s = (
                self.requested_signal,
                self.local_save_ended,
                time.monotonic(),
            )
            return
        self._finish_vote()
        self._steps_to_poll -= 1
        if self._steps_to_poll == 0:
            self._start_vote()
            if self._poll_every_n == 1:  # Steps are slow, so the result is needed before the next one.
                self._finish_vote()

    def vote_now(self, *flags: bool) -> list[bool]:
        """Exchange the clock, signals and flags now. Collective: every rank must call this.

        Args:
            *flags: Flags of this process.

        Returns:
            A bool for each flag: True if some process has set the flag.
        """
        self._finish_vote()
        self._start_vote(*flags)
        return self._finish_vote()

    def reset_interval(self) -> None:
        """Poll at every call again, because the time between polls changes. Every rank must call this."""
        self._poll_every_n = self._steps_to_poll = 1

    def _start_vote(self, *flags: bool) -> None:
        clock_s = time.monotonic() if self._processes.rank == 0 else 0.0
        self._is_stale = False
        numbers = clock_s, self.requested_signal is not None, self.local_save_ended, *flags
        self._pending_sum = self._processes.start_sum([*map(float, numbers)])

    def _finish_vote(self) -> list[bool]:
        if self._pending_sum is None:
            return []
        (clock_s, requests, ended_saves, *flags), self._pending_sum = self._pending_sum(), None
        before_s, self.now_s = self.now_s, clock_s
        if requests and self.stop_signal is None:
            signals = self._processes.all_gather(self.requested_signal)
            self.stop_signal = next(signal for signal in signals if signal is not None)
        self.save_ended = ended_saves > 0 and not self._is_stale
        took_s = max(self.now_s - before_s, 1e-6) / max(self._poll_every_n - self._steps_to_poll, 1)
        self._poll_every_n = self._steps_to_poll = max(1, min(2 * self._poll_every_n, int(_INTERVAL_S / took_s)))
        return [count > 0 for count in flags]

    def acknowledge_save(self) -> None:
        """Reset `save_ended` after all have seen it. A poll in flight may repeat it once. Every rank must call this."""
        self.local_save_ended = self.save_ended = False
        self._is_stale = True


@final
class RunEnd:
    """End of a run, decided alike on all processes.

    Args:
        plan: Limits of the run, by epochs, steps and time.
        progress: Counters of the run.
        processes: The processes of the run, which agree on the end.
        log: Collector of the values that the run logs.

    Attributes:
        vote: The time and the stop request that all processes act on.
        finished: True if the run is over.
        ends_epoch: True if all batches of the epoch are done.
        is_vote_requested: True if a callback has requested a vote on the end of this step, in `on_step_end` on all
            ranks.
        votes_each_step: True if a rank has hooks between the last backward of a step and its end that may stop the run.
        is_decided: True once this step's `finished` is final; callbacks that save need to know.
        is_stop_agreed: True if the newest vote found a request to stop, so that all processes know of the request.
        rollback: The numbers of steps before and after this step to leave out, if the run rolls back to a checkpoint
            after this step; else None.
        validated_at_s: Time of the end of the last validation, or of the start of training, as `vote.now_s`.
    """

    def __init__(self, plan: Plan, progress: Progress, processes: Processes, log: LogContext) -> None:
        self._plan, self._progress, self._processes, self._log = plan, progress, processes, log
        self.vote = StopVote(processes)
        self.finished = self.ends_epoch = self.is_vote_requested = self.votes_each_step = self.is_decided = False
        self.is_stop_agreed = True  # A request from a checkpoint is the same on all processes.
        self.rollback: tuple[int, int] | None = None
        self._clock_s = self.validated_at_s = self.vote.now_s

    def request_stop(self, *, value: bool = True) -> None:
        """Ask for the end of the run once its minimum is reached; withdraw the request if `value` is False."""
        self._progress.should_stop = value

    def request_stop_vote(self) -> None:
        """Let all processes vote on the end after `on_step_end`. Every rank must call this in `on_step_end`."""
        self.is_vote_requested = True

    def roll_back(self, before: int, after: int) -> None:
        """Roll back to a checkpoint after this step.

        Args:
            before: Number of steps before this step to leave out after the rollback.
            after: Number of steps after this step to leave out, likewise.
        """
        self.rollback = before, after

    def start_clock(self) -> None:
        """Start the clock of the training. Earlier time does not count."""
        self._clock_s = self.validated_at_s = self.vote.now_s
        self.read_clock()
        self.finished = self.limit_reached is not None

    def read_clock(self) -> None:
        """Read the clock at the end of a step, where logged values belong to no step. Collective."""
        self._log.stage = None
        self.vote.poll_when_due()
        self._progress.elapsed_s += self.vote.now_s - self._clock_s
        self._clock_s = self.vote.now_s

    def decide_end(self) -> bool:
        """Decide whether the run ends with this step. Returns True if the run ends."""
        self.finished, self.is_vote_requested, self.is_decided = self.limit_reached is not None, False, True
        return self.finished

    def decide_validation(self, window: AccumulationWindow, loaders: Loaders, *, updated: bool) -> None:
        """Decide whether a validation follows the step that has just ended.

        Args:
            window: The micro-batches of the step.
            loaders: The loaders of the run.
            updated: True if the step has updated the parameters.
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
            batches = plan.count_batches("train", loaders.train)
            assert batches is not None  # Plan.check_validation
            done, each = progress.batches, batches * fraction
            progress.validation_due = int(done / each + 1e-9) > int((done - window.batches) / each + 1e-9)

    def note_validation(self) -> None:
        """Note that the validation of this step is complete."""
        self._progress.validation_due = False
        self.validated_at_s = self.vote.now_s

    def end_epoch(self, *, complete: bool) -> None:
        """Note that all batches of the epoch are done, or that the run ends in the middle of the epoch."""
        self.ends_epoch = complete

    def vote_now(self, *flags: bool) -> list[bool]:
        """Exchange the clock, signals, requests to stop, and further flags now.

        Collective: every rank must call this at the start, after a validation or an epoch, and before a checkpoint.

        Args:
            *flags: Further flags of this process.

        Returns:
            A bool for each further flag: True if some process has set the flag.
        """
        wants_to_stop, *votes = self.vote.vote_now(self._progress.should_stop, *flags)
        self.apply_vote(wants_to_stop=wants_to_stop)
        return votes

    def apply_vote(self, *, wants_to_stop: bool) -> None:
        """Take over the vote of the processes: True if some process asks to stop the run."""
        self.is_stop_agreed = wants_to_stop
        if wants_to_stop:
            self._progress.should_stop = True

    @property
    def limit_reached(self) -> str | None:
        """The reason why the run is over, or None. A step whose validation is due is not complete."""
        plan, progress = self._plan, self._progress
        if progress.validation_due:
            return None
        if plan.max_steps is not None and progress.step >= plan.max_steps:
            return f"max_steps={plan.max_steps} reached"
        if plan.max_epochs is not None and progress.epoch >= plan.max_epochs:
            return f"max_epochs={plan.max_epochs} reached"
        if plan.max_time_s is not None and progress.elapsed_s >= plan.max_time_s:
            return f"max_time of {plan.max_time_s:g} s reached"
        is_requested = progress.should_stop and (self.is_stop_agreed or self._processes.world_size == 1)
        return "stopped early" if is_requested and self.is_minimum_reached else None

    @property
    def is_minimum_reached(self) -> bool:
        """True if the minimum of steps and epochs is reached, so that a request to stop takes effect."""
        return self._progress.step >= self._plan.min_steps and self._progress.epoch >= self._plan.min_epochs

    @property
    def is_last_step(self) -> bool:
        """True in `on_step_checkpoint` if this step is the last: the run is over, or a signal asks it to stop."""
        return self.finished or self.vote.stop_signal is not None
