"""Task with manual optimization: two adversarial networks, each with an optimizer and a schedule."""

import torch
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader, TensorDataset

import lumen
from tests.helpers.tasks import Regression


def make_pairs(samples=50, dtype=torch.float64):
    """Return real samples and noise, of 3 and 4 numbers."""
    generator = torch.Generator().manual_seed(1)
    real = torch.randn(samples, 3, generator=generator, dtype=torch.float64) + 1
    return real.to(dtype), torch.randn(samples, 4, generator=generator, dtype=torch.float64).to(dtype)


def make_pair_loader(samples=50, batch_size=8, dtype=torch.float64, **options):
    return DataLoader(TensorDataset(*make_pairs(samples, dtype)), batch_size, **options)


def make_networks(dtype=torch.float64):
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)).to(dtype)
    critic = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 1)).to(dtype)
    return generator, critic


def critic_loss(generator, critic, real, noise):
    return (softplus(-critic(real)) + softplus(critic(generator(noise).detach()))).mean()


def generator_loss(generator, critic, noise):
    return softplus(-critic(generator(noise))).mean()


def make_optimizers(generator, critic):
    """Return two optimizers, and a schedule for each."""
    both = torch.optim.Adam(generator.parameters(), 1e-2), torch.optim.SGD(critic.parameters(), 0.1, momentum=0.9)
    return both, tuple(torch.optim.lr_scheduler.StepLR(each, 3, 0.5) for each in both)


class Gan(lumen.TaskModule):
    """Task whose generator moves in every `every`-th batch and critic in each; each step freezes the other."""

    def __init__(self, dtype=torch.float64, every=1):
        super().__init__()
        self.automatic_optimization = False
        self.every = every
        self.generator, self.critic = make_networks(dtype)
        self.indices = []

    def training_step(self, batch, batch_idx):
        real, noise = batch
        self.indices.append(batch_idx)
        ours, theirs = self.optimizers()
        with self.toggled_optimizer(theirs):
            loss = critic_loss(self.generator, self.critic, real, noise)
            theirs.zero_grad()
            self.manual_backward(loss)
            theirs.step()
        schedules = self.lr_schedulers()
        schedules[1].step()
        self.log("critic", loss, on_step=False, on_epoch=True)
        if batch_idx % self.every == self.every - 1:
            self.move_generator(ours, noise)
            schedules[0].step()

    def move_generator(self, optimizer, noise):
        self.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        loss = generator_loss(self.generator, self.critic, noise)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.05)
        optimizer.step()
        self.untoggle_optimizer(optimizer)
        self.log("generator", loss, on_step=False, on_epoch=True)

    def validation_step(self, batch):
        self.log("val", critic_loss(self.generator, self.critic, *batch))

    def configure_optimizers(self):
        return make_optimizers(self.generator, self.critic)


class Sharp(torch.optim.Optimizer):
    """Optimizer like SAM: it climbs to a larger loss, takes the gradient there, and steps from the old parameters."""

    def __init__(self, parameters, **options):
        super().__init__(parameters, {"rho": 0.05})
        self.base = torch.optim.SGD(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self):
        held = [each for group in self.param_groups for each in group["params"]]
        norm = torch.stack([each.grad.norm() for each in held]).norm()
        for each in held:
            self.state[each]["old"] = each.clone()
            each.add_(each.grad * (self.defaults["rho"] / norm))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for each in group["params"]:
                each.copy_(self.state[each]["old"])
        self.base.step()

    def step(self, closure=None):
        assert closure is not None, "Sharp needs a closure"
        self.first_step()
        closure()
        self.second_step()


def make_sharp(parameters):
    return Sharp(parameters, lr=0.05, momentum=0.9)


class SharpByHand(Regression):
    """Task with the two steps of `Sharp` in manual optimization."""

    def __init__(self, dtype=torch.float32):
        super().__init__(dtype=dtype)
        self.automatic_optimization = False

    def training_step(self, batch):
        optimizer = self.optimizers()
        for step in (optimizer.first_step, optimizer.second_step):
            optimizer.zero_grad()
            self.manual_backward(nn.functional.mse_loss(self(batch[0]), batch[1]))
            step()

    def configure_optimizers(self):
        return make_sharp(self.parameters())
