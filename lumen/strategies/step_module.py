"""The module that torch's wrappers wrap: calling it runs a step of the task, whose own `forward` stays as it is."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from lumen.errors import ConfigError
from lumen.errors.arguments import first_names


@final
class Additions:
    """Notices whenever any module is given a parameter or a submodule; a step that adds none costs nothing.

    Attributes:
        noticed: Something was added to some module since this was last set to False.
    """

    def __init__(self) -> None:
        self.noticed = True  # nobody has looked yet
        self._handles = [
            register_module_module_registration_hook(self._notice),
            register_module_parameter_registration_hook(self._notice),
        ]

    def _notice(self, module: nn.Module, name: str, value: Any) -> None:
        self.noticed = True

    def close(self) -> None:
        """Stop noticing."""
        for handle in self._handles:
            handle.remove()


@final
class Steps(nn.Module):
    """Runs steps of a task.

    Args:
        task: The task whose steps are run.
        anchored: Let a loss of 0 depend on one parameter of this module's own, not on all of the task's.
    """

    def __init__(self, task: nn.Module, *, anchored: bool = False) -> None:
        super().__init__()
        self.task = task
        self.anchor = nn.Parameter(torch.zeros(())) if anchored else None

    def forward(self, step: str | None, *args: Any) -> Any:
        """Run the task's method `step`; for None return a loss of 0.

        Args:
            step: Name of the method.
            *args: Its arguments. For None whether the loss depends on what has a gradient, and on nothing else.
        """
        if step is not None:
            return getattr(self.task, step)(*args)
        used_only = args == (True,)
        parts = [] if self.anchor is None else [self.anchor * 0.0]
        if self.anchor is None or used_only:
            trained = [p for p in self.task.parameters() if p.requires_grad]
            parts += [_part_of(p) for p in trained if not (used_only and p.grad is None)]
        return torch.stack(parts).sum() if parts else torch.zeros((), requires_grad=True)


def describe_unused(names: list[str], rank: int, strategy: str) -> str:
    """Describe the parameters that took no part in a rank's loss, and what to set under a strategy of this name."""
    return (
        f"{len(names)} parameters took no part in the loss of rank {rank}: {first_names(names)}. Set requires_grad of "
        "them to False if they are never trained, or use strategy: "
        f"{{class_path: lumen.{strategy}, init_args: {{find_unused_parameters: true}}}}."
    )


def refuse_sparse(task: nn.Module, strategy: str) -> None:
    """Refuse sparse gradients, which of all backends only gloo sums.

    Raises:
        ConfigError: The task has embeddings with sparse gradients.
    """
    if any(isinstance(each, (nn.Embedding, nn.EmbeddingBag)) and each.sparse for each in task.modules()):
        raise ConfigError(
            f"{strategy}: the gradients of nn.Embedding(sparse=True) cannot be summed over processes. Set "
            "sparse=False, or train on one device with strategy: single."
        )


def _part_of(parameter: nn.Parameter) -> torch.Tensor:
    """A scalar 0 whose gradient is 0 in every element of the parameter."""
    real = torch.view_as_real(parameter) if parameter.is_complex() else parameter
    return real.reshape(-1)[:1].sum() * 0.0
