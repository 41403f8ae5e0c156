"""Handwritten digits in two views each, for learning without labels."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from datamodules.mnist import MNIST5k


class TwoViews(MNIST5k):
    """Digits of `MNIST5k`, with two views of each training image: turned, moved, stretched and partly hidden.

    A training batch is ``[one, other, labels]``, two views of the same images; the labels are for a probe, which
    measures the quality of the features. A validation batch is ``[images, labels]``. Shapes are as in `MNIST5k`.

    Args:
        turn: Largest angle of a rotation, in degrees.
        labelled: Number of training images, from the first one, that train the probe.
        options: Options of `datamodules.mnist.MNIST5k`.
    """

    def __init__(self, turn: float = 20.0, labelled: int = 100, **options: Any):
        super().__init__(**options)
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        """Read the images into memory."""
        super().setup(stage)
        self.original = self.train
        self.train = Twice(self.train, self.hparams.turn)

    def train_dataloader(self) -> DataLoader:
        """Return the views, shuffled, in full batches: the loss needs several images in each batch."""
        return self.loader(self.train, self.hparams.batch_size, shuffle=True, drop_last=True)

    def labelled_images(self) -> tuple[Tensor, Tensor]:
        """Return the images for the probe, of shape ``(labelled, 1, 28, 28)``, and their labels."""
        images, labels = zip(*(self.original[i] for i in range(self.hparams.labelled)), strict=True)
        return torch.stack(images), torch.stack(labels)


class Twice(Dataset):
    """Two views of each image of a dataset. Drawn here, the views do not depend on processes or workers."""

    def __init__(self, digits: Dataset, turn: float):
        self.digits, self.turn = digits, turn

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        image, label = self.digits[index]
        return seen(image, self.turn), seen(image, self.turn), label


def seen(image: Tensor, turn: float) -> Tensor:
    """Return a view of an image: turned, moved, stretched, with a black square of 8 x 8 pixels; ``(1, 28, 28)``."""
    angle, wide, high, right, down = (2 * torch.rand(5) - 1).tolist()
    angle = math.radians(turn * angle)
    sine, cosine, wide, high = math.sin(angle), math.cos(angle), 1 + 0.2 * wide, 1 + 0.2 * high
    matrix = torch.tensor([[[wide * cosine, -high * sine, 0.2 * right], [wide * sine, high * cosine, 0.2 * down]]])
    view = F.grid_sample(image[None], F.affine_grid(matrix, [1, 1, 28, 28], align_corners=False), align_corners=False)[
        0
    ]
    left, top = torch.randint(0, 21, (2,)).tolist()
    view[:, top : top + 8, left : left + 8] = 0
    return view
