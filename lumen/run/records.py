"""Records: the rows that a run's loggers get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import torch

from lumen.loggers import takes_epoch
from lumen.metrics.step_values import PendingStepLog
from lumen.run.agreement_guard import AgreementGuard
from lumen.run.goodput import Goodput
from lumen.run.log_context import LogContext
from lumen.run.plan import Plan, Progress
from lumen.run.step_context import StepContext
from lumen.strategies import Strategy

if TYPE_CHECKING:
    from lumen.loggers import Logger


@final
class Records:
    """Gives values to the loggers of a run.

    Args:
        loggers: Loggers of this process; empty on all ranks but 0.
        plan: Settings of the run: which steps are logged.
        progress: Counters of the run.
        log: Collected values of the run's steps.
        step: The step in progress, with the newest gradient norm, and whether there was an update.
        strategy: Where values are computed, and which of them all ranks must have alike.
        goodput: Measures where the time goes.

    Attributes:
        loggers: Loggers that are given each row.
        pending: The row that is on its way to the loggers; None: none is.
        is_logged: A rank has loggers.
        absent: States of the loggers that the run had in an earlier part only, by key.
        before_evaluation: States of the loggers before an evaluation that is not complete; None: there is none.
        goodput: Where the time goes.
        guard: Whether ranks still agree at logged steps, and which of them is slow.
        kept_row: A step that was not logged when it was made, and its values.
    """

    def __init__(
        self,
        loggers: Sequence[Logger],
        plan: Plan,
        progress: Progress,
        log: LogContext,
        step: StepContext,
        strategy: Strategy,
        goodput: Goodput,
    ) -> None:
        self._plan, self._progress, self._log, self._step = plan, progress, log, step
        self._device, self.goodput, self.loggers, self.is_logged = strategy.device, goodput, loggers, bool(loggers)
        self.guard = AgreementGuard(strategy, progress, step)
        self.pending: PendingStepLog | None = None
        self._told_epochs = [takes_epoch(logger) for logger in loggers]
        self.absent: dict[str, Any] = {}
        self.before_evaluation: dict[str, Any] | None = None
        self.kept_row: tuple[int, dict[str, float]] = 0, {}

    def restore_row(self, row: tuple[int, dict[str, float]] | None) -> None:
        """Take over the `kept_row` of a checkpoint, if it has one."""
        self.kept_row = row or self.kept_row

    def continue_records(self, states: Mapping[str, Any]) -> None:
        """Note the states of a checkpoint whose loggers this run does not have."""
        present = {each.state_key for each in self.loggers}
        self.absent = {key: state for key, state in states.items() if key not in present}

    def begin_evaluation(self, states: dict[str, Any]) -> None:
        """Keep the states that the loggers have before an evaluation, for a checkpoint that is saved within it."""
        self.before_evaluation = states

    def end_evaluation(self) -> None:
        """Note that the evaluation is complete."""
        self.before_evaluation = None

    def log_step(self) -> None:
        """Let the loggers have the values of this step: now, or once a device has computed them. Collective."""
        if self.is_logged:
            self.pending = self._newest_log()
            if not self.is_asynchronous:
                self.write_row()

    def keep_row(self) -> None:
        """Keep the values of the newest step, if it was not logged: it may turn out to be the last. Collective."""
        if self._is_unlogged and self._step.updated:
            self.kept_row = self._progress.step, self._newest_log().values(self._log.gather)

    def log_last_step(self) -> None:
        """Let the loggers have the values of the run's last step, if no `log_step` gave them. Collective."""
        progress = self._progress
        if self._is_unlogged:
            self.keep_row()
            step, values = self.kept_row
            self._write(values if step == progress.step else {}, step, progress.epoch - (not progress.in_epoch))

    def write_row(self) -> None:
        """Write what `log_step` has left, before anything else is written or saved. Collective."""
        if self.pending is not None:
            row, self.pending = self.pending, None
            self._write(row.values(self._log.gather), row.step, row.epoch)

    def write(self, values: Mapping[str, float | torch.Tensor]) -> None:
        """Give values to every logger at the current step."""
        self._write({name: float(value) for name, value in values.items()}, self._progress.step, self._progress.epoch)

    def log_system(self, values: Mapping[str, float]) -> None:
        """Give every logger values that no two runs share: times, speeds, memory."""
        for logger in self.loggers:
            logger.log_system(values, self._progress.step)

    @property
    def is_asynchronous(self) -> bool:
        """Whether values stay on the device, which computes them later: who reads one waits."""
        return self._device.type == "cuda"

    @property
    def _is_unlogged(self) -> bool:
        return self.is_logged and self._progress.step % self._plan.log_every_n_steps != 0

    def _newest_log(self) -> PendingStepLog:
        return PendingStepLog(self._log.train.latest(), self._step.grad_norm, self._progress.step, self._progress.epoch)

    def _write(self, values: Mapping[str, float], step: int, epoch: int) -> None:
        if values:
            for logger, told in zip(self.loggers, self._told_epochs, strict=True):
                logger.log_metrics(values, step, *((epoch,) if told else ()))
