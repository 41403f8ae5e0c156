"""Place in a run where `self.log` is called, which decides to which values a number is added."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import final

from lumen.metrics.collector import StageMetrics
from lumen.metrics.log_call import PartialValueWarnings
from lumen.metrics.step_values import Latest
from lumen.metrics.torchmetrics_states import Gather, find_metrics, share_metrics
from lumen.strategies import Strategy, gather_from_data_ranks
from lumen.task.hooks import Hooks
from lumen.task.task_module import TaskModule


@final
class LogContext:
    """Place in a run where `self.log` is called.

    Args:
        task: The task, whose torchmetrics objects may be logged.
        hooks: Hooks of the run, which may log.
        strategy: The run's strategy, whose processes merge values.

    Attributes:
        train: The values of the training epoch in progress.
        stage: Collector of the values logged now: `train`, or that of an evaluation; None to drop values.
        batch_samples: Samples of the micro-batch in progress, the weight of its values in a mean.
        batch_index: The `batch_idx` of the micro-batch in progress; None between micro-batches.
        loader_suffix: Suffix of the names that are logged for one of several evaluation loaders.
        in_train_step: True during a training step.
        in_evaluation_pass: True while an evaluation reads its loaders.
        hook: Name of the hook outside of steps that runs now; "" in steps.
        doubts: Detector of numbers that each process logs from its own samples only.
        has_epoch_ends: True if a rank has a hook at the end of training epochs.
        has_evaluation_ends: True if a rank has a hook at the end of the pass over the data of an evaluation.
        has_metrics: True if a rank has torchmetrics objects.
    """

    def __init__(self, task: TaskModule, hooks: Hooks, strategy: Strategy) -> None:
        self._hooks, self._strategy = hooks, strategy
        self.train, self.doubts = self.make_metrics(), PartialValueWarnings()
        self.stage: StageMetrics | None = None
        self.batch_samples = 1
        self.batch_index: int | None = None
        self.loader_suffix = self.hook = ""
        self.in_train_step = self.in_evaluation_pass = False
        self.has_epoch_ends = bool(hooks.on_train_epoch_end)
        self.has_evaluation_ends = bool(hooks.on_validation_epoch_end or hooks.on_test_epoch_end)
        self.has_metrics = bool(find_metrics(task))

    @property
    def gather(self) -> Gather | None:
        """Function that gathers values of all ranks; None for a single process."""
        return partial(gather_from_data_ranks, self._strategy) if self._strategy.processes.world_size > 1 else None

    def make_metrics(self, before: Latest | None = None) -> StageMetrics:
        """Make a collector of values; see `StageMetrics`."""
        return StageMetrics(before, exact=bool(self._strategy.is_exact))

    def begin_epoch(self) -> None:
        """Collect the values of a new training epoch."""
        self.train = self.stage = self.make_metrics(self.train.get_latest(has_earlier=True))

    def resume_epoch(self) -> None:
        """Collect values in the training epoch in progress."""
        self.stage = self.train

    def end_epoch(self) -> None:
        """Collect no values until the next epoch."""
        self.stage = None

    def begin_batch(self, samples: int, index: int) -> None:
        """Collect the values of an evaluation's next batch, with its number of samples and its `batch_idx`."""
        self.batch_samples, self.batch_index = samples, index
        if self.stage is not None:
            self.stage.begin_window()

    def set_weight(self, samples: int) -> None:
        """Weigh the values logged from here on by a number of samples."""
        self.batch_samples = samples

    def end_batch(self) -> None:
        """Note that no micro-batch is in progress, while the run may wait for data."""
        self.batch_index = None

    def end_step(self) -> None:
        """Note that no training step is in progress."""
        self.in_train_step, self.batch_index = False, None

    def begin_loader(self, suffix: str) -> None:
        """Add a suffix to logged names, because the batches of an evaluation loader come next."""
        self.loader_suffix, self.in_evaluation_pass = suffix, True

    def end_loader(self) -> None:
        """Note that an evaluation loader has given all batches."""
        self.in_evaluation_pass = False

    def end_loaders(self) -> None:
        """Note that all batches of an evaluation are done: numbers have weight 1 and no suffix."""
        self.loader_suffix, self.batch_samples = "", 1

    def note_metrics(self, *, has_metrics: bool) -> None:
        """Note whether a rank has torchmetrics objects."""
        self.has_metrics = has_metrics

    @contextmanager
    def discard_logged(self) -> Iterator[None]:
        """Drop all values that a forward in this context logs."""
        before, self.stage = self.stage, self.make_metrics()
        try:
            yield
        finally:
            self.stage = before

    def call_hooks(self, name: str) -> None:
        """Call hooks outside of steps, where a logged number belongs to this process instead of samples."""
        self.hook = name
        for hook in getattr(self._hooks, name):
            hook()
        self.hook = ""

    def share_metrics(self, task: TaskModule) -> None:
        """Let the task's torchmetrics objects compute over all processes, except within steps and evaluation passes."""
        if self.gather is not None:
            share_metrics(task, self.gather, lambda: self.in_train_step or self.in_evaluation_pass)
