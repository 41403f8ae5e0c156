"""One micro-batch: its weight, its forward and its backward.

`begin_weighting` runs once at the beginning of a step, `accumulate_gradient` for each micro-batch. The other functions
are for errors, and for a process without a loss, which still takes part in the collectives of the step.

`strategy.has_collectives_in("backward")` is True for DDP and FSDP with several processes, which average gradients in
the step's last backward. `strategy.has_collectives_in("forward")` is True for FSDP, which gathers parameters in each
forward too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from lumen.data.nested import fill_tensor
from lumen.data.windows import AccumulationWindow, MicroBatch
from lumen.errors import TrainingError
from lumen.internals.tensors import get_direct_buffers
from lumen.metrics.torchmetrics_states import copy_metric_states, restore_metrics
from lumen.run.exact_reduction import check_no_buffer_writes, list_buffer_writes
from lumen.run.loss_weighting import LossWeighting
from lumen.run.run import Run
from lumen.strategies.sequence import cut_sequences
from lumen.task.steps import make_no_gradient_error, read_output


def begin_weighting(run: Run, window: AccumulationWindow) -> Iterable[MicroBatch]:
    """Begin the weighting of a step. Returns an iterable that reads the step's micro-batches from the loader."""
    micro_batches: Iterable[MicroBatch] = window
    planned: float = window.samples  # The window knows the number of samples of all processes.
    if run.step.weighting.is_set_by_task:
        # `batch_weight` of the task reads each batch, so all batches of the step are taken from the loader now.
        micro_batches = list(window)
        for micro in micro_batches:
            micro.set_weight(0.0 if micro.is_dummy else float(run.task.batch_weight(take_part(run, micro.batch))))
        weights = run.step.weighting.spread([micro.weight for micro in micro_batches], len(window.sizes))
        # In tensor parallelism several processes compute the same batch, whose weight counts once.
        shared_by = run.processes.world_size // run.strategy.data_world_size
        planned = math.fsum(run.processes.all_reduce_sum(weights)) / shared_by
    # If `training_step` returns the weights, their sum is known after the forwards only. The losses are then divided
    # by `weight_guess`, and the gradients are corrected in the end.
    run.step.weighting.begin_step(planned, len(window.sizes), run.progress.weight_guess)
    return micro_batches


def take_part(run: Run, batch: Any) -> Any:
    """Return the part of a batch that this process computes: parts of sequences in a context group, else the batch."""
    context, dim = run.strategy.context, run.task.sequence_dim
    return batch if context is None or dim is None else cut_sequences(batch, dim, context)


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
    # All but the last backward of a step only add to the gradients of this process (`no_sync` of DDP), because an
    # average over the processes takes time. With `reduction: exact`, each backward communicates.
    with strategy.gradient_sync(last=micro.last):
        if not micro.is_dummy:
            # A task written for a plain loop may call backward in `training_step`, which would count the gradient
            # twice. The first step of a run compares the gradients before and after.
            before = None if run.step.weighted_windows else run.optim.list_gradients()
            writes = None if before is None or not strategy.is_exact else list_buffer_writes(run)
            with precision.forward():  # autocast
                # `training_step` may leave out batch_idx and dataloader_idx in its signature. `call` runs the step
                # within the forward of DDP's or FSDP's wrapper, whose hooks must see the forward.
                arguments = run.calls.get_arguments("training_step", batch, micro.index, micro.loader)
                output = strategy.call("training_step", *arguments)
            if before is not None:
                check_no_user_backward(run, before)
            if writes is not None:
                check_no_buffer_writes(run, writes)
            loss, returned_weight = read_output(output)
        if loss is not None:
            if weighting.needs_guess:
                # Returned weights have an unknown sum until the step ends. The first weight gives a guess of the sum.
                weighting.set_first_guess(micro.number, returned_weight)
            # The factor is weight / sum of weights, times the number of processes.
            loss_factor = weighting.get_loss_factor(micro.weight, returned_weight)
            if check:
                run.step.check_loss(loss, loss_factor)
            # A loss of weight 0 adds no gradient. If processes average gradients in the backward, the other processes
            # would wait for the backward of this process, so this process computes it with the factor 0.
            if loss_factor or (loss.requires_grad and strategy.has_collectives_in("backward")):
                # A factor of 1 is left out, so that a single micro-batch trains as in a loop written by hand.
                weighted_loss = loss if loss_factor == 1.0 else loss * loss_factor
        if weighted_loss is not None:
            if weighting.losses is not None:  # A callback reads the step's mean loss.
                weighting.keep_loss(weighted_loss)
            for hook in hooks.on_before_backward:
                hook(weighted_loss)
            run_backward(run, micro, weighted_loss, weighting)
            for hook in hooks.on_after_backward:
                hook()
            if strategy.has_collectives_in("forward"):
                # FSDP needs a forward of every process. If a later micro-batch has no loss, this batch is repeated.
                run.step.keep_dummy(batch, micro)
        elif strategy.has_collectives_in("backward"):
            # No loss on this process: a dummy, or `training_step` returned None. The other processes still wait.
            run_zero_backward(run, micro, batch, weighting)
        elif micro.last:
            # No process waits, but the step still needs its sum of weights, and the flags of this process.
            weighting.start_sum(run.step.skips_epoch, run.progress.should_stop, run.step.has_shrunk)
        if micro.last:
            # This raises if a parameter of this process got no gradient, for which the other processes would wait.
            strategy.after_backward()
    return output, weighted_loss


