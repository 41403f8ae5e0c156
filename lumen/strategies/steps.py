"""The module that torch's wrappers wrap: a call of it runs a step of the task, whose own `forward` is left alone."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import nn


@final
class Steps(nn.Module):
    """Runs steps of a task.

    Args:
        task: Whose.
        anchored: A loss of 0 depends on a parameter of this module's own, instead of on every one of the task.
        flag: A parameter of this module's own that no loss depends on.
    """

    def __init__(self, task: nn.Module, *, anchored: bool = False, flag: nn.Parameter | None = None) -> None:
        super().__init__()
        self.task = task
        self.anchor = nn.Parameter(torch.zeros(())) if anchored else None
        self.flag = flag

    def forward(self, step: str | None, *args: Any) -> Any:
        """What a step returns; for None a loss of 0."""
        if step is not None:
            return getattr(self.task, step)(*args)
        if self.anchor is not None:
            return self.anchor * 0.0
        trained = [p for p in self.task.parameters() if p.requires_grad]
        real = [torch.view_as_real(p) if p.is_complex() else p for p in trained]
        parts = [p.reshape(-1)[:1].sum() * 0.0 for p in real]
        return torch.stack(parts).sum() if parts else torch.zeros((), requires_grad=True)
