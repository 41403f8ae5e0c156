"""A step in which nothing is computed, so that only the loop's own Python is left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final
from unittest import mock

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

BATCH = torch.zeros(1), torch.zeros(1)
LOSS = torch.zeros((), requires_grad=True)


@final
class NoData(Dataset[None]):
    """Samples that cost nothing to read."""

    def __init__(self, length: int):
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> None:
        return None


@final
class NoOptimizer(torch.optim.Optimizer):
    """Optimizer that changes nothing."""

    def __init__(self, parameters: Any):
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        """Do nothing."""


def no_loader(steps: int) -> DataLoader[Any]:
    """Return a loader that repeats one batch."""
    return DataLoader(NoData(steps), 1, collate_fn=lambda _: BATCH)


def nothing(*_: Any) -> None:
    """Do nothing."""


@contextmanager
def no_backward() -> Iterator[None]:
    """Make the backward of all tensors do nothing in the context."""
    with mock.patch.object(Tensor, "backward", nothing):
        yield


@contextmanager
def no_seeding() -> Iterator[None]:
    """Make keys without seeding the generators of torch, numpy and Python in the context."""
    with mock.patch.multiple("lumen.random", _seed_torch=id, _seed_numpy=id, _seed_python=id):
        yield
