"""Example GPT: the same validation loss on one device, under DDP, under FSDP and under torchrun."""

import os
import subprocess
import sys

import pytest

from tests.helpers import ROOT
from tests.helpers.tables import read_rows

TWO = ["--trainer.devices", "2"]
LUMEN = [sys.executable, "-m", "lumen"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "lumen"]
WAYS = {
    "ddp": (LUMEN, [*TWO, "--trainer.strategy", "ddp"]),
    "fsdp": (LUMEN, [*TWO, "--trainer.strategy", "fsdp"]),
    "torchrun": (TORCHRUN, []),
}


def train_to_val_loss(folder, name, command, *options):
    """Train, and return the last validation loss."""
    words = [*command, "fit", "--config", "models/gpt.yaml", "--trainer.default_root_dir", str(folder)]
    words += ["--trainer.name", name, "--trainer.global_batch_size", "24", *options]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=500, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    values = [row["val_loss"] for row in read_rows(folder / name / "metrics.csv") if row.get("val_loss")]
    return float(values[-1])


@pytest.mark.slow
@pytest.mark.time_limit(300)
def test_twenty_steps_in_float64_agree_to_ten_digits(tmp_path):
    options = ["--trainer.precision", "fp64", "--trainer.max_steps", "20", "--trainer.val_check_interval", "20"]
    options += ["--trainer.limit_val_batches", "6", "--model.preset", "gpt-nano", "--model.dropout", "0.1"]
    alone = train_to_val_loss(tmp_path, "alone", LUMEN, *options)
    for name, (command, devices) in WAYS.items():
        loss = train_to_val_loss(tmp_path, name, command, *devices, *options)
        print(f"{name}: {loss!r}, alone {alone!r}")
        assert abs(loss / alone - 1) < 1e-10


@pytest.mark.torture
@pytest.mark.time_limit(1500)
def test_demo_in_float32_agrees_across_strategies(tmp_path):
    """The validation losses differ by at most half a percent."""
    alone = train_to_val_loss(tmp_path, "alone", LUMEN)
    for name in ("ddp", "fsdp"):
        command, devices = WAYS[name]
        loss = train_to_val_loss(tmp_path, name, command, *devices)
        print(f"{name}: {loss!r}, alone {alone!r}")
        assert abs(loss / alone - 1) < 5e-3
