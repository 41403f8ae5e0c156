"""One optimizer step, in the order in which the device sees it.

For each micro-batch: seed, copy to the device, forward, backward. After the last one, once: bring the gradients to the
mean over all processes, clip them, update the parameters, move the schedules.

`train_step`, `update_parameters` and `complete_gradients` are the step. `micro_batch` has the forward and the backward.
Below the
three follow two ways to update that few tasks use: an optimizer that evaluates the loss several times, as LBFGS does
(`Closure`), and a task that overrides `optimizer_step` (`update_by_task`).

`run` holds the state of the training in parts, such as `run.progress` for its counters. `run.hooks.NAME` is the list of
the methods NAME that the task and the callbacks have, so a loop over it calls them.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any, final

import torch

from lumen.console import logger as _log
from lumen.data.nested import detach_all
from lumen.data.windows import AccumulationWindow, MicroBatch
from lumen.errors import TrainingError
from lumen.internals.tensors import get_version
from lumen.loop.micro_batch import accumulate_gradient, begin_weighting
from lumen.loop.step_in_parts import StepInParts, reduce_max_samples, warn_of_parts
from lumen.metrics.torchmetrics_states import copy_metric_states, restore_metrics
from lumen.random import GeneratorStates
from lumen.run.loss_weighting import LossWeighting
from lumen.run.run import Run


class EpochSkipped(Exception):
    """End of the epoch by a hook."""


def train_step(run: Run, window: AccumulationWindow) -> bool:
    """Make one optimizer step: a forward and a backward for each micro-batch, then one update of the parameters.

    Args:
        run: The run that trains.
        window: The step's micro-batches on this process. Iterating over the window takes them from the loader.

    Returns:
        True if the parameters were updated.

    Raises:
        EpochSkipped: `on_train_batch_start` returned -1, on any process. The parameters were not updated.
    """
    hooks, optimizer, weighting = run.hooks, run.optim.optimizer, run.step.weighting
    updated = False
    # The step numbers its micro-batches, for seeds and errors. `self.log` averages what it gets in them into one value.
    run.step.begin_step(window)
    # The step's gradient is sum(weight * gradient) / sum(weight), over the micro-batches of all processes. A weight is
    # a number of samples, or of tokens if the task counts them. Each loss is multiplied by weight / sum(weight), and by
    # the number of processes, since DDP and FSDP average the gradients of the processes.
    micro_batches = begin_weighting(run, window)
    # LBFGS and its like compute loss and gradient again within `optimizer.step`. The closure keeps the batches for it.
    closure = Closure(run, weighting) if run.optim.needs_closure else None
    # With `halve_on_oom` a micro-batch that does not fit into memory is computed again, in parts.
    halving = StepInParts(run, window) if run.plan.halve_on_oom and closure is None else None
    for micro in micro_batches:
        # The seed follows from the number of the micro-batch in the run, so any number of processes draws the same.
        # `self.log` weights values by the samples of this micro-batch, and names its index in errors.
        run.step.seed_micro_batch(micro, micro.index)
        # A process that has fewer micro-batches than others gets a dummy, often without a batch. The dummy only takes
        # part in the communication of the others' backward, so no hook of the user sees it. `receive` copies a batch to
        # the device.
        batch = run.calls.move_to_device(micro.batch, micro.loader) if micro.batch is not None else None
        for hook in hooks.on_train_batch_start if not micro.is_dummy else ():
            if hook(batch, micro.index) == -1:
                skip_epoch(run, window, micro)
        if micro.first:
            # Gradients of the step before are freed only now, so that the hooks at its end could read them.
            for hook in hooks.on_before_zero_grad:
                hook(optimizer)
            run.optim.zero_grad(run.progress.epoch, window.first_index)
            # DDP and FSDP must know before the forward which parameters were frozen or unfrozen since the last step.
            run.strategy.begin_step()
        # Forward and backward add to `parameter.grad`. Processes average gradients in the step's last backward only.
        if halving is not None:
            output = halving.accumulate_gradient(micro, batch)
        elif closure is not None:
            output = closure.evaluate_first(micro, batch, weighting)
        else:
            output, _ = accumulate_gradient(run, micro, batch, weighting)
        if micro.last:
            updated = update_parameters(run, window, weighting, closure)
        if hooks.on_train_batch_end and not micro.is_dummy:
            # A hook may keep the output. Without `detach_all` the output would hold the graph of the forward.
            output = detach_all(output)
            for hook in hooks.on_train_batch_end:
                hook(output, batch, micro.index)
    run.log.end_step()
    return updated


def skip_epoch(run: Run, window: AccumulationWindow, micro: MicroBatch) -> None:
    """End the epoch in this step, because a hook returned -1.

    Raises:
        EpochSkipped: No other process waits for this one.
    """
    run.step.skip_epoch()
    if not run.strategy.has_collectives_in("backward"):
        run.step.end_step(window)
        raise EpochSkipped
    # The other processes wait for this one in the step's last backward. `update_parameters` ends the epoch on all of
    # them.
    micro.exclude()


def update_parameters(
    run: Run, window: AccumulationWindow, weighting: LossWeighting, closure: Closure | None = None
) -> bool:
    """Turn the accumulated gradients into one update of the parameters.

    Returns:
        False if no update was made: then no schedule moves.

    Raises:
        EpochSkipped: A hook of some process ended the epoch.
    """
    optim = run.optim
    # Each process sent its sum of weights and these flags along with the last backward. Here it waits for the totals,
    # so that all processes end the epoch, or the run, at the same step.
    skips_epoch, wants_to_stop, too_large = weighting.finish_sum()
    if wants_to_stop or run.ending.stop_agreed:  # Otherwise nothing has changed.
        run.ending.apply_vote(
            wants_to_stop=wants_to_stop
        )  # `run.ending` decides at the end of the step whether to stop.
    if too_large:  # A micro-batch did not fit into the memory of some process, which computed it in parts.
        warn_of_parts(run, reduce_max_samples(run))
    if skips_epoch:
        run.step.end_step(window)  # The batches of the step count as used.
        raise EpochSkipped
    updated = False
    if weighting.total:
        complete_gradients(run, weighting)
    if not weighting.total:
        # The mean over nothing is 0 / 0, and an update with gradients of 0 would still apply momentum and weight decay.
        _log.warning("update after step %d skipped: the weights of its micro-batches sum to 0", run.progress.step)
    elif run.step.skips_update:
        # A hook has called `trainer.skip_update()`. The loss scale of fp16 adapts to each step, to this one too.
        run.precision.skip_update(optim.optimizer)
    else:
        # If Lumen has computed a norm for clipping, a NaN in it is an error. On CUDA the error may come some steps
        # later, because the host does not wait for the norm, but no checkpoint is saved before. From here to `count` a
        # call of `optimizer.step` passes. A call elsewhere in a training step raises, because it is the user's.
        run.step.begin_update()
        if closure is not None:
            closure.release_first(weighting)
        if "optimizer_step" in optim.overridden_hooks:  # The task overrides this method.
            updated = update_by_task(run, window, closure)
        else:
            updated = run.precision.step(optim.optimizer, closure)  # False if gradients overflowed in fp16.
    run.step.count_window(
        window, updated=updated
    )  # Steps, samples, and the place in the epoch, which a checkpoint keeps.
    if updated:
        for scheduler in optim.schedulers:
            # A schedule with a monitor (ReduceLROnPlateau) moves after the validation that gives the monitor a value.
            if scheduler.monitor is None and scheduler.moves_at(run.progress.step):
                scheduler.step()
            elif scheduler.interval == "token":  # A schedule over the sum of weights so far, instead of over steps.
                scheduler.move_to(run.progress.units, counted=weighting.counts_units)
        # A teacher is a module whose parameters are moving averages of the trained ones. Its updates count from 0.
        for teacher in optim.teachers:
            teacher.follow(run.progress.step - 1)
    return updated


def complete_gradients(run: Run, weighting: LossWeighting) -> None:
    """Bring the accumulated gradients to those of the step's mean loss, and clip them."""
    plan, optim = run.plan, run.optim
    # fp16 has multiplied the losses by its scale. Hooks and thresholds need the gradients without the scale.
    run.precision.unscale(optim.optimizer)
    # If forwards return the weights, the losses were divided by a guess of their sum: planned / total puts it right. In
    # fp16 the number of processes is multiplied here, not into the losses, which it could bring out of range.
    if (factor := weighting.correction) != 1.0:
        optim.scale_gradients(factor)
    for hook in run.hooks.on_before_optimizer_step:
        hook(optim.optimizer)
    if optim.overridden_hooks & {"configure_gradient_clipping", "clip_gradients"}:
        # The task clips, perhaps not in this step: the norm of an earlier step must not be logged for this one.
        run.step.store_norm(None)
        value = plan.clip_norm if plan.clip_value is None else plan.clip_value
        algorithm = None if value is None else "norm" if plan.clip_value is None else "value"
        run.task.configure_gradient_clipping(optim.optimizer, value, algorithm)
        return
    if plan.clip_norm is not None:
        run.step.store_norm(optim.clip_grad_norm(plan.clip_norm))
    if plan.clip_value is not None:
        optim.clip_grad_value(plan.clip_value)


