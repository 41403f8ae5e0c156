"""Small real tasks that many tests train."""

import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import lumen

FEATURES = 6


def regression_data(samples=50, dtype=torch.float32, seed=0):
    """Return inputs (samples, 6) and targets (samples, 1) of a noisy linear map."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, FEATURES, generator=generator, dtype=torch.float64)
    targets = inputs.sum(1, keepdim=True).sin() + 0.1 * torch.randn(
        samples, 1, generator=generator, dtype=torch.float64
    )
    return inputs.to(dtype), targets.to(dtype)


def loader(samples=50, batch_size=8, *, shuffle=True, dtype=torch.float32, **options):
    """Return a standard loader over `regression_data`."""
    return DataLoader(TensorDataset(*regression_data(samples, dtype)), batch_size, shuffle=shuffle, **options)


def network(dropout=0.0, dtype=torch.float32, seed=0):
    """Return a two-layer perceptron with known initial weights."""
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 1))
    return layers.to(dtype)


def backpropagate(net):
    """Compute the gradients of a `network` in float64 over all of `regression_data`. Return the loss."""
    inputs, targets = regression_data(dtype=torch.float64)
    net.zero_grad(set_to_none=True)
    loss = nn.functional.mse_loss(net(inputs), targets)
    loss.backward()
    return loss


def weights(module):
    """Return a copy of all parameters as one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


class Regression(lumen.TaskModule):
    """Least squares with all common logged values."""

    def __init__(self, lr=1e-2, dropout=0.0, dtype=torch.float32, optimizer="AdamW"):
        super().__init__()
        self.save_hyperparameters()
        self.net = network(dropout, dtype)

    def forward(self, inputs):
        return self.net(inputs)

    def training_step(self, batch):
        inputs, targets = batch
        loss = nn.functional.mse_loss(self(inputs), targets)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch):
        inputs, targets = batch
        self.log("val_loss", nn.functional.mse_loss(self(inputs), targets))

    def test_step(self, batch):
        inputs, targets = batch
        self.log("test_loss", nn.functional.mse_loss(self(inputs), targets))

    def predict_step(self, batch):
        return self(batch[0])

    def configure_optimizers(self):
        return getattr(torch.optim, self.hparams.optimizer)(self.parameters(), lr=self.hparams.lr)


class Drawing(Dataset):
    """Data set whose augmentation draws from torch, numpy and `random`, like careless user code."""

    def __init__(self, samples=40):
        self.inputs, self.targets = regression_data(samples)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        noise = torch.randn(FEATURES) + np.random.randn() + random.random()
        return self.inputs[index] + 0.05 * noise, self.targets[index], index


def quiet_trainer(tmp_path, **options):
    """Return a trainer that writes below a test's directory and shows nothing."""
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "log_level": "ERROR"}
    options = {"accelerator": "cpu", "seed": 3} | quiet | options
    return lumen.Trainer(default_root_dir=tmp_path / "runs", name="run", **options)


def bare_trainer(tmp_path, **options):
    """Return a trainer that writes no files."""
    return quiet_trainer(tmp_path, **{"logger": False, "enable_checkpointing": False} | options)


class Seeing(lumen.TaskModule):
    """Task that keeps every batch, by epoch."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.epochs = {}

    def training_step(self, batch):
        self.epochs.setdefault(self.current_epoch, []).append(batch)
        return self.weight.square()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def samples(self, epoch):
        """Return the first field of an epoch's samples, in order."""
        batches = [batch[0] if isinstance(batch, (list, tuple)) else batch for batch in self.epochs[epoch]]
        return torch.cat(batches).tolist()


def read_batches(tmp_path, data, **options):
    """Return the batches that a task gets from a loader."""
    task = Seeing()
    bare_trainer(tmp_path, **{"max_epochs": 2} | options).fit(task, data)
    return task


def make_numbers(samples=20):
    """Return a data set whose samples are their numbers."""
    return TensorDataset(torch.arange(samples))


class Saving(lumen.Callback):
    """Callback that saves a checkpoint at one step."""

    def __init__(self, step, path):
        self.step, self.path = step, path

    def on_step_checkpoint(self, trainer, task):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def as_lists(batches):
    return [torch.as_tensor(batch[0] if isinstance(batch, (list, tuple)) else batch).tolist() for batch in batches]
