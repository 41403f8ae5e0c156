"""ThroughputMonitor: speed, use of the hardware, and memory of a run in its record."""

from __future__ import annotations

import logging
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import lumen
from lumen.callbacks.monitors import find_peak_flop_per_s
from tests.helpers.tables import read_rows

pytestmark = pytest.mark.usefixtures("clock")  # time passes only where steps, data and validations sleep
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


def read_records(directory: Path) -> list[dict[str, float]]:
    return [{name: float(value) for name, value in row.items() if value} for row in read_rows(directory / "system.csv")]


def test_speed_and_memory_are_recorded_at_logged_steps(tmp_path: Path) -> None:
    rows = read_records(fit(tmp_path, Task(step_s=0.01)))
    assert list(rows[0]) == [
        "step", "time_s", "steps_per_s", "batches_per_s", "samples_per_s", "data_wait_share", "memory_mb"
    ]  # fmt: skip
    assert [row["step"] for row in rows] == [5, 10, 15, 20]
    times = [row["time_s"] for row in rows]
    assert [later - earlier for earlier, later in pairwise(times)] == pytest.approx([0.05] * 3, abs=1e-3)
    for row in rows:
        assert row["steps_per_s"] == pytest.approx(100)
        assert row["batches_per_s"] == pytest.approx(row["steps_per_s"])
        assert row["samples_per_s"] == pytest.approx(BATCH * row["steps_per_s"])
        assert row["data_wait_share"] == 0
        assert 50 < row["memory_mb"] < 20_000


def test_data_wait_share_is_correct(tmp_path: Path) -> None:
    waiting = read_records(fit(tmp_path / "data", Task(), pause_s=0.003))
    computing = read_records(fit(tmp_path / "step", Task(step_s=0.012)))
    both = read_records(fit(tmp_path / "both", Task(step_s=0.012), pause_s=0.001))
    assert [row["data_wait_share"] for row in waiting] == [1.0] * 4
    assert [row["data_wait_share"] for row in computing] == [0.0] * 4
    assert [row["data_wait_share"] for row in both] == pytest.approx([0.25] * 4, abs=1e-3)


def test_validation_time_is_excluded_from_speed(tmp_path: Path) -> None:
    task = Task(step_s=0.01, validation_s=0.5)
    rows = read_records(fit(tmp_path, task, validation=True, val_check_interval=5, num_sanity_val_steps=0))
    assert rows[-1]["time_s"] >= 20 * 0.01 + 3 * 0.5
    assert [row["steps_per_s"] for row in rows] == pytest.approx([100.0] * 4)


def test_timings_stay_out_of_metrics_csv(tmp_path: Path) -> None:
    directory = fit(tmp_path, Task())
    assert "steps_per_s" in (directory / "system.csv").read_text()
    assert (directory / "metrics.csv").read_text().startswith("step,epoch,loss\n")


def test_a_run_without_loggers_records_nothing(tmp_path: Path) -> None:
    trainer = lumen.Trainer(max_steps=1, logger=False)
    assert not any(isinstance(callback, lumen.ThroughputMonitor) for callback in trainer.callbacks)
    assert not (fit(tmp_path, Task(), logger=False) / "system.csv").exists()


def test_a_resumed_run_goes_on_with_its_record(tmp_path: Path) -> None:
    fit(tmp_path, Task(step_s=0.01), max_steps=10)
    rows = read_records(fit(tmp_path, Task(step_s=0.01), resume="auto"))
    assert [row["step"] for row in rows] == [5, 10, 15, 20]
    assert rows[2]["time_s"] == pytest.approx(rows[1]["time_s"] + 0.05, abs=1e-3)
    assert rows[2]["steps_per_s"] == pytest.approx(100)


def test_window_averages_speed_over_time(tmp_path: Path) -> None:
    class Faster(Task):
        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            self.step_s = 0.03 if self.global_step < 10 else 0.01
            return super().training_step(batch)

    last, whole = (
        read_records(fit(tmp_path / str(window_s), Faster(), callbacks=[lumen.ThroughputMonitor(window_s=window_s)]))[
            -1
        ]
        for window_s in (0.0, 60.0)
    )
    assert last["steps_per_s"] == pytest.approx(100)
    assert whole["steps_per_s"] == pytest.approx(50)


@pytest.mark.parametrize("weighs", ["returned", "beforehand"])
def test_batch_weights_are_counted_as_units(tmp_path: Path, weighs: str) -> None:
    class Weighing(Task):
        def training_step(self, batch: torch.Tensor) -> Any:
            loss = super().training_step(batch)
            return (loss, 10.0 * len(batch)) if weighs == "returned" else loss

        if weighs == "beforehand":

            def batch_weight(self, batch: torch.Tensor) -> float:
                return 10.0 * len(batch)

    for row in read_records(fit(tmp_path, Weighing(), accumulate_grad_batches=2)):
        assert row["units_per_s"] == pytest.approx(10 * row["samples_per_s"])
        assert row["batches_per_s"] == pytest.approx(2 * row["steps_per_s"])


# ---------------------------------------------------------------------- operations


