"""The beginning of a run, as `fit` makes it, of which nothing stays."""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from logging.handlers import BufferingHandler
from typing import Any, final

import torch

from lumen.callbacks import Callback, EarlyStopping, ModelCheckpoint, Timer, savers_of
from lumen.checkpoint import check_savable
from lumen.console import logger
from lumen.loop.fit import train
from lumen.loop.micro_batch import unnoticed
from lumen.profilers import make_profiler
from lumen.random import GeneratorStates
from lumen.run.plan import Plan
from lumen.run.run import Run
from lumen.task.hooks import check_training
from lumen.task.step_output import read_output
from lumen.task.task_module import TaskModule
from lumen.tools.bystanders import BYSTANDERS
from lumen.tools.check.probes import Probes, Seen
from lumen.tools.check.show import Part, largest, parts_of
from lumen.trainer.logs import LogSettings
from lumen.trainer.prepare import begin_training, go_back
from lumen.trainer.session import join_callbacks, opened
from lumen.trainer.trainer import Trainer
from lumen.trainer.tuner import BatchSizeFinder, LearningRateFinder

LOOKED_INTO = 3  # micro-batches; those after them are timed
_LEAST, _MOST, _BUDGET_S = 6, 40, 4.0


class Enough(Exception):
    """The run has shown what it can."""


@final
@dataclass
class Gradients:
    """Those of the first micro-batch, or of the first step, before they are clipped.

    Attributes:
        norm: Of all of them; None: it is not known.
        without: Names of parameters that require one and have none.
        zero: Names of those whose gradient is zero throughout.
        odd: Names of those with NaN or infinity.
    """

    norm: float | None = None
    without: list[str] = field(default_factory=list)
    zero: list[str] = field(default_factory=list)
    odd: list[str] = field(default_factory=list)


