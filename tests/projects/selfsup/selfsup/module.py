"""BYOL (Grill et al. 2020) with a linear probe that learns at the same time without effect on the encoder."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.utilities.types import STEP_OUTPUT, OptimizerLRScheduler
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from selfsup.networks import Encoder, head


class BYOL(pl.LightningModule):
    def __init__(
        self,
        width: int = 16,
        features: int = 64,
        projection: int = 32,
        lr: float = 2e-3,
        probe_lr: float = 1e-2,
        weight_decay: float = 1e-4,
        warmup_steps: int = 5,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.student = nn.Sequential(Encoder(width, features), head(features, projection))
        self.predictor = head(projection, projection)
        self.teacher = deepcopy(self.student)
        self.teacher.requires_grad_(False)
        self.probe = nn.Linear(features, 10)
        self.accuracies = nn.ModuleList(MulticlassAccuracy(10, average="micro") for _ in range(2))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.student[0](images)

    # ------------------------------------------------------------------ losses

    def regression_loss(self, view: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        predicted = F.normalize(self.predictor(self.student(view)), dim=1)
        with torch.no_grad():
            target = F.normalize(self.teacher(other), dim=1)
        return (2 - 2 * (predicted * target).sum(dim=1)).mean()

    def probe_loss(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            features = self(images)
        return F.cross_entropy(self.probe(features), labels)

    # ------------------------------------------------------------------ steps

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> STEP_OUTPUT:
        first, second = batch["views"]
        byol = (self.regression_loss(first, second) + self.regression_loss(second, first)) / 2
        probe = self.probe_loss(*batch["labelled"])
        self.log("byol_loss", byol, prog_bar=True, on_step=True, on_epoch=True, batch_size=len(first))
        self.log("probe_loss", probe, on_step=False, on_epoch=True, batch_size=len(batch["labelled"][0]))
        return byol + probe

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        images, labels = batch
        features = self(images)
        accuracy = self.accuracies[dataloader_idx]
        accuracy(self.probe(features), labels)
        name = ("few", "held_out")[dataloader_idx]
        self.log(f"accuracy_{name}", accuracy, add_dataloader_idx=False, prog_bar=True)
        spread = F.normalize(features, dim=1).std(dim=0).mean()
        self.log("spread", spread, on_epoch=True)  # 0 if all images look the same

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
        images, _ = batch
        return F.normalize(self(images), dim=1)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        norms = [each.grad.norm() for each in self.student.parameters() if each.grad is not None]
        self.log("grad_norm", torch.stack(norms).norm(), on_step=True)

    # ------------------------------------------------------------------ optimizer

    def configure_optimizers(self) -> OptimizerLRScheduler:
        hparams = self.hparams
        learned = [*self.student.parameters(), *self.predictor.parameters()]
        optimizer = torch.optim.AdamW(
            [
                {"params": learned, "lr": hparams.lr, "weight_decay": hparams.weight_decay},
                {"params": self.probe.parameters(), "lr": hparams.probe_lr, "weight_decay": 0.0},
            ]
        )
        total = self.trainer.estimated_stepping_batches

        def factor(step: int) -> float:
            if step < hparams.warmup_steps:
                return (step + 1) / hparams.warmup_steps
            share = (step - hparams.warmup_steps) / max(1, total - hparams.warmup_steps)
            return 0.5 * (1 + math.cos(math.pi * min(1.0, share)))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
