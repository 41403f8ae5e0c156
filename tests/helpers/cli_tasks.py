"""Tiny task and data for the command line, like a user's."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lumen


@dataclass
class Noise:
    """Noise on the inputs."""

    scale: float = 0.0
    kind: str = "normal"


class Line(lumen.TaskModule):
    """Fits a line.

    Args:
        width: Inputs of a sample.
        lr: Learning rate.
        encoder: Module that is applied to the inputs first.
        label: Label of the data, or None.
        noise: Noise on the inputs.
        widths: Some numbers.
    """

    def __init__(
        self,
        width: int,
        lr: float = 0.01,
        encoder: nn.Module | None = None,
        label: str | None = None,
        noise: Noise = Noise(),  # noqa: B008
        widths: tuple[int, ...] = (1, 2),
    ):
        super().__init__()
        self.save_hyperparameters(ignore=["encoder", "noise"])
        self.encoder, self.noise, self.width = encoder, noise, width
        self.layer = nn.Linear(width, 1)

    def forward(self, x):
        return self.layer(x if self.encoder is None else self.encoder(x))

    def training_step(self, batch):
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch):
        self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[1]))

    def test_step(self, batch):
        self.log("test_loss", nn.functional.mse_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


class Configured(Line):
    """Fits a line; its argument has the name of the command line's option --config."""

    def __init__(self, config: dict[str, int]):
        super().__init__(config["width"])


class Slope(Line):
    """Line task whose predictions are text."""

    def __init__(self, width: int, lr: float = 0.02, steepness: float = 1.0):
        super().__init__(width, lr)

    def predict_step(self, batch):
        return [f"y = {float(y):.3f}" for y in self(batch[0])]


class Columns(Line):
    """Line task whose predictions have names."""

    def predict_step(self, batch):
        return {"x": batch[0], "y": self(batch[0])[:, 0]}


class Pairs(lumen.DataModule):
    """Data module with two validation loaders, with names or without."""

    def __init__(self, names: list[str] | None = None):
        super().__init__()
        self.names = names

    def val_dataloader(self):
        loaders = [DataLoader(TensorDataset(torch.full((4, 3), value), torch.ones(4, 1)), 2) for value in (0.0, 1.0)]
        return dict(zip(self.names, loaders, strict=True)) if self.names else loaders


class Points(lumen.DataModule):
    """Random points on a line.

    Args:
        width: Inputs of a sample.
        samples: Number of samples.
        label: Label for a linked argument.
        batch_size: Samples in a batch.
    """

    def __init__(self, width: int = 3, samples: int = 12, label: str | None = None, batch_size: int = 4):
        super().__init__()
        self.save_hyperparameters()
        self.width, self.label = width, label
        self.count = torch.tensor(width)
        torch.rand(samples)  # draws random numbers, as constructors of data may

    def setup(self, stage):
        x = torch.randn(self.hparams.samples, self.width, generator=torch.Generator().manual_seed(0))
        self.points = TensorDataset(x, x.sum(1, keepdim=True))

    def train_dataloader(self):
        return DataLoader(self.points, self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.points, self.hparams.batch_size)

    test_dataloader = predict_dataloader = val_dataloader


class Grid(lumen.DataModule):
    """Other data; one argument has the same name and another meaning."""

    def __init__(self, width: int = 2, samples: int = 6):
        super().__init__()
        self.samples, self.width = samples, width

    def train_dataloader(self):
        x = torch.ones(self.samples, self.width)
        return DataLoader(TensorDataset(x, x[:, :1]), 2)


class Spy(lumen.Callback):
    """Callback that keeps the trainer and the task of the last fit for tests."""

    trainer = task = None

    def __init__(self, name: str = "spy"):
        self.name = name

    def setup(self, trainer, task, stage):
        Spy.trainer, Spy.task = trainer, task


class Loud(lumen.Callback):
    """Another callback with a `name`."""

    def __init__(self, name: str = "loud", volume: int = 1):
        self.name, self.volume = name, volume


class Broken(Line):
    """A user's bug."""

    def training_step(self, batch):
        return {}["nothing"]


class Interrupted(Line):
    """Task whose construction is interrupted by Ctrl-C."""

    def __init__(self, width: int = 3, signal: str = "int"):
        raise KeyboardInterrupt if signal == "int" else SystemExit(143)


class Stepless(lumen.TaskModule):
    """A task without a training step."""
