"""The beginning of a run, as `fit` makes it, of which nothing stays, and what is seen of it, inside of forwards too."""

from __future__ import annotations

import inspect
import logging
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from logging.handlers import BufferingHandler
from typing import Any, NamedTuple, final

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from lumen.callbacks import Callback, EarlyStopping, ModelCheckpoint, Timer, savers_of
from lumen.checkpoint import check_savable
from lumen.console import logger
from lumen.errors import DataError
from lumen.loop.fit import train
from lumen.loop.micro_batch import unnoticed
from lumen.random import GeneratorStates
from lumen.run.plan import Plan
from lumen.run.run import Run
from lumen.task.hooks import check_training
from lumen.task.steps import read_output
from lumen.task.task_module import TaskModule
from lumen.tools.bystanders import BYSTANDERS
from lumen.tools.check.show import Part, largest, parts_of
from lumen.trainer.prepare import begin_training, roll_back
from lumen.trainer.session import join_callbacks, opened
from lumen.trainer.trainer import Trainer
from lumen.trainer.tuner import BatchSizeFinder, LearningRateFinder

_BY_CLASSES = (functional.cross_entropy, functional.nll_loss)
_BINARY = (functional.binary_cross_entropy_with_logits, functional.binary_cross_entropy)
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@final
@dataclass(frozen=True)
class ClassLoss:
    """A call of `cross_entropy`, or of one of its kin.

    Attributes:
        classes: How many there are; 2 for a binary one.
        is_plain: The mean of all targets, none weighed: with equal odds for all classes it is the logarithm of their
            number.
        value: The loss; None: not a single number.
        least: The smallest label, those aside that are ignored; None: there are no labels.
        most: The largest label.
        labels: Different labels, of the first 4096.
    """

    classes: int
    is_plain: bool
    value: float | None
    least: int | None = None
    most: int | None = None
    labels: frozenset[int] = frozenset()

    @property
    def is_out_of_range(self) -> bool:
        """A label is no number of a class."""
        return self.least is not None and self.most is not None and (self.least < 0 or self.most >= self.classes)


class FirstInput(NamedTuple):
    """What a task's first linear or convolutional layer was given.

    Attributes:
        name: Of the layer, with its class.
        mean: Over all elements.
        std: Standard deviation over all elements.
        least: The smallest element.
        most: The largest one.
    """

    name: str
    mean: float
    std: float
    least: float
    most: float


@final
@dataclass
class Seen:
    """What a forward has shown.

    Attributes:
        losses: Calls of losses of classifiers, in their order.
        first: What the first layer was given; None: it has none, or no numbers.
    """

    losses: list[ClassLoss] = field(default_factory=list)
    first: FirstInput | None = None


