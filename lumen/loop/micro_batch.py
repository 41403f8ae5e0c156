"""One micro-batch: its weight, its forward and its backward.

`begin_weighting` runs once at the beginning of a step, `accumulate_gradient` for each micro-batch. The other functions
are for processes without a loss, which take part in the communication of the others, and for errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from lumen.data.nested import fill_tensor
from lumen.data.windows import AccumulationWindow, MicroBatch
from lumen.errors import TrainingError
from lumen.internals.tensors import get_direct_buffers
from lumen.metrics.torchmetrics_states import copy_metric_states, restore_metrics
from lumen.run.loss_weighting import LossWeighting
from lumen.run.run import Run
from lumen.task.steps import read_output, without_gradient


def begin_weighting(run: Run, window: AccumulationWindow) -> Iterable[MicroBatch]:
    """Begin the weighting of a step. Returns its micro-batches, which iteration takes from the loader."""
    micro_batches: Iterable[MicroBatch] = window
    planned: float = window.samples
    if run.step.weighting.is_set_by_task:
        # `batch_weight` of the task looks at each batch, so all batches of the step are taken from the loader now.
        micro_batches = list(window)
        for micro in micro_batches:
            micro.set_weight(0.0 if micro.is_dummy else float(run.task.batch_weight(micro.batch)))
        (total,) = run.processes.all_reduce_sum([sum(micro.weight for micro in micro_batches)])
        # In tensor parallelism several processes compute the same batch, whose weight counts once.
        planned = total * run.strategy.data_world_size / run.processes.world_size
    # `weight_guess` takes the place of the sum if `training_step` returns the weights, which are then known too late.
    run.step.weighting.begin_step(planned, len(window.sizes), run.progress.weight_guess)
    return micro_batches


def accumulate_gradient(
    run: Run, micro: MicroBatch, batch: Any, weighting: LossWeighting, *, check: bool = True
) -> tuple[Any, torch.Tensor | None]:
    """Add the gradient of one micro-batch to the step's, by a forward and a backward.

    Args:
        run: The run that trains.
        micro: The micro-batch, with its weight and its place in the step.
        batch: The batch on the device; None if this process has no batch.
        weighting: The weights of the step, which count this micro-batch.
        check: True to raise an error if the loss is NaN or infinite.

    Returns:
        The return value of `training_step`, and the weighted loss; None if the micro-batch adds no gradient.
    """
    hooks, precision, strategy = run.hooks, run.precision, run.strategy
    output = loss = weighted_loss = None
    # All but the last backward of a step only add to the gradients of this process, since an average over processes
    # takes time.
    with strategy.gradient_sync(last=micro.last):
        if not micro.is_dummy:
            # A task written for a plain loop may call backward in `training_step`. Only the first step looks for that.
            before = None if run.step.weighted_windows else run.optim.list_gradients()
            with precision.forward():
                # `training_step` may leave out batch_idx and dataloader_idx in its signature. `call` runs it within the
                # forward of DDP's or FSDP's wrapper, which has to see the step.
                arguments = run.calls.get_arguments("training_step", batch, micro.index, micro.loader)
                output = strategy.call("training_step", *arguments)
            if before is not None:
                check_no_own_backward(run, before)
            loss, returned_weight = read_output(output)
        if loss is not None:
            if weighting.unseeded:
                # Weights that the task returns have an unknown sum until the step ends. The first one gives a guess.
                weighting.seed_guess(micro.number, returned_weight)
            loss_factor = weighting.get_loss_factor(micro.weight, returned_weight)
            if check:
                run.step.check_loss(loss, loss_factor)
            # A loss of weight 0 adds no gradient, but the backward of the other processes may wait for this one's.
            if loss_factor or (loss.requires_grad and strategy.has_collectives_in("backward")):
                weighted_loss = loss if loss_factor == 1.0 else loss * loss_factor
        if weighted_loss is not None:
            if weighting.losses is not None:  # A callback asks for the step's mean loss.
                weighting.keep_loss(weighted_loss)
            for hook in hooks.on_before_backward:
                hook(weighted_loss)
            run_backward(run, micro, weighted_loss, weighting)
            for hook in hooks.on_after_backward:
                hook()
            if strategy.has_collectives_in("forward"):
                # FSDP needs a forward of every process. If a later micro-batch has none, this batch is repeated.
                run.step.keep_dummy(batch, micro)
        elif strategy.has_collectives_in("backward"):
            run_zero_backward(run, micro, batch, weighting)
        elif micro.last:
            weighting.start_sum(run.step.skips_epoch, run.progress.should_stop, run.step.has_shrunk)
        if micro.last:
            strategy.after_backward()  # This raises if a parameter got no gradient, for which others wait.
    return output, weighted_loss


def run_backward(run: Run, micro: MicroBatch, loss: torch.Tensor, weighting: LossWeighting) -> None:
    """Compute the gradients of a loss; in the last backward of the step the processes average theirs.

    Raises:
        TrainingError: The loss requires no gradient, or its backward was called before.
    """
    if not loss.requires_grad:
        raise without_gradient(run.task)
    if weighting.unseeded:
        weighting.seed_guess(None)  # This process has no weight, but takes part in the exchange of the first guess.
    if micro.last:
        # The sum of weights and these flags travel while the device computes the backward. `update` waits for them.
        weighting.start_sum(run.step.skips_epoch, run.progress.should_stop, run.step.has_shrunk)
    try:
        if run.optim.backward is None:
            run.precision.backward(loss)
        else:
            run.precision.backward(loss, run.optim.backward)  # The task overrides `run_backward`.
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        raise TrainingError(
            "the graph of the loss that training_step returned has had its backward already. Lumen calls it: leave "
            "loss.backward() out and return the loss. What is kept from an earlier step (a hidden state, an embedding) "
            "has to be detached before it is used in a later one."
        ) from error


def run_zero_backward(run: Run, micro: MicroBatch, batch: Any, weighting: LossWeighting) -> None:
    """Take part in the backward of the other processes, and add nothing to the gradient.

    Args:
        run: The run that trains.
        micro: The micro-batch of this process, which has no loss.
        batch: The batch of the micro-batch, or None; for a dummy of FSDP the batch of another process.
        weighting: The weights of the step.

    Raises:
        TrainingError: `training_step` has called no module that FSDP shards, for any batch.
    """
    strategy = run.strategy
    check_no_sync_batchnorm(run)
    has_others_batch = micro.is_dummy and batch is not None and strategy.has_collectives_in("forward")
    # Under DDP a sum over all parameters is such a loss; under FSDP one over outputs of the forward, if there was one.
    loss = None if has_others_batch else strategy.make_zero_loss()
    if loss is not None:
        run_backward(run, micro, loss * 0.0, weighting)
        return
    # Otherwise a forward is needed, of which nothing counts. Its backward belongs into the same context, because the
    # backward reads buffers as the forward has left them.
    with undo_forward_effects(run):
        for other_batch, other in filter(None, ((batch, micro) if has_others_batch else None, run.step.dummy)):
            with run.precision.forward():
                arguments = run.calls.get_arguments("training_step", other_batch, other.index, other.loader)
                loss, _ = read_output(strategy.call("training_step", *arguments))
            loss = strategy.make_zero_loss() if loss is None else loss
            if loss is not None:
                run_backward(run, micro, loss * 0.0, weighting)
                return
    raise TrainingError(
        f"training_step returned None for the first micro-batch of rank {run.processes.rank}, and this "
        "strategy needs a forward of every rank. Return (loss, 0) for a batch to leave out."
    )


def check_no_own_backward(run: Run, before: Sequence[torch.Tensor | None]) -> None:
    """Raise if `training_step` has touched gradients in the first step of a run.

    Args:
        run: The run that trains.
        before: The gradients before the call of `training_step`.

    Raises:
        TrainingError: `training_step` has called backward or zero_grad itself.
    """
    for old, new in zip(before, run.optim.list_gradients(), strict=False):
        if old is not new:
            did = "a backward" if new is not None else "zero_grad"
            raise TrainingError(
                f"training_step has called {did} itself: the gradients of the optimizer's parameters are not what they "
                "were before. Lumen calls zero_grad, backward and the optimizer's step: return the loss, or the sum of "
                "several. For gradients that are used within the step call torch.autograd.grad, which leaves those of "
                "parameters alone."
            )


def check_no_sync_batchnorm(run: Run) -> None:
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


def make_restore_point(run: Run) -> Callable[[], None]:
    """Return a function that restores metrics and buffers as they are now."""
    accumulated = copy_metric_states(run.task)
    # A forward may write to a buffer, or assign a new tensor to its name: both are undone.
    places = [(own, own.copy()) for module in run.task.modules() if (own := get_direct_buffers(module))]
    values = [(buffer, buffer.detach().clone()) for buffer in run.task.buffers()]

    def put_back() -> None:
        restore_metrics(accumulated)
        for buffers, held in places:
            buffers.clear()
            buffers.update(held)
        with torch.no_grad():
            for buffer, before in values:
                fill_tensor(buffer, before)

    return put_back


@contextmanager
def undo_forward_effects(run: Run) -> Iterator[None]:
    """Undo at the end what a forward in this context logs, adds to metrics and changes in buffers."""
    put_back = make_restore_point(run)
    with run.log.discard_logged():
        try:
            yield
        finally:
            put_back()
