"""Run with checkpoints to export."""

from pathlib import Path

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lumen
from lumen.cli import main
from lumen.optim import Lookahead
from tests.helpers.tasks import loader, quiet_trainer

STEPS = ["step-00000002", "step-00000004", "step-00000006"]


class Net(nn.Module):
    """Plain torch module with a tied, a frozen, a scalar, an integer and an unsaved tensor."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.again = nn.Linear(6, 6, bias=False)
        self.again.weight = self.first.weight
        self.norm = nn.BatchNorm1d(6)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.ones(6, 1), requires_grad=False)
        self.register_buffer("cache", torch.ones(3), persistent=False)

    def forward(self, inputs):
        return self.norm(self.again(self.first(inputs))) @ self.frozen * self.scale


class Task(lumen.TaskModule):
    """Task with the network and an average, as in torch's documentation."""

    def __init__(self, k: int | None = None):
        super().__init__()
        self.net = Net()
        self.averaged = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        self.k = k

    def training_step(self, batch):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.averaged.update_parameters(self.net)

    def validation_step(self, batch):
        self.log("score", self.trainer.global_step * 1.0)  # the first checkpoint is the best one

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW([p for p in self.net.parameters() if p.requires_grad], lr=0.05)
        return Lookahead(optimizer, self.k) if self.k else optimizer


def fit(*callbacks, **options):
    """Train a small run in runs/run with three checkpoints, the first of which is the best."""
    torch.manual_seed(0)
    task = Task(**options)
    saver = lumen.ModelCheckpoint(monitor="score", every_n_train_steps=2, keep_last=-1)
    trainer = quiet_trainer(
        Path(), max_steps=6, val_check_interval=2, callbacks=[*callbacks, saver], num_sanity_val_steps=0
    )
    trainer.fit(task, loader(), val_dataloaders=loader(16))
    assert sorted(path.name for path in Path("runs/run/checkpoints").iterdir()) == STEPS
    return task


def export(*words):
    assert main(["export", *map(str, words)]) == 0
