"""Tasks for `lumen verify`: some keep every promise of Lumen, and others break one each."""

import os
import random
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

import lumen
from lumen.tools.proof.causes import explain_difference, explain_failure, explain_validation_change  # noqa: F401
from lumen.tools.proof.outcome import Outcome, compare_outcomes, compare_values, merge_outcomes
from lumen.tools.proof.variants import VariantSize
from lumen.tools.proof.worker import BuiltTraining, VariantResult, describe_error, run_variant
from tests.helpers.following_training import Asking
from tests.helpers.tasks import FEATURES, regression_data


class Data(lumen.DataModule):
    """Batches of a regression; the validation has an uneven number of batches of unequal sizes."""

    def __init__(self, batch_size: int = 4, samples: int = 40):
        super().__init__()
        self.batch_size = batch_size
        self.train, self.val = TensorDataset(*regression_data(samples)), TensorDataset(*regression_data(10, seed=1))

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, self.batch_size)


class Clean(lumen.TaskModule):
    """Small network with dropout and a schedule."""

    def __init__(self, dropout: float = 0.0, lr: float = 1e-2):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))

    def training_step(self, batch):
        loss = self.error(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch):
        self.log("val_loss", self.error(batch))

    def error(self, batch):
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class ByOwnHand(Clean):
    """Task with manual optimization."""

    automatic_optimization = False

    def training_step(self, batch):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.error(batch))
        optimizer.step()


class InTurns(ByOwnHand):
    """Task with two optimizers, each of which clears its own gradients only, so the other's have leftovers."""

    def training_step(self, batch):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.error(batch))
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(self.net[place].parameters(), lr=self.lr) for place in (0, 3)]


class LateOnRankZero(Clean):
    """Task that ends later on rank 0, as on a busy machine."""

    def teardown(self, stage):
        if self.global_rank == 0:
            time.sleep(3)


class Exits(Clean):
    """Task that ends its process in the first step, like a crash in native code."""

    def training_step(self, batch):
        print("the last words", flush=True)
        os._exit(3)


# ---------------------------------------------------------------------- tasks that each break a promise


class Norm(nn.Module):
    """Module with BatchNorm, whose running statistics come from the batches of a process."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        return self.norm(x)


class OwnGenerator(nn.Module):
    """Module with noise from a generator that Lumen does not seed."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x):
        return x + 0.1 * torch.randn(x.shape, generator=self.generator).to(x)


class Entropy(nn.Module):
    """Module with noise from the system."""

    def forward(self, x):
        return x * (1 + int.from_bytes(os.urandom(2), "little") / 65536)


