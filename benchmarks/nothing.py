"""`python -m benchmarks.nothing`: a step in which nothing is computed, so that only the loop's own Python is left."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any, final
from unittest import mock

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import lumen

BATCH = torch.zeros(1), torch.zeros(1)
LOSS = torch.zeros((), requires_grad=True)


@final
class NoData(Dataset[None]):
    """Samples that cost nothing to read."""

    draws_randomness = False

    def __init__(self, length: int):
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> None:
        return None


@final
class NoOptimizer(torch.optim.Optimizer):
    """Moves nothing."""

    def __init__(self, parameters: Any):
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        """Nothing."""


@final
class NoTask(lumen.TaskModule):
    """Its loss is there already."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))  # an optimizer wants one

    def training_step(self, batch: Any) -> Tensor:
        """No forward."""
        return LOSS

    def configure_optimizers(self) -> NoOptimizer:
        """No optimizer."""
        return NoOptimizer(self.parameters())


def loader(steps: int) -> DataLoader[Any]:
    """One batch, again and again."""
    return DataLoader(NoData(steps), 1, collate_fn=lambda _: BATCH)


def by_hand(steps: int, epochs: int) -> Iterator[float]:
    """CPU microseconds of a step in each epoch, of a loop by hand."""
    task, batches = NoTask(), loader(steps)
    optimizer = task.configure_optimizers()
    for _ in range(epochs):
        begin_s = time.process_time()
        for batch in batches:
            optimizer.zero_grad()
            loss = task.training_step(batch)
            loss.backward()
            optimizer.step()
        yield (time.process_time() - begin_s) / steps * 1e6


def by_lumen(steps: int, epochs: int) -> Iterator[float]:
    """CPU microseconds of a step in each epoch, of Lumen."""
    marks_s: list[float] = []

    def mark(*_: Any) -> None:
        marks_s.append(time.process_time())

    marks = lumen.LambdaCallback(on_train_epoch_start=mark, on_train_epoch_end=mark)
    with TemporaryDirectory() as folder:
        trainer = lumen.Trainer(
            max_epochs=epochs, callbacks=marks, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=folder, log_level="WARNING",
        )  # fmt: skip
        trainer.fit(NoTask(), loader(steps))
    for begin_s, end_s in zip(marks_s[::2], marks_s[1::2], strict=True):
        yield (end_s - begin_s) / steps * 1e6


def nothing(*_: Any) -> None:
    """Do it."""


@contextmanager
def without_seeding() -> Iterator[None]:
    """The context in which keys are made, but torch's, numpy's and Python's own generators do not take them."""
    with mock.patch.multiple("lumen.random", _seed_torch=id, _seed_numpy=id, _seed_python=id):
        yield


def main(steps: int = 20_000, epochs: int = 6) -> dict[str, float]:
    """Print what a step costs each of them, and return it, in CPU microseconds: the best epoch after the first."""
    found = {}
    with mock.patch.object(Tensor, "backward", nothing):
        found["by hand"] = best(by_hand, steps, epochs)
        with without_seeding():
            found["Lumen's own Python"] = best(by_lumen, steps, epochs)
        found["Lumen"] = best(by_lumen, steps, epochs)
    for name, microseconds in found.items():
        print(f"{name:20} {microseconds:6.1f} µs CPU / step")
    return found


def best(system: Callable[[int, int], Iterator[float]], steps: int, epochs: int) -> float:
    """Of the epochs after the first."""
    return min(list(system(steps, epochs))[1:])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.nothing", description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000, help="of an epoch (20000)")
    parser.add_argument("--epochs", type=int, default=6, help="the first one warms up (6)")
    arguments = parser.parse_args()
    main(arguments.steps, arguments.epochs)
