"""Handwritten digits with random numbers, from which a network generates images."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from datamodules.mnist import MNIST5k


class DigitsAndNoise(MNIST5k):
    """Digits of `MNIST5k` with noise.

    A batch is ``[images, labels, noise]``: images and labels as in `MNIST5k`, and noise, float32 of shape
    ``(batch, noise)``.

    Args:
        noise: Number of normally distributed random numbers for each image, which change in every epoch.
        options: Options of `datamodules.mnist.MNIST5k`.
    """

    def __init__(self, noise: int = 32, **options: Any):
        super().__init__(**options)
        self.save_hyperparameters()
        self.noise = noise

    def setup(self, stage: str) -> None:
        """Read the images into memory."""
        super().setup(stage)
        self.train, self.val = Noisy(self.train, self.noise), Noisy(self.val, self.noise)


class Noisy(Dataset):
    """Samples of a dataset, each with noise as its last element.

    Noise drawn in `training_step` depends on the number of the micro-batch, and so on the division of batches among
    processes. Noise drawn here depends on (seed, epoch, index), and is the same on any number of processes.
    """

    def __init__(self, data: Dataset, size: int):
        self.data, self.size = data, size

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return *self.data[index], torch.randn(self.size)
