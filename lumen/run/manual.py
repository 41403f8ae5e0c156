"""Manual optimization: the task's own calls of backward and of its optimizers' steps, made exact and safe."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, final

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from lumen.errors import ConfigError, TrainingError
from lumen.internals.optimizers import bare_step, has_stepped
from lumen.internals.tensors import multiply
from lumen.optim import needs_closure
from lumen.precision import Precision
from lumen.run.gradients import largest
from lumen.run.plan import Plan, by_epoch
from lumen.run.step_context import StepContext
from lumen.strategies import Strategy
from lumen.task.hooks import Hooks, overrides
from lumen.task.step_output import without_gradient
from lumen.task.task_module import TaskModule

_log = logging.getLogger("lumen")


def check_plan(task: TaskModule, plan: Plan) -> None:
    """Refuse settings of the trainer that are the task's where it optimizes by hand.

    Raises:
        ConfigError: There are some; says what to call instead.
    """
    name = f"{type(task).__name__} optimizes by hand (automatic_optimization = False)"
    if plan.accumulates:
        raise ConfigError(
            f"accumulate_grad_batches: {by_epoch(plan.accumulate)}, but {name}: let training_step call step() and "
            "zero_grad() of its optimizers in every so many batches, by batch_idx; or give a larger global_batch_size."
        )
    if plan.clip_norm is not None or plan.clip_value is not None:
        raise ConfigError(
            f"gradient_clip_val: {plan.clip_norm or plan.clip_value}, but {name}: call "
            "self.clip_gradients(optimizer, gradient_clip_val=...) before its step()."
        )


@final
class ManualOptimizer:
    """An optimizer as a task that optimizes by hand has it: its attributes are the optimizer's.

    Args:
        manual: Makes the steps of the task's optimizers.
        optimizer: Torch's own optimizer, which is updated.

    Attributes:
        optimizer: Torch's own optimizer.
    """

    def __init__(self, manual: ManualOptimization, optimizer: Optimizer) -> None:
        self._manual = manual
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return repr(self.optimizer)

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Update the parameters, unless gradients overflowed in fp16.

        Args:
            closure: Computes loss and gradients and returns the loss.
            options: Passed on to the optimizer's own `step`.

        Returns:
            The loss that the closure returned; None without one.
        """
        return self._manual.step(self.optimizer, closure, options)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of what this optimizer moves."""
        self.optimizer.zero_grad(set_to_none)
        self._manual.forget(self.optimizer)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """The context in which only what this optimizer moves is trained.

        Args:
            sync_grad: False: Lightning then leaves the sum over processes to a later backward. Here each backward makes
                its own sum, so the gradients are the same.
        """
        self._manual.toggle(self)
        try:
            yield
        finally:
            self._manual.untoggle()


@final
class ManualOptimization:
    """Makes the calls of a task that optimizes by hand exact on several processes, and safe in fp16.

    A backward adds to the gradients what is complete: summed over the processes, and divided by the loss scale. So the
    task may read, clip and accumulate gradients as it likes, and several backwards may go into one update or several
    updates be made in one call of `training_step`. The loss scale changes between such calls only.

    Args:
        task: The task that optimizes by hand.
        optimizers: Those that its `configure_optimizers` returned.
        hooks: Those of the run.
        precision: Scales losses in fp16.
        strategy: Sums gradients over the processes.
        step: The step in progress.

    Attributes:
        handles: The optimizers as the task has them, in the same order.
        has_tried: A step of an optimizer was called in the step in progress.
        is_updating: A step of an optimizer is being made.
    """

    def __init__(
        self,
        task: TaskModule,
        optimizers: Sequence[Optimizer],
        hooks: Hooks,
        precision: Precision,
        strategy: Strategy,
        step: StepContext,
    ) -> None:
        self._task, self._optimizers = task, list(optimizers)
        self._hooks, self._precision, self._strategy, self._step = hooks, precision, strategy, step
        self._backward = task.backward if overrides(task, "backward") else torch.Tensor.backward
        self._sums = strategy.processes.world_size > 1 or strategy.shards
        self._factor, self._is_dummy = 1.0, False
        self.has_tried = self._has_moved = self._has_overflowed = False
        self._toggled: Optimizer | None = None
        self._open = set[int]()  # ids of the optimizers for which a backward was made since they have moved
        self._known = set[int]()  # or ever
        self._frozen: list[nn.Parameter] = []
        self._parts: list[Optimizer] = []  # what was unscaled since the scale changed last
        self._moved, self._told = set[int](), set[int]()  # ids of optimizers
        self.handles = [ManualOptimizer(self, each) for each in optimizers]
        self.is_updating = False

    def begin(self, factor: float, *, is_dummy: bool) -> None:
        """A step begins.

        Args:
            factor: What each loss is multiplied by, for the part that this process has of the batch.
            is_dummy: This process has no part of the batch.
        """
        self._factor, self._is_dummy = factor, is_dummy
        self.has_tried = self._has_moved = self._has_overflowed = False
        self._step.grad_norm = None  # of a step in which nothing is clipped there is none

    def end(self) -> bool:
        """A step ends. Returns whether an optimizer has moved."""
        self.untoggle()
        if self.has_tried and self._precision.handles_overflow:
            number = nn.Parameter(torch.zeros(1, device=self._strategy.device))
            number.grad = torch.full_like(number, math.inf if self._has_overflowed else 0.0)
            told = SGD([number], lr=0.0)
            self._precision.step(told)  # the scaler looks at all that was unscaled
            self._parts.clear()
        return self._has_moved

    # ------------------------------------------------------------------ gradients

    def backward(self, loss: torch.Tensor, *args: Any, **options: Any) -> None:
        """Add the gradient of a loss to those of the parameters.

        Raises:
            TrainingError: The loss has no gradient.
            NonFiniteLoss: It is NaN or infinite.
        """
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
            raise without_gradient(self._task)
        meant = {*map(id, self._optimizers if self._toggled is None else [self._toggled])}
        self._open |= meant
        self._known |= meant
        if not self._is_dummy:
            if loss.numel() == 1:
                self._step.check_loss(loss, self._factor)
            for hook in self._hooks.on_before_backward:
                hook(loss)
        part = loss if self._factor == 1.0 else loss * self._factor
        with self._outside_autocast():
            if self._sums or self._precision.handles_overflow:
                self._add_apart(part, args, options)
            elif args or options or self._backward is not torch.Tensor.backward:
                self._precision.backward(part, lambda each: self._backward(each, *args, **options))
            else:
                self._precision.backward(part)
        for hook in self._hooks.on_after_backward if not self._is_dummy else ():
            hook()

    def _add_apart(self, loss: torch.Tensor, args: Any, options: Any) -> None:
        """Make a backward apart from the gradients there are, complete its own, and add them to those."""
        parameters = list(self._task.parameters())
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        self._precision.backward(loss, lambda each: self._backward(each, *args, **options))
        self._strategy.after_backward()
        if self._precision.handles_overflow:
            self._unscale(parameters)
        for parameter, gradient in zip(parameters, before, strict=True):
            if not parameter.requires_grad:  # FSDP gives one, where the graph is older than the freezing
                parameter.grad = gradient
            elif gradient is not None:
                parameter.grad = gradient if parameter.grad is None else gradient + parameter.grad

    def _unscale(self, parameters: list[nn.Parameter]) -> None:
        """Divide gradients by the loss scale; the processes are multiplied here, as in a loss they could overflow."""
        given = [parameter for parameter in parameters if parameter.grad is not None]
        if given:
            self._parts.append(SGD(given, lr=0.0))
            self._precision.unscale(self._parts[-1])
            world = self._strategy.processes.world_size
            if world > 1:
                multiply([parameter.grad for parameter in given if parameter.grad is not None], world)

    def kept_gradients(self) -> dict[nn.Parameter, torch.Tensor]:
        """The gradients that a later update may need: those of optimizers that have not moved since a backward."""
        kept = [each for each in self._optimizers if id(each) in self._open]
        held = [parameter for each in kept for group in each.param_groups for parameter in group["params"]]
        return {parameter: parameter.grad for parameter in held if parameter.grad is not None}

    def keep(self, gradients: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """Go on with the gradients that `kept_gradients` gave."""
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        self._known = {*map(id, self._optimizers)}
        self._open = {*self._known} if gradients else set()

    def forget(self, optimizer: Optimizer) -> None:
        """The gradients of an optimizer are used, or dropped."""
        self._open.discard(id(optimizer))

    # ------------------------------------------------------------------ updates

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None, options: dict[str, Any]) -> Any:
        """Make a step of an optimizer. Returns what the closure returned.

        Raises:
            TrainingError: Its gradients come from a backward that was not summed over the processes, or not scaled.
        """
        loss = None
        if closure is not None and not needs_closure(optimizer):
            with torch.enable_grad():
                loss = closure()
            closure = None
        self._refuse_plain_backward(optimizer)
        if closure is None:
            self._say_if_nothing_moves(optimizer)
        for hook in self._hooks.on_before_optimizer_step:
            hook(optimizer)
        self.has_tried = True
        self._moved.add(id(optimizer))
        if self._precision.handles_overflow and self._overflows(optimizer):
            has_stepped(optimizer)
            self._has_overflowed = True
            self.forget(optimizer)
            return loss
        self.is_updating = True
        with self._outside_autocast():
            if closure is not None or options:
                loss = optimizer.step(closure, **options)
            else:
                bare_step(optimizer)()
        self.is_updating, self._has_moved = False, True
        self.forget(optimizer)
        if torch.is_autocast_enabled(self._strategy.device.type):
            torch.clear_autocast_cache()  # it holds the parameters in 16 bits as they were
        return loss

    def _overflows(self, optimizer: Optimizer) -> bool:
        found = largest(parameter for group in optimizer.param_groups for parameter in group["params"])
        if found is None:
            return False
        if self._strategy.shards:
            found = self._strategy.reduce(found.nan_to_num(math.inf), "max")
        return not math.isfinite(found.item())

    def _refuse_plain_backward(self, optimizer: Optimizer) -> None:
        if id(optimizer) in self._known or not (self._sums or self._precision.handles_overflow):
            return
        if any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"]):
            raise TrainingError(
                f"{type(optimizer).__name__}.step: no manual_backward was called for what it moves, so its "
                "gradients are neither summed over the processes nor scaled for fp16. Call "
                "self.manual_backward(loss) instead of loss.backward()."
            )

    def _say_if_nothing_moves(self, optimizer: Optimizer) -> None:
        """Say once of an optimizer that a step of it changes nothing."""
        held = (parameter for group in optimizer.param_groups for parameter in group["params"])
        if id(optimizer) not in self._told and all(parameter.grad is None for parameter in held):
            self._told.add(id(optimizer))
            _log.warning(
                "%s.step was called where no parameter of it has a gradient: nothing moves. Call "
                "self.manual_backward(loss) before it, and zero_grad before that",
                type(optimizer).__name__,
            )

    def say_idle(self) -> None:
        """Say which optimizers nobody has moved."""
        for number, optimizer in enumerate(self._optimizers):
            if id(optimizer) not in self._moved and not optimizer.state:
                _log.warning(
                    "optimizer %d of configure_optimizers (%s) was never moved: training_step has not called its step",
                    number,
                    type(optimizer).__name__,
                )

    def _outside_autocast(self) -> AbstractContextManager[Any]:
        """The context of what is not a forward: torch wants autocast to end before."""
        kind = self._strategy.device.type
        return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()

    # ------------------------------------------------------------------ which parameters are trained

    def toggle(self, optimizer: Any) -> None:
        """Freeze what the other optimizers move, and this one does not."""
        self.untoggle()
        self._toggled = next((each for each in self._optimizers if each.param_groups is optimizer.param_groups), None)
        kept = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for other in self._optimizers:
            for group in other.param_groups:
                for parameter in group["params"]:
                    if id(parameter) not in kept and parameter.requires_grad:
                        self._frozen.append(parameter)
                        parameter.requires_grad_(False)

    def untoggle(self) -> None:
        """Put `requires_grad` back to what it was."""
        for parameter in self._frozen:
            parameter.requires_grad_()
        self._frozen.clear()
        self._toggled = None
