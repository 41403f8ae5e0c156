"""Forward and backward of one micro-batch."""

from __future__ import annotations

from typing import Any

import torch

from lumen.data.windows import MicroBatch
from lumen.errors import TrainingError
from lumen.loop.around_step import refuse_own_backward, refuse_synced_norms, unnoticed
from lumen.run.loss_weighting import LossWeighting
from lumen.run.run import Run
from lumen.task.step_output import read_output, without_gradient


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
