"""Module for torch's wrappers: a call runs a step of the task, so that the task's own `forward` stays unchanged."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from lumen.errors import ConfigError
from lumen.errors.arguments import format_first_names


@final
class AdditionMonitor:
    """Hooks that record when any module receives a parameter or a submodule; a step without additions costs nothing.

    Attributes:
        has_additions: True if a parameter or submodule was added since this attribute was last set to False.
    """

    def __init__(self) -> None:
        self.has_additions = True  # nothing has been checked yet
        self._handles = [
            register_module_module_registration_hook(self._on_registration),
            register_module_parameter_registration_hook(self._on_registration),
        ]

    def _on_registration(self, module: nn.Module, name: str, value: Any) -> None:
        self.has_additions = True

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


@final
class StepModule(nn.Module):
    """Module that runs the steps of a task.

    Args:
        task: The task whose steps are run.
        has_anchor: True if a loss of 0 depends on one parameter of this module, not on all parameters of the task.
    """

    def __init__(self, task: nn.Module, *, has_anchor: bool = False) -> None:
        super().__init__()
        self.task = task
        self.anchor = nn.Parameter(torch.zeros(())) if has_anchor else None

    def forward(self, step: str | None, *args: Any) -> Any:
        """Run the task's method `step`; for None, return a loss of 0.

        Args:
            step: The name of the method, or None.
            *args: The arguments of the method. For None: True if the loss depends only on parameters with a gradient.
        """
        if step is not None:
            return getattr(self.task, step)(*args)
        used_only = args == (True,)
        parts = [] if self.anchor is None else [self.anchor * 0.0]
        if self.anchor is None or used_only:
            trained = [p for p in self.task.parameters() if p.requires_grad]
            parts += [_make_zero_of(p) for p in trained if not (used_only and p.grad is None)]
        return torch.stack(parts).sum() if parts else torch.zeros((), requires_grad=True)


def describe_unused(names: list[str], rank: int, strategy: str) -> str:
    """Return an error text that names the parameters unused in a rank's loss, and the option to set."""
    return (
        f"{len(names)} parameters did not contribute to the loss of rank {rank}: {format_first_names(names)}. Set "
        f"requires_grad=False for parameters that are never trained, or use strategy: {{class_path: lumen.{strategy}, "
        "init_args: {find_unused_parameters: true}}."
    )


def refuse_sparse(task: nn.Module, strategy: str) -> None:
    """Refuse sparse gradients, because gloo is the only backend that sums them.

    Raises:
        ConfigError: The task has embeddings with sparse gradients.
    """
    if any(isinstance(each, (nn.Embedding, nn.EmbeddingBag)) and each.sparse for each in task.modules()):
        raise ConfigError(
            f"{strategy}: the gradients of nn.Embedding(sparse=True) cannot be summed over processes. Set "
            "sparse=False, or train on one device with strategy: single."
        )


def _make_zero_of(parameter: nn.Parameter) -> torch.Tensor:
    """Return a scalar 0 whose gradient is 0 in every element of the parameter."""
    real = torch.view_as_real(parameter) if parameter.is_complex() else parameter
    return real.reshape(-1)[:1].sum() * 0.0
