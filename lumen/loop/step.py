"""One optimizer step, in the order in which the device sees it.

For each micro-batch: seed, copy to the device, forward, backward. After the last micro-batch, once: correct the
gradients to the mean over all processes, clip them, update the parameters, move the schedules.

`train_step`, `update_parameters` and `complete_gradients` are the step. `micro_batch` has the forward and the backward,
`lumen.run.loss_weighting` the factors of the losses. The rest of this file serves two kinds of tasks: those with an
optimizer that evaluates the loss several times, such as LBFGS (`Closure`), and those that override `optimizer_step`
(`update_by_task`).

A *step* is one call of `optimizer.step`. A *micro-batch* is one batch of the loader, with one forward and one backward
on one process. The *window* holds the micro-batches of a step; iteration yields those of this process. `run` holds the
state of the training in parts, such as `run.progress` for the counters. `run.hooks.NAME` is a tuple of the methods NAME
of the task and the callbacks, so a loop over the tuple calls the hook.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch

from lumen.console import logger as _log
from lumen.data.nested import detach_all
from lumen.data.windows import AccumulationWindow, MicroBatch
from lumen.errors import TrainingError
from lumen.internals.optimizers import ForwardingOptimizer
from lumen.internals.tensors import get_version
from lumen.loop.context_check import check_context
from lumen.loop.micro_batch import accumulate_gradient, begin_weighting, take_part
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
    # Micro-batches are numbered from here on, for seeds and errors. `self.log` averages the values of a name over the
    # micro-batches of the step.
    run.step.begin_step(window)
    # The step's gradient is sum(weight * gradient) / sum(weight), over the micro-batches of all processes. A weight is
    # a number of samples, or of tokens if the task counts tokens. Each loss is multiplied by weight / sum(weight), and
    # by the number of processes, because DDP and FSDP average the gradients of the processes. With `reduction: exact`
    # they sum the gradients.
    micro_batches = begin_weighting(run, window)
    # LBFGS computes loss and gradient several times within `optimizer.step`. The closure keeps the batches for this.
    closure = Closure(run, weighting) if run.optim.needs_closure else None
    # With `halve_on_oom`, a micro-batch that does not fit into memory is computed again, in parts.
    halving = StepInParts(run, window) if run.plan.halve_on_oom and closure is None else None
    for micro in micro_batches:
        # The seed is a function of the micro-batch's number in the run. So dropout draws the same numbers for a sample
        # on any number of processes, and in a resumed run.
        run.step.seed_micro_batch(micro, micro.index)
        # If the micro-batches of a step do not divide evenly, some processes get a dummy in the last round. A dummy
        # has weight 0 and often no batch. No hook sees a dummy, which only takes part in the collectives of the step.
        whole = run.calls.move_to_device(micro.batch, micro.loader) if micro.batch is not None else None
        batch = whole if run.strategy.context is None else take_part(run, whole)
        for hook in hooks.on_train_batch_start if not micro.is_dummy else ():
            if hook(batch, micro.index) == -1:
                skip_epoch(run, window, micro)
        if micro.first:
            # Gradients of the previous step are freed only now, so that hooks at the end of that step can read them.
            for hook in hooks.on_before_zero_grad:
                hook(optimizer)
            run.optim.zero_grad(run.progress.epoch, window.first_index)
            # DDP and FSDP must know before the forward which parameters were frozen or unfrozen since the last step.
            run.strategy.begin_step()
            if run.strategy.context is not None and not run.step.weighted_windows:
                check_context(run, micro, whole)
        # Forward and backward add to `parameter.grad`. The processes average gradients in the step's last backward.
        if halving is not None:
            output = halving.accumulate_gradient(micro, batch)
        elif closure is not None:
            output = closure.evaluate_first(micro, batch, weighting)
        else:
            output, _ = accumulate_gradient(run, micro, batch, weighting)
        if micro.last:
            updated = update_parameters(run, window, weighting, closure)
        if hooks.on_train_batch_end and not micro.is_dummy:
            # A hook may keep the output. Without `detach_all` the output would keep the graph of the forward alive.
            output = detach_all(output)
            for hook in hooks.on_train_batch_end:
                hook(output, batch, micro.index)
    run.log.end_step()
    return updated


def skip_epoch(run: Run, window: AccumulationWindow, micro: MicroBatch) -> None:
    """End the epoch in this step, because a hook returned -1.

    Raises:
        EpochSkipped: No other process waits for this process.
    """
    run.step.skip_epoch()
    if not run.strategy.has_collectives_in("backward"):
        run.step.end_step(window)
        raise EpochSkipped
    # The other processes wait for this process in the step's last backward, so the step continues with a dummy. The
    # flag `skips_epoch` travels with that backward, and `update_parameters` ends the epoch on all processes.
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
    # Each process sent its sum of weights and three flags during the last backward. Here the process waits for the
    # totals, so that all processes end the epoch, or the run, at the same step.
    skips_epoch, wants_to_stop, too_large = weighting.finish_sum()
    # A request to stop is new, or an earlier request may be withdrawn. `run.ending` decides at the end of the step.
    if wants_to_stop or run.ending.is_stop_agreed:
        run.ending.apply_vote(wants_to_stop=wants_to_stop)
    if too_large:  # Some process had too little memory for a micro-batch, and computed the micro-batch in parts.
        warn_of_parts(run, reduce_max_samples(run))
    if skips_epoch:
        run.step.end_step(window)  # The batches of the step count as used.
        raise EpochSkipped
    updated = False
    if weighting.total:
        complete_gradients(run, weighting)
    if not weighting.total:
        # The mean over no samples is 0 / 0. An update with gradients of 0 would still apply momentum and weight decay.
        _log.warning("update after step %d skipped: the weights of its micro-batches sum to 0", run.progress.step)
    elif run.step.skips_update:
        # A hook has called `trainer.skip_update()`. The loss scale of fp16 adapts to skipped steps too.
        run.precision.skip_update(optim.optimizer)
    else:
        # If Lumen has computed a norm for clipping, a NaN norm is an error. On CUDA the error may come some steps
        # later, because the host does not wait for the norm. No checkpoint is saved before the norm is checked.
        # `begin_update` also allows calls of `optimizer.step` until `count_window`. Elsewhere in a training step such
        # a call raises an error, because user code made it.
        run.step.begin_update()
        if closure is not None:
            closure.offer_first_evaluation(weighting)
        if "optimizer_step" in optim.overridden_hooks:  # The task overrides this method.
            updated = update_by_task(run, window, closure)
        else:
            updated = run.precision.step(optim.optimizer, closure)  # False if gradients overflowed in fp16.
    # Counts steps and samples, and advances the position in the epoch. A checkpoint keeps these counters.
    run.step.count_window(window, updated=updated)
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
    return updated  # The caller validates, logs and saves: see `lumen/loop/fit.py`.


def complete_gradients(run: Run, weighting: LossWeighting) -> None:
    """Make the accumulated gradients the gradients of the step's mean loss, and clip them."""
    plan, optim = run.plan, run.optim
    if optim.is_exact and run.processes.world_size == 1:
        optim.remove_negative_zeros()  # A sum over several processes begins with 0.0.
    # fp16 has multiplied the losses by its scale. Hooks and thresholds need the gradients without the scale.
    run.precision.unscale(optim.optimizer)
    # If `training_step` returned the weights, the losses were divided by a guess of the sum of weights. The factor
    # guess / sum corrects the gradients. Under fp16 it includes the number of processes, which could have made a loss
    # overflow.
    if (factor := weighting.correction) != 1.0:
        optim.scale_gradients(factor)
    for hook in run.hooks.on_before_optimizer_step:
        hook(optim.optimizer)
    if optim.overridden_hooks & {"configure_gradient_clipping", "clip_gradients"}:
        # The task clips, but perhaps not in this step. Then no norm may be logged for this step.
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

    `train_step` makes the first evaluation: only this evaluation logs, updates metrics and counts. Each further
    evaluation uses the same batches on the device and the same random numbers. Gradients are dropped, corrected and
    clipped as in any step, with the hooks from `on_before_backward` to `on_before_optimizer_step`. The loss may be
    infinite or NaN, because a line search may try too long a step. Buffers that the forward changes, such as
    BatchNorm's statistics, change in each evaluation, as in a loop written by hand.

    Args:
        run: The run that trains.
        weighting: The weights of the step, before any loss was counted.
    """

    def __init__(self, run: Run, weighting: LossWeighting) -> None:
        self._run = run
        self._unused_weighting = weighting.copy_without_losses()
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

    def offer_first_evaluation(self, weighting: LossWeighting) -> None:
        """Keep the loss of the first evaluation for the optimizer, once its gradients are complete."""
        self._first_loss = weighting.compute_mean_loss(self._losses, self._run.processes.all_reduce_sum)
        self._writes = self._count_writes()

    def __call__(self) -> torch.Tensor:
        """Compute the gradients for the parameters as they are now.

        Returns:
            The mean loss of the step.

        Raises:
            TrainingError: All micro-batches have the weight 0 this time, or `training_step` returned None for all.
        """
        # Most optimizers evaluate the loss before they change a parameter. Then the first evaluation is the answer.
        loss, self._first_loss = self._first_loss, None
        if loss is not None and self._count_writes() == self._writes:
            return loss
        run = self._run
        accumulated = copy_metric_states(run.task)
        with run.step.repeat_evaluation():
            try:
                return self._repeat_evaluation()
            finally:
                restore_metrics(accumulated)

    @torch.enable_grad()  # Optimizers call the closure under `no_grad`.
    def _repeat_evaluation(self) -> torch.Tensor:
        run, weighting = self._run, self._unused_weighting.copy_without_losses()
        run.optim.zero_grad(run.progress.epoch, self._micro_batches[0][0].index)
        losses = []
        for micro, batch, states in self._micro_batches:
            states.restore()
            losses.append(accumulate_gradient(run, micro, batch, weighting, check=False)[1])
        weighting.finish_sum()
        if not weighting.total:
            raise TrainingError(
                f"{type(run.optim.optimizer).__name__} evaluated step {run.progress.step + 1} again, and now all its "
                "micro-batches have the weight 0. Let training_step skip a batch only by the data of this batch."
            )
        complete_gradients(run, weighting)
        return weighting.compute_mean_loss(losses, run.processes.all_reduce_sum)

    def _count_writes(self) -> list[Any]:
        """Return values that differ once the optimizer has written to a parameter or a gradient."""
        return [
            (get_version(parameter), gradient is not None and (id(gradient), get_version(gradient)))
            for parameter in self._run.optim.parameters
            for gradient in [parameter.grad]
        ]


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
class StepOptimizer(ForwardingOptimizer):
    """Optimizer that `optimizer_step` of a task gets. It forwards other attributes to the run's optimizer.

    Args:
        run: The run that trains.
        closure: The closure of an optimizer that evaluates loss and gradients several times; else None.

    Attributes:
        has_moved: True once `step` has updated the parameters.
        was_called: True once `step` was called.
    """

    def __init__(self, run: Run, closure: Evaluate | None) -> None:
        super().__init__(run.optim.optimizer)
        self._run, self._closure = run, closure
        self.has_moved = self.was_called = False

    def step(self, closure: Evaluate | None = None) -> Any:
        """Update the parameters, unless gradients overflowed in fp16. Returns the loss that `closure` returned."""
        loss = None if closure in (None, self._closure) else closure()
        if not self.was_called:
            self.has_moved = self._run.precision.step(self._run.optim.optimizer, self._closure)
        elif self.has_moved:
            # The first call has removed the scale of fp16 from the gradients. The scaler's `step` would do so again.
            self._run.optim.optimizer.step(self._closure)
        self.was_called = True
        return loss

    def get_loss(self) -> torch.Tensor | None:
        """Return the loss of the step's newest micro-batch, without its graph."""
        newest = self._run.step.loss
        return None if newest is None else newest.detach()
