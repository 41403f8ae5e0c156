"""Reads saved tensors into the sharding of the present run, whatever that of the run that saved them was."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping

import torch
from torch import nn

from lumen.checkpoint.reader import Checkpoint
from lumen.distributed.dtensor import from_part, is_cut, is_sharded, own_block


def states_of(checkpoint: Checkpoint) -> Callable[[str, nn.Parameter], Mapping[str, torch.Tensor]]:
    """A function from a parameter's name and the parameter to the section "optimizer", placed as its state has to be.

    Tensors are read to the parameter's device. For a sharded parameter they are sharded or replicated as they were when
    saved. If the saving run sharded nothing, a tensor is sharded where the parameter is sharded in a dimension of the
    same size; but not a scalar, nor one that has the same shape for parameters of several shapes.
    """
    were_sharded = _sharded(checkpoint, "optimizer")
    plain = _of_one_shape(checkpoint) if were_sharded is None else set()

    def state_of(owner: str, parameter: nn.Parameter) -> Mapping[str, torch.Tensor]:
        def read(name: str) -> torch.Tensor:
            _, shape = checkpoint.spec("optimizer", name)
            if were_sharded is None:
                lies_beside = bool(shape) and name.removeprefix(owner) not in plain
                copied = not is_cut(parameter, shape)
            else:
                lies_beside, copied = name in were_sharded, not were_sharded.get(name)
            if is_sharded(parameter) and lies_beside:
                return _read_like(checkpoint, "optimizer", name, parameter, copied=copied)
            return checkpoint.tensor("optimizer", name).to(parameter.device)

        return checkpoint.tensors("optimizer", read)

    return state_of


def _of_one_shape(checkpoint: Checkpoint) -> set[str]:
    """Keys of optimizer state, such as `.norms`, that has one shape for parameters of several shapes."""
    shapes, owners = defaultdict(set), defaultdict(set)
    for name in checkpoint.names("optimizer"):
        begins = [name[:dot] for dot, letter in enumerate(name) if letter == "."]
        owner = next((each for each in reversed(begins) if each in checkpoint.state["optimizer"]["state"]), None)
        if owner is not None:
            shapes[name.removeprefix(owner)].add(checkpoint.spec("optimizer", name)[1])
            owners[name.removeprefix(owner)].add(checkpoint.spec("model", owner)[1])
    return {key for key in shapes if len(shapes[key]) == 1 < len(owners[key])}


def read_beside(checkpoint: Checkpoint, section: str, name: str, like: torch.Tensor) -> torch.Tensor | None:
    """A tensor that was sharded when saved, as a DTensor; None if it was not, or if `like` is not sharded now."""
    were_sharded = _sharded(checkpoint, section) or {}
    if name not in were_sharded or not is_sharded(like):
        return None
    return _read_like(checkpoint, section, name, like, copied=not were_sharded[name])


def extra_of(task: nn.Module, checkpoint: Checkpoint) -> Mapping[str, torch.Tensor]:
    """The section "extra": tensors in the states of callbacks, modules, the task and the data module.

    Where the run cuts up its parameters, these come beside them:

    * what did when it was saved, cut up or copied as it was then;
    * of a run that cut up nothing, averages and the like: what lies under the name of a parameter
      (`average.net.0.weight` for `net.0.weight`) and has its shape, and what lies in a list with the shapes of all
      parameters of a model or a part of it, or of all trained ones, in their order (`shadow[0]`, or `state[0].mean`).

    Everything else comes whole, on the host of every process; where the run cuts up nothing, that is everything.

    Args:
        task: The run's task, whose parameters the strategy has placed.
        checkpoint: The checkpoint to read from.
    """
    were_sharded = _sharded(checkpoint, "extra")
    likes: dict[str, torch.Tensor] = {}
    if any(map(is_sharded, task.parameters())):
        if were_sharded is None:
            likes = _of_parameters_in_order(task, checkpoint) | _of_parameters_by_name(task, checkpoint)
        else:
            likes = dict.fromkeys(were_sharded, next(filter(is_sharded, task.parameters())))

    def read(name: str) -> torch.Tensor:
        like = likes.get(name)
        if like is None or not is_sharded(like):
            return checkpoint.tensor("extra", name)
        return _read_like(checkpoint, "extra", name, like, copied=not (were_sharded or {}).get(name, True))

    return checkpoint.tensors("extra", read)


def _sharded(checkpoint: Checkpoint, section: str) -> dict[str, bool] | None:
    """Names of the tensors that were DTensors, with whether they were sharded; None: the run sharded no parameter."""
    sharded: dict[str, dict[str, bool]] | None = checkpoint.state["sharded"]
    return None if sharded is None else sharded[section]


def _of_parameters_by_name(task: nn.Module, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    parameters = dict(task.named_parameters(remove_duplicate=False))
    found: dict[str, torch.Tensor] = {}
    for name in checkpoint.names("extra"):
        ends = (name[dot + 1 :] for dot, letter in enumerate(name) if letter == ".")
        parameter = next((parameters[end] for end in ends if end in parameters), None)
        if parameter is not None and parameter.shape == checkpoint.spec("extra", name)[1]:
            found[name] = parameter
    return found


def _of_parameters_in_order(task: nn.Module, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    lists: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    for name in checkpoint.names("extra"):
        if place := re.fullmatch(r"(.*)\[(\d+)\](.*?)", name):
            lists[place[1], place[3]][int(place[2])] = name
    orders: dict[tuple[torch.Size, ...], list[nn.Parameter]] = {}
    for module in task.modules():
        if next(module.children(), None) is None:
            continue  # the mean and the variance of features have the shapes of a norm's parameters
        every = list(module.parameters())
        for order in (every, [parameter for parameter in every if parameter.requires_grad]):
            orders[tuple(parameter.shape for parameter in order)] = order
    found: dict[str, torch.Tensor] = {}
    for entries in lists.values():
        names = [entries[place] for place in sorted(entries)]
        shapes = tuple(checkpoint.spec("extra", name)[1] for name in names)
        if len(names) > 1 and shapes in orders:  # a single tensor may have the shape of a parameter by chance
            found |= zip(names, orders[shapes], strict=True)
    return found


def _read_like(checkpoint: Checkpoint, section: str, name: str, like: torch.Tensor, *, copied: bool) -> torch.Tensor:
    """This process's part of a tensor that is to be sharded as `like` is."""
    _, shape = checkpoint.spec(section, name)
    part = checkpoint.part(section, name, *own_block(like, shape, copied=copied))
    return from_part(part.to(like.device), like, shape, copied=copied)