@final
class Witness(Callback):
    """Sees the first validation batches and the first steps of a run, and ends it there.

    Attributes:
        batch: The first training batch, as a step gets it.
        validation: Of each loader the first batch, by its number.
        losses: The loss of each micro-batch.
        seen: What was seen inside of the first forwards.
        seen_in_validation: What was seen inside of the first validation forwards.
        compute_s: How long each micro-batch takes that was only timed, without waiting for it.
        waited_s: How long each step waited for its data.
        step_s: How long the updates took.
        validation_s: How long the validation steps took.
        micro_batches: How many there were.
        gradients: The first ones.
        twins: The loss of a batch, and of the same one with its largest part changed; None: not tried.
        changed: Which part that was.
        names: Names that were logged.
    """

    def __init__(self, *, looks_inside: bool) -> None:
        self.batch: list[Part] | None = None
        self.validation: dict[int, list[Part]] = {}
        self.losses: list[float] = []
        self.seen: list[Seen] = []
        self.seen_in_validation: list[Seen] = []
        self.compute_s: list[float] = []
        self.waited_s: list[float] = []
        self.step_s: list[float] = []
        self.validation_s: list[float] = []
        self.micro_batches = 0
        self.gradients: Gradients | None = None
        self.twins: tuple[float, float] | None = None
        self.changed = ""
        self.names: set[str] = set()
        self._looks_inside = looks_inside
        self._probes: Probes | None = None
        self._began_s = self._at_s = self._step_at_s = 0.0
        self._waited_before_s = 0.0
        self._updates = 0
        self._is_over = False

    # ------------------------------------------------------------------ validation

    def on_validation_batch_start(
        self, trainer: Trainer, task: TaskModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Describe a loader's first batch."""
        self.validation.setdefault(dataloader_idx, parts_of(batch))
        if self._looks_inside:
            self._probes = self._probes or Probes(task)
            self.seen_in_validation.append(self._probes.begin())
        self._at_s = _now(trainer)

    def on_validation_batch_end(
        self, trainer: Trainer, task: TaskModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Note how long the step took."""
        self.end_probes()
        self.validation_s.append(_now(trainer) - self._at_s)

    def on_validation_end(self, trainer: Trainer, task: TaskModule) -> None:
        """Note what was logged."""
        self.names |= set(trainer.run.values.newest)

    # ------------------------------------------------------------------ training

    def on_train_batch_start(self, trainer: Trainer, task: TaskModule, batch: Any, batch_idx: int) -> None:
        """Describe the first batch; look into the first ones."""
        if self.batch is None:
            self.batch, self._began_s = parts_of(batch), time.perf_counter()
            if self._looks_inside and task.automatic_optimization:
                with suppress(Exception):  # it fails in the step itself, then
                    self._try_changed(trainer, task, batch, batch_idx)
        if self._looks_inside and self.micro_batches < LOOKED_INTO:
            self._probes = self._probes or Probes(task)
            self.seen.append(self._probes.begin())
        self._at_s = _now(trainer)

    def on_before_backward(self, trainer: Trainer, task: TaskModule, loss: torch.Tensor) -> None:
        """The forward is over."""
        self.end_probes()
        if task.automatic_optimization and trainer.run.step.loss is not None:
            self.losses.append(float(trainer.run.step.loss.detach()))
        elif loss.numel() == 1 and not task.automatic_optimization:
            self.losses.append(float(loss.detach()))

    def on_after_backward(self, trainer: Trainer, task: TaskModule) -> None:
        """Note the time, and which parameters have a gradient now."""
        if task.automatic_optimization:
            self._time(trainer)
            if self.gradients is None:
                self.gradients = _gradients(task, trainer)

    def on_before_optimizer_step(self, trainer: Trainer, task: TaskModule, optimizer: torch.optim.Optimizer) -> None:
        """Let nothing move, but for the last two steps: the first of them makes the optimizer's state."""
        if not task.automatic_optimization:
            return
        if self.gradients is not None and not self.waited_s:
            self.gradients = _gradients(task, trainer, is_whole=True)
        self._is_over = self._is_over or self._has_enough(trainer)
        if self._is_over:
            self._updates += 1
            self._step_at_s = _now(trainer)
        else:
            trainer.skip_update()

    def on_train_batch_end(self, trainer: Trainer, task: TaskModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count; end it where it has shown enough."""
        self.end_probes()
        self.micro_batches += 1
        if not task.automatic_optimization:
            self._time(trainer)
            self._is_over = self.micro_batches >= LOOKED_INTO + 1 or _is_last(trainer)
            self._updates = 2
        waited_s = trainer.run.step.counters.waited_s
        if waited_s > self._waited_before_s:
            self.waited_s.append(waited_s - self._waited_before_s)
            self._waited_before_s = waited_s
        if self._step_at_s:
            self.step_s.append(_now(trainer) - self._step_at_s)
            self._step_at_s = 0.0
        late = time.perf_counter() - self._began_s > 5 * _BUDGET_S  # in the middle of a long step
        if (self._is_over and (self._updates > 1 or _is_last(trainer))) or (late and self.micro_batches > 1):
            raise Enough

    def end_probes(self) -> None:
        """Look into no forward any more."""
        if self._probes is not None:
            self._probes.end()

    # ------------------------------------------------------------------ within

    def _time(self, trainer: Trainer) -> None:
        took_s = _now(trainer) - self._at_s
        if self.micro_batches >= LOOKED_INTO or not self.compute_s:
            self.compute_s.append(took_s)
        else:
            self.compute_s[0] = took_s  # the newest stands in, until some are only timed

    def _has_enough(self, trainer: Trainer) -> bool:
        done, took_s = self.micro_batches + 1, time.perf_counter() - self._began_s
        return (done >= _LEAST and took_s > _BUDGET_S) or done >= _MOST or _is_last(trainer)

    def _try_changed(self, trainer: Trainer, task: TaskModule, batch: Any, batch_idx: int) -> None:
        """The loss of the batch, and of the same with its largest part changed, by the same random numbers."""
        found = largest(batch)
        if found is None:
            return
        self.changed, tensor = found
        before, states = tensor.clone(), GeneratorStates()
        one = self._loss(trainer, batch, batch_idx)
        states.restore()
        try:
            with torch.no_grad():
                tensor.copy_(_changed(before))
            states.restore()
            other = self._loss(trainer, batch, batch_idx)
        finally:
            with torch.no_grad():
                tensor.copy_(before)
            states.restore()
        if one is not None and other is not None:
            self.twins = one, other

    def _loss(self, trainer: Trainer, batch: Any, batch_idx: int) -> float | None:
        run = trainer.run
        with unnoticed(run), run.precision.forward(), torch.no_grad():
            output = run.strategy.call("training_step", *run.calls.arguments("training_step", batch, batch_idx, 0))
            loss, _ = read_output(output)
        return None if loss is None else float(loss)


def _changed(tensor: torch.Tensor) -> torch.Tensor:
    """Other numbers of the same kind."""
    if tensor.is_floating_point():
        return tensor * 0.5 + 0.25 * torch.randn_like(tensor)
    return tensor.flip(-1)


def _now(trainer: Trainer) -> float:
    """The time at which the device has done what was asked of it."""
    if trainer.strategy.device.type == "cuda":
        torch.cuda.synchronize(trainer.strategy.device)
    return time.perf_counter()


def _is_last(trainer: Trainer) -> bool:
    return bool(trainer.num_training_batches != float("inf") and trainer.is_last_batch)


def _gradients(task: TaskModule, trainer: Trainer, *, is_whole: bool = False) -> Gradients:
    found, norms = Gradients(), []
    for name, parameter in task.named_parameters():
        if not parameter.requires_grad:
            continue
        gradient = parameter.grad
        if gradient is None:
            found.without.append(name)
            continue
        values = gradient.detach()
        values = values.coalesce().values() if values.is_sparse else values
        norm = float(torch.linalg.vector_norm(values.float())) if values.numel() else 0.0
        norms.append(norm)
        if norm == 0.0:
            found.zero.append(name)
        elif not norm < float("inf"):
            found.odd.append(name)
    if is_whole or not trainer.run.precision.handles_overflow:  # else it is scaled still
        found.norm = sum(norm * norm for norm in norms) ** 0.5
    return found


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
        # The other schedules stay at their start, from which they are to be drawn.
        with suppress(Enough), run.optim.moving(lambda config: config.interval == "hand"):
            if (left_out := train(run)) is not None:
                go_back(self.trainer, run, left_out)
        self.witness.names |= {name for each in run.log.train.published().values() for name in each}
        run.log.end_step()
        run.log.end_epoch()

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
        handler = BufferingHandler(sys.maxsize)
        handler.setLevel(logging.WARNING)
        logger.addHandler(handler)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")
                yield
        finally:
            logger.removeHandler(handler)
            self.said += dict.fromkeys(record.getMessage() for record in handler.buffer)
