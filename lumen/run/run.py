"""Run: what is trained or evaluated, from the start of a stage to its end, in parts that have one owner each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

from lumen.precision import Precision
from lumen.run.ending import Ending
from lumen.run.loaders import Loaders
from lumen.run.optimization import Optimization
from lumen.run.plan import Plan, Progress
from lumen.run.records import LogContext, Records
from lumen.run.step_context import StepContext, TaskCalls
from lumen.run.values import LoggedValues
from lumen.strategies import Strategy
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
        trainer: The trainer that the run belongs to.
        stage: "fit", "validate", "test" or "predict".
        task: What is trained or evaluated.
        datamodule: None: the loaders were given, or are the task's.
        loaders: The loaders that were given, for training and for evaluation; None: none were.
        precision: In which dtype the task computes.
        seed: 0 to 2**63 - 1; keys everything random.
        loggers: Loggers of this process; empty on all ranks but 0.

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

    checkpoint: Checkpoint | None
    saves: Saves

    def __init__(
        self,
        trainer: Any,
        stage: str,
        task: TaskModule,
        datamodule: DataModule | None,
        loaders: tuple[Any, Any] | None,
        precision: Precision,
        seed: int,
        loggers: Sequence[Logger],
    ) -> None:
        strategy: Strategy = trainer.strategy
        plan: Plan = trainer.plan
        replays_graphs = trainer.compilation.replays_graphs(strategy.device)
        self.trainer = trainer
        self.stage = stage
        self.task = task
        self.strategy = strategy
        self.processes = strategy.processes
        self.precision = precision
        self.plan = plan
        self.seed = seed
        self.hooks = Hooks(task, trainer.callbacks, trainer)
        self.progress = Progress()
        self.ending = Ending(plan, self.progress, strategy.processes)
        self.loaders = Loaders(datamodule, loaders, plan, self.progress, strategy.data_world_size)
        self.calls = TaskCalls(task, datamodule, strategy, precision, replays_graphs=replays_graphs)
        self.step = StepContext(strategy, precision, self.progress, seed, replays_graphs=replays_graphs)
        self.optim = Optimization(task)
        self.log = LogContext(task, self.hooks, strategy)
        self.values = LoggedValues(task, self.loaders)
        self.records = Records(loggers, plan, self.progress, self.log, self.step, strategy)
