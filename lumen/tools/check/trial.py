"""Trial run: the first steps of `fit` without side effects, and observations of them, also inside the forwards."""

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

from lumen.callbacks import (
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    Timer,
    get_checkpoint_callbacks,
)
from lumen.checkpoint import check_savable
from lumen.console import logger
from lumen.errors import DataError
from lumen.loop.fit import train_run
from lumen.loop.micro_batch import undo_forward_effects
from lumen.random import GeneratorStates
from lumen.run.plan import Plan
from lumen.run.run import Run
from lumen.task.hooks import check_training
from lumen.task.steps import read_output
from lumen.task.task_module import TaskModule
from lumen.tools.check.report import BatchLeaf, describe_leaves, find_largest
from lumen.tools.side_effect_callbacks import SIDE_EFFECT_CALLBACKS
from lumen.trainer.prepare import begin_training, remove_newer_checkpoints
from lumen.trainer.session import join_callbacks, open_run
from lumen.trainer.trainer import Trainer
from lumen.trainer.tuner import BatchSizeFinder, LearningRateFinder

_CLASS_LOSSES = (functional.cross_entropy, functional.nll_loss)
_BINARY_LOSSES = (functional.binary_cross_entropy_with_logits, functional.binary_cross_entropy)
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@final
@dataclass(frozen=True)
class ClassLoss:
    """Call of `cross_entropy` or a similar loss.

    Attributes:
        classes: Number of classes, 2 for a binary loss.
        is_plain: True for the unweighted mean over all targets. At chance level, this loss is the logarithm of the
            number of classes.
        value: The loss, or None if it is not a single number.
        least: The smallest label except ignored ones, or None without labels.
        most: The largest label except ignored ones, or None without labels.
        labels: Distinct labels among the first 4096.
    """

    classes: int
    is_plain: bool
    value: float | None
    least: int | None = None
    most: int | None = None
    labels: frozenset[int] = frozenset()

    @property
    def is_out_of_range(self) -> bool:
        """True if a label is not the number of a class."""
        return self.least is not None and self.most is not None and (self.least < 0 or self.most >= self.classes)


class FirstInput(NamedTuple):
    """Input of a task's first linear or convolutional layer.

    Attributes:
        name: Name of the layer, with its class.
        mean: Mean over all elements.
        std: Standard deviation over all elements.
        least: The smallest element.
        most: The largest element.
    """

    name: str
    mean: float
    std: float
    least: float
    most: float


@final
@dataclass
class ForwardObservations:
    """Observations of one forward.

    Attributes:
        losses: Calls of classification losses, in order.
        first: Input of the first layer, or None without such a layer or a floating-point input.
    """

    losses: list[ClassLoss] = field(default_factory=list)
    first: FirstInput | None = None


@final
class _LossObserver(TorchFunctionMode):
    """Function mode that records calls of torch's classification losses."""

    def __init__(self, seen: ForwardObservations) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _CLASS_LOSSES and func not in _BINARY_LOSSES:
            return func(*args, **kwargs)
        found = None
        with suppress(TypeError, ValueError, IndexError):  # The loss function raises its own error for bad arguments.
            found = _observe_loss(func, dict(inspect.signature(func).bind(*args, **kwargs).arguments))
        if found is not None:
            self._seen.losses.append(found)
            if found.is_out_of_range and found.least is not None and args[0].device.type != "cpu":
                raise DataError(  # A CUDA assertion would break the process and be reported elsewhere.
                    f"labels range from {found.least} to {found.most}, but the output has {found.classes} classes. "
                    f"Labels must be from 0 to {found.classes - 1}, or ignore_index."
                )
        value = func(*args, **kwargs)
        if found is not None and value.numel() == 1:
            self._seen.losses[-1] = replace(found, value=float(value.detach()))
        return value


def _observe_loss(func: Callable[..., Any], arguments: dict[str, Any]) -> ClassLoss | None:
    outputs, target = arguments["input"], arguments["target"]
    is_mean = arguments.get("reduction", "mean") == "mean" and arguments.get("weight") is None
    if func in _BINARY_LOSSES:
        return ClassLoss(2, is_mean and arguments.get("pos_weight") is None, None)
    classes = outputs.shape[1 if outputs.dim() > 1 else 0]
    if target.is_floating_point():
        return ClassLoss(classes, is_mean, None)
    labels = target.detach()[target.detach() != arguments.get("ignore_index", -100)]
    if not labels.numel():
        return None
    distinct = frozenset(labels.flatten()[:4096].tolist())
    return ClassLoss(classes, is_mean, None, int(labels.min()), int(labels.max()), distinct)


