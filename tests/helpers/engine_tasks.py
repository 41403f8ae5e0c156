"""Task that records which samples took part in which step, for runs that engines restart."""

import json
import os
import time
from collections import Counter
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lumen

SAMPLES, EPOCHS = 64, 3
CONFIG = """\
model: {class_path: tests.helpers.engine_tasks.Recorded}
data: {class_path: tests.helpers.engine_tasks.Numbered}
optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 0.01}}
seed_everything: 7
trainer:
  name: run
  max_epochs: 3
  global_batch_size: 4
  accelerator: cpu
  enable_progress_bar: false
  callbacks:
    checkpoints: {class_path: lumen.ModelCheckpoint, init_args: {every_n_train_steps: 2}}
"""


class Recorded(lumen.TaskModule):
    """Task in float64 that writes the samples and losses of each micro-batch to a file."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def training_step(self, batch):
        ids, x = batch
        losses = (self.layer(x).squeeze(1) - x.sum(1)).square()
        with Path(f"record-{self.trainer.global_rank}.jsonl").open("a") as file:
            step = self.trainer.global_step
            for number, loss in zip(ids.tolist(), losses.tolist(), strict=True):
                file.write(json.dumps([step, number, loss]) + "\n")
        self.log("error", losses.mean(), on_step=False, on_epoch=True)
        time.sleep(float(os.environ.get("LUMEN_TEST_PAUSE_S", "0")))
        return losses.mean()


class Numbered(lumen.DataModule):
    """Data set with numbered samples."""

    def train_dataloader(self):
        x = torch.randn(SAMPLES, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        return DataLoader(TensorDataset(torch.arange(SAMPLES), x), batch_size=2, shuffle=True)


def read_record(directory):
    """Return the loss of each sample, by step and number; fail if a repeated step has another loss."""
    found = {}
    for path in sorted(directory.glob("record-*.jsonl")):
        for line in path.read_text().splitlines():
            step, number, loss = json.loads(line)
            assert found.setdefault((step, number), loss) == loss, (step, number)
    return found


def check_epochs(found):
    """Check that each sample takes part once in each epoch."""
    steps = SAMPLES // 4
    for epoch in range(EPOCHS):
        counted = Counter(number for step, number in found if epoch * steps <= step < (epoch + 1) * steps)
        assert counted == Counter(range(SAMPLES)), epoch
    assert len(found) == SAMPLES * EPOCHS


def count_started_steps(directory):
    """Return the number of started steps."""
    return len({step for step, _ in read_record(directory)})
