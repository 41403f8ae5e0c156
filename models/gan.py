"""A generative adversarial network (Goodfellow et al., 2014) that writes a requested digit.

Two networks are trained against each other, each with its own optimizer, by manual optimization.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lumen


class Generator(nn.Module):
    """Network that makes an image from a digit and noise, 260 thousand parameters.

    The network has no batch norm, so an image does not depend on the other images of its batch, and batches may be
    divided among processes.
    """

    def __init__(self, noise: int, width: int = 16):
        super().__init__()
        self.digits = nn.Embedding(10, noise)
        self.net = nn.Sequential(
            nn.Linear(2 * noise, 2 * width * 7 * 7),
            nn.Unflatten(1, (2 * width, 7, 7)),
            nn.GroupNorm(4, 2 * width),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, kernel_size=4, stride=2, padding=1),
            nn.GroupNorm(4, width),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 1, kernel_size=4, stride=2, padding=1),
            nn.Sigmoid(),
        )

    def forward(self, digits: Tensor, noise: Tensor) -> Tensor:
        """Return images in [0, 1] of shape ``(batch, 1, 28, 28)``, for digits ``(batch,)`` and noise ``(batch, n)``."""
        return self.net(torch.cat([self.digits(digits), noise], dim=1))


class Critic(nn.Module):
    """Network that separates real from generated images of a digit, by projection (Miyato, Koyama)."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, width, kernel_size=5, stride=2, padding=2),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, kernel_size=5, stride=2, padding=2),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(2 * width * 7 * 7, 128),
            nn.LeakyReLU(0.2),
        )
        self.score = nn.Linear(128, 1)
        self.digits = nn.Embedding(10, 128)

    def forward(self, images: Tensor, digits: Tensor) -> Tensor:
        """Return logits that the images are real, of shape ``(batch,)``."""
        seen = self.net(images)
        return self.score(seen).squeeze(1) + (seen * self.digits(digits)).sum(dim=1) / math.sqrt(128)


class Gan(lumen.TaskModule):
    """GAN: a critic that detects generated images, and a generator that deceives the critic.

    Batches are as in `datamodules.noise.DigitsAndNoise`.

    Args:
        noise: Number of random numbers for an image, as in the data module.
        width: Number of channels of the first convolution.
        learning_rate: Learning rate of Adam, for both networks.
        betas: Betas of Adam.
        penalty: Weight of the critic's squared gradient at real images (Mescheder et al., 2018), at least 0. Without
            the penalty, the generator makes only one image of each digit.
        penalty_every: Number of batches between two penalties. A penalty has the weight of all these batches.
    """

    def __init__(
        self,
        noise: int,
        width: int = 16,
        learning_rate: float = 1e-3,
        betas: tuple[float, float] = (0.5, 0.99),
        penalty: float = 0.5,
        penalty_every: int = 4,
    ):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = Generator(noise, width)
        self.critic = Critic(width)

    def forward(self, digits: Tensor, noise: Tensor) -> Tensor:
        """Return images of the digits."""
        return self.generator(digits, noise)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Make a step of the critic, then a step of the generator (non-saturating losses)."""
        images, digits, noise = batch
        of_generator, of_critic = self.optimizers()

        with self.toggled_optimizer(of_critic):
            made = self(digits, noise).detach()
            loss = F.softplus(-self.critic(images, digits)).mean() + F.softplus(self.critic(made, digits)).mean()
            self.log("critic_loss", loss)
            if batch_idx % self.hparams.penalty_every == 0:
                loss = loss + self.hparams.penalty_every * self.hparams.penalty / 2 * self.steepness(images, digits)
            of_critic.zero_grad()
            self.manual_backward(loss)
            of_critic.step()

        with self.toggled_optimizer(of_generator):
            loss = F.softplus(-self.critic(self(digits, noise), digits)).mean()
            of_generator.zero_grad()
            self.manual_backward(loss)
            of_generator.step()
        self.log("generator_loss", loss)

    def steepness(self, images: Tensor, digits: Tensor) -> Tensor:
        """Return the mean of the critic's squared gradient at images, which is differentiable."""
        images = images.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.critic(images, digits).sum(), images, create_graph=True)
        return gradient.square().flatten(1).sum(dim=1).mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Log the share of validation images and of generated images that the critic takes for real, and a picture."""
        images, digits, noise = batch
        real, made = self.critic(images, digits) > 0, self.critic(self(digits, noise), digits) > 0
        self.log("val_found_real", real.float().mean())
        self.log("val_taken_for_real", made.float().mean(), prog_bar=True)
        if batch_idx == 0:  # Only one process has this batch.
            page = self.page(noise[:10])
            for logger in self.trainer.loggers:
                logger.log_image("made", page, self.global_step)

    def page(self, noise: Tensor) -> Tensor:
        """Return a picture of the ten digits for each row of noise, in [0, 1], of shape ``(28 * rows, 280)``."""
        digits = torch.arange(10, device=noise.device)
        rows = [self(digits, each.expand(10, -1)).squeeze(1).transpose(0, 1).flatten(1) for each in noise]
        return torch.cat(rows)

    def predict_step(self, batch: list[Tensor]) -> Tensor:
        """Return an image of each digit of the batch."""
        _, digits, noise = batch
        return self(digits, noise)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return an Adam for each network."""
        h = self.hparams
        return [torch.optim.Adam(net.parameters(), h.learning_rate, h.betas) for net in (self.generator, self.critic)]
