"""Scales and clips the gradients of a step: dense ones, sparse ones, and those that are cut up over processes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from lumen.distributed.dtensor import is_sharded, own_part
from lumen.internals.tensors import clamp, multiply


def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply all gradients by a factor, in a few kernels."""
    if gradients := _local(parameters):
        multiply(gradients, factor)  # of sparse ones torch multiplies the rows


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Clip the gradients by their norm over all parameters.

    Collective where gradients are cut up (`DTensor`): every rank must call this.

    Returns:
        The norm before clipping: a scalar tensor on the device of the gradients.
    """
    parameters = list(parameters)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if _are_cut(gradients):
        norm: Any = nn.utils.get_total_norm(gradients)
        norm = norm.full_tensor() if is_sharded(norm) else norm
        multiply(list(map(own_part, gradients)), (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm  # type: ignore[no-any-return]
    try:
        return nn.utils.clip_grad_norm_(parameters, max_norm)
    except NotImplementedError:  # some are sparse
        return nn.utils.clip_grad_norm_(_with_rows(parameters), max_norm)


def clip_grad_value(parameters: Iterable[nn.Parameter], max_value: float) -> None:
    """Clamp every gradient element to [-max_value, max_value]."""
    gradients = _local(_with_rows(parameters))
    if gradients:
        clamp(gradients, max_value)


def _local(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients; of those that are cut up this process's parts."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return list(map(own_part, gradients)) if _are_cut(gradients) else gradients


def _are_cut(gradients: list[torch.Tensor]) -> bool:
    """Whether some are cut up over processes; most models have none, which their types say at once."""
    return not {*map(type, gradients)} <= {torch.Tensor} and any(map(is_sharded, gradients))


def _with_rows(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """The parameters; for one with a sparse gradient a stand-in whose gradient is its rows, each once."""
    found: list[torch.Tensor] = []
    for parameter in parameters:
        if parameter.grad is None or not parameter.grad.is_sparse:
            found.append(parameter)
            continue
        parameter.grad = parameter.grad.coalesce()
        rows = parameter.grad.values()
        found.append(torch.empty_like(rows))
        found[-1].grad = rows
    return found
