"""Runs that differ in their training loader, and that may kill themselves: the child of test_loader_resume."""

import os
import signal

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler, Subset, WeightedRandomSampler, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

import lumen
from tests.helpers.tasks import FEATURES, Drawing, loader, regression_data

SAMPLES = 41


class Pairs(Sampler):
    """Batches of varying size that draw from numpy's generator, a private generator, and torch's generator."""

    def __init__(self):
        self.own = np.random.default_rng(1)

    def __iter__(self):
        order = torch.randperm(SAMPLES).tolist()
        while order:
            size = int(1 + np.random.randint(4) + self.own.integers(3))
            yield order[:size]
            del order[:size]


class Shuffling(IterableDataset):
    """Stream through a shuffle buffer, with noise; `state_dict` has all of its state, also the next epoch."""

    def __init__(self, samples=SAMPLES):
        self.inputs, self.targets = regression_data(samples)
        self.samples, self.read, self.epoch, self.buffer = samples, 0, 0, []

    def __iter__(self):
        self.epoch += self.read == 0
        while self.read < self.samples or self.buffer:
            while self.read < self.samples and len(self.buffer) < 8:
                self.buffer.append((self.read * (1 + self.epoch)) % self.samples)
                self.read += 1
            index = self.buffer.pop(int(torch.randint(len(self.buffer), ())))
            yield self.inputs[index] + 0.1 * torch.randn(FEATURES), self.targets[index], index
        self.read = 0

    def state_dict(self):
        return {"read": self.read, "epoch": self.epoch, "buffer": torch.tensor(self.buffer)}

    def load_state_dict(self, state):
        self.read, self.epoch, self.buffer = state["read"], state["epoch"], state["buffer"].tolist()


class Sharded(IterableDataset):
    """Stream that workers split; its draws depend on its position alone, so the position is its whole state."""

    def __init__(self, samples=SAMPLES):
        self.inputs, self.targets = regression_data(samples)
        self.place = 0

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        indices = list(range(worker, len(self.inputs), workers))
        while self.place < len(indices):
            index = indices[self.place]
            self.place += 1
            noise = torch.randn(FEATURES, generator=torch.Generator().manual_seed(index))
            yield self.inputs[index] + 0.1 * noise, self.targets[index], index
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


class Forgetful(IterableDataset):
    """A stream without a state."""

    def __init__(self, samples=SAMPLES):
        self.samples = samples

    def __iter__(self):
        yield from Shuffling(self.samples)


def make_weighted_loader(**options):
    sampler = WeightedRandomSampler(torch.arange(1.0, SAMPLES + 1), 30)
    return DataLoader(Drawing(SAMPLES), 4, sampler=sampler, **options)


def make_shuffled_loader(batch_size, **options):
    return DataLoader(Drawing(SAMPLES), batch_size, shuffle=True, **options)


KINDS = {
    "plain": lambda: make_shuffled_loader(4),
    "lists": lambda: make_shuffled_loader(4, collate_fn=lambda samples: samples),
    "weighted": make_weighted_loader,
    "weighted-workers": lambda: make_weighted_loader(num_workers=2, persistent_workers=True),
    "batch-sampler": lambda: DataLoader(Drawing(SAMPLES), batch_sampler=Pairs()),
    "batch-sampler-workers": lambda: DataLoader(Drawing(SAMPLES), batch_sampler=Pairs(), num_workers=2),
    "single": lambda: DataLoader(Drawing(SAMPLES), batch_size=None, shuffle=True),
    "stateful-map": lambda: StatefulDataLoader(Drawing(SAMPLES), 4, shuffle=True),
    "stream": lambda: DataLoader(Shuffling(), 4),
    "stateful-stream": lambda: StatefulDataLoader(Shuffling(), 4),
    "stateful-workers": lambda: StatefulDataLoader(Sharded(), 4, num_workers=2),
    "forgetful": lambda: DataLoader(Forgetful(), 4),
    "forgetful-workers": lambda: DataLoader(Forgetful(), 4, num_workers=2),
    **{
        mode: lambda mode=mode: lumen.CombinedLoader(
            {"small": make_weighted_loader(), "stream": DataLoader(Shuffling(), 3), "large": make_shuffled_loader(2)},
            mode,
        )
        for mode in ("max_size_cycle", "max_size", "min_size", "sequential")
    },
    "overfit": lambda: make_shuffled_loader(4),
    "reloaded": None,  # made by the task
}
OPTIONS = {
    "overfit": {"overfit_batches": 3},
    "reloaded": {"reload_dataloaders_every_n_epochs": 2, "max_epochs": 5},
    "stream": {"limit_train_batches": 7},
}


class Fitted(lumen.TaskModule):
    """Task of least squares with dropout over any structure of batches."""

    def __init__(self, killed_at=None):
        super().__init__()
        self.steps, self.killed_at = 0, killed_at
        self.net = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx, dataloader_idx):
        self.steps += 1
        if self.steps == self.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        parts = [part for part in batch.values() if part is not None] if isinstance(batch, dict) else [batch]
        loss = sum(self.loss(part) for part in parts)
        self.log("loss", loss)
        self.log("from", float(dataloader_idx))
        return loss

    def loss(self, part):
        if isinstance(part[0], tuple):  # a list of samples
            part = [torch.stack([torch.as_tensor(field) for field in fields]) for fields in zip(*part, strict=True)]
        inputs, targets, indices = part
        self.log("sum of indices", torch.as_tensor(indices).float().sum())
        return nn.functional.mse_loss(self.net(inputs), targets)

    def train_dataloader(self):
        part = torch.randperm(SAMPLES)[: 20 + 3 * self.current_epoch]
        return DataLoader(Subset(Drawing(SAMPLES), part.tolist()), 4, shuffle=True)

    def validation_step(self, batch):
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(kind, killed_at=None):
    """Resume the run of a kind in the working directory, up to its end or to the start of a micro-batch."""
    torch.set_num_threads(1)
    lumen.seed_everything(7)
    options = {"max_epochs": 3, "accumulate_grad_batches": 2} | OPTIONS.get(kind, {})
    trainer = lumen.Trainer(
        **options, seed=7, log_every_n_steps=1, default_root_dir=".", name=kind, resume="auto",
        enable_progress_bar=False, enable_model_summary=False, log_level="WARNING",
        callbacks=[lumen.ModelCheckpoint(every_n_train_steps=1)],
    )  # fmt: skip
    make = KINDS[kind]
    trainer.fit(Fitted(killed_at), make and make(), val_dataloaders=make and loader(10, 5, shuffle=False))
