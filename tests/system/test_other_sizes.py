"""Killed runs that resume with other processes under another strategy: each sample once, and the same losses."""

import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.helpers.tables import read_rows

SCRIPT = """
import json, os, signal, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import lumen

strategy, devices, fatal_step, fatal_rank = sys.argv[1], *map(int, sys.argv[2:])

class Task(lumen.TaskModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.Linear(16, 1))

    def training_step(self, batch):
        if self.global_step == fatal_step and self.global_rank == fatal_rank:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=True)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with open("samples", "a") as file:
            file.write(json.dumps([self.current_epoch, batch_idx, batch[2].tolist()]) + chr(10))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

lumen.seed_everything(5)
data = TensorDataset(torch.randn(50, 6), torch.randn(50, 1), torch.arange(50))
trainer = lumen.Trainer(
    max_steps=20, devices=devices, strategy=strategy, accelerator="cpu", precision="fp64", name="run", resume="auto",
    global_batch_size=12, callbacks=[lumen.ModelCheckpoint(every_n_train_steps=2)], log_every_n_steps=1,
    enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Task(), DataLoader(data, 3, shuffle=True))
"""


@pytest.fixture(autouse=True)
def script(program_directory):
    Path("job.py").write_text(SCRIPT)


def run_attempt(strategy, devices, fatal_step=-1, fatal_rank=0):
    """Run one attempt, in which the rank kills itself at the step; return its output."""
    words = [sys.executable, "job.py", strategy, devices, fatal_step, fatal_rank]
    job = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=200, check=False)
    output = job.stdout + job.stderr
    assert job.returncode == (0 if fatal_step < 0 else 137), output
    return output


def read_result():
    """Return the loss of each step, and how often each sample was trained on by epoch, repeated steps counted once."""
    losses = [float(row["loss"]) for row in read_rows(Path("runs/run/metrics.csv"))]
    batches = {}
    for epoch, number, samples in map(json.loads, Path("samples").read_text().splitlines()):
        assert batches.setdefault((epoch, number), samples) == samples
    seen = {}
    for (epoch, _), samples in batches.items():
        seen.setdefault(epoch, Counter()).update(samples)
    Path("samples").unlink()
    Path("runs").rename(f"runs-{len(os.listdir())}")
    return losses, seen


def check_sizes(expected, lives):
    """Compare a run of these attempts, each (strategy, devices, fatal step, fatal rank), with the uninterrupted run."""
    outputs = [run_attempt(*each) for each in lives]
    losses, seen = read_result()
    assert losses == pytest.approx(expected[0], abs=1e-10, rel=0)
    assert len(losses) == 20
    assert seen == expected[1] == {epoch: Counter(range(50)) for epoch in range(4)}
    return outputs


@pytest.mark.slow
@pytest.mark.time_limit(400)
def test_killed_run_resumes_with_other_world_sizes():
    """One line reports the change."""
    run_attempt("single", 1)
    expected = read_result()
    lives = [("ddp", 2, 5, 1), ("fsdp", 3, 13, 2), ("single", 1, -1, 0)]
    _, three, one = check_sizes(expected, lives)
    assert (
        "steps are the same as in step-00000004, with different settings: processes: was 2, is 3; strategy: was DDP, "
        "is FSDP\n"
    ) in three
    assert (
        "steps are the same as in step-00000012, with different settings: processes: was 3, is 1; strategy: was FSDP, "
        "is SingleDevice; micro-batches of a step on each process: was 2, is 4\n"
    ) in one


@pytest.mark.torture
@pytest.mark.time_limit(7200)
@pytest.mark.parametrize("seed", range(20))
def test_random_kills_and_sizes_keep_losses_and_samples(seed):
    run_attempt("single", 1)
    expected = read_result()
    draw, step, lives = random.Random(seed), 0, []
    for devices in (4, 2, 3):
        step += draw.randrange(3, 6)
        rank = draw.randrange(min(devices, 2)) if step % 5 < 4 else 0  # the last step of an epoch has one micro-batch
        lives.append((draw.choice(["ddp", "fsdp"]), devices, step, rank))
    check_sizes(expected, [*lives, ("single", 1, -1, 0)])