@final
class _Losses(TorchFunctionMode):
    """Sees calls of torch's losses."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _BY_CLASSES and func not in _BINARY:
            return func(*args, **kwargs)
        found = None
        with suppress(TypeError, ValueError, IndexError):  # the function itself refuses it, in its own words
            found = _look(func, dict(inspect.signature(func).bind(*args, **kwargs).arguments))
        if found is not None:
            self._seen.losses.append(found)
            if found.is_out_of_range and found.least is not None and args[0].device.type != "cpu":
                raise DataError(  # a GPU would fail for good, and far from here
                    f"labels from {found.least} to {found.most}, but {found.classes} classes: from 0 to "
                    f"{found.classes - 1}."
                )
        value = func(*args, **kwargs)
        if found is not None and value.numel() == 1:
            self._seen.losses[-1] = replace(found, value=float(value.detach()))
        return value


def _look(func: Callable[..., Any], given: dict[str, Any]) -> ClassLoss | None:
    outputs, target = given["input"], given["target"]
    is_mean = given.get("reduction", "mean") == "mean" and given.get("weight") is None
    if func in _BINARY:
        return ClassLoss(2, is_mean and given.get("pos_weight") is None, None)
    classes = outputs.shape[1 if outputs.dim() > 1 else 0]
    if target.is_floating_point():
        return ClassLoss(classes, is_mean, None)
    labels = target.detach()[target.detach() != given.get("ignore_index", -100)]
    if not labels.numel():
        return None
    some = frozenset(labels.flatten()[:4096].tolist())
    return ClassLoss(classes, is_mean, None, int(labels.min()), int(labels.max()), some)


def _see_first(names: Mapping[nn.Module, str], seen: Seen, module: nn.Module, args: tuple[Any, ...]) -> None:
    """Note what the first of some layers is given; a hook for all modules."""
    given = args[0] if args and module in names and seen.first is None else None
    if isinstance(given, torch.Tensor) and given.is_floating_point() and given.numel() > 1:
        numbers = given.detach().float()
        mean, std, least, most = map(float, (numbers.mean(), numbers.std(), numbers.min(), numbers.max()))
        seen.first = FirstInput(f"{names[module]} ({type(module).__name__})", mean, std, least, most)


@contextmanager
def _looking_into(task: nn.Module) -> Iterator[Seen]:
    """Yield what forwards of a task show, as long as the context is open."""
    layers: dict[nn.Module, str] = {each: name for name, each in task.named_modules() if isinstance(each, _LAYERS)}
    seen = Seen()
    with _Losses(seen), register_module_forward_pre_hook(partial(_see_first, layers, seen)):
        yield seen


LOOKED_INTO = 3  # micro-batches; those after them are timed
_LEAST, _MOST, _BUDGET_S = 6, 40, 4.0


class Enough(Exception):
    """The run has shown what it can."""


@final
class Gradients:
    """The gradients of the first micro-batch, or of the first step, before they are clipped.

    Args:
        task: The task that has them.
        trainer: The trainer of the task, in a run.
        is_whole: They are complete, and scaled no longer.

    Attributes:
        norm: Of all of them; None: it is not known.
        without: Names of parameters that require one and have none.
        zero: Names of those whose gradient is zero throughout.
        odd: Names of those with NaN or infinity.
    """

    def __init__(self, task: TaskModule, trainer: Trainer, *, is_whole: bool = False) -> None:
        self.without, self.zero, self.odd = list[str](), list[str](), list[str]()
        norms = list[float]()
        for name, parameter in task.named_parameters():
            if parameter.grad is None:
                self.without += [name] * parameter.requires_grad
                continue
            values = parameter.grad.detach()
            values = values.coalesce().values() if values.is_sparse else values
            norms.append(float(torch.linalg.vector_norm(values.float())) if values.numel() else 0.0)
            if norms[-1] == 0.0:
                self.zero.append(name)
            elif not math.isfinite(norms[-1]):
                self.odd.append(name)
        is_known = is_whole or not trainer.run.precision.handles_overflow  # else it is scaled still
        self.norm = math.hypot(*norms) if is_known else None


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
        self.losses, self.compute_s, self.waited_s = list[float](), list[float](), list[float]()
        self.step_s, self.validation_s = list[float](), list[float]()
        self.seen, self.seen_in_validation = list[Seen](), list[Seen]()
        self.micro_batches = 0
        self.gradients: Gradients | None = None
        self.twins: tuple[float, float] | None = None
        self.changed = ""
        self.names: set[str] = set()
        self._looks_inside = looks_inside
        self._probe = ExitStack()
        self._began_s = self._at_s = self._step_at_s = self._waited_before_s = 0.0
        self._updates = 0
        self._is_over = False

    # ------------------------------------------------------------------ validation

    def on_validation_batch_start(
        self, trainer: Trainer, task: TaskModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Describe a loader's first batch."""
        self.validation.setdefault(dataloader_idx, parts_of(batch))
        self._look_inside(task, self.seen_in_validation)
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
        if self.micro_batches < LOOKED_INTO:
            self._look_inside(task, self.seen)
        self._at_s = _now(trainer)

    def on_before_backward(self, trainer: Trainer, task: TaskModule, loss: torch.Tensor) -> None:
        """The forward is over."""
        self.end_probes()
        value = trainer.run.step.loss if task.automatic_optimization else loss
        if value is not None and value.numel() == 1:
            self.losses.append(float(value.detach()))

    def on_after_backward(self, trainer: Trainer, task: TaskModule) -> None:
        """Note the time, and which parameters have a gradient now."""
        if task.automatic_optimization:
            self._time(trainer)
            if self.gradients is None:
                self.gradients = Gradients(task, trainer)

    def on_before_optimizer_step(self, trainer: Trainer, task: TaskModule, optimizer: torch.optim.Optimizer) -> None:
        """Let nothing move, but for the last two steps: the first of them makes the optimizer's state."""
        if not task.automatic_optimization:
            return
        if self.gradients is not None and not self.waited_s:
            self.gradients = Gradients(task, trainer, is_whole=True)
        done, took_s = self.micro_batches + 1, time.perf_counter() - self._began_s
        has_enough = (done >= _LEAST and took_s > _BUDGET_S) or done >= _MOST or _is_last(trainer)
        self._is_over = self._is_over or has_enough
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
        self._probe.close()

    # ------------------------------------------------------------------ within

    def _look_inside(self, task: TaskModule, seen: list[Seen]) -> None:
        self.end_probes()
        if self._looks_inside:
            seen.append(self._probe.enter_context(_looking_into(task)))

    def _time(self, trainer: Trainer) -> None:
        took_s = _now(trainer) - self._at_s
        if self.micro_batches >= LOOKED_INTO or not self.compute_s:
            self.compute_s.append(took_s)
        else:
            self.compute_s[0] = took_s  # the newest stands in, until some are only timed

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
                is_float = before.is_floating_point()
                tensor.copy_(before * 0.5 + 0.25 * torch.randn_like(before) if is_float else before.flip(-1))
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


