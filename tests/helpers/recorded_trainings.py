"""Trainings that are recorded, and small changes that make two of them part."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lumen
from tests.helpers.tasks import FEATURES, Regression, bare_trainer, loader, regression_data


class Deep(Regression):
    """A task with norms, dropout and what is changed in place."""

    def __init__(self, dropout=0.2, **options):
        super().__init__(dropout=dropout, **options)
        self.net = nn.Sequential(
            nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Dropout(dropout), nn.Linear(16, 1)
        )
        torch.manual_seed(5)
        for parameter in self.net.parameters():
            nn.init.normal_(parameter, std=0.3)


class Unkeyed(nn.Module):
    """Adds what no seed decides."""

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
    """Returns its input, and no twice the same gradient."""

    def forward(self, x):
        return _Disturbed.apply(x)


class WithModule(Deep):
    """One layer is another module."""

    def __init__(self, module):
        super().__init__()
        self.net[2] = module


class OtherRate(Deep):
    """Learns twice as fast from step 3 on."""

    def on_train_batch_start(self, batch):
        if self.global_step == 2:
            self.trainer.optimizers[0].param_groups[0]["lr"] = 0.02


class OtherDropout(Deep):
    """Draws other masks in step 2."""

    def on_train_batch_start(self, batch):
        if self.global_step == 1:
            torch.manual_seed(1)


def other_layer():
    """A task of which one layer begins elsewhere."""
    task = Deep()
    with torch.no_grad():
        task.net[4].bias += 1e-6
    return task


def changed_sample(number):
    """The loader's data with another target of one sample."""
    inputs, targets = regression_data()
    targets[number] += 1e-3
    return DataLoader(TensorDataset(inputs, targets), 8, shuffle=True)


def training(tmp_path, task=Deep, data=loader, **options):
    """What trains with a recorder, the same each time."""

    def fit(recorder, *others):
        settings = {"max_epochs": 2, "callbacks": [*others, recorder] if recorder else [*others]} | options
        made = task()
        bare_trainer(tmp_path, **settings).fit(made, data(), val_dataloaders=loader(20))
        return made

    return fit


class OtherLayer(Deep):
    """One of its layers begins elsewhere."""

    def __init__(self):
        super().__init__()
        with torch.no_grad():
            self.net[4].bias += 1e-6


class WithUnkeyed(Deep):
    """One layer adds what no seed decides."""

    def __init__(self):
        super().__init__()
        self.net[2] = Unkeyed()


class Failing(Deep):
    """A user's bug, which shows in step 2."""

    def training_step(self, batch):
        if self.global_step == 1 and self.trainer.default_root_dir.name != "runs":
            raise KeyError("nothing")
        return super().training_step(batch)


class Points(lumen.DataModule):
    """The data of `loader`.

    Args:
        changed: A sample whose target is another one.
    """

    def __init__(self, changed: int | None = None):
        super().__init__()
        self.changed = changed

    def train_dataloader(self):
        return loader() if self.changed is None else changed_sample(self.changed)

    def val_dataloader(self):
        return loader(20)
