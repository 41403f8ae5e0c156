"""Self-supervised task like BYOL, and its loop by hand."""

import math

import torch
from torch import nn

import lumen
from tests.helpers.tasks import FEATURES, loader


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, inputs):
        return inputs + torch.tanh(self.linear(inputs))


def make_student(norm=False, dtype=torch.float64):
    torch.manual_seed(0)
    between = [nn.BatchNorm1d(8)] if norm else []
    return nn.Sequential(nn.Linear(FEATURES, 8), *between, nn.Sequential(Block(), Block()), nn.Linear(8, 3)).to(dtype)


def make_predictor(dtype=torch.float64):
    torch.manual_seed(1)
    return nn.Linear(3, 3).to(dtype)


def make_views(inputs):
    return inputs * 1.1 + 0.1, inputs * 0.9


def distance(predicted, target):
    return (2 - 2 * nn.functional.cosine_similarity(predicted, target)).mean()


class Byol(lumen.TaskModule):
    """Task whose optimizer gets all parameters."""

    def __init__(self, norm=False, dtype=torch.float64, **options):
        super().__init__()
        self.save_hyperparameters(ignore="dtype")
        self.student, self.predictor = make_student(norm, dtype), make_predictor(dtype)
        self.teacher = lumen.Teacher(self.student, **options)

    def training_step(self, batch):
        one, two = make_views(batch[0])
        return distance(self.predictor(self.student(one)), self.teacher(two))

    def validation_step(self, batch):
        self.log("val_loss", self.training_step(batch))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)


class ByHand(Byol):
    """Task that steps its optimizer itself, at every second batch."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(super().training_step(batch) / 2)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


def decay_by_cosine(decay, final, step, steps):
    return final - (final - decay) * (math.cos(math.pi * step / steps) + 1) / 2


def train_by_hand(decay, steps, *, norm=False, accumulate=1, eval_mode=False, buffers=False, samples=48):
    """Return the states of student and teacher after a number of updates in a plain loop.

    Args:
        decay: Function of the number of completed steps.
        steps: Number of updates.
        norm: True if the student has BatchNorm.
        accumulate: Batches in each update.
        eval_mode: True if the teacher is in eval mode.
        buffers: True if the teacher's buffers follow too.
        samples: Size of the data.
    """
    online, target, head = make_student(norm), make_student(norm).requires_grad_(False), make_predictor()
    target.train(not eval_mode)
    optimizer = torch.optim.AdamW([*online.parameters(), *head.parameters()], lr=1e-2, weight_decay=0.1)
    batches = [*loader(samples, shuffle=False, dtype=torch.float64)] * steps * accumulate
    for step in range(steps):
        optimizer.zero_grad()
        for inputs, _ in batches[step * accumulate : (step + 1) * accumulate]:
            one, two = make_views(inputs)
            (distance(head(online(one)), target(two)) / accumulate).backward()
        optimizer.step()
        with torch.no_grad():
            for ours, theirs in zip(target.parameters(), online.parameters(), strict=True):
                ours.lerp_(theirs, 1 - decay(step))
            for ours, theirs in zip(target.buffers(), online.buffers(), strict=True) if buffers else ():
                ours.lerp_(theirs, 1 - decay(step)) if ours.is_floating_point() else ours.copy_(theirs)
    return online.state_dict(), target.state_dict()