def _now(trainer: Trainer) -> float:
    """The time at which the device has done what was asked of it."""
    if trainer.strategy.device.type == "cuda":
        torch.cuda.synchronize(trainer.strategy.device)
    return time.perf_counter()


def _is_last(trainer: Trainer) -> bool:
    return bool(trainer.num_training_batches != float("inf") and trainer.is_last_batch)


_LEFT_OUT = (*BYSTANDERS, BatchSizeFinder, LearningRateFinder, Timer)


@final
class Trial:
    """A run of `fit` up to its first steps.

    Args:
        trainer: Of one process, not in a run; it is changed, and is of no use afterwards.
        task: The user's task, which is trained.
        data: A data module, a loader or several.
        configure: Used instead of the task's `configure_optimizers`; None: the task's.
        processes: How many the run is to have, which are looked at as one.

    Attributes:
        plan: That of the trainer, as it was given.
        savers: The callbacks that save checkpoints.
        monitors: Who waits for which logged name.
        witness: What the first steps have shown.
        said: What the run has warned of.
        finders: Searches that `fit` makes first.
    """

    def __init__(
        self, trainer: Trainer, task: TaskModule, data: Any, configure: Callable[[], Any] | None, processes: int
    ) -> None:
        self.trainer, self.task, self.data, self.processes = trainer, task, data, processes
        self._configure = configure
        join_callbacks(trainer, "fit", task)
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
    def opened(self) -> Iterator[Run]:
        """The context of the run, in which its parts are there; its first steps are made by `begin`."""
        check_training(self.task, self.data, optimizer_given=self._configure is not None)
        self._leave_no_traces()
        with self._heard(), opened(self.trainer, "fit", self.task, self.data, None) as run:
            try:
                yield run
            finally:
                self.witness.end_probes()

    def begin(self, run: Run) -> None:
        """Build what training needs, and make the first steps of a run that was just opened."""
        self.witness.end_probes()
        begin_training(self.trainer, run, self._configure)
        if run.ending.limit_reached is not None:
            return
        if self.savers:
            check_savable(run)
        # The other schedules stay at their start, from which they are to be drawn.
        with suppress(Enough), run.optim.moving(lambda config: config.interval == "hand"):
            if (left_out := train(run)) is not None:
                roll_back(self.trainer, run, left_out)
        self.witness.names |= {name for each in run.log.train.published().values() for name in each}
        run.log.end_step()
        run.log.end_epoch()

    def _leave_no_traces(self) -> None:
        kept = [each for each in self.trainer.callbacks if not isinstance(each, _LEFT_OUT)]
        processes = self.processes if self.task.automatic_optimization else 1
        self.trainer._leave_no_traces(
            [*kept, self.witness], "WARNING", sanity_batches=2,
            accumulate={epoch: number * processes for epoch, number in self.plan.accumulate.items()},
            val_every_n_steps=None, val_every_epoch_fraction=None, val_every_s=None,
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
