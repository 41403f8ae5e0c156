"""Comparison of the first training step of context parallelism with the same step on whole sequences."""

from __future__ import annotations

from typing import Any

import torch

from lumen.data.windows import MicroBatch
from lumen.distributed.context import Context, use_context
from lumen.distributed.dtensor import get_local_tensor
from lumen.errors import ConfigError
from lumen.loop.micro_batch import undo_forward_effects
from lumen.run.run import Run
from lumen.strategies.sequence import cut_sequences, gather_sequences, shorten_sequences
from lumen.task.steps import read_output

_LENGTH = 512  # positions of each process that are compared, if the loss of the batch has weight there


def check_context(run: Run, micro: MicroBatch, batch: Any) -> None:
    """Compare gradients of a micro-batch whose sequences are cut with gradients of whole sequences. Collective.

    It runs two forwards and two backwards of `training_step` before the first step of a run, with the beginnings of the
    sequences: a process need not have memory for long ones. It leaves no gradient and no logged value.

    Args:
        run: The run that trains.
        micro: The first micro-batch of this process.
        batch: The part of its batch on the device; a dummy's batch counts nothing.

    Raises:
        ConfigError: The gradients differ.
    """
    dim, context = run.task.sequence_dim, run.strategy.context
    assert dim is not None
    assert context is not None
    whole_batch = gather_sequences(batch, dim, context)
    for length in (_LENGTH, None):
        beginning = shorten_sequences(whole_batch, dim, None if length is None else length * context.size)
        cut, weight = _compute_gradients(run, micro, cut_sequences(beginning, dim, context), context)
        if weight:  # The loss may leave out the beginning, such as a prompt.
            break
    whole, _ = _compute_gradients(run, micro, beginning, None)
    differences = [
        value
        for one, other in zip(cut, whole, strict=True)
        for value in (float((one - other).double().square().sum()), float(other.double().square().sum()))
    ]
    totals = run.processes.all_reduce_sum(differences)
    # A gradient that is zero without rounding is noise of the others' scale.
    eps = max((torch.finfo(each.dtype).eps for each in whole), default=0.0)
    noise = 100 * eps * max(totals[1::2], default=0.0) ** 0.5
    different = [
        name
        for (name, _), difference, norm in zip(_list_trained(run), totals[::2], totals[1::2], strict=True)
        if not difference**0.5 <= eps**0.5 * norm**0.5 + noise
    ]
    if different:
        raise ConfigError(
            f"Mesh: {type(run.task).__name__} has other gradients with sequences cut into context parts: "
            f"{len(different)} differ, such as that of {different[0]}. Causes are: attention other than "
            "lumen.attention; positions that begin at 0 in each part: use lumen.position_ids; targets that the step "
            "shifts: shift them in the data; a mean over tokens without their number: return (loss, number of tokens); "
            "or dropout by F.dropout: use nn.Dropout."
        )


def _list_trained(run: Run) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, each) for name, each in run.task.named_parameters() if each.requires_grad]


def _compute_gradients(
    run: Run, micro: MicroBatch, batch: Any, context: Context | None
) -> tuple[list[torch.Tensor], float]:
    """Return gradients of the mean over the micro-batches of all processes, and the sum of weights. Collective."""
    strategy = run.strategy
    run.step.seed_micro_batch(micro, micro.index)
    # Autocast to 16 bits would hide a difference in its rounding.
    with undo_forward_effects(run), strategy.gradient_sync(last=True), use_context(context):
        arguments = run.calls.get_arguments("training_step", batch, micro.index, micro.loader)
        loss, weight = read_output(strategy.call("training_step", *arguments))
        if run.step.weighting.is_set_by_task:
            weight = float(run.task.batch_weight(batch))
        if loss is None:
            loss, weight = strategy.make_zero_loss(), 0.0
        assert loss is not None
        weight = 0.0 if micro.is_dummy else 1.0 if weight is None else weight
        (loss * weight).backward()  # type: ignore[no-untyped-call]
    strategy.after_backward()
    (total,) = run.processes.all_reduce_sum([weight])
    gradients = []
    for _, parameter in _list_trained(run):
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradients.append(get_local_tensor(gradient.detach()) / (total or 1.0))
        parameter.grad = None
    return gradients, total
