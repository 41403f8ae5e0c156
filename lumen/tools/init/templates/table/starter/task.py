"""The network, its loss and its optimizer."""

import lumen
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Classifier(lumen.TaskModule):
    """Network with one hidden layer that classifies rows.

    Args:
        features: Number of features in a row. The data module provides this argument.
        classes: Number of classes. The data module provides this argument.
        width: Size of the hidden layer.
        dropout: Probability of dropout, at least 0 and less than 1.
        lr: Learning rate of AdamW.
    """

    def __init__(self, features: int, classes: int, width: int = 32, dropout: float = 0.1, lr: float = 1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("std", torch.ones(features))
        self.net = nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, classes))

    def setup(self, stage: str) -> None:
        """Compute mean and standard deviation of each column of the training rows. Both are saved in checkpoints."""
        if stage == "fit":
            rows, _ = self.trainer.datamodule.train[:]
            self.mean.copy_(rows.mean(0))
            self.std.copy_(rows.std(0).clamp(min=1e-6))

    def forward(self, rows: Tensor) -> Tensor:
        """Return logits of shape `(batch, classes)` for rows of the table, of shape `(batch, features)`."""
        return self.net((rows - self.mean) / self.std)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Return the loss to minimize, the cross-entropy of the labels."""
        rows, labels = batch
        loss = F.cross_entropy(self(rows), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor]) -> None:
        """Log loss and accuracy on validation rows."""
        self.evaluate(batch, "val")

    def test_step(self, batch: list[Tensor]) -> None:
        """Log loss and accuracy on test rows."""
        self.evaluate(batch, "test")

    def evaluate(self, batch: list[Tensor], part: str) -> None:
        """Log loss and accuracy under names that begin with `part`."""
        rows, labels = batch
        logits = self(rows)
        self.log(f"{part}_loss", F.cross_entropy(logits, labels), prog_bar=True)
        self.log(f"{part}_acc", (logits.argmax(dim=1) == labels).float().mean(), prog_bar=True)

    def predict_step(self, batch: list[Tensor]) -> list[dict]:
        """Return the most likely class of each row, under the name of its column, and its probability."""
        data, (rows, _) = self.trainer.datamodule, batch
        highest, classes = self(rows).softmax(dim=1).max(dim=1)
        pairs = zip(classes.tolist(), highest.tolist(), strict=True)
        return [{data.target: data.names[each], "probability": probability} for each, probability in pairs]

    def configure_optimizers(self) -> dict:
        """Return AdamW with a learning rate that rises for a tenth of the run, then falls to 0. Norms do not decay."""
        groups = lumen.optim.decay_groups(self, weight_decay=0.01)
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.lr)
        steps = self.trainer.estimated_stepping_batches
        schedule = lumen.optim.cosine(optimizer, steps, warmup=steps // 10, start=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
