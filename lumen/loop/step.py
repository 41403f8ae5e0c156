"""One optimizer step, in the order the device sees it."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any, final

import torch

from lumen.console import logger as _log
from lumen.data.nested import detached
from lumen.data.windows import AccumulationWindow, MicroBatch
from lumen.errors import TrainingError
from lumen.internals.tensors import writes_to
from lumen.loop.micro_batch import accumulate, weigh
from lumen.loop.step_in_parts import StepInParts, agree_on_size, say_size
from lumen.metrics.collector import StageMetrics
from lumen.metrics.torchmetrics_states import metric_states, restore_metrics
from lumen.random import GeneratorStates
from lumen.run.loss_weighting import LossWeighting
from lumen.run.run import Run


class EpochSkipped(Exception):
    """A hook ended the epoch."""


def train_step(run: Run, window: AccumulationWindow) -> bool:
    """One optimizer step. Returns False if no update was made.

    Raises:
        EpochSkipped: A hook asks to end the epoch here: nothing is updated.
    """
    hooks, optimizer = run.hooks, run.optim.optimizer
    updated = False
    run.log.train.window += 1
    run.log.in_train_step = True
    run.step.begin()
    micro_batches, weighting = weigh(run, window), run.step.weighting
    closure = Closure(run, weighting) if run.optim.needs_closure else None
    parts = StepInParts(run, window) if run.plan.halve_on_oom and closure is None else None
    for micro in micro_batches:
        run.step.seed(micro)
        run.log.batch_samples, run.log.batch_index = micro.samples, micro.index
        batch = run.calls.receive(micro.batch, micro.loader) if micro.batch is not None else None
        for hook in hooks.on_train_batch_start if not micro.is_dummy else ():
            if hook(batch, micro.index) == -1:
                skip(run, window, micro)
        if micro.first:
            for hook in hooks.on_before_zero_grad:
                hook(optimizer)
            run.optim.zero_grad(run.progress.epoch, window.first_index)
            run.strategy.begin_step()
        if parts is not None:
            output = parts.accumulate(micro, batch)
        elif closure is not None:
            output = closure.first(micro, batch, weighting)
        else:
            output, _ = accumulate(run, micro, batch, weighting)
        if micro.last:
            updated = update(run, window, weighting, closure)
        if hooks.on_train_batch_end and not micro.is_dummy:
            output = detached(output)
            for hook in hooks.on_train_batch_end:
                hook(output, batch, micro.index)
    run.log.in_train_step, run.log.batch_index = False, None
    return updated


def skip(run: Run, window: AccumulationWindow, micro: MicroBatch) -> None:
    """End the epoch here; where gradients are still under way, at the end of the step, once all ranks know of it."""
    run.step.skips_epoch = True
    if not run.strategy.communicates_in("backward"):
        run.step.end(window)
        raise EpochSkipped
    micro.is_dummy = True


def update(run: Run, window: AccumulationWindow, weighting: LossWeighting, closure: Closure | None = None) -> bool:
    """Turn the gradients of a window into one update. Returns False if it was skipped: then no schedule moves."""
    skips_epoch, wants_to_stop, too_large = weighting.agree()
    run.ending.hear(wants_to_stop=wants_to_stop)
    if too_large:
        say_size(run, agree_on_size(run))
    if skips_epoch:
        run.step.end(window)
        raise EpochSkipped
    updated = bool(weighting.total)
    if updated:
        complete_gradients(run, weighting)
        if run.step.skips_update:
            return leave_out(run, window)
        if run.step.grad_norm is not None:
            run.step.check_gradient(run.step.grad_norm)
        if closure is not None:
            closure.hand_over(weighting)
        run.optim.is_updating = True
        if "optimizer_step" in run.optim.own:
            updated = update_by_task(run, window, closure)
        else:
            updated = run.precision.step(run.optim.optimizer, closure)
        run.optim.is_updating = False
    else:
        _log.warning("update after step %d skipped: the weights of its micro-batches sum to 0", run.progress.step)
    run.step.count(window, updated=updated)
    if updated:
        for scheduler in run.optim.schedulers:
            if scheduler.monitor is None and scheduler.moves_at(run.progress.step):  # a plateau waits for validation
                scheduler.step()
            elif scheduler.interval == "token":
                scheduler.move_to(run.progress.units, counted=weighting.counted)
        for teacher in run.optim.teachers:
            teacher.follow(run.progress.step - 1)
    return updated


def leave_out(run: Run, window: AccumulationWindow) -> bool:
    """Make no update of a step, as a hook has asked: its batches are used. Returns False."""
    run.step.skips_update = False
    run.precision.leave_out(run.optim.optimizer)
    run.step.count(window, updated=False)
    return False


def complete_gradients(run: Run, weighting: LossWeighting) -> None:
    """Bring the accumulated gradients to the size of the step's mean, and clip them."""
    plan = run.plan
    run.precision.unscale(run.optim.optimizer)
    if (factor := weighting.correction) != 1.0:
        run.optim.scale_gradients(factor)
    for hook in run.hooks.on_before_optimizer_step:
        hook(run.optim.optimizer)
    if run.optim.own & {"configure_gradient_clipping", "clip_gradients"}:
        run.step.grad_norm = None  # it may clip in some steps only
        value = plan.clip_norm if plan.clip_value is None else plan.clip_value
        algorithm = None if value is None else "norm" if plan.clip_value is None else "value"
        run.task.configure_gradient_clipping(run.optim.optimizer, value, algorithm)
        return
    if plan.clip_norm is not None:
        run.step.grad_norm = run.optim.clip_grad_norm(plan.clip_norm).to(run.strategy.device)
    if plan.clip_value is not None:
        run.optim.clip_grad_value(plan.clip_value)


