"""Bootstrap your own latent (Grill et al., 2020): a network learns features of digits without labels.

A student sees one view of an image, and predicts the teacher's output for a second view. The teacher is a moving
average of the student.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lumen


class BYOL(lumen.TaskModule):
    """BYOL, which trains an encoder with pairs of views, and evaluates the encoder with a linear probe.

    Batches are as in `datamodules.views.TwoViews`.

    Args:
        features: Number of features that the encoder returns for an image.
        width: Number of hidden units of the heads.
        decay: Weight of the teacher's previous parameters in the moving average, in [0, 1].
        learning_rate: Learning rate of AdamW.
        weight_decay: Weight decay of AdamW.
    """

    def __init__(
        self,
        features: int = 64,
        width: int = 128,
        decay: float = 0.98,
        learning_rate: float = 2e-3,
        weight_decay: float = 0.01,
    ):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(
            *block(1, 16),
            *block(16, 32),
            *block(32, 64),
            nn.Flatten(),
            nn.Linear(64 * 4 * 4, features),
        )
        self.student = nn.Sequential(self.encoder, head(features, width))
        self.predictor = head(width, width)
        self.teacher = lumen.Teacher(self.student, decay)

    def forward(self, images: Tensor) -> Tensor:
        """Return features of shape ``(batch, features)`` for images of shape ``(batch, 1, 28, 28)``."""
        return self.encoder(images)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Return the distance of student and teacher, from 0 to 4, a mean over images and views."""
        one, other, _ = batch
        predicted = self.predictor(self.student(torch.cat([one, other])))
        target = self.teacher(torch.cat([other, one]))
        loss = 2 - 2 * F.cosine_similarity(predicted, target).mean()
        self.log("train_loss", loss)
        return loss

    def on_validation_epoch_start(self) -> None:
        """Fit a linear probe to the few labelled images (least squares), equally in all processes."""
        images, digits = self.trainer.datamodule.labelled_images()
        seen = self(images.to(self.device, self.dtype))
        self.middle, self.spread = seen.mean(dim=0), seen.std(dim=0)
        seen, wanted = self.scaled(seen), F.one_hot(digits.to(self.device), 10).to(seen) - 0.1
        self.probe = torch.linalg.solve(seen.T @ seen + 10 * torch.eye(seen.shape[1]).to(seen), seen.T @ wanted)

    def scaled(self, seen: Tensor) -> Tensor:
        """Scale features to mean 0 and standard deviation 1 over the labelled images."""
        return (seen - self.middle) / self.spread

    def validation_step(self, batch: list[Tensor]) -> None:
        """Log the accuracy of the probe on validation images."""
        images, digits = batch
        read = (self.scaled(self(images)) @ self.probe).argmax(dim=1)
        self.log("val_probe", (read == digits).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW for all parameters except the teacher's."""
        h, trained = self.hparams, [*self.student.parameters(), *self.predictor.parameters()]
        return torch.optim.AdamW(trained, lr=h.learning_rate, weight_decay=h.weight_decay)


def block(channels: int, wider: int) -> list[nn.Module]:
    """Return a convolution that halves an image, with a norm that does not depend on the batch."""
    return [nn.Conv2d(channels, wider, kernel_size=3, stride=2, padding=1), nn.GroupNorm(4, wider), nn.ReLU()]


def head(features: int, width: int) -> nn.Module:
    """Return an MLP. Without its batch norm, the features of all images would collapse to one point."""
    return nn.Sequential(
        nn.Linear(features, width),
        nn.BatchNorm1d(width, track_running_stats=False),
        nn.ReLU(),
        nn.Linear(width, width),
    )
