"""Handwritten digits, each with numbers drawn anew: what a network makes an image of."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from datamodules.mnist import MNIST5k


class DigitsAndNoise(MNIST5k):
    """The digits of `MNIST5k` with noise.

    A batch is ``[images, labels, noise]``: those of `MNIST5k`, and float32 of shape ``(batch, noise)``.

    Args:
        noise: Numbers that are drawn for each image from a normal distribution, others in every epoch.
        options: Those of `datamodules.mnist.MNIST5k`.
    """

    def __init__(self, noise: int = 32, **options: Any):
        super().__init__(**options)
        self.save_hyperparameters()
        self.noise = noise

    def setup(self, stage: str) -> None:
        """Read the images."""
        super().setup(stage)
        self.train, self.val = Noisy(self.train, self.noise), Noisy(self.val, self.noise)


class Noisy(Dataset):
    """The samples of another data set, each with noise behind it.

    Noise that `training_step` draws is keyed by the number of the micro-batch, and so depends on how a batch is cut and
    divided among processes. What is drawn here is keyed by (seed, epoch, index): the same on any number of processes.
    """

    def __init__(self, data: Dataset, size: int):
        self.data, self.size = data, size

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return *self.data[index], torch.randn(self.size)