class Mixed(lumen.TaskModule):
    """Task with convolution, BatchNorm, dropout, attention and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = torch.nn.Conv1d(1, 8, 3, padding=1)
        self.norm = torch.nn.BatchNorm1d(8)
        self.encoder = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.out = torch.nn.Linear(8, 1)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.conv(batch[:, None])).transpose(1, 2)
        loss: torch.Tensor = self.out(self.encoder(hidden)).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


def train(folder: Path, task: lumen.TaskModule, measure: bool, **options: Any) -> list[dict[str, float]]:
    monitor = lumen.ThroughputMonitor(measure_flops=measure)
    settings: dict[str, Any] = {"max_steps": 4, "log_every_n_steps": 1, "seed": 1, "callbacks": [monitor], **options}
    trainer = lumen.Trainer(
        default_root_dir=folder, name="run", enable_progress_bar=False, enable_model_summary=False, **settings
    )
    generator = torch.Generator().manual_seed(0)
    trainer.fit(task, DataLoader(torch.randn(24, 6, generator=generator), batch_size=BATCH))  # type: ignore[arg-type]
    return read_records(folder / "run")


@pytest.mark.parametrize(
    "options",
    [{}, {"precision": "bf16"}, {"precision": "fp16"}, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}],
)
def test_counting_operations_changes_no_bit_of_the_training(tmp_path: Path, options: dict[str, Any]) -> None:
    plain, counted = Mixed(), Mixed()
    without = train(tmp_path / "plain", plain, False, **options)
    found = train(tmp_path / "counted", counted, True, **options)
    assert "flop_per_s" not in without[0]
    assert found[0]["flop_per_s"] > 0
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, counted.state_dict()[name]), name
    metrics = [(tmp_path / name / "run/metrics.csv").read_text() for name in ("plain", "counted")]
    assert metrics[0] == metrics[1]


class Linear(lumen.TaskModule):
    """Task with 2 * 6 * 5 operations a sample in each direction: one matrix product, and inputs without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 5, bias=False)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor | None:
        return self.layer(batch).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3)


def test_flop_per_step_match_the_samples(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lumen"):
        rows = train(tmp_path, Linear(), True, accumulate_grad_batches=2, max_steps=3)
    assert [row["flop_per_step"] for row in rows] == [pytest.approx(2 * BATCH * 2 * 2 * 6 * 5)] * 3
    for row in rows:
        assert row["flop_per_s"] == pytest.approx(120 * row["samples_per_s"])
        assert "mfu" not in row
    assert caplog.text.count("120 FLOP per sample") == 1
    assert caplog.text.count("not logging mfu: the peak of cpu in float32 is unknown") == 1


def test_a_batch_that_is_skipped_is_not_counted(tmp_path: Path) -> None:
    class SkipsTheFirst(Linear):
        def training_step(self, batch: torch.Tensor) -> torch.Tensor | None:
            self.calls = getattr(self, "calls", 0) + 1
            return None if self.calls == 1 else super().training_step(batch)

    rows = train(tmp_path, SkipsTheFirst(), True, accumulate_grad_batches=2, max_steps=2, log_level="ERROR")
    assert "flop_per_step" not in rows[0] or rows[0]["flop_per_step"] == pytest.approx(2 * BATCH * 120)
    assert rows[1]["flop_per_step"] == pytest.approx(2 * BATCH * 120)


def test_an_error_while_counting_leaves_nothing_behind(tmp_path: Path) -> None:
    class Fails(Linear):
        def training_step(self, batch: torch.Tensor) -> torch.Tensor | None:
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        train(tmp_path, Fails(), True)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_a_compiled_model_is_left_compiled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Compiled(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.layer.compile(backend="eager")

    with caplog.at_level(logging.WARNING, "lumen"):
        rows = train(tmp_path, Compiled(), True)
    assert "flop_per_s" not in rows[0]
    assert "cannot count the operations" in caplog.text


@pytest.mark.parametrize(
    ("device", "dtype", "tf32", "tflop_per_s"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, False, 989.4),
        ("NVIDIA H100 80GB HBM3", torch.float32, True, 494.7),
        ("NVIDIA H100 80GB HBM3", torch.float32, False, 67.0),
        ("NVIDIA H100 PCIe", torch.bfloat16, False, 756.0),
        ("NVIDIA H200", torch.float16, False, 989.4),
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, False, 312.0),
        ("A100-SXM4-40GB", torch.float32, True, 156.0),
        ("NVIDIA A100 80GB PCIe", torch.bfloat16, False, 312.0),
        ("NVIDIA L4", torch.bfloat16, False, 121.0),
        ("NVIDIA L40S", torch.bfloat16, False, 362.0),
        ("Tesla V100-SXM2-32GB", torch.float16, False, 125.0),
        ("Tesla V100-SXM2-32GB", torch.float32, True, 15.7),
        ("Tesla V100-SXM2-32GB", torch.bfloat16, False, None),
        ("Tesla T4", torch.float16, False, 65.0),
        ("NVIDIA GeForce RTX 3090", torch.bfloat16, False, 71.0),
        ("NVIDIA GeForce RTX 3090 Ti", torch.bfloat16, False, None),
        ("NVIDIA GeForce RTX 4090", torch.float16, False, 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", torch.float16, False, None),
        ("NVIDIA B200", torch.bfloat16, False, 2250.0),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", torch.bfloat16, False, None),
        ("NVIDIA L40", torch.bfloat16, False, None),
        ("NVIDIA H100 80GB HBM3", torch.float64, False, None),
        ("cpu", torch.float32, False, None),
    ],
)
def test_peak_flops_depend_on_device_and_dtype(
    device: str, dtype: torch.dtype, tf32: bool, tflop_per_s: float | None
) -> None:
    expected = None if tflop_per_s is None else pytest.approx(tflop_per_s * 1e12)
    assert find_peak_flop_per_s(device, dtype, tf32=tf32) == expected
