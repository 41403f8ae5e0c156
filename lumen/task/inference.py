"""Undoes what an evaluation under `torch.inference_mode` leaves in a task: tensors that cannot be trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lumen.internals.tensors import own_buffers, own_parameters


@contextmanager
def ordinary_afterwards(task: nn.Module, optimizer: Optimizer | None) -> Iterator[None]:
    """The context after which the tensors of a task and its optimizer are no inference tensors.

    Autograd and in-place updates refuse tensors made under `torch.inference_mode`. Parameters stay the objects that
    they are; buffers, attributes of modules and entries of the optimizer's state are replaced by copies.

    Args:
        task: The task whose parameters, buffers and modules' attributes are looked at.
        optimizer: The optimizer whose state is looked at; None if there is none.
    """
    try:
        yield
    finally:
        copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # with the tensor, or another could get its id
        for module in task.modules():
            for parameter in own_parameters(module).values():
                if parameter is not None and _is_inference(parameter):
                    parameter.data = parameter.data.clone()
            _replace(own_buffers(module), copies)
            _replace(vars(module), copies)
        for state in optimizer.state.values() if optimizer is not None else ():
            if isinstance(state, dict):
                _replace(state, copies)


def make_trainable(task: nn.Module) -> None:
    """Replace what a task has of inference tensors, as one that was built in a hook of an evaluation: it may train.

    Parameters are new objects; those that several modules share stay shared.
    """
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    with ordinary_afterwards(task, None):
        for module in task.modules():
            for name, parameter in own_parameters(module).items():
                if parameter is not None and _is_inference(parameter):
                    if id(parameter) not in made:
                        copied = nn.Parameter(parameter.data.clone(), requires_grad=parameter.requires_grad)
                        made[id(parameter)] = parameter, copied
                    own_parameters(module)[name] = made[id(parameter)][1]


def _is_inference(tensor: torch.Tensor) -> bool:
    return not is_lazy(tensor) and tensor.is_inference()  # one without a shape yet does not tell


def _replace(holder: dict[str, Any], copies: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
    for key, value in holder.items():
        if isinstance(value, torch.Tensor) and _is_inference(value):
            if id(value) not in copies:
                copies[id(value)] = value, value.clone()
            holder[key] = copies[id(value)][1]
