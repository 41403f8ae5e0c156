"""Recorded trainings, and small changes that make two of them differ."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lumen
from tests.helpers.tasks import FEATURES, Regression, bare_trainer, loader, regression_data


class Deep(Regression):
    """Task with norms, dropout and in-place changes."""

    def __init__(self, dropout=0.2, **options):
        super().__init__(dropout=dropout, **options)
        self.net = nn.Sequential(
            nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Dropout(dropout), nn.Linear(16, 1)
        )
        torch.manual_seed(5)
        for parameter in self.net.parameters():
            nn.init.normal_(parameter, std=0.3)


class Unkeyed(nn.Module):
    """Layer that adds unseeded numbers."""

    def forward(self, x):
        return x + 1e-3 * int.from_bytes(os.urandom(2), "little")


class _Disturbed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient + 1e-3 * int.from_bytes(os.urandom(2), "little")


class UnkeyedBackward(nn.Module):
    """Module that returns its input, and a different gradient each time."""

    def forward(self, x):
        return _Disturbed.apply(x)


class WithModule(Deep):
    """Task with another module as one layer."""

    def __init__(self, module):
        super().__init__()
        self.net[2] = module


class OfWidth(Regression):
    """Task that takes the number of its inputs from the data module."""

    def __init__(self, features: int):
        super().__init__()
        self.net[0] = nn.Linear(features, 16)


class OtherRate(Deep):
    """Task whose rate doubles from step 3 on."""

    def on_train_batch_start(self, batch):
        if self.global_step == 2:
            self.trainer.optimizers[0].param_groups[0]["lr"] = 0.02


class OtherDropout(Deep):
    """Task that draws other masks in step 2."""

    def on_train_batch_start(self, batch):
        if self.global_step == 1:
            torch.manual_seed(1)


def make_other_layer():
    """Return a task of which one layer has other initial values."""
    task = Deep()
    with torch.no_grad():
        task.net[4].bias += 1e-6
    return task


def change_sample(number):
    """Return the loader's data with another target for one sample."""
    inputs, targets = regression_data()
    targets[number] += 1e-3
    return DataLoader(TensorDataset(inputs, targets), 8, shuffle=True)


def make_training(tmp_path, task=Deep, data=loader, **options):
    """Return a function that trains with a recorder, equally each time."""

    def fit(recorder, *others):
        settings = {"max_epochs": 2, "callbacks": [*others, recorder] if recorder else [*others]} | options
        made = task()
        bare_trainer(tmp_path, **settings).fit(made, data(), val_dataloaders=loader(20))
        return made

    return fit


class OtherLayer(Deep):
    """Task of which one layer has other initial values."""

    def __init__(self):
        super().__init__()
        with torch.no_grad():
            self.net[4].bias += 1e-6


class WithUnkeyed(Deep):
    """Task of which one layer adds unseeded numbers."""

    def __init__(self):
        super().__init__()
        self.net[2] = Unkeyed()


class Failing(Deep):
    """Task with a user's bug, which appears in step 2."""

    def training_step(self, batch):
        if self.global_step == 1 and self.trainer.default_root_dir.name != "runs":
            raise KeyError("nothing")
        return super().training_step(batch)


class Points(lumen.DataModule):
    """Data of `loader`.

    Args:
        changed: Number of a sample with another target.
    """

    features = FEATURES

    def __init__(self, changed: int | None = None):
        super().__init__()
        self.changed = changed

    def train_dataloader(self):
        return loader() if self.changed is None else change_sample(self.changed)

    def val_dataloader(self):
        return loader(20)
