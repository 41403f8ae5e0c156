"""One micro-batch: its weight, its forward and its backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from lumen.data.nested import fill
from lumen.data.windows import AccumulationWindow, MicroBatch
from lumen.errors import TrainingError
from lumen.internals.tensors import own_buffers
from lumen.metrics.collector import StageMetrics
from lumen.metrics.torchmetrics_states import metric_states, restore_metrics
from lumen.run.loss_weighting import LossWeighting
from lumen.run.run import Run
from lumen.task.step_output import read_output, without_gradient


def weigh(run: Run, window: AccumulationWindow) -> Iterable[MicroBatch]:
    """Return the micro-batches of a step with the weights that are known, all fetched if the task weighs them."""
    micro_batches: Iterable[MicroBatch] = window
    planned: float = window.samples
    if run.step.weighting.by_task:
        micro_batches = list(window)
        for micro in micro_batches:
            micro.weight = 0.0 if micro.is_dummy else float(run.task.batch_weight(micro.batch))
        (total,) = run.processes.sum([sum(micro.weight for micro in micro_batches)])
        planned = total * run.strategy.data_world_size / run.processes.world_size  # a data rank counts once
    run.step.weighting.begin(planned, len(window.sizes), run.progress.weight_guess)
    return micro_batches


def accumulate(
    run: Run, micro: MicroBatch, batch: Any, weighting: LossWeighting, *, check: bool = True
) -> tuple[Any, torch.Tensor | None]:
    """Forward and backward of one micro-batch: add its part of the step's gradient.

    Returns:
        What `training_step` returned, and the micro-batch's part of the step's loss; None if it counts nothing.
    """
    hooks, precision, strategy = run.hooks, run.precision, run.strategy
    output = loss = part = None
    with strategy.gradient_sync(last=micro.last):
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
            if weighting.losses is not None:
                weighting.losses.append(part.detach())
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
            weighting.begin_agreement(
                run.step.skips_epoch, run.progress.should_stop, run.step.fits != run.progress.fits
            )
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
        weighting.begin_agreement(run.step.skips_epoch, run.progress.should_stop, run.step.fits != run.progress.fits)
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

    Raises:
        TrainingError: `training_step` called no unit for any batch.
    """
    strategy = run.strategy
    refuse_synced_norms(run)
    borrows = micro.is_dummy and batch is not None and strategy.communicates_in("forward")
    loss = None if borrows else strategy.zero_loss()
    if loss is not None:
        backward(run, micro, loss * 0.0, weighting)
        return
    with unnoticed(run):  # the backward too: it reads buffers that the forward has moved
        for given, of in filter(None, ((batch, micro) if borrows else None, run.step.dummy)):
            with run.precision.forward():
                arguments = run.calls.arguments("training_step", given, of.index, of.loader)
                loss, _ = read_output(strategy.call("training_step", *arguments))
            loss = strategy.zero_loss() if loss is None else loss
            if loss is not None:
                backward(run, micro, loss * 0.0, weighting)
                return
    raise TrainingError(
        f"training_step returned None for the first micro-batch of rank {run.processes.rank}, and this "
        "strategy needs a forward of every rank. Return (loss, 0) for a batch to leave out."
    )


def refuse_own_backward(run: Run, before: Sequence[torch.Tensor | None]) -> None:
    """Raise if `training_step` has touched gradients in the first step of a run.

    Args:
        run: The run that trains.
        before: The gradients before it was called.

    Raises:
        TrainingError: `training_step` has called backward or zero_grad itself.
    """
    for old, new in zip(before, run.optim.gradients(), strict=False):
        if old is not new:
            did = "a backward" if new is not None else "zero_grad"
            raise TrainingError(
                f"training_step has called {did} itself: the gradients of the optimizer's parameters are not what they "
                "were before. Lumen calls zero_grad, backward and the optimizer's step: return the loss, or the sum of "
                "several. For gradients that are used within the step call torch.autograd.grad, which leaves those of "
                "parameters alone."
            )


def refuse_synced_norms(run: Run) -> None:
    """Raise if SyncBatchNorm is used: its forward on a dummy batch would change the statistics.

    Raises:
        TrainingError: A module of the task is a SyncBatchNorm in training.
    """
    if run.processes.world_size == 1:
        return
    if any(isinstance(module, torch.nn.SyncBatchNorm) and module.training for module in run.task.modules()):
        raise TrainingError(
            f"rank {run.processes.rank} has no loss in step {run.progress.step + 1}, but SyncBatchNorm needs a forward "
            "and a backward of every process. Use drop_last=True and a global batch that is a multiple of the "
            "processes', return no None from training_step, or use a norm that does not depend on the batch."
        )


def mark(run: Run) -> Callable[[], None]:
    """Return a function that restores metrics and buffers as they are now."""
    accumulated = metric_states(run.task)
    places = [(own, own.copy()) for module in run.task.modules() if (own := own_buffers(module))]
    values = [(buffer, buffer.detach().clone()) for buffer in run.task.buffers()]

    def put_back() -> None:
        restore_metrics(accumulated)
        for buffers, held in places:  # an assignment has put another tensor there
            buffers.clear()
            buffers.update(held)
        with torch.no_grad():
            for buffer, before in values:
                fill(buffer, before)

    return put_back


@contextmanager
def unnoticed(run: Run) -> Iterator[None]:
    """Restore afterwards what a forward in this context logs, counts and moves, since it is no part of the run."""
    metrics, put_back = run.log.stage, mark(run)
    run.log.stage = StageMetrics()
    try:
        yield
    finally:
        run.log.stage = metrics
        put_back()
