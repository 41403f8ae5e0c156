"""The network, its loss and its optimizer."""

import lumen
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Classifier(lumen.TaskModule):
    """Tells the class of a row.

    Args:
        features: Numbers in a row; not set in the config, it comes from the data.
        classes: Number of classes; from the data too.
        width: Numbers in the hidden layer.
        dropout: Probability with which one of them is dropped in training.
        lr: AdamW's learning rate.
    """

    def __init__(self, features: int, classes: int, width: int = 32, dropout: float = 0.1, lr: float = 1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("std", torch.ones(features))
        self.net = nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, classes))

    def setup(self, stage: str) -> None:
        """Learn the scale of each column from the training rows; a checkpoint brings it along."""
        if stage == "fit":
            rows, _ = self.trainer.datamodule.train[:]
            self.mean.copy_(rows.mean(0))
            self.std.copy_(rows.std(0).clamp(min=1e-6))

    def forward(self, rows: Tensor) -> Tensor:
        """Logits of shape `(batch, classes)`, from rows of shape `(batch, features)` as they stand in the table."""
        return self.net((rows - self.mean) / self.std)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Cross-entropy of the labels, which is made smaller."""
        rows, labels = batch
        loss = F.cross_entropy(self(rows), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor]) -> None:
        """How good it is on rows that it does not learn from."""
        self.evaluate(batch, "val")

    def test_step(self, batch: list[Tensor]) -> None:
        """How good it is in the end."""
        self.evaluate(batch, "test")

    def evaluate(self, batch: list[Tensor], part: str) -> None:
        """Log the loss, and the part of the rows whose class is found."""
        rows, labels = batch
        logits = self(rows)
        self.log(f"{part}_loss", F.cross_entropy(logits, labels), prog_bar=True)
        self.log(f"{part}_acc", (logits.argmax(dim=1) == labels).float().mean(), prog_bar=True)

    def predict_step(self, batch: list[Tensor]) -> list[str]:
        """The class that it finds for each row, and how sure it is."""
        sure, found = self(batch[0]).softmax(dim=1).max(dim=1)
        names = self.trainer.datamodule.names
        return [f"{names[label]} {p:.0%}" for label, p in zip(found.tolist(), sure.tolist(), strict=True)]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
