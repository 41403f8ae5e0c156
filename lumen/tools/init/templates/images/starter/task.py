"""The network, its loss and its optimizer."""

import lumen
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Classifier(lumen.TaskModule):
    """Tells what an image shows.

    Args:
        channels: Numbers of a pixel; not set in the config, it comes from the data.
        classes: Number of classes; from the data too.
        width: Channels after the first convolution; there are twice as many after the second.
        dropout: Probability with which a number is dropped in training.
        lr: AdamW's learning rate.
        weight_decay: AdamW's weight decay.
    """

    def __init__(
        self,
        channels: int,
        classes: int,
        width: int = 32,
        dropout: float = 0.2,
        lr: float = 3e-3,
        weight_decay: float = 0.01,
    ):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(8 * width, classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Logits of shape `(batch, classes)`, from images of shape `(batch, channels, height, width)`."""
        return self.net(images)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Cross-entropy of the labels, which is made smaller."""
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor]) -> None:
        """How good it is on images that it does not learn from."""
        self.evaluate(batch, "val")

    def test_step(self, batch: list[Tensor]) -> None:
        """How good it is in the end."""
        self.evaluate(batch, "test")

    def evaluate(self, batch: list[Tensor], part: str) -> None:
        """Log the loss, and the part of the images whose label is found."""
        images, labels = batch
        logits = self(images)
        self.log(f"{part}_loss", F.cross_entropy(logits, labels))
        self.log(f"{part}_acc", (logits.argmax(dim=1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=self.hparams.weight_decay)
