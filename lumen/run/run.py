"""Run: what is trained or evaluated, from the start of a stage to its end, in parts that have one owner each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

from lumen.metrics.collector import StageMetrics
from lumen.metrics.torchmetrics_states import unshare_metrics
from lumen.precision import Precision
from lumen.run.ending import Ending
from lumen.run.goodput import Goodput
from lumen.run.loaders import Loaders
from lumen.run.log_context import LogContext
from lumen.run.optimization import Optimization
from lumen.run.plan import Plan, Progress
from lumen.run.records import Records
from lumen.run.step_context import StepContext, TaskCalls
from lumen.run.values import LoggedValues
from lumen.strategies import Strategy
from lumen.task.compile import Compilation
from lumen.task.data_module import DataModule
from lumen.task.hooks import Hooks
from lumen.task.task_module import TaskModule

if TYPE_CHECKING:
    from lumen.checkpoint import Checkpoint, Saves
    from lumen.loggers import Logger


@final
class Run:
    """The parts of a run. The trainer makes one for each stage.

    Args:
        stage: "fit", "validate", "test" or "predict".
        task: The task that is trained or evaluated.
        datamodule: None: the loaders were given, or are the task's.
        loaders: The loaders that were given, for training and for evaluation; None: none were.
        strategy: The strategy of the trainer, whose processes are connected.
        plan: The settings of the trainer in resolved units.
        precision: The dtype that the task computes in.
        hooks: The hooks of the task and of the trainer's callbacks.
        compilation: The modules that are compiled during the run.
        seed: 0 to 2**63 - 1; keys everything random.
        loggers: Loggers of this process; empty on all ranks but 0.
        goodput: Measures where the time goes.
        checkpoint: The checkpoint that `fit` resumes; None: a new run.
        make_saves: Makes the part that writes checkpoints of this run.

    Attributes:
        stage: As given; "sanity" and "validate" during the evaluations of `fit`, "" when the run is over.
        strategy: On which devices the task lies, and how a step is computed there.
        processes: Who takes part, and what of plain data they tell each other.
        plan: How long the run is and what happens when.
        hooks: What is called when: the task's methods and the callbacks'.
        progress: How far the run is; saved in checkpoints.
        calls: How a batch reaches the task.
        step: The optimizer step in progress.
        loaders: The open loaders.
        optim: The optimizer and its schedules.
        log: The stage and hook in which `self.log` is called.
        values: The newest values of what was logged.
        records: Loggers, the values on their way to them, and where the time goes.
        ending: Whether the run is over.
        checkpoint: What `fit` goes on from, or whose parameters are evaluated; None: there is none.
        saves: The checkpoints that the run writes.
    """

    def __init__(
        self,
        stage: str,
        task: TaskModule,
        datamodule: DataModule | None,
        loaders: tuple[Any, Any] | None,
        *,
        strategy: Strategy,
        plan: Plan,
        precision: Precision,
        hooks: Hooks,
        compilation: Compilation,
        seed: int,
        loggers: Sequence[Logger],
        goodput: Goodput,
        checkpoint: Checkpoint | None,
        make_saves: Callable[[Run], Saves],
    ) -> None:
        replays_graphs = compilation.replays_graphs(strategy.device)
        self.stage, self.task, self.hooks, self.plan, self.seed = stage, task, hooks, plan, seed
        self.strategy, self.processes, self.precision = strategy, strategy.processes, precision
        self.checkpoint = checkpoint
        self.progress = Progress()
        self.log = LogContext(task, hooks, strategy)
        self.ending = Ending(plan, self.progress, strategy.processes, self.log)
        self.loaders = Loaders(datamodule, loaders, plan, self.progress, strategy.data_world_size)
        self.calls = TaskCalls(task, datamodule, strategy, precision, compilation)
        self.step = StepContext(strategy, precision, self.progress, self.log, seed, replays_graphs=replays_graphs)
        self.optim = Optimization(task)
        self.values = LoggedValues(task, self.loaders)
        self.records = Records(loggers, plan, self.progress, self.log, self.step, strategy, goodput)
        self.saves = make_saves(self)

    def agree_on_logging(self) -> None:
        """Find out what any rank logs and asks for. Collective: every rank must call this."""
        asks = self.hooks.may_stop_at_steps and self.processes.world_size > 1
        flags = self.records.is_logged, self.log.has_epoch_ends, self.log.has_metrics, asks
        of_any = (ranks > 0 for ranks in self.processes.sum([*map(float, flags)]))
        self.records.is_logged, self.log.has_epoch_ends, self.log.has_metrics, self.ending.asks_each_step = of_any

    @contextmanager
    def in_stage(self, stage: str, metrics: StageMetrics) -> Iterator[None]:
        """The context of an evaluation, whose values `metrics` collects."""
        before = self.stage, self.log.stage
        self.stage, self.log.stage, self.log.batch_samples = stage, metrics, 1
        try:
            yield
        finally:
            self.log.loader_suffix, self.log.in_evaluation_pass = "", False
            self.stage, self.log.stage = before

    def end_boundary(self) -> None:
        """Let what is logged belong to the training epoch in progress again, if there is one."""
        self.ending.is_decided = False
        self.log.stage = self.log.train if self.progress.in_epoch else None
        self.values.updated.clear()

    def evaluate_checkpoint(self, checkpoint: Checkpoint | None) -> None:
        """Note the checkpoint whose parameters this run evaluates; None: it evaluates those that the task has."""
        self.checkpoint = checkpoint

    def close(self) -> None:
        """End the loaders' workers; the task is again one without a run, whose `log` does nothing."""
        self.stage = ""
        self.optim.release()
        self.loaders.close()
        unshare_metrics(self.task)
