"""A perceptron with a choice of width, depth and dropout."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import nn
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score


class WineModel(LightningModule):
    """The optimizer and its schedule come from the config.

    Args:
        n_features: Measurements of a wine; linked to the data.
        n_classes: Cultivars; linked to the data.
        width: Units of a hidden layer.
        depth: Hidden layers.
        dropout: Share of units that is dropped.
        label_smoothing: As in torch's cross entropy.
    """

    def __init__(
        self,
        n_features: int,
        n_classes: int,
        width: int = 32,
        depth: int = 2,
        dropout: float = 0.1,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        layers: list[nn.Module] = []
        for number in range(depth):
            layers += [nn.Linear(width if number else n_features, width), nn.ReLU(), nn.Dropout(dropout)]
        self.net = nn.Sequential(*layers, nn.Linear(width, n_classes))
        self.loss = nn.CrossEntropyLoss(label_smoothing=label_smoothing)
        self.train_accuracy = MulticlassAccuracy(n_classes, average="micro")
        self.val_accuracy = MulticlassAccuracy(n_classes, average="micro")
        self.test_accuracy = MulticlassAccuracy(n_classes, average="micro")
        self.test_f1 = MulticlassF1Score(n_classes)
        self.example_input_array = torch.zeros(2, n_features)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.net(features)

    def training_step(self, batch, batch_idx: int) -> STEP_OUTPUT:
        features, labels = batch
        logits = self(features)
        loss = self.loss(logits, labels)
        self.train_accuracy(logits, labels)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("train_accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        return {"loss": loss, "logits": logits.detach()}

    def validation_step(self, batch, batch_idx: int) -> STEP_OUTPUT:
        features, labels = batch
        logits = self(features)
        loss = self.loss(logits, labels)
        self.val_accuracy(logits, labels)
        self.log_dict({"val_loss": loss, "val_accuracy": self.val_accuracy}, prog_bar=True, enable_graph=False)
        return loss

    def test_step(self, batch, batch_idx: int) -> STEP_OUTPUT:
        features, labels = batch
        logits = self(features)
        self.test_accuracy(logits, labels)
        self.test_f1(logits, labels)
        self.log("test_loss", self.loss(logits, labels))
        self.log("test_accuracy", self.test_accuracy)
        self.log("test_f1", self.test_f1)
        return None

    def predict_step(self, batch, batch_idx: int):
        features, _ = batch
        return self(features).argmax(dim=1)
