"""Strategy: the one owner of processes, placement and communication."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import nn

T = TypeVar("T")


class Strategy(ABC):
    """How a task lies on devices and how processes agree. The loop calls it and never asks which one it is.

    A class outside Lumen can be given to `Trainer(strategy=...)`; it needs no entry anywhere.
    """

    #: Process number in the run, 0 to world_size - 1.
    rank: int = 0
    #: Number of processes that share the run.
    world_size: int = 1
    #: The device of this process.
    device: torch.device

    @property
    def is_global_zero(self) -> bool:
        """True in the one process that writes logs and talks to the user."""
        return self.rank == 0

    @abstractmethod
    def setup(self, task: nn.Module) -> None:
        """Place the task's parameters and buffers. Collective: every rank must call this. Before optimizers exist."""

    @abstractmethod
    def call(self, step: str, *args: Any) -> Any:
        """Run a step of the task (`"training_step"`, ...) through whatever wraps it."""

    @abstractmethod
    def gradient_sync(self, last: bool) -> AbstractContextManager[Any]:
        """The context of one micro-batch's forward and backward; ranks communicate gradients only in the last."""

    @abstractmethod
    def correct_gradients(self, parameters: Iterable[nn.Parameter], factor: float) -> None:
        """Multiply all gradients by a factor, when the weights of a step were known only after its backward."""

    @abstractmethod
    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
        """Clip by the norm over all gradients of all ranks.

        Returns:
            The norm before clipping: a tensor without dimensions on the device.
        """

    @abstractmethod
    def clip_grad_value(self, parameters: Iterable[nn.Parameter], max_value: float) -> None:
        """Clamp every gradient element to [-max_value, max_value]."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait for all ranks. Collective: every rank must call this."""

    @abstractmethod
    def broadcast(self, value: T, source: int = 0) -> T:
        """Rank `source`'s value of plain data, on every rank. Collective: every rank must call this."""

    @abstractmethod
    def gather(self, value: T) -> list[T]:
        """Every rank's value of plain data, in rank order, on every rank. Collective: every rank must call this."""

    @abstractmethod
    def reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks of a tensor, on every rank. Collective: every rank must call this."""

    def teardown(self) -> None:
        """Give back what `setup` took."""
