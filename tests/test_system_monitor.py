"""SystemMonitor: speed and memory of a run, on record."""

from __future__ import annotations

import csv
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import lumen

BATCH = 4


class Slow(Dataset[torch.Tensor]):
    def __init__(self, samples: int, pause_s: float) -> None:
        self.samples = samples
        self.pause_s = pause_s

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.pause_s)
        return torch.full((2,), float(index))


class Task(lumen.TaskModule):
    def __init__(self, step_s: float = 0.0, validation_s: float = 0.0) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 1)
        self.step_s = step_s
        self.validation_s = validation_s

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(self.step_s)
        loss: torch.Tensor = self.net(batch).square().mean() * 1e-4
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor) -> None:
        time.sleep(self.validation_s)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-6)


def fit(folder: Path, task: Task, *, pause_s: float = 0.0, validation: bool = False, **options: Any) -> Path:
    """Train for 20 steps without a progress bar; returns the run directory."""
    settings: dict[str, Any] = {"max_steps": 20, "log_every_n_steps": 5, **options}
    trainer = lumen.Trainer(default_root_dir=folder, name="run", enable_progress_bar=False, **settings)
    trainer.fit(
        task,
        DataLoader(Slow(200, pause_s), batch_size=BATCH),
        val_dataloaders=DataLoader(Slow(BATCH, 0.0), batch_size=BATCH) if validation else None,
    )
    return folder / "run"


def records(directory: Path) -> list[dict[str, float]]:
    with (directory / "system.csv").open() as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def test_speed_and_memory_are_recorded_at_each_logged_step_even_without_a_bar(tmp_path: Path) -> None:
    rows = records(fit(tmp_path, Task(step_s=0.01)))
    assert list(rows[0]) == ["step", "time_s", "steps_per_s", "samples_per_s", "data_wait_share", "memory_mb"]
    assert [row["step"] for row in rows] == [5, 10, 15, 20]
    times = [row["time_s"] for row in rows]
    assert all(later - earlier > 0.05 for earlier, later in pairwise(times))
    for row in rows:
        assert 1 < row["steps_per_s"] < 100
        assert row["samples_per_s"] == pytest.approx(BATCH * row["steps_per_s"])
        assert 0 <= row["data_wait_share"] < 0.5
        assert 50 < row["memory_mb"] < 20_000


def test_the_share_of_time_spent_waiting_for_data_is_true(tmp_path: Path) -> None:
    waiting = records(fit(tmp_path / "data", Task(), pause_s=0.003))
    computing = records(fit(tmp_path / "step", Task(step_s=0.012)))
    assert all(row["data_wait_share"] > 0.6 for row in waiting)
    assert all(row["data_wait_share"] < 0.4 for row in computing)


def test_time_spent_on_validation_is_not_taken_for_slow_training(tmp_path: Path) -> None:
    task = Task(step_s=0.01, validation_s=0.5)
    rows = records(fit(tmp_path, task, validation=True, val_check_interval=5, num_sanity_val_steps=0))
    assert rows[-1]["time_s"] > 4 * 0.5
    assert max(row["steps_per_s"] for row in rows) > 5 / (5 * 0.01 + 0.4)


def test_timings_stay_out_of_the_record_that_repeats_exactly(tmp_path: Path) -> None:
    directory = fit(tmp_path, Task())
    assert "steps_per_s" in (directory / "system.csv").read_text()
    assert (directory / "metrics.csv").read_text().startswith("step,epoch,loss\n")


def test_a_run_without_loggers_records_nothing(tmp_path: Path) -> None:
    trainer = lumen.Trainer(max_steps=1, logger=False)
    assert not any(isinstance(callback, lumen.callbacks.SystemMonitor) for callback in trainer.callbacks)
    assert not (fit(tmp_path, Task(), logger=False) / "system.csv").exists()


def test_a_resumed_run_goes_on_with_its_record(tmp_path: Path) -> None:
    fit(tmp_path, Task(step_s=0.01), max_steps=10)
    rows = records(fit(tmp_path, Task(step_s=0.01), resume="auto"))
    assert [row["step"] for row in rows] == [5, 10, 15, 20]
    assert rows[2]["time_s"] > rows[1]["time_s"] + 0.05
    assert rows[2]["steps_per_s"] < 100
