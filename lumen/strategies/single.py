"""One process, one device."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, final

import torch
from torch import nn

from lumen.errors import ConfigError
from lumen.strategies.base import Strategy

T = TypeVar("T")
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

    def barrier(self) -> None:
        """Nobody to wait for."""

    def broadcast(self, value: T, source: int = 0) -> T:
        """The value itself."""
        return value

    def gather(self, value: T) -> list[T]:
        """The value alone."""
        return [value]

    def reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return tensor


def make_strategy(strategy: str | Strategy, accelerator: str, devices: int | str) -> Strategy:
    """The strategy of a name, on the best device there is.

    Args:
        strategy: `auto`, `single`, or a strategy of the user's own, returned as it is.
        accelerator: `auto` (CUDA, else MPS, else CPU), `cpu`, `cuda` (`gpu`), `mps`.
        devices: 1 or `auto`.

    Raises:
        ConfigError: Not available here.
    """
    if isinstance(strategy, Strategy):
        return strategy
    if strategy not in ("auto", "single"):
        raise ConfigError(
            f"strategy: {strategy!r} is unknown; use auto or single, or give an object of your own class."
        )
    if devices not in (1, "1", "auto"):
        raise ConfigError(f"devices: {devices!r} asked for, but strategy {strategy!r} runs one device. Set devices: 1.")
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    name = "cuda" if accelerator == "gpu" else accelerator
    if name == "auto":
        name = next(kind for kind, found in available.items() if found)
    if not available.get(name, False):
        found = ", ".join(kind for kind, there in available.items() if there)
        raise ConfigError(f"accelerator: {accelerator!r} is not available here; there are: auto, {found}.")
    return SingleDevice(name)