class Counts(nn.Module):
    """Module that does more from call to call, and saves no counter."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * (1 + self.calls / 100)


class Hashes(nn.Module):
    """Module with a factor from the hash of a string, which differs in each interpreter."""

    def forward(self, x):
        return x * (1 + hash("a name") % 1000 / 1000)


class Unordered(nn.Module):
    """Module that averages numbers in the order of a set of strings, which differs in each interpreter."""

    def __init__(self):
        super().__init__()
        self.factors = {f"part {number}": 1.7 * number for number in range(60)}

    def forward(self, x):
        total = torch.zeros((), dtype=x.dtype)
        for name in set(self.factors):
            total = 0.5 * total + torch.tensor(self.factors[name], dtype=x.dtype).sin()
        return x * total


class Within(Clean):
    """Task of the network with a module in its middle.

    Args:
        module: Name of a class of this file.
    """

    def __init__(self, module: str):
        super().__init__()
        self.net[2] = globals()[module]()


class Tokens(Clean):
    """Task that returns a mean over the masked tokens of the micro-batch without their number."""

    def training_step(self, batch):
        inputs, targets, mask = batch
        return ((self.net(inputs) - targets).square().squeeze(1) * mask).sum() / mask.sum().clamp(min=1)

    def validation_step(self, batch):
        """Log nothing."""


class Contrasts(Clean):
    """Task with a loss that compares the samples of a micro-batch with each other."""

    def training_step(self, batch):
        outputs = self.net(batch[0])
        return (outputs - outputs.mean()).square().mean() - batch[1].mean() * outputs.std()


class Plays(Asking):
    """Task whose data depends on the task itself."""

    def __init__(self):
        super().__init__(length=20)


class ByHand(Clean):
    """Task with a metric that is averaged by hand over the batches of a process."""

    def on_validation_epoch_start(self):
        self.errors = []

    def validation_step(self, batch):
        self.errors.append(self.error(batch))

    def on_validation_epoch_end(self):
        self.log("val_loss", torch.stack(self.errors).mean())


class MovesNorm(Clean):
    """Task with BatchNorm that a hook puts into training mode for the validation."""

    def __init__(self):
        super().__init__()
        self.net[2] = nn.BatchNorm1d(8)

    def on_validation_start(self):
        self.net.train()


class BuiltApart(Clean):
    """Task whose parameters each process draws without a seed."""

    def __init__(self):
        super().__init__()
        with torch.no_grad():
            self.net[0].weight.add_(int.from_bytes(os.urandom(2), "little") / 65536)


class Replaced(Clean):
    """Task with parameters that a hook replaces after the optimizer was made."""

    def on_train_start(self):
        self.net[0] = nn.Linear(FEATURES, 8)


class NoisyStep(Clean):
    """Task that adds noise from the system to its inputs."""

    def error(self, batch):
        return super().error((batch[0] + os.urandom(1)[0], batch[1]))


class TimedLoss(Clean):
    """Task whose loss depends on the time."""

    def training_step(self, batch):
        return super().training_step(batch) * (1 + time.time() % 1)


class NoisyBackward(torch.autograd.Function):
    """Function with noise from the system in its backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (1 + os.urandom(1)[0])


class NoisyGradient(Clean):
    """Task with noise from the system in the backward of its loss."""

    def error(self, batch):
        return NoisyBackward.apply(super().error(batch))


class NoisyHook(Clean):
    """Task with a hook that adds noise from the system to gradients."""

    def on_after_backward(self):
        self.net[0].weight.grad.add_(os.urandom(1)[0])


class WritesNoise(Clean):
    """Task with a hook that adds noise from the system to parameters."""

    def on_step_end(self):
        with torch.no_grad():
            self.net[0].weight.mul_(1 + os.urandom(1)[0] / 1000)


class Decays(Clean):
    """Task with a hook that decays parameters at the end of each step, as a hook may."""

    def on_step_end(self):
        with torch.no_grad():
            self.net[0].weight.mul_(0.9)


class NoisySGD(torch.optim.SGD):
    """Optimizer with noise from the system in its updates."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        self.param_groups[0]["params"][0].add_(os.urandom(1)[0])
        return loss


UPDATES = []


class CountingSGD(torch.optim.SGD):
    """Optimizer that counts its updates outside its state."""

    def step(self, closure=None):
        UPDATES.append(1)
        self.param_groups[0]["weight_decay"] = len(UPDATES) / 100
        return super().step(closure)


class Updated(Clean):
    """Task with another optimizer.

    Args:
        optimizer: Name of a class of this file.
    """

    def __init__(self, optimizer: str):
        super().__init__()
        self.optimizer = optimizer

    def configure_optimizers(self):
        return globals()[self.optimizer](self.parameters(), lr=self.lr)


class CountsCalls(Clean):
    """Task whose loss depends on a global counter, and which reads a clock only to measure."""

    def training_step(self, batch):
        self.began_s = time.time()
        UPDATES.append(1)
        return super().training_step(batch) * len(UPDATES)


class OnRankZero(lumen.Callback):
    """Callback that decays the weights on one rank alone."""

    def on_step_end(self, trainer, task):
        if trainer.is_global_zero and trainer.world_size > 1:
            with torch.no_grad():
                task.net[0].weight.mul_(0.9)


class Growing(Dataset):
    """Data set that grows while it is read."""

    def __init__(self):
        self.inputs, self.targets = regression_data(40)
        self.extra = 0

    def __len__(self):
        return 40 - self.extra

    def __getitem__(self, index):
        self.extra = min(self.extra + 1, 12)
        return self.inputs[index] * (1 + self.extra), self.targets[index]


class Remembers(Dataset):
    """Data set whose samples depend on the sample before."""

    def __init__(self):
        self.inputs, self.targets = regression_data(40)
        self.last = torch.zeros(FEATURES)

    def __len__(self):
        return 40

    def __getitem__(self, index):
        mixed, self.last = self.inputs[index] + 0.1 * self.last, self.inputs[index]
        return mixed, self.targets[index]


class Clock(Dataset):
    """Data set whose samples depend on the time."""

    def __init__(self):
        self.inputs, self.targets = regression_data(40)

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return self.inputs[index] + time.time() % 1, self.targets[index]


SYSTEM = random.SystemRandom()


def add_noise(x):
    """Add noise from the system, outside the class that calls the function."""
    return x + SYSTEM.random()


def collate_with_noise(samples):
    """Join samples with noise from the system."""
    inputs, targets = map(torch.stack, zip(*samples, strict=True))
    return inputs + os.urandom(1)[0], targets


class SystemNoise(Clock):
    """Data set with noise from a generator of the system."""

    def __getitem__(self, index):
        return add_noise(self.inputs[index]), self.targets[index]


class ReadsLog(Clock):
    """Data set that reads a file, which grows with each sample."""

    def __getitem__(self, index):
        with Path("reads.log").open("a+") as log:
            log.write("x")
            return self.inputs[index] * log.tell(), self.targets[index]


class OwnOrder(Sampler):
    """Sampler with an order from a new generator for each pass."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __iter__(self):
        return iter(np.random.default_rng().permutation(len(self.data)).tolist())