def _observe_first_layer(
    names: Mapping[nn.Module, str], seen: ForwardObservations, module: nn.Module, args: tuple[Any, ...]
) -> None:
    """Record the input of the first of some layers, as a forward pre-hook of all modules."""
    value = args[0] if args and module in names and seen.first is None else None
    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 1:
        numbers = value.detach().float()
        mean, std, least, most = map(float, (numbers.mean(), numbers.std(), numbers.min(), numbers.max()))
        seen.first = FirstInput(f"{names[module]} ({type(module).__name__})", mean, std, least, most)


@contextmanager
def _probe_forwards(task: nn.Module) -> Iterator[ForwardObservations]:
    """Record observations of the forwards of a task while the context is open."""
    layers: dict[nn.Module, str] = {each: name for name, each in task.named_modules() if isinstance(each, _LAYERS)}
    seen = ForwardObservations()
    with _LossObserver(seen), register_module_forward_pre_hook(partial(_observe_first_layer, layers, seen)):
        yield seen


MAX_PROBED_BATCHES = 3  # number of micro-batches; later micro-batches are only timed
_MIN_STEPS, _MAX_STEPS, _BUDGET_S = 6, 40, 4.0


class TrialFinished(Exception):
    """Signal that ends the trial run, raised after enough steps."""


@final
class GradientSummary:
    """Gradients of the first micro-batch or the first step, before clipping.

    Args:
        task: The task with the gradients.
        trainer: The trainer of the task, in a run.
        is_complete: True if the gradients are complete and unscaled.

    Attributes:
        norm: Norm of all gradients, or None if they are still scaled.
        without: Names of parameters that require a gradient and have none.
        zero: Names of parameters whose gradient is zero everywhere.
        odd: Names of parameters whose gradient has NaN or infinite elements.
    """

    def __init__(self, task: TaskModule, trainer: Trainer, *, is_complete: bool = False) -> None:
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
        is_known = is_complete or not trainer.run.precision.handles_overflow  # Other gradients have the loss scale.
        self.norm = math.hypot(*norms) if is_known else None


