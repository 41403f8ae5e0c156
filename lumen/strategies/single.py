"""One process, one device."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import nn

from lumen.strategies.base import Strategy

_NO_CONTEXT = nullcontext()


@final
class SingleDevice(Strategy):
    """Runs the task as it is on one device.

    Args:
        device: Where the task is placed.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._task: nn.Module | None = None

    def setup(self, task: nn.Module) -> None:
        """Move the task to the device."""
        self._task = task.to(self.device)

    def call(self, step: str, *args: Any) -> Any:
        """Call the step."""
        return getattr(self._task, step)(*args)

    def gradient_sync(self, last: bool) -> AbstractContextManager[Any]:
        """Nothing to synchronise."""
        return _NO_CONTEXT

    def correct_gradients(self, parameters: Iterable[nn.Parameter], factor: float) -> None:
        """Multiply in place, all tensors in a few kernels."""
        torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], factor)

    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
        """Clip as `torch.nn.utils.clip_grad_norm_` does."""
        return nn.utils.clip_grad_norm_(parameters, max_norm)

    def clip_grad_value(self, parameters: Iterable[nn.Parameter], max_value: float) -> None:
        """Clip as `torch.nn.utils.clip_grad_value_` does."""
        nn.utils.clip_grad_value_(parameters, max_value)