# ---------------------------------------------------------------------- an optimizer that evaluates the loss again


@final
class Closure:
    """Loss and gradients of a step, for an optimizer that evaluates them several times.

    The first evaluation is the step's own: only this one logs, updates metrics and counts. Each further evaluation
    uses the same batches on the device and the same random numbers. Gradients are dropped, corrected and clipped as in
    any step, with the hooks from `on_before_backward` to `on_before_optimizer_step`. The loss may be infinite or NaN,
    because a line search may look too far. Buffers that the forward changes, such as BatchNorm's statistics, change in
    each evaluation, as in a loop written by hand.

    Args:
        run: The run that trains.
        weighting: The weights of the step, before any loss was counted.
    """

    def __init__(self, run: Run, weighting: LossWeighting) -> None:
        self._run = run
        self._unused_weighting = copy(weighting)
        self._micro_batches: list[tuple[MicroBatch, Any, GeneratorStates]] = []
        self._losses: list[torch.Tensor | None] = []
        self._first_loss: torch.Tensor | None = None
        self._writes: list[Any] = []

    def evaluate_first(self, micro: MicroBatch, batch: Any, weighting: LossWeighting) -> Any:
        """Evaluate a micro-batch for the first time, and keep it. Returns what `training_step` returned."""
        self._micro_batches.append((micro, batch, GeneratorStates()))
        output, loss = accumulate_gradient(self._run, micro, batch, weighting)
        self._losses.append(loss)
        return output

    def release_first(self, weighting: LossWeighting) -> None:
        """Let the optimizer have the first evaluation, whose gradients are complete now."""
        self._first_loss, self._writes = _compute_mean_loss(self._run, self._losses, weighting), self._count_writes()

    def __call__(self) -> torch.Tensor:
        """Compute the gradients for the parameters as they are now.

        Returns:
            The mean loss of the step.

        Raises:
            TrainingError: All micro-batches have the weight 0 this time, or `training_step` returned None for all.
        """
        # Most optimizers evaluate before they move: then the step's own evaluation is the answer.
        loss, self._first_loss = self._first_loss, None
        if loss is not None and self._count_writes() == self._writes:
            return loss
        run = self._run
        accumulated = copy_metric_states(run.task)
        with run.step.evaluate_again():
            try:
                return self._evaluate_again()
            finally:
                restore_metrics(accumulated)

    @torch.enable_grad()  # Optimizers call the closure under `no_grad`.
    def _evaluate_again(self) -> torch.Tensor:
        run, weighting = self._run, copy(self._unused_weighting)
        weighting.drop_losses()  # The losses of the first evaluation are the step's.
        run.optim.zero_grad(run.progress.epoch, self._micro_batches[0][0].index)
        losses = []
        for micro, batch, states in self._micro_batches:
            states.restore()
            losses.append(accumulate_gradient(run, micro, batch, weighting, check=False)[1])
        weighting.finish_sum()
        if not weighting.total:
            raise TrainingError(
                f"{type(run.optim.optimizer).__name__} evaluated step {run.progress.step + 1} again, and this time its "
                "micro-batches weigh 0. Let what training_step leaves out depend on the batch alone."
            )
        complete_gradients(run, weighting)
        return _compute_mean_loss(run, losses, weighting)

    def _count_writes(self) -> list[Any]:
        """Return values that differ once the optimizer has written to a parameter or a gradient."""
        return [
            (get_version(parameter), gradient is not None and (id(gradient), get_version(gradient)))
            for parameter in self._run.optim.parameters
            for gradient in [parameter.grad]
        ]


