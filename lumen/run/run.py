"""`Run`: the state of a training or evaluation from the start of a stage to its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

from lumen.metrics.collector import StageMetrics
from lumen.metrics.torchmetrics_states import unshare_metrics
from lumen.precision import Precision
from lumen.run.goodput import Goodput
from lumen.run.loaders import Loaders
from lumen.run.log_context import LogContext
from lumen.run.optimization import Optimization
from lumen.run.plan import Plan, Progress
from lumen.run.records import RunRecords
from lumen.run.run_end import RunEnd
from lumen.run.step_context import StepContext, TaskCalls
from lumen.run.values import LoggedValues
from lumen.strategies import Strategy, count_training_parts
from lumen.task.compile import Compilation
from lumen.task.data_module import DataModule
from lumen.task.hooks import Hooks
from lumen.task.task_module import TaskModule

if TYPE_CHECKING:
    from lumen.checkpoint import Checkpoint, CheckpointSaver
    from lumen.loggers import Logger


@final
class Run:
    """The parts of a run. The trainer makes one for each stage.

    Args:
        stage: "fit", "validate", "test" or "predict".
        task: The task that is trained or evaluated.
        datamodule: The data module; None if loaders were passed, or the task has them.
        loaders: The loaders that were passed, for training and for evaluation; None if no loaders were passed.
        strategy: The strategy of the trainer, whose processes are connected.
        plan: The settings of the trainer in resolved units.
        precision: The dtype that the task computes in.
        hooks: The hooks of the task and of the trainer's callbacks.
        compilation: The modules that are compiled during the run.
        seed: The seed of everything random, 0 to 2**63 - 1.
        loggers: Loggers of this process; empty on all ranks but 0.
        goodput: Measurement of how the run spends its time.
        checkpoint: The checkpoint that `fit` resumes; None for a new run.
        trained: Counters of the newest `fit`, at which an evaluation writes its values; None in `fit`, or without one.
        make_saves: Function that makes the part which writes checkpoints of this run.

    Attributes:
        stage: The stage; "sanity" and "validate" during the evaluations of `fit`, "" when the run is over.
        strategy: Strategy of the run: the devices of the task, and the way a step is computed there.
        processes: Processes of the run, with collectives for plain data.
        plan: Limits and intervals of the run.
        hooks: Methods of the task and the callbacks, by the name of the hook.
        progress: Counters of the run, saved in checkpoints.
        calls: Transfer of batches to the device, and the arguments of the task's steps.
        step: The optimizer step in progress.
        loaders: The open loaders.
        optim: The optimizer and its schedules.
        log: The stage and hook in which `self.log` is called.
        values: The newest values of logged names.
        records: Loggers and the rows of values that they get.
        ending: The end of the run, decided alike on all processes.
        checkpoint: The checkpoint that `fit` resumes, or whose parameters are evaluated; None without a checkpoint.
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
        trained: Progress | None,
        make_saves: Callable[[Run], CheckpointSaver],
    ) -> None:
        replays_graphs = compilation.replays_graphs(strategy.device)
        self.stage, self.task, self.hooks, self.plan, self.seed = stage, task, hooks, plan, seed
        self.strategy, self.processes, self.precision = strategy, strategy.processes, precision
        self.checkpoint = checkpoint
        self.progress = Progress()
        self.log = LogContext(task, hooks, strategy)
        self.ending = RunEnd(plan, self.progress, strategy.processes, self.log)
        self.loaders = Loaders(datamodule, loaders, plan, self.progress, count_training_parts(strategy))
        self.calls = TaskCalls(task, datamodule, strategy, precision, compilation)
        self.step = StepContext(strategy, precision, self.progress, self.log, seed, replays_graphs=replays_graphs)
        self.optim = Optimization(task)
        self.values = LoggedValues(task, self.loaders)
        self.records = RunRecords(loggers, plan, trained or self.progress, self.log, self.step, strategy, goodput)
        self.saves = make_saves(self)

    def sync_logging_flags(self) -> None:
        """Reduce flags of logging and stop requests over all ranks. Collective: every rank must call this."""
        votes_each_step = self.hooks.may_stop_at_steps and self.processes.world_size > 1
        log = self.log
        flags = (
            self.records.is_logged, log.has_epoch_ends, log.has_evaluation_ends, log.has_metrics, votes_each_step,
        )  # fmt: skip
        of_any = (ranks > 0 for ranks in self.processes.all_reduce_sum([*map(float, flags)]))
        self.records.is_logged, log.has_epoch_ends, log.has_evaluation_ends, log.has_metrics, votes_each_step = of_any
        self.ending.votes_each_step = votes_each_step

    @contextmanager
    def in_stage(self, stage: str, metrics: StageMetrics | None) -> Iterator[None]:
        """Run an evaluation or its hooks within the context, and collect logged values in `metrics`, if given."""
        before = self.stage, self.log.stage
        self.stage, self.log.stage, self.log.batch_samples = stage, metrics, 1
        try:
            yield
        finally:
            self.log.loader_suffix, self.log.in_evaluation_pass = "", False
            self.stage, self.log.stage = before

    def resume_epoch_logging(self) -> None:
        """Collect logged values for the training epoch in progress again, if there is one."""
        self.ending.is_decided = False
        self.log.stage = self.log.train if self.progress.in_epoch else None
        self.values.updated.clear()

    def evaluate_checkpoint(self, checkpoint: Checkpoint | None) -> None:
        """Note the checkpoint whose parameters this run evaluates; None to evaluate the task's present parameters."""
        self.checkpoint = checkpoint

    def close(self) -> None:
        """End the loaders' workers, and detach the task from the run, so that `self.log` does nothing."""
        self.stage = ""
        self.optim.release()
        self.loaders.close()
        unshare_metrics(self.task)
