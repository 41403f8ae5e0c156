"""Callbacks that the configs name."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter

log = logging.getLogger("lightning.pytorch")


class ConfusionMatrix(Callback):
    """Counts which cultivar is taken for which, over all validations of a run."""

    def __init__(self, n_classes: int = 3) -> None:
        self.n_classes = n_classes
        self.counts = torch.zeros(n_classes, n_classes, dtype=torch.long)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        if trainer.sanity_checking:
            return
        features, labels = batch
        for label, guess in zip(labels.tolist(), pl_module(features).argmax(1).tolist(), strict=True):
            self.counts[label, guess] += 1

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        log.info("confusions: %s", self.counts.tolist())

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.counts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.counts = state_dict["counts"]


class GradientNorms(Callback):
    """Logs the norm of the gradient of each layer."""

    def __init__(self, prefix: str = "grad") -> None:
        self.prefix = prefix

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer) -> None:
        for name, parameter in pl_module.named_parameters():
            if parameter.grad is not None and name.endswith("weight"):
                pl_module.log(f"{self.prefix}/{name}", parameter.grad.norm(), on_step=False, on_epoch=True)


class ConfidenceWatch(Callback):
    """Log the model's confidence in its training batches."""

    def __init__(self) -> None:
        self.confidences: list[float] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert torch.isfinite(outputs["loss"])
        self.confidences.append(float(outputs["logits"].softmax(1).max(1).values.mean()))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.log("confidence", sum(self.confidences) / len(self.confidences))
        self.confidences.clear()


class JsonPredictions(BasePredictionWriter):
    """Write predictions as JSON."""

    def __init__(self, path: str, write_interval: str = "epoch") -> None:
        super().__init__(write_interval)
        self.path = Path(path)

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(torch.cat(predictions).tolist()))
