"""One run that may be killed at any moment and started again: the child process of test_exact_resume.

    python -m tests.promises.resumable_run DIRECTORY WORKERS PRECISION[-asynchronous]

It prints a line at each micro-batch, validation batch and fsync of a save, so that its parent can strike there, and
keeps a record of every sample it trained on.
"""

import json
import os
import random
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanAbsoluteError

import lumen
from tests.tasks import FEATURES, Drawing, loader

SAMPLES = 50
EPOCHS = 3
#: fp32 runs whole epochs of 5 steps; bf16 ends inside the last one.
LENGTH = {"fp32": {"max_epochs": EPOCHS}, "bf16": {"max_steps": 13}}


def say(what):
    sys.stdout.write(f"{what}\n")  # at once, for two threads say something


class Noisy(lumen.TaskModule):
    """Dropout, batch norm, randomness of three libraries in the step, torchmetrics, a schedule and a plateau."""

    def __init__(self, record):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(FEATURES, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 1)
        )
        self.error = MeanAbsoluteError()
        self.record = Path(record)

    def training_step(self, batch, batch_idx):
        say("train")
        inputs, targets, indices = batch
        entry = [self.current_epoch, self.global_step, batch_idx, indices.tolist()]
        with self.record.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        prediction = self.net(inputs + 0.01 * (np.random.randn() + random.random()))
        self.error(prediction.float(), targets)
        self.log("error", self.error)
        loss = nn.functional.mse_loss(prediction, targets)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss, float(len(indices)) * (1.0 + batch_idx % 2)

    def validation_step(self, batch):
        say("validate")
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        step = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return [optimizer], [
            {"scheduler": step, "interval": "step"},
            {"scheduler": plateau, "monitor": "val_loss"},
        ]


def main(directory, workers, kind):
    precision, _, asynchronous = kind.partition("-")
    torch.set_num_threads(1)
    fsync = os.fsync

    def announced_fsync(descriptor):
        say("save")
        fsync(descriptor)

    os.fsync = announced_fsync
    lumen.seed_everything(7)
    task = Noisy(Path(directory) / "samples.jsonl")
    trainer = lumen.Trainer(
        **LENGTH[precision], accumulate_grad_batches=3, precision=precision, gradient_clip_val=1.0, seed=7,
        val_check_interval=0.5, log_every_n_steps=1, default_root_dir=directory, name="run", resume="auto",
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[
            lumen.ModelCheckpoint(monitor="val_loss", every_n_train_steps=1, asynchronous=bool(asynchronous)),
            lumen.EarlyStopping("val_loss", patience=100),
            lumen.LearningRateMonitor(),
        ],
    )  # fmt: skip
    trainer.fit(
        task,
        DataLoader(Drawing(SAMPLES), 4, shuffle=True, num_workers=workers, persistent_workers=workers > 0),
        val_dataloaders=loader(20, 5, shuffle=False),
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