def _compute_mean_loss(run: Run, losses: list[torch.Tensor | None], weighting: LossWeighting) -> torch.Tensor:
    """Return the step's mean loss over all processes. Collective: every rank must call this.

    Args:
        run: The run that trains.
        losses: The weighted loss of each micro-batch of this process; None if it had none.
        weighting: The weights of the step, agreed on.
    """
    scalars = [loss.detach().reshape(()) for loss in losses if loss is not None]
    own = torch.stack(scalars).sum() if scalars else torch.zeros((), device=run.strategy.device)
    return weighting.compute_mean_loss(own, run.strategy.reduce)


# ---------------------------------------------------------------------- a task that overrides `optimizer_step`


Evaluate = Callable[[], Any]


def update_by_task(run: Run, window: AccumulationWindow, closure: Evaluate | None) -> bool:
    """Let the task's `optimizer_step` make the update. Returns False if the task made no update."""
    handle = StepOptimizer(run, closure)
    last = window.first_index + window.batches - 1
    run.task.optimizer_step(run.progress.epoch, last, handle, closure or handle.get_loss)
    if not handle.was_called:
        run.precision.skip_update(run.optim.optimizer)  # The loss scale of fp16 adapts to this step too.
    return handle.has_moved


@final
class StepOptimizer:
    """The optimizer that `optimizer_step` of a task gets. Other attributes are those of the run's optimizer.

    Args:
        run: The run that trains.
        closure: The closure of an optimizer that evaluates loss and gradients several times; else None.

    Attributes:
        has_moved: True once `step` has updated the parameters.
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
        elif self.has_moved:
            # The scaler of fp16 has removed its scale already: its `step` would divide the gradients again.
            self._run.optim.optimizer.step(self._closure)
        self.was_called = True
        return loss

    def get_loss(self) -> torch.Tensor | None:
        """Return the loss of the step's newest micro-batch, without its graph."""
        newest = self._run.step.loss
        return None if newest is None else newest.detach()
