"""Comparison of the first training step of context parallelism with the same step on whole sequences."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import copy
from typing import Any

import torch

from lumen.console import logger as _log
from lumen.data.windows import MicroBatch
from lumen.distributed.context import Context, use_context
from lumen.distributed.dtensor import get_local_tensor
from lumen.errors import ConfigError
from lumen.loop.micro_batch import make_no_forward_error, undo_forward_effects
from lumen.random import GENERATORS, GeneratorStates
from lumen.run.run import Run
from lumen.strategies import count_training_parts, gather_from_data_ranks
from lumen.strategies.sequence import cut_sequences, shorten_sequences
from lumen.task.steps import read_output

_LENGTH = 512  # positions of each process that are compared, if the loss of the batch has weight there
_PLAIN = (bool, int, float, str, type(None), torch.Tensor, list, dict, set)
_INTERNAL = frozenset(vars(torch.nn.Module()))  # attributes of every module, such as its hooks

#: Gradients of this process's shards, by name; the sum of weights; and logged values.
_Results = tuple[dict[str, torch.Tensor], float, dict[str, float]]


def check_context(run: Run, micro: MicroBatch, batch: Any) -> None:
    """Compare gradients of a micro-batch whose sequences are cut with gradients of whole sequences. Collective.

    Before the first step of a run, `training_step` computes the beginnings of the sequences in parts and whole, because
    a process may have too little memory for whole sequences. If the beginnings have no loss, it computes all positions.
    No gradient and no logged value stays. A logged value that differs is a warning.

    Args:
        run: The run that trains.
        micro: The first micro-batch of this process.
        batch: Its batch on the device, with whole sequences; the batch of a dummy counts nothing.

    Raises:
        ConfigError: The gradients differ.
        TrainingError: `training_step` returned None without a forward.
    """
    context = run.strategy.context
    assert context is not None
    for length in (_LENGTH * context.size, sys.maxsize):
        cut, weight, cut_values = _compute_step(run, micro, batch, length, context)
        if weight:  # The loss may leave out the beginning, such as a prompt.
            break
    whole, _, values = _compute_step(run, micro, batch, length, None)
    squares = [
        float(each.double().square().sum())
        for name, gradient in whole.items()
        for each in (cut[name] - gradient, gradient)
    ]
    norms = [total**0.5 for total in run.processes.all_reduce_sum(squares)]
    # A gradient that is zero without rounding is noise of the others' scale.
    eps = max((torch.finfo(each.dtype).eps for each in run.task.parameters() if each.is_floating_point()), default=0.0)
    noise = min(100 * eps, eps**0.5) * max(norms[1::2], default=0.0)
    different = [
        name
        for name, difference, norm in zip(whole, norms[::2], norms[1::2], strict=True)
        if not difference <= eps**0.5 * norm + noise
    ]
    if different:
        raise ConfigError(
            f"Mesh: {type(run.task).__name__} has other gradients with sequences cut into context parts: "
            f"{len(different)} differ, such as that of {different[0]}. Causes are: attention other than "
            "lumen.attention; positions that begin at 0 in each part: use lumen.position_ids; targets that the step "
            "shifts: shift them in the data; random numbers that the step draws, such as F.dropout: use nn.Dropout, or "
            "draw them in the data; a mean over tokens without their number: return (loss, number of tokens); or a "
            "token that only one part has, or a mean over positions: see docs/guides/mesh.md."
        )
    for name, value in values.items():
        part = cut_values.get(name, math.nan)
        if not math.isclose(part, value, rel_tol=eps**0.5, abs_tol=eps**0.5) and not math.isnan(value):
            _log.warning(
                "training_step logs %r as %g over parts of sequences, but as %g over whole sequences. For a mean over "
                "tokens, write self.log(%r, ..., batch_size=number of tokens).", name, part, value, name,
            )  # fmt: skip


def _compute_step(run: Run, micro: MicroBatch, batch: Any, length: int, context: Context | None) -> _Results:
    """Compute the mean gradient of the micro-batches of all processes, and what they log. Collective.

    Args:
        run: The run that trains.
        micro: The micro-batch of this process.
        batch: Its batch on the device, with whole sequences.
        length: Number of positions of each sequence that are used.
        context: The processes that share sequences; None: each process computes whole sequences.
    """
    strategy, dim = run.strategy, run.task.sequence_dim
    assert dim is not None
    size = strategy.data_world_size // count_training_parts(strategy) if context is None else 1

    def cut_batch(whole: Any) -> Any:
        beginning = shorten_sequences(whole, dim, length)
        return beginning if context is None else cut_sequences(beginning, dim, context)

    def gather(value: Any) -> list[Any]:  # Processes with the same whole sequences count once.
        return gather_from_data_ranks(strategy, value)[::size]

    with (
        undo_forward_effects(run), _undo_attributes(run.task), strategy.gradient_sync(last=True),
        use_context(context), run.calls.compilation.pause(),
    ):  # fmt: skip
        logged = run.log.make_metrics() if micro.is_dummy else run.log.stage
        weight = _accumulate_gradient(run, micro, batch, cut_batch)
        assert logged is not None
        values = {name: float(value) for name, value in logged.compute_step_values(gather=gather).items()}
        values |= logged.compute_epoch_values(run.task, gather)
    strategy.after_backward()
    (total,) = run.processes.all_reduce_sum([weight])
    return _take_gradients(run.task, total or 1.0), total, values


def _accumulate_gradient(run: Run, micro: MicroBatch, batch: Any, cut_batch: Callable[[Any], Any]) -> float:
    """Run forward and backward of a micro-batch. Return its weight: 0.0 for a dummy, and without a loss."""
    # Autocast to 16 bits would hide a difference in its rounding, but parameters of several dtypes need it.
    dtypes = {each.dtype for each in run.task.parameters() if each.is_floating_point()}
    with run.precision.forward() if len(dtypes) > 1 else nullcontext():
        arguments = run.calls.get_arguments("training_step", cut_batch(batch), micro.index, micro.loader)
        loss, weight = read_output(run.strategy.call("training_step", *arguments))
    if run.step.weighting.is_set_by_task:
        weight = float(run.task.batch_weight(cut_batch(micro.batch)))
    if loss is None:  # The other processes wait in the collectives of the backward.
        loss, weight = run.strategy.make_zero_loss(), 0.0
        if loss is None:
            raise make_no_forward_error(run)
    if micro.is_dummy:
        weight = 0.0
    elif weight is None:  # The loss is a mean whose weight the task does not return.
        weight = 1.0
    (loss * weight).backward()  # type: ignore[no-untyped-call]
    return weight


def _take_gradients(task: torch.nn.Module, total: float) -> dict[str, torch.Tensor]:
    """Remove the gradients of this process's shards, and return them by name, divided by the sum of weights."""
    gradients = {}
    for name, parameter in task.named_parameters():
        if parameter.requires_grad:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradients[name] = get_local_tensor(gradient.detach()) / total
            parameter.grad = None
    return gradients


@contextmanager
def _undo_attributes(task: torch.nn.Module) -> Iterator[None]:
    """Restore attributes of the task's modules at the end: plain data, tensors and generators of random numbers.

    Collections and tensors are replaced by copies in this context.
    """
    modules = [vars(module) for module in task.modules()]
    states = GeneratorStates([each for module in modules for each in module.values() if isinstance(each, GENERATORS)])
    kept = [_find_plain(attributes) for attributes in modules]
    for attributes, before in zip(modules, kept, strict=True):
        attributes |= {name: _copy_plain(each) for name, each in before.items()}
    try:
        yield
    finally:
        for attributes, before in zip(modules, kept, strict=True):
            for name in _find_plain(attributes).keys() - before.keys():
                del attributes[name]
            attributes |= before
        states.restore()


def _copy_plain(value: Any) -> Any:
    """Copy a collection or a tensor."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    return copy(value)


def _find_plain(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return attributes of a module that are plain data or tensors, without those of every `nn.Module`."""
    return {name: each for name, each in attributes.items() if isinstance(each, _PLAIN) and name not in _INTERNAL}
