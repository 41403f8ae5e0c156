"""WGAN-GP by manual optimization: several steps of the critic for each one of the generator."""

import lightning as L
import torch
from lightning.pytorch.utilities.types import STEP_OUTPUT, OptimizerLRScheduler
from torchmetrics import MeanMetric

from digitgan.networks import Critic, Generator


class DigitGAN(L.LightningModule):
    def __init__(
        self,
        latent_dim: int = 16,
        width: int = 32,
        lr_generator: float = 1e-3,
        lr_critic: float = 1e-3,
        betas: tuple[float, float] = (0.5, 0.9),
        critic_steps: int = 3,
        penalty: float = 10.0,
        clip: float = 5.0,
        lr_decay: float = 0.95,
    ):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = Generator(latent_dim, width)
        self.critic = Critic(width)
        self.distance = MeanMetric()
        self.register_buffer("fixed_noise", torch.randn(10, latent_dim))

    def forward(self, noise: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.generator(noise, labels)

    def sample(self, labels: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(len(labels), self.hparams.latent_dim, device=self.device)
        return self.generator(noise, labels)

    def gradient_penalty(self, real: torch.Tensor, fake: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the distance of the critic's gradient from length 1, between real and generated images."""
        share = torch.rand(len(real), 1, 1, 1, device=self.device)
        between = (share * real + (1 - share) * fake).requires_grad_()
        scores = self.critic(between, labels)
        (gradient,) = torch.autograd.grad(scores.sum(), between, create_graph=True)
        return ((gradient.flatten(1).norm(dim=1) - 1) ** 2).mean()

    # ------------------------------------------------------------------ training

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> STEP_OUTPUT:
        real, labels = batch
        optimizer_g, optimizer_c = self.optimizers()
        self._critic_step(optimizer_c, real, labels)
        if (batch_idx + 1) % self.hparams.critic_steps == 0:
            self._generator_step(optimizer_g, labels)
        return None

    def _critic_step(self, optimizer, real: torch.Tensor, labels: torch.Tensor) -> None:
        self.toggle_optimizer(optimizer)
        fake = self.sample(labels).detach()
        distance = self.critic(real, labels).mean() - self.critic(fake, labels).mean()
        penalty = self.gradient_penalty(real, fake, labels)
        loss = -distance + self.hparams.penalty * penalty
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=self.hparams.clip, gradient_clip_algorithm="norm")
        optimizer.step()
        self.untoggle_optimizer(optimizer)
        self.log("critic/loss", loss, on_step=True, on_epoch=True, prog_bar=True, batch_size=len(real))
        self.log("critic/penalty", penalty, on_step=False, on_epoch=True, sync_dist=True, rank_zero_only=False)

    def _generator_step(self, optimizer, labels: torch.Tensor) -> None:
        self.toggle_optimizer(optimizer)
        loss = -self.critic(self.sample(labels), labels).mean()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.untoggle_optimizer(optimizer)
        self.log("generator/loss", loss, on_step=True, on_epoch=True, prog_bar=True)

    def on_train_epoch_end(self) -> None:
        for scheduler in self.lr_schedulers():
            scheduler.step()
        self.log("lr", self.optimizers()[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer_g = torch.optim.Adam(
            self.generator.parameters(), lr=self.hparams.lr_generator, betas=self.hparams.betas
        )
        optimizer_c = torch.optim.Adam(self.critic.parameters(), lr=self.hparams.lr_critic, betas=self.hparams.betas)
        schedulers = [
            torch.optim.lr_scheduler.ExponentialLR(each, gamma=self.hparams.lr_decay)
            for each in (optimizer_g, optimizer_c)
        ]
        return [optimizer_g, optimizer_c], schedulers

    # ------------------------------------------------------------------ evaluation

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> STEP_OUTPUT:
        """Log the differences of the means and deviations of pixels from those in real images."""
        real, labels = batch
        fake = self.sample(labels)
        means = (real.mean(0) - fake.mean(0)).abs().mean()
        deviations = (real.std(0) - fake.std(0)).abs().mean()
        self.distance.update(means + deviations, weight=len(real))
        self.log("val/distance", self.distance, on_step=False, on_epoch=True, prog_bar=True)

    def predict_step(self, batch: tuple[torch.Tensor], batch_idx: int) -> torch.Tensor:
        (labels,) = batch
        return self.sample(labels)