@final
class Closure:
    """Loss and gradients of a step, for an optimizer that evaluates them several times.

    The first evaluation is the step's own: it alone logs, updates metrics and counts. Every further one is made of the
    same batches, as they were received, with the same random numbers; gradients are zeroed, brought to the size of the
    step's mean and clipped as in any step, with the hooks from `on_before_backward` to `on_before_optimizer_step`. Its
    loss may be infinite or NaN: a line search may look too far. Buffers that the forward changes, such as BatchNorm's
    statistics, change with every evaluation, as in the loop written by hand.
    """

    def __init__(self, run: Run, weighting: LossWeighting) -> None:
        self._run = run
        self._unused_weighting = copy(weighting)
        self._micro_batches: list[tuple[MicroBatch, Any, GeneratorStates]] = []
        self._parts: list[torch.Tensor | None] = []
        self._first: torch.Tensor | None = None
        self._seen: list[Any] = []

    def first(self, micro: MicroBatch, batch: Any, weighting: LossWeighting) -> Any:
        """Evaluate a micro-batch for the first time, and keep it. Returns what `training_step` returned."""
        self._micro_batches.append((micro, batch, GeneratorStates()))
        output, part = accumulate(self._run, micro, batch, weighting)
        self._parts.append(part)
        return output

    def hand_over(self, weighting: LossWeighting) -> None:
        """The gradients of the first evaluation are complete: from now on it is the optimizer that evaluates."""
        self._first, self._seen = _mean(self._run, self._parts, weighting), self._look()

    def __call__(self) -> torch.Tensor:
        """Bring the gradients to where the parameters are now.

        Returns:
            The mean loss of the step.

        Raises:
            TrainingError: There is none: `training_step` returned None for every micro-batch, or the weight 0.
        """
        loss, self._first = self._first, None
        if loss is not None and self._look() == self._seen:
            return loss
        run = self._run
        before = run.log.stage, run.step.grad_norm, metric_states(run.task)
        run.log.stage = StageMetrics()
        try:
            return self._evaluate()
        finally:
            run.log.stage, run.step.grad_norm, accumulated = before
            restore_metrics(accumulated)

    @torch.enable_grad()
    def _evaluate(self) -> torch.Tensor:
        run, weighting = self._run, copy(self._unused_weighting)
        weighting.losses = None  # those of the first evaluation are the step's
        run.optim.zero_grad(run.progress.epoch, self._micro_batches[0][0].index)
        parts = []
        for micro, batch, states in self._micro_batches:
            states.restore()
            parts.append(accumulate(run, micro, batch, weighting, check=False)[1])
        weighting.agree()
        if not weighting.total:
            raise TrainingError(
                f"{type(run.optim.optimizer).__name__} evaluated step {run.progress.step + 1} again, and this time its "
                "micro-batches weigh 0. Let what training_step leaves out depend on the batch alone."
            )
        complete_gradients(run, weighting)
        return _mean(run, parts, weighting)

    def _look(self) -> list[Any]:
        """What changes when the optimizer moves parameters or touches gradients before its first evaluation."""
        return [
            (writes_to(parameter), gradient is not None and (id(gradient), writes_to(gradient)))
            for parameter in self._run.optim.parameters
            for gradient in [parameter.grad]
        ]


def _mean(run: Run, parts: list[torch.Tensor | None], weighting: LossWeighting) -> torch.Tensor:
    """The step's mean loss, over all processes."""
    losses = [part.detach().reshape(()) for part in parts if part is not None]
    own = torch.stack(losses).sum() if losses else torch.zeros((), device=run.strategy.device)
    return weighting.mean(own, run.strategy.reduce)


Evaluate = Callable[[], Any]


def update_by_task(run: Run, window: AccumulationWindow, closure: Evaluate | None) -> bool:
    """Let the task's `optimizer_step` make the update. Returns False if there was none."""
    handle = OptimizerOfStep(run, closure)
    last = window.first_index + window.batches - 1
    run.task.optimizer_step(run.progress.epoch, last, handle, closure or handle.loss)
    if not handle.was_called:
        run.precision.leave_out(run.optim.optimizer)
    return handle.has_moved


@final
class OptimizerOfStep:
    """The run's optimizer as `optimizer_step` of a task has it: its attributes are the optimizer's.

    Args:
        run: The run that trains.
        closure: For an optimizer that evaluates the loss several times; None: this one does not.

    Attributes:
        has_moved: It has made an update.
        was_called: True once `step` was called.
    """

    def __init__(self, run: Run, closure: Evaluate | None) -> None:
        self._run, self._closure = run, closure
        self.has_moved = self.was_called = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run.optim.optimizer, name)

    def step(self, closure: Evaluate | None = None) -> Any:
        """Update the parameters, unless gradients overflowed in fp16. Returns the loss that `closure` returned."""
        loss = None if closure in (None, self._closure) else closure()
        if not self.was_called:
            self.has_moved = self._run.precision.step(self._run.optim.optimizer, self._closure)
        elif self.has_moved:  # a scaler steps once: it would divide the gradients again
            self._run.optim.optimizer.step(self._closure)
        self.was_called = True
        return loss

    def loss(self) -> torch.Tensor | None:
        """The loss of the step's newest micro-batch, without its graph."""
        newest = self._run.step.loss
        return None if newest is None else newest.detach()
