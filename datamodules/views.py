"""Handwritten digits, each seen twice: what learns without labels learns that both are the same."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from datamodules.mnist import MNIST5k


class TwoViews(MNIST5k):
    """The digits of `MNIST5k`, each training image turned, moved, stretched and partly hidden in two ways.

    A training batch is ``[one, other, labels]``, two views of the same images; the labels are for a probe, which tells
    how good they are. A validation batch is ``[images, labels]``. Shapes are those of `MNIST5k`.

    Args:
        turn: Degrees by which an image is turned at most.
        labelled: Images to train the probe with, the first of the training images.
        options: Those of `datamodules.mnist.MNIST5k`.
    """

    def __init__(self, turn: float = 20.0, labelled: int = 100, **options: Any):
        super().__init__(**options)
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        """Read the images."""
        super().setup(stage)
        self.original = self.train
        self.train = Twice(self.train, self.hparams.turn)

    def train_dataloader(self) -> DataLoader:
        """The views, shuffled, in whole batches: a batch of one image has no other to be told from."""
        return self.loader(self.train, self.hparams.batch_size, shuffle=True, drop_last=True)

    def labelled_images(self) -> tuple[Tensor, Tensor]:
        """The images for the probe, of shape ``(labelled, 1, 28, 28)``, and their labels."""
        images, labels = zip(*(self.original[i] for i in range(self.hparams.labelled)), strict=True)
        return torch.stack(images), torch.stack(labels)


class Twice(Dataset):
    """Two views of each image of another data set: drawn here, they do not depend on processes or workers."""

    def __init__(self, digits: Dataset, turn: float):
        self.digits, self.turn = digits, turn

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        image, label = self.digits[index]
        return seen(image, self.turn), seen(image, self.turn), label


def seen(image: Tensor, turn: float) -> Tensor:
    """A view of an image of shape ``(1, 28, 28)``: turned, moved, stretched, and without a square of 8 x 8 pixels."""
    angle, wide, high, right, down = (2 * torch.rand(5) - 1).tolist()
    angle = math.radians(turn * angle)
    sine, cosine, wide, high = math.sin(angle), math.cos(angle), 1 + 0.2 * wide, 1 + 0.2 * high
    how = torch.tensor([[[wide * cosine, -high * sine, 0.2 * right], [wide * sine, high * cosine, 0.2 * down]]])
    view = F.grid_sample(image[None], F.affine_grid(how, [1, 1, 28, 28], align_corners=False), align_corners=False)[0]
    left, top = torch.randint(0, 21, (2,)).tolist()
    view[:, top : top + 8, left : left + 8] = 0
    return view