@final
class TrialObserver(Callback):
    """Callback that records the first validation batches and the first steps of a run, and then ends the run.

    Attributes:
        batch: The first training batch, as passed to the step.
        validation: The first batch of each validation loader, by the loader's number.
        losses: The loss of each micro-batch.
        forwards: Observations of the first training forwards.
        validation_forwards: Observations of the first validation forwards.
        compute_s: Duration of each micro-batch that was only timed, without waiting for data.
        waited_s: Time that each step waited for its data.
        step_s: Duration of each update.
        validation_s: Duration of each validation step.
        micro_batches: Number of micro-batches.
        gradients: The first gradients, or None.
        paired_losses: The loss of a batch, and of that batch with its largest tensor changed, or None if not tried.
        changed: Path of the changed tensor in the batch.
        names: Names of the logged values.
    """

    def __init__(self, *, probes_forwards: bool) -> None:
        self.batch: list[BatchLeaf] | None = None
        self.validation: dict[int, list[BatchLeaf]] = {}
        self.losses, self.compute_s, self.waited_s = list[float](), list[float](), list[float]()
        self.step_s, self.validation_s = list[float](), list[float]()
        self.forwards, self.validation_forwards = list[ForwardObservations](), list[ForwardObservations]()
        self.micro_batches = 0
        self.gradients: GradientSummary | None = None
        self.paired_losses: tuple[float, float] | None = None
        self.changed = ""
        self.names: set[str] = set()
        self._probes_forwards = probes_forwards
        self._probe = ExitStack()
        self._began_s = self._at_s = self._step_at_s = self._waited_before_s = 0.0
        self._updates = 0
        self._is_over = False

    # ------------------------------------------------------------------ validation

    def on_validation_batch_start(
        self, trainer: Trainer, task: TaskModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Record the loader's first batch, and start to observe the forward."""
        self.validation.setdefault(dataloader_idx, describe_leaves(batch))
        self._run_probed(task, self.validation_forwards)
        self._at_s = _get_synchronized_time(trainer)

    def on_validation_batch_end(
        self, trainer: Trainer, task: TaskModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Record the duration of the step."""
        self.end_probes()
        self.validation_s.append(_get_synchronized_time(trainer) - self._at_s)

    def on_validation_end(self, trainer: Trainer, task: TaskModule) -> None:
        """Record the logged names."""
        self.names |= set(trainer.run.values.newest)

    # ------------------------------------------------------------------ training

    def on_train_batch_start(self, trainer: Trainer, task: TaskModule, batch: Any, batch_idx: int) -> None:
        """Describe the first batch, and observe the forwards of the first batches."""
        if self.batch is None:
            self.batch, self._began_s = describe_leaves(batch), time.perf_counter()
            if self._probes_forwards and task.automatic_optimization:
                with suppress(Exception):  # The step itself will raise the error.
                    self._compare_changed_batch(trainer, task, batch, batch_idx)
        if self.micro_batches < MAX_PROBED_BATCHES:
            self._run_probed(task, self.forwards)
        self._at_s = _get_synchronized_time(trainer)

    def on_before_backward(self, trainer: Trainer, task: TaskModule, loss: torch.Tensor) -> None:
        """Stop observing the forward, and record the loss."""
        self.end_probes()
        value = trainer.run.step.loss if task.automatic_optimization else loss
        if value is not None and value.numel() == 1:
            self.losses.append(float(value.detach()))

    def on_after_backward(self, trainer: Trainer, task: TaskModule) -> None:
        """Record the time, and the first gradients."""
        if task.automatic_optimization:
            self._record_compute_s(trainer)
            if self.gradients is None:
                self.gradients = GradientSummary(task, trainer)

    def on_before_optimizer_step(self, trainer: Trainer, task: TaskModule, optimizer: torch.optim.Optimizer) -> None:
        """Skip all updates but the last two. The first of these creates the optimizer's state."""
        if not task.automatic_optimization:
            return
        if self.gradients is not None and not self.waited_s:
            self.gradients = GradientSummary(task, trainer, is_complete=True)
        done, took_s = self.micro_batches + 1, time.perf_counter() - self._began_s
        has_enough = (done >= _MIN_STEPS and took_s > _BUDGET_S) or done >= _MAX_STEPS or _is_last(trainer)
        self._is_over = self._is_over or has_enough
        if self._is_over:
            self._updates += 1
            self._step_at_s = _get_synchronized_time(trainer)
        else:
            trainer.skip_update()

    def on_train_batch_end(self, trainer: Trainer, task: TaskModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count the micro-batch, and end the run after enough steps."""
        self.end_probes()
        self.micro_batches += 1
        if not task.automatic_optimization:
            self._record_compute_s(trainer)
            self._is_over = self.micro_batches >= MAX_PROBED_BATCHES + 1 or _is_last(trainer)
            self._updates = 2
        waited_s = trainer.run.step.counters.waited_s
        if waited_s > self._waited_before_s:
            self.waited_s.append(waited_s - self._waited_before_s)
            self._waited_before_s = waited_s
        if self._step_at_s:
            self.step_s.append(_get_synchronized_time(trainer) - self._step_at_s)
            self._step_at_s = 0.0
        is_late = time.perf_counter() - self._began_s > 5 * _BUDGET_S  # A long step may not be over.
        if (self._is_over and (self._updates > 1 or _is_last(trainer))) or (is_late and self.micro_batches > 1):
            raise TrialFinished

    def end_probes(self) -> None:
        """Stop observing forwards."""
        self._probe.close()

    # ------------------------------------------------------------------ helpers

    def _run_probed(self, task: TaskModule, seen: list[ForwardObservations]) -> None:
        self.end_probes()
        if self._probes_forwards:
            seen.append(self._probe.enter_context(_probe_forwards(task)))

    def _record_compute_s(self, trainer: Trainer) -> None:
        took_s = _get_synchronized_time(trainer) - self._at_s
        if self.micro_batches >= MAX_PROBED_BATCHES or not self.compute_s:
            self.compute_s.append(took_s)
        else:
            self.compute_s[0] = took_s  # The newest duration counts until a micro-batch is only timed.

    def _compare_changed_batch(self, trainer: Trainer, task: TaskModule, batch: Any, batch_idx: int) -> None:
        """Compare the loss of a batch with the loss after changing its largest tensor, with the same random numbers."""
        found = find_largest(batch)
        if found is None:
            return
        self.changed, tensor = found
        before, states = tensor.clone(), GeneratorStates()
        loss = self._compute_loss(trainer, batch, batch_idx)
        states.restore()
        try:
            with torch.no_grad():
                is_float = before.is_floating_point()
                tensor.copy_(before * 0.5 + 0.25 * torch.randn_like(before) if is_float else before.flip(-1))
            states.restore()
            changed_loss = self._compute_loss(trainer, batch, batch_idx)
        finally:
            with torch.no_grad():
                tensor.copy_(before)
            states.restore()
        if loss is not None and changed_loss is not None:
            self.paired_losses = loss, changed_loss

    def _compute_loss(self, trainer: Trainer, batch: Any, batch_idx: int) -> float | None:
        run = trainer.run
        with undo_forward_effects(run), run.precision.forward(), torch.no_grad():
            output = run.strategy.call("training_step", *run.calls.get_arguments("training_step", batch, batch_idx, 0))
            loss, _ = read_output(output)
        return None if loss is None else float(loss)


def _get_synchronized_time(trainer: Trainer) -> float:
    """Return the time after the device has completed all work."""
    if trainer.strategy.device.type == "cuda":
        torch.cuda.synchronize(trainer.strategy.device)
    return time.perf_counter()


def _is_last(trainer: Trainer) -> bool:
    return bool(trainer.num_training_batches != float("inf") and trainer.is_last_batch)


# The plan has the numbers of a GradientAccumulationScheduler already.
_EXCLUDED_CALLBACKS = (
    *SIDE_EFFECT_CALLBACKS, BatchSizeFinder, GradientAccumulationScheduler, LearningRateFinder, Timer,
)  # fmt: skip


@final
class CheckTrial:
    """Run of `fit` up to its first steps.

    Args:
        trainer: A trainer of one process, not in a run. The trainer is changed and cannot be used afterwards.
        task: The user's task, which is trained.
        data: A data module, a loader or several.
        configure: Function used instead of the task's `configure_optimizers`, or None for the task's.
        processes: Number of processes of the real run that read different batches. The trial has one process.

    Attributes:
        plan: The trainer's plan, as given.
        savers: The callbacks that save checkpoints.
        monitors: Names of callbacks, each with the logged name that it monitors.
        observer: Observations of the first steps.
        warnings: Warnings of the run.
        finders: Names of the search callbacks that `fit` would run first.
    """

    def __init__(
        self, trainer: Trainer, task: TaskModule, data: Any, configure: Callable[[], Any] | None, processes: int
    ) -> None:
        self.trainer, self.task, self.data, self.processes = trainer, task, data, processes
        self._configure = configure
        join_callbacks(trainer, "fit", task)
        self.plan: Plan = trainer.plan
        callbacks: list[Callback] = trainer.callbacks
        self.savers = get_checkpoint_callbacks(callbacks) if trainer.enable_checkpointing else []
        watched = (each for each in callbacks if isinstance(each, (EarlyStopping, ModelCheckpoint)))
        self.monitors = [
            (type(each).__name__, each.monitor)
            for each in watched
            if each.monitor is not None and not (isinstance(each, ModelCheckpoint) and each.monitor in each.COUNTS)
        ]
        finders = (each for each in callbacks if isinstance(each, (BatchSizeFinder, LearningRateFinder)))
        self.finders = [type(each).__name__ for each in finders]
        self.observer = TrialObserver(probes_forwards=not trainer.compilation.setting)
        self.warnings: list[str] = []

    @contextmanager
    def open_run(self) -> Iterator[Run]:
        """Open the run as a context manager. `begin` makes the first steps."""
        check_training(self.task, self.data, has_optimizer=self._configure is not None)
        self._disable_side_effects()
        with self._capture_warnings(), open_run(self.trainer, "fit", self.task, self.data, None) as run:
            try:
                yield run
            finally:
                self.observer.end_probes()

    def begin(self, run: Run) -> None:
        """Prepare the training, and make the first steps of a run that was just opened."""
        self.observer.end_probes()
        begin_training(self.trainer, run, self._configure)
        if run.ending.limit_reached is not None:
            return
        if self.savers:
            check_savable(run)
        # Other schedules stay at their start, because their curves are drawn from there.
        with suppress(TrialFinished), run.optim.select_schedulers(lambda config: config.interval == "hand"):
            if (left_out := train_run(run)) is not None:
                remove_newer_checkpoints(self.trainer, run, left_out)
        self.observer.names |= {name for each in run.log.train.map_published_names().values() for name in each}
        run.log.end_step()
        run.log.end_epoch()

    def _disable_side_effects(self) -> None:
        kept = [each for each in self.trainer.callbacks if not isinstance(each, _EXCLUDED_CALLBACKS)]
        processes = self.processes if self.task.automatic_optimization else 1
        self.trainer._disable_side_effects(
            [*kept, self.observer], "WARNING", sanity_batches=2,
            accumulate={epoch: number * processes for epoch, number in self.plan.accumulate.items()},
            val_every_n_steps=None, val_every_epoch_fraction=None, val_every_s=None,
        )  # fmt: skip

    @contextmanager
    def _capture_warnings(self) -> Iterator[None]:
        """Collect Lumen's warnings while the context is open, without showing them."""
        handler = BufferingHandler(sys.maxsize)
        handler.setLevel(logging.WARNING)
        logger.addHandler(handler)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")
                yield
        finally:
            logger.removeHandler(handler)
            self.warnings += dict.fromkeys(record.getMessage() for record in handler.buffer)
