"""Rows of values for a run's loggers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import torch

from lumen.loggers import takes_epoch
from lumen.metrics.step_values import PendingStepLog
from lumen.run.consistency_guard import ConsistencyGuard
from lumen.run.goodput import Goodput
from lumen.run.log_context import LogContext
from lumen.run.plan import Plan, Progress
from lumen.run.step_context import StepContext
from lumen.strategies import Strategy

if TYPE_CHECKING:
    from lumen.loggers import Logger


@final
class RunRecords:
    """Rows of values that a run passes to its loggers.

    Args:
        loggers: Loggers of this process; empty on all ranks but 0.
        plan: Settings of the run, with the interval of logged steps.
        progress: Counters at which values are written: those of the run, or for an evaluation those of the newest fit.
        log: Collected values of the run's steps.
        step: The step in progress, with the newest gradient norm and a flag for an update.
        strategy: Strategy of the run, with the device and the numbers that must be equal on all ranks.
        goodput: Measurement of how the run spends its time.

    Attributes:
        loggers: Loggers that get each row.
        progress: Counters at which values are written.
        pending: The row whose values are not yet on the host; None if there is no such row.
        is_logged: True if a rank has loggers.
        absent_logger_states: States in a checkpoint of loggers that this run does not have, by key.
        before_evaluation: States of the loggers before the evaluation in progress; None outside of evaluations.
        goodput: Measurement of how the run spends its time.
        guard: Check at logged steps that the ranks agree, and detection of slow ranks.
        kept_row: The number and the values of a step that was not logged.
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
        self._plan, self.progress, self._log, self._step = plan, progress, log, step
        self._device, self.goodput, self.loggers, self.is_logged = strategy.device, goodput, loggers, bool(loggers)
        self.guard = ConsistencyGuard(strategy, progress, step)
        self.pending: PendingStepLog | None = None
        self._takes_epoch = [takes_epoch(logger) for logger in loggers]
        self.absent_logger_states: dict[str, Any] = {}
        self.before_evaluation: dict[str, Any] | None = None
        self.kept_row: tuple[int, dict[str, float]] = 0, {}

    def restore_kept_row(self, row: tuple[int, dict[str, float]] | None) -> None:
        """Take over the `kept_row` of a checkpoint; keep the present row if it is None."""
        self.kept_row = row or self.kept_row

    def keep_logger_states(self, states: Mapping[str, Any]) -> None:
        """Keep the states from a checkpoint whose loggers this run does not have."""
        present = {each.state_key for each in self.loggers}
        self.absent_logger_states = {key: state for key, state in states.items() if key not in present}

    def begin_evaluation(self, states: dict[str, Any]) -> None:
        """Keep the states of the loggers before an evaluation, for a checkpoint saved during the evaluation."""
        self.before_evaluation = states

    def end_evaluation(self) -> None:
        """Note that the evaluation is complete."""
        self.before_evaluation = None

    def log_step(self) -> None:
        """Log the values of this step: now, or on CUDA later, when the device has computed them. Collective."""
        if self.is_logged:
            self.pending = self._make_pending_log()
            if not self.is_asynchronous:
                self.write_pending_row()

    def keep_row(self) -> None:
        """Keep the values of the newest step if it was not logged, because it may be the last. Collective."""
        if self._is_unlogged and self._step.updated:
            self.kept_row = self.progress.step, self._make_pending_log().get_values(self._log.gather)

    def log_last_step(self) -> None:
        """Log the values of the run's last step, if `log_step` has not logged them. Collective."""
        progress = self.progress
        if self._is_unlogged:
            self.keep_row()
            step, values = self.kept_row
            self._write(values if step == progress.step else {}, step, progress.epoch - (not progress.in_epoch))

    def write_pending_row(self) -> None:
        """Write the pending row of `log_step`, before anything else is written or saved. Collective."""
        if self.pending is not None:
            row, self.pending = self.pending, None
            self._write(row.get_values(self._log.gather), row.step, row.epoch)

    def write_values(self, values: Mapping[str, float | torch.Tensor]) -> None:
        """Pass values to every logger at the current step."""
        self._write({name: float(value) for name, value in values.items()}, self.progress.step, self.progress.epoch)

    def log_system(self, values: Mapping[str, float]) -> None:
        """Pass measurements that differ between runs to every logger: times, speeds, memory."""
        for logger in self.loggers:
            logger.log_system(values, self.progress.step)

    @property
    def is_asynchronous(self) -> bool:
        """True if values stay on the device, which computes them later, so that reading a value waits."""
        return self._device.type == "cuda"

    @property
    def _is_unlogged(self) -> bool:
        return self.is_logged and self.progress.step % self._plan.log_every_n_steps != 0

    def _make_pending_log(self) -> PendingStepLog:
        return PendingStepLog(
            self._log.train.get_latest(), self._step.grad_norm, self.progress.step, self.progress.epoch
        )

    def _write(self, values: Mapping[str, float], step: int, epoch: int) -> None:
        if values:
            for logger, takes_epoch in zip(self.loggers, self._takes_epoch, strict=True):
                logger.log_metrics(values, step, *((epoch,) if takes_epoch else ()))
