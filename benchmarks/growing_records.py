"""Costs of records by the number of names, rows, runs and steps, in CPU seconds or bytes."""

from __future__ import annotations

import csv
import os
import resource
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lumen

_QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "log_level": "ERROR", "seed": 0}
_FITS, _STEPS = 20, 10


class Named(lumen.TaskModule):
    """Task that logs many names in each step, and records the start time of each step."""

    def __init__(self, names: int) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)
        self.names = [f"name_{number}" for number in range(names)]
        self.began_s: list[float] = []

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """Return the loss of a batch of shape (4, 4)."""
        self.began_s.append(time.process_time())
        for name in self.names:
            self.log(name, 0.5)
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD, the cheapest optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(task: Named, batches: int, **options: Any) -> None:
    loader = DataLoader(TensorDataset(torch.zeros(4 * batches, 4)), batch_size=4)
    lumen.Trainer(enable_checkpointing=False, **_QUIET, **options).fit(task, loader)


def step_with_a_row(names: int) -> float:
    """Return the time of a step that writes its row."""
    task = Named(names)
    _fit(task, _STEPS + 2, max_epochs=1, log_every_n_steps=1)
    return (task.began_s[-1] - task.began_s[1]) / _STEPS


def step_with_a_row_by_hand(names: int) -> float:
    """Return the time of a step that keeps the numbers in a dictionary and writes them by `csv.writer`."""
    columns = [f"name_{number}" for number in range(names)]
    net, batch = nn.Linear(4, 1), torch.zeros(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with open("metrics.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)

        def step() -> None:
            optimizer.zero_grad()
            net(batch).square().mean().backward()
            optimizer.step()
            row = dict.fromkeys(columns, 0.5)
            writer.writerow([row[name] for name in columns])
            file.flush()

        step()
        return seconds(lambda: [step() for _ in range(_STEPS)]) / _STEPS


def first_step_of_an_epoch(names: int) -> float:
    """Return the time of an epoch's first step, in which all names are new, without a logger."""
    task = Named(names)
    _fit(task, 2, max_epochs=5, logger=False)
    pairs = [*zip(task.began_s[::2], task.began_s[1::2], strict=True)][1:]
    return sum(second - first for first, second in pairs) / len(pairs)


def seconds(function: Callable[[], Any]) -> float:
    """Return the CPU time of this process in a call."""
    began_s = time.process_time()
    function()
    return time.process_time() - began_s


def peak(function: Callable[[], Any]) -> float:
    """Return the peak memory of Python's objects during a call, in bytes."""
    tracemalloc.start()
    function()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return most


def _written(rows: int) -> lumen.CSVLogger:
    """Return a resumed logger with many rows of five values."""
    with open("metrics.csv", "w", newline="") as file:
        csv.writer(file).writerows([("step", "epoch", "a", "b", "c"), *((s, 0, 0.5, -s, 1e-9) for s in range(rows))])
    logger = lumen.CSVLogger()
    logger.open(Path.cwd(), resumed=True)
    return logger


def _add_column(logger: lumen.CSVLogger) -> None:
    logger.log_metrics({"late": 1.0}, 0, 0)


def _cut_back(logger: lumen.CSVLogger) -> None:
    state = logger.state_dict()
    state["metrics.csv"]["rows"] -= 1
    logger.load_state_dict(state)


def late_column(rows: int) -> float:
    """Return the time of a new column after many rows."""
    logger = _written(rows)
    return seconds(lambda: _add_column(logger))


def late_column_by_hand(rows: int) -> float:
    """Return the time of a copy from `csv.reader` to `csv.writer`."""
    _written(rows).finalize("success")

    def copy() -> None:
        with open("metrics.csv", newline="") as old, open("new", "w", newline="") as new:
            csv.writer(new).writerows([*row, ""] for row in csv.reader(old))

    return seconds(copy)


def memory_of_a_late_column(rows: int) -> float:
    """Return the peak memory of a new column."""
    logger = _written(rows)
    return peak(lambda: _add_column(logger))


def memory_of_cutting_back(rows: int) -> float:
    """Return the peak memory while a resume cuts metrics.csv back to a checkpoint."""
    logger = _written(rows)
    return peak(lambda: _cut_back(logger))


def fit_beside_runs(runs: int) -> float:
    """Return the time of a fit of one step, in a folder with many runs of its name."""
    for number in range(2, runs):
        os.makedirs(f"runs/named-{number}/checkpoints")
    _fit(Named(1), 1, max_steps=1)
    return seconds(lambda: [_fit(Named(1), 1, max_steps=1) for _ in range(_FITS)]) / _FITS


def memory_of_steps(steps: int) -> float:
    """Return the peak resident memory of a process after a run of many steps, in bytes."""
    _fit(Named(3), 1000, max_steps=steps)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
