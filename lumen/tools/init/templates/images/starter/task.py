"""The network, its loss and its optimizer."""

import lumen
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Classifier(lumen.TaskModule):
    """Convolutional network that classifies images.

    Args:
        channels: Number of channels of an image. The data module provides this argument.
        classes: Number of classes. The data module provides this argument.
        width: Number of channels after the first convolution. The second convolution has twice as many.
        dropout: Probability of dropout, at least 0 and less than 1.
        lr: Learning rate of AdamW.
        weight_decay: Weight decay of AdamW.
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
        """Return logits of shape `(batch, classes)` for images of shape `(batch, channels, height, width)`."""
        return self.net(images)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Return the loss to minimize, the cross-entropy of the labels."""
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor]) -> None:
        """Log loss and accuracy on validation images."""
        self.evaluate(batch, "val")

    def test_step(self, batch: list[Tensor]) -> None:
        """Log loss and accuracy on test images."""
        self.evaluate(batch, "test")

    def evaluate(self, batch: list[Tensor], part: str) -> None:
        """Log loss and accuracy under names that begin with `part`."""
        images, labels = batch
        logits = self(images)
        self.log(f"{part}_loss", F.cross_entropy(logits, labels))
        self.log(f"{part}_acc", (logits.argmax(dim=1) == labels).float().mean(), prog_bar=True)

    def predict_step(self, batch: list[Tensor]) -> dict[str, Tensor]:
        """Return for each image its label, the most likely class, and the probability of that class."""
        images, labels = batch
        highest, classes = self(images).softmax(dim=1).max(dim=1)
        return {"label": labels, "prediction": classes, "probability": highest}

    def configure_optimizers(self) -> dict:
        """Return AdamW with a learning rate that rises for a tenth of the run, then falls to 0. Norms do not decay."""
        groups = lumen.optim.decay_groups(self, self.hparams.weight_decay)
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.lr)
        steps = self.trainer.estimated_stepping_batches
        schedule = lumen.optim.cosine(optimizer, steps, warmup=steps // 10, start=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
