"""Runs with `accumulate_grad_batches` by epoch, and the micro-batches of each step."""

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.sharded import unshard
from tests.helpers.tasks import Regression, quiet_trainer, regression_data

BATCH, SAMPLES = 4, 30  # eight micro-batches, the last one with two samples
SCHEDULE = {0: 1, 1: 3, 3: 8, 4: 2}
STEPS = (8, 3, 3, 1, 4)  # of the first five epochs


class RecordsWindows(Regression):
    """Task that records the numbers of the samples of each micro-batch, by epoch and step."""

    def __init__(self, dropout=0.0):
        super().__init__(dropout=dropout, dtype=torch.float64)
        self.seen = []

    def training_step(self, batch):
        inputs, targets, numbers = batch
        self.seen.append((self.current_epoch, self.global_step, numbers.tolist()))
        loss = nn.functional.mse_loss(self(inputs), targets)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": StepLR(optimizer, 4, 0.5), "interval": "step"}]

    def windows(self):
        """Return the sizes of the micro-batches of each step, by epoch."""
        epochs = {}
        for epoch, step, numbers in self.seen:
            epochs.setdefault(epoch, {}).setdefault(step, []).append(len(numbers))
        return [list(steps.values()) for steps in epochs.values()]


def make_dataset(samples=SAMPLES):
    return TensorDataset(*regression_data(samples, torch.float64), torch.arange(samples))


def loader(samples=SAMPLES, **options):
    return DataLoader(make_dataset(samples), BATCH, **{"shuffle": True} | options)


def train_with_schedule(folder, data=None, dropout=0.0, **options):
    """Train five epochs, with the schedule unless the options override it."""
    task = RecordsWindows(dropout)
    options = {"max_epochs": len(STEPS), "accumulate_grad_batches": SCHEDULE} | options
    trainer = quiet_trainer(folder, **options)
    trainer.fit(task, loader() if data is None else data)
    return trainer, task


def train_by_hand(task):
    """Return the network after a plain loop over the same micro-batches."""
    net = RecordsWindows().net
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    inputs, targets, _ = make_dataset().tensors
    steps = {}
    for epoch, step, numbers in task.seen:
        steps.setdefault((epoch, step), []).append(numbers)
    schedule = StepLR(optimizer, 4, 0.5)
    for batches in steps.values():
        optimizer.zero_grad()
        for numbers in batches:
            share = len(numbers) / sum(map(len, batches))
            (nn.functional.mse_loss(net(inputs[numbers]), targets[numbers]) * share).backward()
        optimizer.step()
        schedule.step()
    return net


def read_state(trainer, task):
    """Return parameters, optimizer state and counters as plain data."""
    tensors = [*task.parameters()]
    for each in trainer.optimizers[0].state.values():
        tensors += [value for value in each.values() if isinstance(value, torch.Tensor)]
    return [unshard(each).numpy().tobytes() for each in tensors] + [trainer.global_step, trainer.current_epoch]


def list_parameters(task):
    """Return all parameters, as lists."""
    return [unshard(each).tolist() for each in task.parameters()]
