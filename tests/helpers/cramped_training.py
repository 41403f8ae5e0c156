"""Training with memory for a few samples only."""

import resource
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import IterableDataset
from torchmetrics import MeanSquaredError

import lumen
from tests.helpers.tasks import Regression, regression_data


class Full(torch.autograd.Function):
    """Changes nothing, and runs out of memory in its backward."""

    @staticmethod
    def forward(ctx, inputs):
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 100 GiB")


class Cramped(Regression):
    """Has memory for a few samples in a step; an attempt with more leaves traces before it fails.

    Args:
        fits: Samples that fit.
        where: The "start" of a step fails, its "forward" or its "backward"; "norms": its forward, which has BatchNorm.
        ranks: On these ranks alone.
    """

    def __init__(self, fits=10**6, where="forward", dropout=0.0, ranks=(0, 1, 2, 3)):
        super().__init__(dropout=dropout, dtype=torch.float64)
        self.net.insert(1, nn.BatchNorm1d(16, dtype=torch.float64)) if where == "norms" else None
        self.fits, self.where, self.ranks, self.sizes = fits, where, ranks, []
        self.error = MeanSquaredError()

    def importance(self, targets):
        """Of each sample, (samples, 1)."""
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


class Floor(nn.Module):
    """A layer that may run out of memory, in its forward or its backward."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, dtype=torch.float64)
        self.fails = None

    def forward(self, inputs):
        if self.fails == "forward":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 100 GiB")
        outputs = self.linear(inputs).tanh()
        return Full.apply(outputs) if self.fails == "backward" else outputs


class Tower(Cramped):
    """Has several floors, of which each is a unit under FSDP; more samples than fit fail on one of them.

    Args:
        fits: Samples that fit.
        where: What fails and of which floor, such as "forward 2".
        ranks: On these ranks alone.
    """

    def __init__(self, fits=10**6, where="forward 1", ranks=(0, 1, 2, 3)):
        super().__init__(ranks=ranks)
        self.fits = fits
        torch.manual_seed(0)
        self.net = nn.Sequential(Floor(6, 16), Floor(16, 16), Floor(16, 16), Floor(16, 1))
        self.part, self.floor = where.split()

    def look(self, batch):
        """Let a floor fail, if memory is not to suffice for this batch."""
        self.sizes.append(len(batch[0]))
        fails = len(batch[0]) > self.fits and self.trainer.global_rank in self.ranks
        self.net[int(self.floor)].fails = self.part if fails else None

    def training_step(self, batch):
        self.look(batch)
        predicted = self(batch[0])
        loss = nn.functional.mse_loss(predicted, batch[1])
        self.error.update(predicted, batch[1])
        self.log("error", self.error, on_step=False, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch):
        self.look(batch)
        self.log("early", batch[0].sum(), reduce_fx="sum")
        super().validation_step(batch)
        return len(batch[0])

    def predict_step(self, batch):
        self.look(batch)
        return self(batch[0])


class Broad(nn.Module):
    """A layer with few parameters and, while it is computed, 512 times its output in memory."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16, dtype=torch.float64)
        self.scales = nn.Parameter(torch.linspace(-1, 1, 512, dtype=torch.float64))

    def forward(self, inputs):
        return self.linear(inputs)[..., None].mul(self.scales).relu().mean(-1) + inputs


class Limited(lumen.TaskModule):
    """Rank 1 really has so much memory left, in MiB, while it trains; None: as much as the machine has."""

    def __init__(self, left_mib=None):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*[Broad() for _ in range(4)], nn.Linear(16, 1, dtype=torch.float64))
        self.left_mib, self.limits, self.sizes = left_mib, resource.getrlimit(resource.RLIMIT_AS), []

    def on_train_start(self):
        if self.left_mib and self.trainer.global_rank == 1:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            resource.setrlimit(
                resource.RLIMIT_AS, (pages * resource.getpagesize() + self.left_mib * 2**20, self.limits[1])
            )

    def on_train_end(self):
        resource.setrlimit(resource.RLIMIT_AS, self.limits)

    def training_step(self, batch):
        self.sizes.append(len(batch[0]))
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Weighed(Cramped):
    """Large targets count more, and a batch by what its samples do."""

    def importance(self, targets):
        return 1.0 + (targets > 0)

    def training_step(self, batch):
        return super().training_step(batch), float(self.importance(batch[1]).sum())


class WeighedBefore(Cramped):
    """The same, known before the forward."""

    importance = Weighed.importance

    def batch_weight(self, batch):
        return float(self.importance(batch[1]).sum())


class Fickle(Tower):
    """What fits does not fit the next time: the first attempt fails, one keeps pace, and the third fails too."""

    def look(self, batch):
        super().look(batch)
        fails = self.fits < 100 and self.trainer.global_rank in self.ranks and len(self.sizes) in (1, 3)
        self.net[int(self.floor)].fails = self.part if fails else None


class Silent(Tower):
    """In the second step, in which memory ends, rank 1 has no loss for its batch and calls no unit."""

    def look(self, batch):
        super().look(batch)
        self.net[int(self.floor)].fails = self.net[int(self.floor)].fails if self.global_step else None

    def training_step(self, batch, batch_idx):
        return None if batch_idx == 5 and self.trainer.global_rank == 1 else super().training_step(batch)


class Heads(Tower):
    """Trains one of two parameters in the first micro-batch of each process, the other in its second, which fails."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.heads = nn.ParameterList([nn.Parameter(torch.ones(4, dtype=torch.float64)) for _ in range(2)])

    def training_step(self, batch, batch_idx):
        fits, self.fits = self.fits, self.fits if batch_idx == 3 else 10**6
        loss = super().training_step(batch)
        self.fits = fits
        return loss * self.heads[batch_idx // 2 % 2].mean()


class Spread(Tower):
    """Has a standard deviation, which is refused if it is not positive."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.spread = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def training_step(self, batch):
        normal = torch.distributions.Normal(0.0, self.spread, validate_args=True)
        return super().training_step(batch) - normal.log_prob(torch.ones_like(self.spread)).mean()


class Touchy(Tower):
    """Refuses batches that are smaller than 8."""

    def training_step(self, batch):
        if len(batch[0]) < 8:
            raise ValueError("a small batch")
        return super().training_step(batch)


class OwnStream(IterableDataset):
    """Gives each process batches of its own.

    Args:
        sizes: For each process, the sizes of its batches.
    """

    shards_itself = True

    def __init__(self, sizes):
        self.sizes = sizes

    def __iter__(self):
        rank = torch.distributed.get_rank()
        data = regression_data(sum(self.sizes[rank]), torch.float64, seed=rank)
        return zip(*[each.split(self.sizes[rank]) for each in data], strict=True)
