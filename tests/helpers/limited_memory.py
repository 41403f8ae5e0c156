"""Training with memory for a few samples only."""

import torch
from torch import nn
from torchmetrics import MeanSquaredError

from tests.helpers.tasks import Regression


class Full(torch.autograd.Function):
    """Autograd function that changes nothing, and runs out of memory in its backward."""

    @staticmethod
    def forward(ctx, inputs):
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 100 GiB")


class Cramped(Regression):
    """Task with memory for a few samples in a step; an attempt with more leaves traces before it fails.

    Args:
        fits: Samples that fit.
        where: Place of the failure: the "start" of a step, its "forward" or its "backward"; "norms": its forward, which
            has BatchNorm.
        ranks: Ranks with this limit.
    """

    def __init__(self, fits=10**6, where="forward", dropout=0.0, ranks=(0, 1, 2, 3)):
        super().__init__(dropout=dropout, dtype=torch.float64)
        self.net.insert(1, nn.BatchNorm1d(16, dtype=torch.float64)) if where == "norms" else None
        self.fits, self.where, self.ranks, self.sizes = fits, where, ranks, []
        self.error = MeanSquaredError()

    def importance(self, targets):
        """Return the importance of each sample, (samples, 1)."""
        return torch.ones_like(targets)

    def training_step(self, batch):
        inputs, targets = batch
        self.sizes.append(len(inputs))
        fails = len(inputs) > self.fits and self.trainer.global_rank in self.ranks
        if fails and self.where == "start":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 100 GiB")
        predicted = self(inputs)
        importance = self.importance(targets)
        loss = (importance * (predicted - targets).square()).sum() / importance.sum()
        self.error.update(predicted, targets)
        self.log("error", self.error, on_step=False, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("most", loss, reduce_fx="max", on_step=False, on_epoch=True)
        if fails:
            if self.where != "backward":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 100 GiB")
            loss = loss + Full.apply(self.net[-1].weight).sum() * 0.0
        self.log("drawn", torch.rand(()), on_step=True)
        return loss


class Weighed(Cramped):
    """Task that gives large targets a larger weight, and a batch the weight of its samples."""

    def importance(self, targets):
        return 1.0 + (targets > 0)

    def training_step(self, batch):
        return super().training_step(batch), float(self.importance(batch[1]).sum())


class WeighedBefore(Cramped):
    """Task whose weights are known before the forward."""

    importance = Weighed.importance

    def batch_weight(self, batch):
        return float(self.importance(batch[1]).sum())