class Marked(Data):
    """Regression data with a mask of the tokens that count."""

    def __init__(self):
        super().__init__()
        inputs, targets = regression_data(40)
        self.train = TensorDataset(inputs, targets, (inputs[:, 0] > 0).long())


class OtherData(Data):
    """Clean task with another data set or sampler.

    Args:
        dataset: Name of a class of this file.
        sampler: Name of a class of this file.
        collates: True to join samples with noise, in a data worker.
    """

    def __init__(self, dataset: str | None = None, sampler: str | None = None, *, collates: bool = False):
        super().__init__()
        if dataset is not None:
            self.train = globals()[dataset]()
        self.sampler, self.collates = sampler, collates

    def train_dataloader(self):
        if self.collates:
            return DataLoader(self.train, self.batch_size, collate_fn=collate_with_noise, num_workers=1)
        if self.sampler is None:
            return super().train_dataloader()
        return DataLoader(self.train, self.batch_size, sampler=globals()[self.sampler](self.train))


class Noisy(OtherData):
    """Regression data with noise from the system."""

    def __init__(self):
        super().__init__("SystemNoise")


# ---------------------------------------------------------------------- variants in this process


class Make:
    """Builder of a new task and its data, as `lumen verify` does with a config."""

    def __init__(self, task, data=Data, callbacks=()):
        self.task, self.data, self.callbacks = task, data, callbacks

    def __call__(self, change, seed):
        lumen.seed_everything(seed, verbose=False)
        task, data = self.task(), self.data()
        given = {"callbacks": [each() for each in self.callbacks]}
        return BuiltTraining(task, data, lumen.Trainer(seed=seed, **change(given)), None)


def observe(folder, variant, make, precision="fp64"):
    """Return the results of a variant on this process and the others of its group."""
    place = folder / variant.name
    place.mkdir(exist_ok=True)
    outcome = Outcome()
    failure = None
    try:
        run_variant(make, variant, SIZE, precision, place, outcome)
    except lumen.LumenError as error:
        failure = describe_error(error)
    return VariantResult(variant, place, [outcome], failure)


def find_cause(reference, other, tolerance=0.0, about=()):
    """Return the cause of the first difference between two results, or None."""
    if other.failure:
        return explain_failure(other, reference)
    ours, theirs = merge_outcomes(reference.outcomes), merge_outcomes(other.outcomes)
    at, wrong = compare_outcomes(ours, theirs, tolerance, about).at, compare_values(ours, theirs, tolerance)[1]
    if at is None and not wrong:
        return None
    return explain_difference(reference, other, at, wrong, exact=tolerance == 0)


SIZE = VariantSize(seed=1, accelerator="cpu")
