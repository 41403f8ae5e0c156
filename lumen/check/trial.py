"""The beginning of a run, as `fit` makes it, of which nothing stays."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, final

from lumen.callbacks import BYSTANDERS, Callback, EarlyStopping, ModelCheckpoint, Timer, savers_of
from lumen.check.witness import Enough, Witness
from lumen.checkpoint import check_savable
from lumen.console import logger
from lumen.loop.fit import train
from lumen.profilers import make_profiler
from lumen.run.plan import Plan
from lumen.run.run import Run
from lumen.task.hooks import check_training
from lumen.task.task_module import TaskModule
from lumen.trainer.fitting import begin_training
from lumen.trainer.join_callbacks import join_callbacks
from lumen.trainer.logs import LogSettings
from lumen.trainer.open_run import opened
from lumen.trainer.trainer import Trainer
from lumen.trainer.tuner import BatchSizeFinder, LearningRateFinder

_LEFT_OUT = (*BYSTANDERS, BatchSizeFinder, LearningRateFinder, Timer)


@final
class Trial:
    """A run of `fit` up to its first steps.

    Args:
        trainer: Of one process, not in a run; it is changed, and is of no use afterwards.
        task: The user's task, which is trained.
        data: A data module, a loader or several.
        processes: How many the run is to have, which are looked at as one.

    Attributes:
        plan: That of the trainer, as it was given.
        savers: The callbacks that save checkpoints.
        monitors: Who waits for which logged name.
        witness: What the first steps have shown.
        said: What the run has warned of.
        finders: Searches that `fit` makes first.
    """

    def __init__(self, trainer: Trainer, task: TaskModule, data: Any, processes: int = 1) -> None:
        self.trainer, self.task, self.data, self.processes = trainer, task, data, processes
        join_callbacks(trainer, "fit", task)
        trainer._asks_task = False
        self.plan: Plan = trainer.plan
        callbacks: list[Callback] = trainer.callbacks
        self.savers = savers_of(callbacks) if trainer.enable_checkpointing else []
        watched = (each for each in callbacks if isinstance(each, (EarlyStopping, ModelCheckpoint)))
        self.monitors = [(type(each).__name__, str(each.monitor)) for each in watched if each.monitor is not None]
        finders = (each for each in callbacks if isinstance(each, (BatchSizeFinder, LearningRateFinder)))
        self.finders = [type(each).__name__ for each in finders]
        self.witness = Witness(looks_inside=not trainer.compilation.setting)
        self.said: list[str] = []

    @contextmanager
    def opened(self, configure: Callable[[], Any] | None) -> Iterator[Run]:
        """The context of the run, in which its parts are there; its first steps are made by `begin`.

        Args:
            configure: Used instead of the task's `configure_optimizers`.
        """
        check_training(self.task, self.data, optimizer_given=configure is not None)
        self._leave_no_traces()
        with self._heard(), opened(self.trainer, "fit", self.task, self.data, None) as run:
            try:
                yield run
            finally:
                self.witness.end_probes()

    def begin(self, run: Run, configure: Callable[[], Any] | None) -> None:
        """Build what training needs, and make the first steps.

        Args:
            run: A run that was just opened.
            configure: Used instead of the task's `configure_optimizers`.
        """
        self.witness.end_probes()
        begin_training(self.trainer, run, configure)
        if run.ending.limit_reached is not None:
            return
        if self.savers:
            check_savable(run)
        schedulers = run.optim.schedulers
        run.optim.schedulers = [each for each in schedulers if each.interval == "hand"]  # to be drawn from the start
        with suppress(Enough):
            train(run)
        run.optim.schedulers = schedulers
        self.witness.names |= {name for each in run.log.train.published().values() for name in each}
        run.log.in_train_step, run.log.stage = False, None

    def _leave_no_traces(self) -> None:
        trainer = self.trainer
        trainer.callbacks = [each for each in trainer.callbacks if not isinstance(each, _LEFT_OUT)] + [self.witness]
        trainer.loggers, trainer.profiler, trainer.enable_checkpointing = [], make_profiler(None), False
        trainer.max_restarts = 0
        trainer.log_settings = LogSettings("WARNING")
        accumulate = {epoch: number * self.processes for epoch, number in self.plan.accumulate.items()}
        trainer.plan = replace(
            self.plan,
            accumulate=accumulate if self.task.automatic_optimization else self.plan.accumulate,
            sanity_batches=2, val_every_n_steps=None, val_every_epoch_fraction=None, val_every_s=None,
        )  # fmt: skip

    @contextmanager
    def _heard(self) -> Iterator[None]:
        """The context in which what Lumen warns of is kept, and not shown."""
        handler = _Keeping(self.said)
        logger.addHandler(handler)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")
                yield
        finally:
            logger.removeHandler(handler)


@final
class _Keeping(logging.Handler):
    """Keeps warnings."""

    def __init__(self, said: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._said = said

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one, once."""
        text = record.getMessage()
        if text not in self._said:
            self._said.append(text)
