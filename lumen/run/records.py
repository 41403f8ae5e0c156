"""Where `self.log` writes, and the rows that a run's loggers get of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch

from lumen.loggers import takes_epoch
from lumen.metrics.collector import StageMetrics
from lumen.metrics.log_call import Doubts
from lumen.metrics.step_values import PendingStepLog
from lumen.metrics.torchmetrics_states import Gather, metrics_of, share_metrics
from lumen.run.agreement_guard import AgreementGuard
from lumen.run.goodput import Goodput
from lumen.run.plan import Plan, Progress
from lumen.run.step_context import StepContext
from lumen.strategies import Strategy, gather_values
from lumen.task.hooks import Hooks
from lumen.task.task_module import TaskModule

if TYPE_CHECKING:
    from lumen.loggers import Logger


@final
class LogContext:
    """Where in a run a value is logged.

    Args:
        task: Its torchmetrics objects are those that may be logged.
        hooks: Hooks of the run, which may log.
        strategy: The run's strategy, whose processes merge values.

    Attributes:
        train: The values of the training epoch in progress.
        stage: Where values go that are logged now: `train`, or those of an evaluation; None: nowhere.
        batch_samples: Samples of the micro-batch in progress: what a mean is weighed with.
        batch_index: The `batch_idx` of the micro-batch in progress; None: there is none, but data may be awaited.
        loader_suffix: Added to the names that are logged for one of several evaluation loaders.
        in_train_step: A training step is in progress.
        in_evaluation_pass: An evaluation reads its loaders.
        hook: The hook that is being called, of those around steps; "" in steps.
        doubts: Finds numbers that one process has logged as if they were of all.
        has_epoch_ends: A rank has a hook at the end of training epochs.
        has_metrics: A rank has torchmetrics objects.
    """

    def __init__(self, task: TaskModule, hooks: Hooks, strategy: Strategy) -> None:
        self._hooks, self._strategy = hooks, strategy
        self.train = StageMetrics()
        self.stage: StageMetrics | None = None
        self.batch_samples = 1
        self.batch_index: int | None = None
        self.loader_suffix = ""
        self.in_train_step = False
        self.in_evaluation_pass = False
        self.hook = ""
        self.doubts = Doubts()
        self.has_epoch_ends = bool(hooks.on_train_epoch_end)
        self.has_metrics = bool(metrics_of(task))

    @property
    def gather(self) -> Gather | None:
        """The function that gathers values of all ranks; None where one process has nothing to merge."""
        return partial(gather_values, self._strategy) if self._strategy.processes.world_size > 1 else None

    def call_hooks(self, name: str) -> None:
        """Call hooks that stand around steps: a number that they log is of this process, not of samples."""
        self.hook = name
        for hook in getattr(self._hooks, name):
            hook()
        self.hook = ""

    def share_metrics(self, task: TaskModule) -> None:
        """Let the task's torchmetrics objects compute over all processes, except where these go ways of their own."""
        if self.gather is not None:
            share_metrics(task, self.gather, lambda: self.in_train_step or self.in_evaluation_pass)


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

    Attributes:
        loggers: Loggers that are given each row.
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
    ) -> None:
        self._plan, self._progress, self._log, self._step = plan, progress, log, step
        self._device = strategy.device
        self.guard = AgreementGuard(strategy, progress, step)
        self._pending: PendingStepLog | None = None  # on its way to the loggers
        self.loggers = loggers
        self._told_epochs = [takes_epoch(logger) for logger in loggers]
        self.is_logged = bool(loggers)
        self.absent: dict[str, Any] = {}
        self.before_evaluation: dict[str, Any] | None = None
        self.goodput = Goodput(None, lambda: 0.0)
        self.kept_row: tuple[int, dict[str, float]] = 0, {}

    def log_step(self) -> None:
        """Let the loggers have the values of this step: now, or once a device has computed them. Collective."""
        if self.is_logged:
            self._pending = self._newest_log()
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
        if self._pending is not None:
            row, self._pending = self._pending, None
            self._write(row.values(self._log.gather), row.step, row.epoch)

    def write(self, values: Mapping[str, float | torch.Tensor]) -> None:
        """Give values to every logger at the current step."""
        self._write({name: float(value) for name, value in values.items()}, self._progress.step, self._progress.epoch)

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
