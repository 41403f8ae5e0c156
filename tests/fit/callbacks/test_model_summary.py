"""ModelSummary: exact counts, printed once."""

from __future__ import annotations

import io
import logging
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, MetricCollection

import lumen
from lumen.callbacks import ModelSummary
from lumen.callbacks.model_summary import Row, summarize
from lumen.errors import ConfigError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)


class Task(lumen.TaskModule):
    """Task with a frozen embedding tied to the head, a block, and a direct parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(3, 4))
        self.embedding = nn.Embedding(10, 4)
        self.block = Block()
        self.activation = nn.ReLU()
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.block.norm.requires_grad_(False)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return self.block.up(batch[0]).square().mean() + self.position.sum() + self.embedding.weight.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 1e-3)


ROWS = [
    Row("", "Task", 12 + 40 + 40, 16),
    Row("position", "Parameter", 12, 0),
    Row("embedding", "Embedding", 40, 0),
    Row("block", "Block", 40, 16),
    Row("block.up", "Linear", 40, 0),
    Row("block.norm", "BatchNorm1d", 0, 16),
    Row("activation", "ReLU", 0, 0),
    Row("head", "Linear", 40, 0),
]


def fit(
    monkeypatch: pytest.MonkeyPatch, folder: Path, summary: ModelSummary, task: lumen.TaskModule, *, terminal: bool
) -> str:
    screen = Console(file=io.StringIO(), force_terminal=terminal, width=80, soft_wrap=True, _environ={"TERM": "xterm"})
    monkeypatch.setattr("lumen.console.console", screen)
    lumen.Trainer(max_steps=1, default_root_dir=folder, name="run", callbacks=summary, enable_progress_bar=False).fit(
        task, DataLoader(TensorDataset(torch.randn(4, 4)), batch_size=4)
    )
    return screen.file.getvalue()


def test_summary_counts_exactly_and_tied_parameters_once() -> None:
    assert summarize(Task(), -1) == ROWS
    assert summarize(Task(), 2) == ROWS


def test_summary_depth_adds_deeper_modules_to_parent() -> None:
    assert summarize(Task()) == [row for row in ROWS if "." not in row.name]
    assert summarize(Task(), 0) == ROWS[:1]


def test_metrics_are_no_rows_unless_they_hold_parameters() -> None:
    task = Task()
    task.accuracy = MeanMetric()
    task.metrics = nn.ModuleDict({"a": MetricCollection([MeanMetric()]), "b": nn.ModuleList([MeanMetric()])})
    assert summarize(task, -1) == ROWS
    task.metrics["judge"] = nn.Linear(1, 1)
    assert [row.name for row in summarize(task, -1)[len(ROWS) :]] == ["metrics", "metrics.judge"]


def test_lazy_parameters_count_zero_until_materialized() -> None:
    lazy = nn.Sequential(nn.LazyLinear(3))
    assert [row.parameters for row in summarize(lazy)] == [0, 0]
    lazy(torch.randn(2, 5))
    assert [row.parameters for row in summarize(lazy)] == [18, 18]


@pytest.mark.parametrize("terminal", [True, False])
def test_summary_prints_table_and_totals_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, terminal: bool) -> None:
    printed = fit(monkeypatch, tmp_path, ModelSummary(), Task(), terminal=terminal)
    totals = "Task: 108 parameters (92 trainable, 16 frozen, 40 more tied to these), < 0.01 MB float32; "
    assert printed.count(totals) == 1
    assert printed.count("buffers < 0.01 MB float32, int64") == 1
    assert (tmp_path / "run" / "run.log").read_text().count(totals) == 1
    assert ("\x1b" in printed) == terminal
    lines = [line.split() for line in printed.splitlines()]
    if not terminal:
        assert lines[2:8] == [
            ["name", "type", "parameters", "trainable"],
            ["position", "Parameter", "12", "100", "%"],
            ["embedding", "Embedding", "40", "100", "%"],
            ["block", "Block", "56", "71.4", "%"],
            ["activation", "ReLU", "0"],
            ["head", "Linear", "40", "100", "%"],
        ]


def test_summary_is_silent_above_log_level_info(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for _ in range(2):
        lumen.Trainer(
            max_steps=0, default_root_dir=tmp_path, log_level="WARNING", enable_progress_bar=False, logger=False,
            enable_checkpointing=False,
        ).fit(Task(), DataLoader(TensorDataset(torch.ones(2, 2))))  # fmt: skip
    assert capfd.readouterr() == ("", "")


def test_long_names_are_complete_in_log_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    task = Task()
    name = "_".join(["a_name_that_goes_on"] * 5)
    setattr(task, name, nn.Linear(1, 1))
    assert f"{name}  Linear" in fit(monkeypatch, tmp_path, ModelSummary(), task, terminal=False)


@pytest.mark.parametrize(
    ("width", "said"),
    [
        (999, "999 parameters"),
        (12_345, "12.3 k parameters"),
        (810_304, "0.81 M parameters"),
        (7_240_000, "7.24 M parameters"),
        (1_500_000_000, "1.5 B parameters"),
    ],
)
def test_totals_are_numbers_for_people(caplog: pytest.LogCaptureFixture, width: int, said: str) -> None:
    task = Task()
    for name in ("position", "embedding", "block", "head"):
        delattr(task, name)
    task.weight = nn.Parameter(torch.empty(width, device="meta"), requires_grad=False)
    with caplog.at_level(logging.INFO, "lumen"):
        ModelSummary(0).on_fit_start(lumen.Trainer(max_steps=1, logger=False), task)
    assert said in caplog.text
    if width == 810_304:
        assert "3.24 MB float32" in caplog.text


def test_a_depth_that_means_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_depth must be at least -1"):
        ModelSummary(max_depth=-2)
