"""One optimizer step, in the order the device sees it."""

from __future__ import annotations

import logging
from copy import copy
from typing import Any, final

import torch

from lumen.data.nested import detached
from lumen.data.windows import AccumulationWindow, MicroBatch
from lumen.errors import TrainingError
from lumen.internals.tensors import writes_to
from lumen.loop.around_step import EpochSkipped, refuse_own_backward, refuse_synced_norms, unnoticed, weigh
from lumen.loop.own_update import update_by_task
from lumen.metrics.collector import StageMetrics
from lumen.metrics.torchmetrics_states import metric_states, restore_metrics
from lumen.random import GeneratorStates
from lumen.run.loss_weighting import LossWeighting
from lumen.run.run import Run
from lumen.task.step_output import read_output, without_gradient

_log = logging.getLogger("lumen")


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
    for micro in micro_batches:
        run.step.seed(micro)
        run.log.batch_samples = micro.samples
        batch = run.calls.receive(micro.batch, micro.loader) if micro.batch is not None else None
        for hook in hooks.on_train_batch_start if not micro.is_dummy else ():
            if hook(batch, micro.index) == -1:
                skip(run, window, micro)
        if micro.first:
            for hook in hooks.on_before_zero_grad:
                hook(optimizer)
            run.optim.zero_grad(run.progress.epoch, window.first_index)
            run.strategy.begin_step()
        if closure is None:
            output, _ = accumulate(run, micro, batch, weighting)
        else:
            output = closure.first(micro, batch, weighting)
        if micro.last:
            updated = update(run, window, weighting, closure)
        if hooks.on_train_batch_end and not micro.is_dummy:
            output = detached(output)
            for hook in hooks.on_train_batch_end:
                hook(output, batch, micro.index)
    run.log.in_train_step = False
    return updated


def skip(run: Run, window: AccumulationWindow, micro: MicroBatch) -> None:
    """End the epoch here; where gradients are still under way, at the end of the step, once all ranks know of it."""
    run.step.skips_epoch = True
    if not run.strategy.communicates_in("backward"):
        run.step.end(window)
        raise EpochSkipped
    micro.is_dummy = True


def accumulate(
    run: Run, micro: MicroBatch, batch: Any, weighting: LossWeighting, *, check: bool = True
) -> tuple[Any, torch.Tensor | None]:
    """Forward and backward of one micro-batch: add its part of the step's gradient.

    Returns:
        What `training_step` returned, and the micro-batch's part of the step's loss; None if it counts nothing.
    """
    hooks, precision, strategy = run.hooks, run.precision, run.strategy
    output = loss = part = None
    with strategy.gradient_sync(micro.last):
        if not micro.is_dummy:
            before = None if run.step.weighted_windows else run.optim.gradients()
            with precision.forward():
                arguments = run.calls.arguments("training_step", batch, micro.index, micro.loader)
                output = strategy.call("training_step", *arguments)
            if before is not None:
                refuse_own_backward(run, before)
            loss, returned_weight = read_output(output)
        if loss is not None:
            if weighting.unseeded:
                weighting.seed(micro.number, returned_weight)
            loss_factor = weighting.loss_factor(micro.weight, returned_weight)
            if check:
                run.step.check_loss(loss, loss_factor)
            if loss_factor or (loss.requires_grad and strategy.communicates_in("backward")):
                part = loss if loss_factor == 1.0 else loss * loss_factor
        if part is not None:
            for hook in hooks.on_before_backward:
                hook(part)
            backward(run, micro, part, weighting)
            for hook in hooks.on_after_backward:
                hook()
            if strategy.communicates_in("forward"):
                run.step.dummy = batch, micro
        elif strategy.communicates_in("backward"):
            backward_of_zero(run, micro, batch, weighting)
        elif micro.last:
            weighting.begin_agreement(run.step.skips_epoch, run.progress.should_stop)
        if micro.last:
            strategy.after_backward()
    return output, part


def backward(run: Run, micro: MicroBatch, loss: torch.Tensor, weighting: LossWeighting) -> None:
    """The backward of a micro-batch; what the processes have to tell each other goes beside the last one.

    Raises:
        TrainingError: There is none, or somebody has made it already.
    """
    if not loss.requires_grad:
        raise without_gradient(run.task)
    if weighting.unseeded:
        weighting.seed(None)
    if micro.last:
        weighting.begin_agreement(run.step.skips_epoch, run.progress.should_stop)
    try:
        if run.optim.backward is None:
            run.precision.backward(loss)
        else:
            run.precision.backward(loss, run.optim.backward)
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        raise TrainingError(
            "the graph of the loss that training_step returned has had its backward already. Lumen calls it: leave "
            "loss.backward() out and return the loss. What is kept from an earlier step (a hidden state, an embedding) "
            "has to be detached before it is used in a later one."
        ) from error


def backward_of_zero(run: Run, micro: MicroBatch, batch: Any, weighting: LossWeighting) -> None:
    """Do this process's part in the backward of the others, adding nothing to the gradient.

    Args:
        run: The run that trains.
        micro: Its micro-batch, which counts nothing.
        batch: It; None where there is none; where forwards communicate, one of another process.
        weighting: The weighting of the losses of the step.
    """
    strategy = run.strategy
    refuse_synced_norms(run)
    borrows = micro.is_dummy and batch is not None and strategy.communicates_in("forward")
    loss = None if borrows else strategy.zero_loss()
    if loss is not None:
        backward(run, micro, loss * 0.0, weighting)
        return
    with unnoticed(run):  # the backward too: it reads buffers that the forward has moved
        for given in ((batch, micro) if borrows else None, run.step.dummy):
            if loss is None and given is not None:
                with run.precision.forward():
                    dummy, of = given
                    arguments = run.calls.arguments("training_step", dummy, of.index, of.loader)
                    output = strategy.call("training_step", *arguments)
                loss, _ = read_output(output)
                loss = strategy.zero_loss() if loss is None else loss
        if loss is None:
            raise TrainingError(
                f"training_step returned None for the first micro-batch of rank {run.processes.rank}, and this "
                "strategy needs a forward of every rank. Return (loss, 0) for a batch to leave out."
            )
        backward(run, micro, loss * 0.0, weighting)


def update(run: Run, window: AccumulationWindow, weighting: LossWeighting, closure: Closure | None = None) -> bool:
    """Turn the gradients of a window into one update. Returns False if it was skipped: then no schedule moves."""
    skips_epoch, wants_to_stop = weighting.agree()
    run.ending.hear(wants_to_stop)
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
