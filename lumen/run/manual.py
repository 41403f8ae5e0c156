"""Manual optimization: exact gradients and safe updates for tasks that call backward and `optimizer.step`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, final

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from lumen.console import logger as _log
from lumen.errors import ConfigError, TrainingError
from lumen.internals.optimizers import ForwardingOptimizer, drop_gradients, get_unwrapped_step, mark_as_stepped
from lumen.optim import needs_closure
from lumen.precision import Precision
from lumen.run.configure_optimizers import make_closure_in_fp16_error
from lumen.run.gradients import compute_max_abs_gradient, list_parameters, scale_gradients
from lumen.run.plan import Plan, format_by_epoch
from lumen.run.step_context import StepContext
from lumen.strategies import Strategy
from lumen.task.hooks import Hooks, is_overridden
from lumen.task.steps import make_no_gradient_error
from lumen.task.task_module import TaskModule


def check_plan(task: TaskModule, plan: Plan) -> None:
    """Refuse settings of the trainer that the task must replace by calls in manual optimization.

    Raises:
        ConfigError: Such a setting is set. The message names the call to use instead.
    """
    name = f"{type(task).__name__} has automatic_optimization = False"
    if plan.has_accumulation:
        raise ConfigError(
            f"accumulate_grad_batches: {format_by_epoch(plan.accumulate)}, but {name}: call step() and zero_grad() of "
            "the optimizers only in every n-th batch, by batch_idx; or set a larger global_batch_size."
        )
    if plan.clip_norm is not None or plan.clip_value is not None:
        raise ConfigError(
            f"gradient_clip_val: {plan.clip_norm or plan.clip_value}, but {name}: call "
            "self.clip_gradients(optimizer, gradient_clip_val=...) before its step()."
        )


@final
class ManualOptimizer(ForwardingOptimizer):
    """Optimizer that a task gets in manual optimization. It forwards other attributes to the torch optimizer.

    Args:
        manual: The manual optimization of the run, which makes the steps.
        optimizer: The torch optimizer to step.

    Attributes:
        optimizer: The torch optimizer.
        is_registered: True once a backward was made for its parameters.
        was_called: True once its `step` was called.
        has_warned: True once Lumen has warned of a step without gradients.
        needs_closure: True if its `step` evaluates the loss.
        is_open: True if a backward was made for it since its gradients were used or dropped.
        has_weight: True if one of these backwards was of a batch whose weights do not sum to 0.
    """

    def __init__(self, manual: ManualOptimization, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self._manual, self.needs_closure = manual, needs_closure(optimizer)
        self.is_registered = self.was_called = self.has_warned = False
        self.note_used()

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if name.endswith("_step") and callable(found) and not hasattr(Optimizer, name):  # such as SAM's `first_step`
            return partial(self._manual.step_part, self, found)
        return found

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Update the parameters, unless gradients overflowed in fp16 or a hook asks for no update.

        Args:
            closure: Function that computes loss and gradients and returns the loss.
            options: Further arguments of the torch optimizer's `step`.

        Returns:
            The loss that the closure returned; None without a closure. If the optimizer needs a closure, the loss is
            the mean over the batches of all processes.

        Raises:
            ConfigError: The closure is not a function.
        """
        if closure is not None and not callable(closure):
            raise ConfigError(f"optimizer.step: expected a function that returns the loss, found {closure!r}.")
        return self._manual.step(self, closure, options)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of this optimizer's parameters."""
        drop_gradients(self.optimizer) if set_to_none else self.optimizer.zero_grad(set_to_none=False)
        self.note_used()

    def note_used(self) -> None:
        """Note that the gradients are used or dropped."""
        self.is_open = self.has_weight = False

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Train only this optimizer's parameters within the context.

        Args:
            sync_grad: Without effect. False lets Lightning leave the sum over processes to a later backward. In Lumen
                each backward is summed, so the gradients are the same.
        """
        self._manual.toggle(self)
        try:
            yield
        finally:
            self._manual.untoggle()


@final
class ManualOptimization:
    """Backward and optimizer steps of manual optimization, exact on several processes and safe in fp16.

    Each backward adds complete gradients: summed over the processes, and divided by the loss scale. So the task may
    read, clip and accumulate gradients. One update may use several backwards, and one call of `training_step` may make
    several updates. The loss scale changes only between calls of `training_step`.

    Args:
        task: The task, with `automatic_optimization = False`.
        hooks: Hooks of the run.
        precision: Precision of the run, which scales losses in fp16.
        strategy: Strategy of the run, which sums gradients over the processes.
        step: The step in progress.
        optimizers: The optimizers of the run.

    Attributes:
        handles: The optimizers that the task gets, in the same order.
        was_attempted: True if the `step` of an optimizer was called in the step in progress.
    """

    def __init__(
        self,
        task: TaskModule,
        hooks: Hooks,
        precision: Precision,
        strategy: Strategy,
        step: StepContext,
        optimizers: Sequence[Optimizer],
    ) -> None:
        self._task = task
        self._hooks, self._precision, self._strategy, self._step = hooks, precision, strategy, step
        self._backward = task.backward if is_overridden(task, "backward") else torch.Tensor.backward
        self._device_type = strategy.device.type
        self._is_distributed = strategy.processes.world_size > 1 or strategy.shards
        self._factor, self._is_dummy, self._has_weight = 1.0, False, True
        self.was_attempted = self._has_moved = self._has_overflowed = False
        self._toggled: ManualOptimizer | None = None
        self._frozen: list[nn.Parameter] = []
        self._unscaled: list[Optimizer] = []  # gradients unscaled since the loss scale last changed
        self.handles = [ManualOptimizer(self, each) for each in optimizers]

    def begin_step(self, factor: float, *, is_dummy: bool, has_weight: bool) -> None:
        """Begin a step.

        Args:
            factor: The factor of each loss, from this process's share of the batch.
            is_dummy: True if this process has no samples of the batch.
            has_weight: True if the weights of the batch, over all processes, do not sum to 0.
        """
        self._factor, self._is_dummy, self._has_weight = factor, is_dummy, has_weight
        self.was_attempted = self._has_moved = self._has_overflowed = False
        self._step.grad_norm = None  # A step without clipping has no norm.

    def end_step(self) -> bool:
        """End a step. Returns True if an optimizer made an update."""
        self.untoggle()
        if self.was_attempted and self._precision.handles_overflow:
            number = nn.Parameter(torch.zeros(1, device=self._strategy.device))
            number.grad = torch.full_like(number, math.inf if self._has_overflowed else 0.0)
            self._precision.step(SGD([number], lr=0.0))  # The scaler adapts to everything unscaled in this step.
            self._unscaled.clear()
        return self._has_moved

    # ------------------------------------------------------------------ gradients

    def backward(self, loss: torch.Tensor, *args: Any, **options: Any) -> None:
        """Add the gradient of a loss to the gradients of the parameters.

        Raises:
            TrainingError: The loss has no gradient.
            NonFiniteLoss: The loss is NaN or infinite.
        """
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
            raise make_no_gradient_error(self._task)
        for each in self.handles if self._toggled is None else [self._toggled]:
            each.is_registered = each.is_open = True
            each.has_weight |= self._has_weight
        if not self._is_dummy:
            if loss.numel() == 1:
                self._step.check_loss(loss, self._factor)
            for hook in self._hooks.on_before_backward:
                hook(loss)
        part = loss if self._factor == 1.0 else loss * self._factor
        is_default = not (args or options) and self._backward is torch.Tensor.backward
        by = () if is_default else (lambda each: self._backward(each, *args, **options),)
        with self._without_autocast():  # torch recommends no autocast during a backward.
            if self._is_distributed or self._precision.handles_overflow:
                self._add_separately(part, by)
            else:
                self._precision.backward(part, *by)
        for hook in self._hooks.on_after_backward if not self._is_dummy else ():
            hook()

    def _without_autocast(self) -> AbstractContextManager[Any]:
        has_autocast = torch.is_autocast_enabled(self._device_type)
        return torch.autocast(self._device_type, enabled=False) if has_autocast else nullcontext()

    def _add_separately(self, loss: torch.Tensor, by: tuple[Callable[[torch.Tensor], Any], ...]) -> None:
        """Compute the gradients of a loss, sum and unscale these alone, and add them to the earlier gradients."""
        parameters = list(self._task.parameters())
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        self._precision.backward(loss, *by)
        self._strategy.after_backward()
        updated = [parameter for parameter in parameters if parameter.grad is not None]
        if updated and self._precision.handles_overflow:
            self._unscaled.append(SGD(updated, lr=0.0))
            self._precision.unscale(self._unscaled[-1])
            if (world := self._strategy.data_world_size) > 1:  # A loss multiplied by this factor could overflow.
                scale_gradients(updated, world)
        for parameter, gradient in zip(parameters, before, strict=True):
            if not parameter.requires_grad:  # FSDP sets a gradient if the graph is older than the freezing.
                parameter.grad = gradient
            elif gradient is not None:
                parameter.grad = gradient if parameter.grad is None else gradient + parameter.grad

    def get_kept_gradients(self) -> dict[nn.Parameter, torch.Tensor]:
        """Return the gradients that a later update may use: of optimizers without a step since a backward."""
        held = [parameter for each in self.handles if each.is_open for parameter in list_parameters(each.optimizer)]
        return {parameter: parameter.grad for parameter in held if parameter.grad is not None}

    def restore_gradients(self, gradients: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """Restore the gradients that `get_kept_gradients` returned."""
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        for each in self.handles:
            each.is_registered, each.is_open, each.has_weight = True, bool(gradients), bool(gradients)

    # ------------------------------------------------------------------ updates

    def step(self, wrapper: ManualOptimizer, closure: Callable[[], Any] | None, options: dict[str, Any]) -> Any:
        """Step an optimizer. Returns what the closure returned.

        Raises:
            TrainingError: The gradients come from a plain `loss.backward()`, neither summed over the processes nor
                scaled; or the optimizer needs a closure and got none.
        """
        optimizer, loss = wrapper.optimizer, None
        if wrapper.needs_closure:
            if closure is None:
                raise TrainingError(
                    f"{type(optimizer).__name__}.step evaluates the loss and needs a closure. Call step(closure) with "
                    "a function that calls zero_grad() and self.manual_backward(loss), and returns the loss."
                )
            return self._make_update(
                wrapper, partial(optimizer.step, self._wrap_closure(wrapper, closure), **options), evaluates=True
            )
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Hooks before the update may add hooks to the optimizer, which `get_unwrapped_step` looks for.
        self._make_update(
            wrapper, partial(optimizer.step, **options) if options else lambda: get_unwrapped_step(optimizer)()
        )
        return loss

    def step_part(self, wrapper: ManualOptimizer, part: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Make one of several partial steps of an optimizer, such as `first_step` and `second_step` of SAM.

        Raises:
            ConfigError: The precision is fp16, whose gradient scaler supports no partial steps.
        """
        if self._precision.handles_overflow:
            raise make_closure_in_fp16_error(wrapper.optimizer)
        return self._make_update(wrapper, partial(part, *args, **options))

    def _make_update(self, wrapper: ManualOptimizer, update: Callable[[], Any], *, evaluates: bool = False) -> Any:
        """Make an update unless it is skipped. Returns what `update` returned, or None."""
        self._refuse_plain_backward(wrapper)
        self.was_attempted = wrapper.was_called = True
        skips = not (self._has_weight if evaluates else wrapper.has_weight or not wrapper.is_open)
        if skips:
            _log.warning(
                "a step of %s was skipped: the weights of its batches sum to 0", type(wrapper.optimizer).__name__
            )
        elif not evaluates:
            if not wrapper.has_warned and all(
                parameter.grad is None for parameter in list_parameters(wrapper.optimizer)
            ):
                wrapper.has_warned = True
                _log.warning(
                    "%s.step was called, but none of its parameters has a gradient: no parameter changes. Call "
                    "zero_grad, then self.manual_backward(loss), then step", type(wrapper.optimizer).__name__,
                )  # fmt: skip
            for hook in self._hooks.on_before_optimizer_step:
                hook(wrapper.optimizer)
            skips, self._step.skips_update = self._step.skips_update, False
            if self._precision.handles_overflow and self._has_overflowed_gradients(wrapper):
                mark_as_stepped(wrapper.optimizer)
                self._has_overflowed = skips = True
        wrapper.note_used()
        if skips:
            return None
        self._step.is_updating = True
        with self._without_autocast():
            found = update()
        torch.clear_autocast_cache()  # The cache holds 16-bit copies of the old parameters.
        self._step.is_updating, self._has_moved = False, True
        wrapper.note_used()  # A closure may have left gradients.
        return found

    def _wrap_closure(self, wrapper: ManualOptimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure for an optimizer that runs in the step's autocast and returns the mean over processes."""
        device_type = self._device_type
        has_autocast, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)

        def evaluate() -> Any:
            if has_autocast:
                torch.clear_autocast_cache()  # The optimizer has changed parameters.
            with torch.enable_grad(), torch.autocast(device_type, dtype, enabled=has_autocast):
                loss = closure()
            self._refuse_plain_backward(wrapper)
            for hook in self._hooks.on_before_optimizer_step:
                hook(wrapper.optimizer)
            if self._strategy.processes.world_size == 1:
                return loss
            local_loss = torch.as_tensor(loss).detach().reshape(())
            part = local_loss.double() * self._factor
            return self._strategy.reduce(torch.zeros_like(part) if self._is_dummy else part).to(local_loss.dtype)

        return evaluate

    def _has_overflowed_gradients(self, wrapper: ManualOptimizer) -> bool:
        if (found := compute_max_abs_gradient(list_parameters(wrapper.optimizer))) is None:
            return False
        if self._strategy.shards:
            found = self._strategy.reduce(found.nan_to_num(math.inf), reduce_op="max")
        return not math.isfinite(found.item())

    def _refuse_plain_backward(self, wrapper: ManualOptimizer) -> None:
        adds_separately = self._is_distributed or self._precision.handles_overflow
        if (
            adds_separately
            and not wrapper.is_registered
            and any(parameter.grad is not None for parameter in list_parameters(wrapper.optimizer))
        ):
            raise TrainingError(
                f"{type(wrapper.optimizer).__name__}.step: manual_backward was not called for its parameters, so their "
                "gradients are neither summed over the processes nor scaled for fp16. Call "
                "self.manual_backward(loss) instead of loss.backward()."
            )

    def warn_of_idle_optimizers(self) -> None:
        """Warn of optimizers whose `step` was never called."""
        for number, each in enumerate(self.handles):
            if not each.was_called and not each.optimizer.state:
                _log.warning(
                    "optimizer %d of configure_optimizers (%s) made no step: training_step has not called its step()",
                    number, type(each.optimizer).__name__,
                )  # fmt: skip

    def toggle(self, optimizer: Any) -> None:
        """Freeze the parameters of the other optimizers that this one does not hold."""
        self.untoggle()
        self._toggled = next((each for each in self.handles if each.param_groups is optimizer.param_groups), None)
        kept = {*map(id, list_parameters(optimizer))}
        for parameter in (parameter for each in self.handles for parameter in list_parameters(each.optimizer)):
            if id(parameter) not in kept and parameter.requires_grad:
                self._frozen.append(parameter)
                parameter.requires_grad_(False)

    def untoggle(self) -> None:
        """Restore `requires_grad` of the frozen parameters."""
        for parameter in self._frozen:
            parameter.requires_grad_()
        self._frozen.clear()
        self._toggled = None
