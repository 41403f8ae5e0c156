"""A variational autoencoder (Kingma and Welling, 2014) of handwritten digits: a few numbers encode an image."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lumen


class VAE(lumen.TaskModule):
    """VAE: encodes an image as a normal distribution of a few numbers, and decodes a sample of the distribution.

    Batches are as in `datamodules.mnist.MNIST5k`. The labels are ignored.

    Args:
        numbers: Number of latent variables of an image.
        width: Number of hidden units.
        learning_rate: Learning rate of AdamW.
    """

    def __init__(self, numbers: int = 10, width: int = 256, learning_rate: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(784, width), nn.ReLU(), nn.Linear(width, 2 * numbers))
        self.decoder = nn.Sequential(
            nn.Linear(numbers, width), nn.ReLU(), nn.Linear(width, 784), nn.Unflatten(1, (1, 28, 28))
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return the latent means of images, of shape ``(batch, numbers)``."""
        return self.encoder(images).chunk(2, dim=1)[0]

    def bound(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two parts of the bound of the negative log-likelihood, in nats, means over the images.

        Returns:
            The reconstruction error, with Bernoulli pixels, and the divergence from the prior.
        """
        mean, log_variance = self.encoder(images).chunk(2, dim=1)
        drawn = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        written = F.binary_cross_entropy_with_logits(self.decoder(drawn), images, reduction="sum")
        divergence = (mean.square() + log_variance.exp() - log_variance - 1).sum() / 2
        return written / len(images), divergence / len(images)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Return the bound."""
        written, divergence = self.bound(batch[0])
        self.log("train_written", written)
        self.log("train_divergence", divergence)
        return written + divergence

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Log the bound of validation images, and a picture of images and their reconstructions."""
        images, _ = batch
        self.log("val_bound", sum(self.bound(images)), prog_bar=True)
        if batch_idx == 0:  # Only one process has this batch.
            pages = {"written_again": self.beside(images[:40]), "drawn": self.draw(100)}
            for logger in self.trainer.loggers:
                for name, page in pages.items():
                    logger.log_image(name, page, self.global_step)

    def beside(self, images: Tensor) -> Tensor:
        """Return rows of ten images, each above the row of their reconstructions, in [0, 1]."""
        pairs = zip(images.split(10), self.decoder(self(images)).sigmoid().split(10), strict=True)
        return torch.cat([in_rows(each) for pair in pairs for each in pair])

    def draw(self, count: int) -> Tensor:
        """Return images that are drawn from the model, ten in a row, in [0, 1]."""
        drawn = torch.randn(count, self.hparams.numbers, device=self.device, dtype=self.dtype)
        return in_rows(self.decoder(drawn).sigmoid())

    def predict_step(self, batch: list[Tensor]) -> Tensor:
        """Return the latent means of each image."""
        return self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW with a constant learning rate."""
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)


def in_rows(images: Tensor) -> Tensor:
    """Return images of shape ``(count, 1, 28, 28)`` as one image of shape ``(28 * count / 10, 280)``."""
    return images.squeeze(1).unflatten(0, (-1, 10)).transpose(1, 2).flatten(2).flatten(0, 1)
