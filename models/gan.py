"""A generative adversarial network (Goodfellow et al., 2014) that writes the digit it is asked for.

Two networks are trained against each other, each by an optimizer of its own: this is what manual optimization is for.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lumen


class Generator(nn.Module):
    """Makes an image of a digit and noise; 260 thousand parameters.

    There is no batch norm in it, so that an image does not depend on which others are in its batch: a batch may be cut
    and divided among processes.
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
        """Images in [0, 1] of shape ``(batch, 1, 28, 28)``, of digits ``(batch,)`` and noise ``(batch, noise)``."""
        return self.net(torch.cat([self.digits(digits), noise], dim=1))


class Critic(nn.Module):
    """Tells a real image of a digit from one that was made; the digit is asked for by projection (Miyato, Koyama)."""

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
        """Logits that the images are real, of shape ``(batch,)``."""
        seen = self.net(images)
        return self.score(seen).squeeze(1) + (seen * self.digits(digits)).sum(dim=1) / math.sqrt(128)


class Gan(lumen.TaskModule):
    """Trains both: the critic to tell images apart, the generator to make ones that it takes for real.

    A batch is that of `datamodules.noise.DigitsAndNoise`.

    Args:
        noise: Numbers an image is made of; those of the data.
        width: Channels of the first convolution.
        learning_rate: Adam's, of both networks.
        betas: Adam's.
        penalty: Weight of the critic's squared gradient at real images (Mescheder et al., 2018), without which the
            generator would make one image of each digit only; at least 0.
        penalty_every: Batches from one penalty to the next, which counts for all of them.
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
        """Images of the digits."""
        return self.generator(digits, noise)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """One step of the critic, then one of the generator (non-saturating losses)."""
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
        """The mean of the critic's squared gradient at images; its own gradient can be asked for."""
        images = images.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.critic(images, digits).sum(), images, create_graph=True)
        return gradient.square().flatten(1).sum(dim=1).mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Log how well the critic tells real images that it has never seen from made ones; and a page of those."""
        images, digits, noise = batch
        real, made = self.critic(images, digits) > 0, self.critic(self(digits, noise), digits) > 0
        self.log("val_found_real", real.float().mean())
        self.log("val_taken_for_real", made.float().mean(), prog_bar=True)
        if batch_idx == 0:  # one process has this batch
            page = self.page(noise[:10])
            for logger in self.trainer.loggers:
                logger.log_image("made", page, self.global_step)

    def page(self, noise: Tensor) -> Tensor:
        """A row of the ten digits for each row of noise, in [0, 1], of shape ``(28 * rows, 280)``."""
        digits = torch.arange(10, device=noise.device)
        rows = [self(digits, each.expand(10, -1)).squeeze(1).transpose(0, 1).flatten(1) for each in noise]
        return torch.cat(rows)

    def predict_step(self, batch: list[Tensor]) -> Tensor:
        """An image of each digit of the batch."""
        _, digits, noise = batch
        return self(digits, noise)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """Adam for each network."""
        h = self.hparams
        return [torch.optim.Adam(net.parameters(), h.learning_rate, h.betas) for net in (self.generator, self.critic)]
