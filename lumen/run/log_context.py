"""What `self.log` reads: where a value is logged, and of how many samples."""

from __future__ import annotations

from functools import partial
from typing import final

from lumen.metrics.collector import StageMetrics
from lumen.metrics.outside_steps import Doubts
from lumen.metrics.torchmetrics_states import Gather, metrics_of, share_metrics
from lumen.strategies import Strategy, gather_values
from lumen.task.hooks import Hooks
from lumen.task.task_module import TaskModule


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
