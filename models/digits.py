"""A small convolutional network that reads handwritten digits."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

import lumen


class DigitsCNN(lumen.TaskModule):
    """Network of two convolutions and two linear layers, 207 thousand parameters.

    A batch is ``[images, labels]``: float32 of shape ``(batch, 1, 28, 28)``, and digits, int64 of shape ``(batch,)``.

    Args:
        learning_rate: Learning rate of AdamW.
        weight_decay: Weight decay of AdamW.
        dropout: Dropout probability, in [0, 1).
    """

    def __init__(self, learning_rate: float = 1e-3, weight_decay: float = 0.01, dropout: float = 0.25):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 7 * 7, 128),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(128, 10),
        )
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of shape ``(batch, 10)``."""
        return self.net(images)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Return the cross-entropy of the labels."""
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor]) -> None:
        """Log loss and accuracy. A metric object makes the accuracy exact over the whole epoch."""
        images, labels = batch
        logits = self(images)
        self.accuracy.update(logits, labels)
        self.log("val_loss", F.cross_entropy(logits, labels), prog_bar=True)
        self.log("val_acc", self.accuracy, prog_bar=True)

    def predict_step(self, batch: list[Tensor]) -> Tensor:
        """Return the most likely digit of each image, int64 of shape ``(batch,)``."""
        images, _ = batch
        return self(images).argmax(dim=-1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW with a constant learning rate."""
        h = self.hparams
        return torch.optim.AdamW(self.parameters(), lr=h.learning_rate, weight_decay=h.weight_decay)
