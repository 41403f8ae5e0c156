"""Tasks whose data depends on training."""

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import lumen


class Answers(IterableDataset):
    """Stream that yields the current weight with noise, and counts its samples."""

    follows_training = True

    def __init__(self, task, length=4):
        self.task, self.length, self.given = task, length, 0

    def __iter__(self):
        for _ in range(self.length):
            self.given += 1
            yield torch.stack([self.task.weight.detach().clone(), torch.rand(())])

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]


class Long(Answers):
    """Stream with a length."""

    def __len__(self):
        return self.length


class Asking(lumen.TaskModule):
    def __init__(self, kind=Long, length=4, **options):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
        self.data = kind(self, length)
        self.options = {"batch_size": None} | options
        self.met, self.held = [], []

    def train_dataloader(self):
        return DataLoader(self.data, **self.options)

    def training_step(self, batch):
        self.met.append(batch.flatten()[0].item())
        self.held.append(self.weight.item())
        return self.weight * (1 + batch.flatten()[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)
