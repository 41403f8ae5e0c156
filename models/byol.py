"""Bootstrap your own latent (Grill et al., 2020): a network learns to see digits without being told what they are.

Of two views of an image a student sees one and foretells what its teacher sees in the other. The teacher is an average
of what the student has been.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lumen


class BYOL(lumen.TaskModule):
    """Trains an encoder by pairs of views, and tries it by a linear probe.

    A batch is that of `datamodules.views.TwoViews`.

    Args:
        features: Numbers that the encoder makes of an image.
        width: Hidden units of the heads.
        decay: What the teacher keeps of itself in a step, in [0, 1].
        learning_rate: AdamW's, of the student.
        weight_decay: AdamW's.
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
        """What is seen in images of shape ``(batch, 1, 28, 28)``, of shape ``(batch, features)``."""
        return self.encoder(images)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """How far the student is from what the teacher sees, from 0 to 4: a mean over images and views."""
        one, other, _ = batch
        said = self.predictor(self.student(torch.cat([one, other])))
        meant = self.teacher(torch.cat([other, one]))
        loss = 2 - 2 * F.cosine_similarity(said, meant).mean()
        self.log("train_loss", loss)
        return loss

    def on_validation_epoch_start(self) -> None:
        """Fit a linear probe to the few labelled images (least squares), alike in all processes."""
        images, digits = self.trainer.datamodule.labelled_images()
        seen = self(images.to(self.device, self.dtype))
        self.middle, self.spread = seen.mean(dim=0), seen.std(dim=0)
        seen, wanted = self.scaled(seen), F.one_hot(digits.to(self.device), 10).to(seen) - 0.1
        self.probe = torch.linalg.solve(seen.T @ seen + 10 * torch.eye(seen.shape[1]).to(seen), seen.T @ wanted)

    def scaled(self, seen: Tensor) -> Tensor:
        """Features as the probe reads them: of the labelled images each has the mean 0 and the spread 1."""
        return (seen - self.middle) / self.spread

    def validation_step(self, batch: list[Tensor]) -> None:
        """Log how many images that it has never seen the probe reads."""
        images, digits = batch
        read = (self.scaled(self(images)) @ self.probe).argmax(dim=1)
        self.log("val_probe", (read == digits).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW, of what is trained; the teacher is not."""
        h, trained = self.hparams, [*self.student.parameters(), *self.predictor.parameters()]
        return torch.optim.AdamW(trained, lr=h.learning_rate, weight_decay=h.weight_decay)


def block(channels: int, wider: int) -> list[nn.Module]:
    """A convolution that halves an image. Its norm sees one image at a time."""
    return [nn.Conv2d(channels, wider, kernel_size=3, stride=2, padding=1), nn.GroupNorm(4, wider), nn.ReLU()]


def head(features: int, width: int) -> nn.Module:
    """An MLP. Its norm tells the images of a micro-batch apart, without which all would become one point."""
    return nn.Sequential(
        nn.Linear(features, width),
        nn.BatchNorm1d(width, track_running_stats=False),
        nn.ReLU(),
        nn.Linear(width, width),
    )