def run_backward(run: Run, micro: MicroBatch, loss: torch.Tensor, weighting: LossWeighting) -> None:
    """Compute the gradients of a loss; in the last backward of the step the processes average theirs.

    Raises:
        TrainingError: The loss requires no gradient, or its backward was called before.
    """
    if not loss.requires_grad:
        raise make_no_gradient_error(run.task)
    if weighting.needs_guess and (micro.last or not run.plan.halve_on_oom):
        # This process has no weight yet, but the first guess is a collective that all processes must call. With
        # `halve_on_oom` each process calls it once, because the processes run different numbers of backwards.
        weighting.set_first_guess(None)
    if micro.last:
        # The sum of weights and three flags travel while the device computes the backward: a hook ends the epoch, the
        # run is asked to stop, memory was short. `update_parameters` in `step` waits for the sums.
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
            "backward was already called on the graph of the loss that training_step returned. Lumen calls backward: "
            "remove loss.backward() and return the loss. Detach tensors that a step keeps for a later step, such as a "
            "hidden state: hidden = hidden.detach()."
        ) from error


def run_zero_backward(run: Run, micro: MicroBatch, batch: Any, weighting: LossWeighting) -> None:
    """Take part in the collectives of the step's backward, and add nothing to the gradient.

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
    has_borrowed_batch = micro.is_dummy and batch is not None and strategy.has_collectives_in("forward")
    # A backward of zero needs a loss that depends on the parameters. Under DDP it is a sum over all parameters. Under
    # FSDP it is a sum over outputs of the forward, if `training_step` made a forward before it returned None.
    loss = None if has_borrowed_batch else strategy.make_zero_loss()
    if loss is not None:
        run_backward(run, micro, loss * 0.0, weighting)
        return
    # FSDP without a forward yet: the other processes wait in the collectives of their forward. So this process runs a
    # forward too, and drops all its effects. The batch is that of the dummy, else the last batch that gave a loss. The
    # backward is in the same context, because it reads buffers as the forward has left them.
    with undo_forward_effects(run):
        for dummy_batch, dummy in filter(None, ((batch, micro) if has_borrowed_batch else None, run.step.dummy)):
            with run.precision.forward():
                arguments = run.calls.get_arguments("training_step", dummy_batch, dummy.index, dummy.loader)
                loss, _ = read_output(strategy.call("training_step", *arguments))
            loss = strategy.make_zero_loss() if loss is None else loss
            if loss is not None:
                run_backward(run, micro, loss * 0.0, weighting)
                return
    raise make_no_forward_error(run)


def make_no_forward_error(run: Run) -> TrainingError:
    """Return the error for a process that has called no module, while the others communicate in their forward."""
    return TrainingError(
        f"training_step returned None for the first micro-batch of rank {run.processes.rank}, but this "
        "strategy needs a forward on every rank. To skip a batch, return (loss, 0)."
    )


def check_no_user_backward(run: Run, before: Sequence[torch.Tensor | None]) -> None:
    """Raise if `training_step` has touched gradients in the first step of a run.

    Args:
        run: The run that trains.
        before: The gradients before the call of `training_step`.

    Raises:
        TrainingError: `training_step` has called backward or zero_grad itself.
    """
    for old, new in zip(before, run.optim.list_gradients(), strict=False):
        if old is not new:
            call = "a backward" if new is not None else "zero_grad"
            raise TrainingError(
                f"training_step has called {call} itself: it changed the gradients of the optimizer's parameters. "
                "Lumen calls zero_grad, backward and the optimizer's step: return the loss, or the sum of several "
                "losses. To use gradients within the step, call torch.autograd.grad, which does not change "
                "parameter.grad."
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
            "and a backward on every rank. Use drop_last=True and a number of micro-batches per step that is a "
            "multiple of the number of ranks. Never return None from training_step. Or use a norm that does not depend "
            "on the batch, such as GroupNorm."
        )


def make_restore_point(run: Run) -> Callable[[], None]:
    """Return a function that restores metrics and buffers as they are now."""
    accumulated = copy_metric_states(run.task)
    # A forward may write to a buffer, or assign a new tensor to the buffer's name: the function undoes both.
    places = [(direct, direct.copy()) for module in run.task.modules() if (direct := get_direct_buffers(module))]
    values = [(buffer, buffer.detach().clone()) for buffer in run.task.buffers()]

    def restore() -> None:
        restore_metrics(accumulated)
        for buffers, held in places:
            buffers.clear()
            buffers.update(held)
        with torch.no_grad():
            for buffer, before in values:
                fill_tensor(buffer, before)

    return restore


@contextmanager
def undo_forward_effects(run: Run) -> Iterator[None]:
    """Undo at the end what a forward in this context logs, adds to metrics and changes in buffers."""
    restore = make_restore_point(run)
    with run.log.discard_logged():
        try:
            yield
        finally:
            restore()
