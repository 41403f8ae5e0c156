"""Helpers for the progress bar."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.utils.data import DataLoader, TensorDataset

import lumen
from lumen.callbacks import ProgressBar

BATCH = 4


class Task(lumen.TaskModule):
    """Task that logs the number of the current step, so that a test can compare it with the shown step."""

    def __init__(self, pause_s: float = 0.0, at: dict[int, Callable[[], Any]] | None = None, bar: bool = True) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 1)
        self.pause_s = pause_s
        self.at = at or {}
        self.bar = bar
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        time.sleep(self.pause_s)
        step = self.global_step + 1
        self.at.get(step, lambda: None)()
        self.log("number", float(step), prog_bar=self.bar)
        loss = (self.net(batch[0]) - 1.0).square().mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        time.sleep(self.pause_s)
        self.log("val_number", 1000.0 + self.global_step, prog_bar=self.bar)
        self.log("unasked", 7.0)

    def predict_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return self.net(batch[0])

    def test_step(self, batch: list[torch.Tensor]) -> None:
        self.log_dict({f"test_{name}": float(place) for place, name in enumerate("abcd")})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


def make_loader(batches: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.linspace(0, 1, 2 * BATCH * batches).reshape(-1, 2)), batch_size=BATCH)


def replace_console(monkeypatch: pytest.MonkeyPatch, *, terminal: bool, width: int = 80) -> Callable[[], str]:
    """Give Lumen a console; return a function that reads its whole text."""
    file = io.StringIO()
    screen = Console(file=file, force_terminal=terminal, width=width, soft_wrap=True, _environ={"TERM": "xterm"})
    monkeypatch.setattr("lumen.console.console", screen)
    return file.getvalue


def make_trainer(folder: Path, bar: ProgressBar | None = None, **options: Any) -> lumen.Trainer:
    settings = {"default_root_dir": folder, "logger": False, "enable_checkpointing": False, "seed": 1, **options}
    return lumen.Trainer(callbacks=bar or ProgressBar(), enable_model_summary=False, **settings)


def strip_escapes(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
