"""Saved tensors as a run holds them: each process reads its part of what the run cuts up, whoever saved it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from lumen.checkpoint.reader import Checkpoint
from lumen.checkpoint.sharded import from_part, is_sharded, own_box


def state_of(parameter: nn.Parameter, checkpoint: Checkpoint) -> Mapping[str, torch.Tensor]:
    """The section "optimizer", to be looked up for one parameter: on its device, and cut up as that lies.

    That is what has the parameter's shape, and what was cut up when it was saved.
    """
    were_sharded = (checkpoint.state["sharded"] or {}).get("optimizer", ())

    def read(name: str) -> torch.Tensor:
        fits = name in were_sharded or checkpoint.spec("optimizer", name)[1] == parameter.shape
        if is_sharded(parameter) and fits:
            return _read_like(checkpoint, "optimizer", name, parameter)
        return checkpoint.tensor("optimizer", name).to(parameter.device)

    return checkpoint.tensors("optimizer", read)


def extra_of(task: nn.Module, checkpoint: Checkpoint) -> Mapping[str, torch.Tensor]:
    """The section "extra": tensors in the states of callbacks, modules, the task and the data module.

    Where the run cuts up its parameters, these come cut up as they are, beside them:

    * what was cut up when it was saved;
    * of a run that did not cut up parameters, what lies under the name of one (`average.net.0.weight` for
      `net.0.weight`) and has its shape, as averages do.

    Everything else comes whole, on the host of every process; where the run cuts up nothing, that is everything.

    Args:
        task: That of the run, placed.
        checkpoint: What is read.
    """
    named = task.named_parameters(remove_duplicate=False)
    parameters = {name: parameter for name, parameter in named if is_sharded(parameter)}
    sharded: dict[str, list[str]] | None = checkpoint.state["sharded"]

    def namesake(name: str) -> torch.Tensor | None:
        ends = (name[dot + 1 :] for dot, letter in enumerate(name) if letter == ".")
        parameter = next((parameters[end] for end in ends if end in parameters), None)
        fits = parameter is not None and parameter.shape == checkpoint.spec("extra", name)[1]
        return parameter if fits else None

    def read(name: str) -> torch.Tensor:
        if sharded is None:
            like = namesake(name)
        else:
            like = next(iter(parameters.values()), None) if name in sharded["extra"] else None
        return checkpoint.tensor("extra", name) if like is None else _read_like(checkpoint, "extra", name, like)

    return checkpoint.tensors("extra", read)


def _read_like(checkpoint: Checkpoint, section: str, name: str, like: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor that is to lie as another one does."""
    _, shape = checkpoint.spec(section, name)
    return from_part(checkpoint.part(section, name, *own_box(like, shape)).to(like.device), like, shape)
