"""Pairs of views without labels, and a few labelled images for the probe."""

from __future__ import annotations

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import CombinedLoader
from pytorch_lightning.utilities.types import EVAL_DATALOADERS, TRAIN_DATALOADERS
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset, TensorDataset


class TwoViews(Dataset):
    """Two random views of an image: shifted by a pixel, scaled in brightness, with noise and a hole."""

    def __init__(self, images: torch.Tensor, noise: float = 0.1) -> None:
        self.images = images
        self.noise = noise

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = self.images[index]
        return self.view(image), self.view(image)

    def view(self, image: torch.Tensor) -> torch.Tensor:
        down, right = torch.randint(-1, 2, (2,)).tolist()
        seen = torch.roll(image, (down, right), dims=(1, 2))
        seen = seen * torch.empty(1).uniform_(0.7, 1.3)
        row, column = torch.randint(0, 7, (2,)).tolist()
        seen = seen.clone()
        seen[:, row : row + 2, column : column + 2] = 0
        return seen + self.noise * torch.randn_like(seen)


class ViewsDataModule(pl.LightningDataModule):
    """Data with two loaders in parallel for training, and two in sequence for validation.

    Args:
        batch_size: Pairs in a batch of the unlabelled loader.
        labelled: Number of images that the probe may learn from.
        noise: Deviation of the noise in a view.
    """

    def __init__(self, batch_size: int = 128, labelled: int = 300, noise: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str | None = None) -> None:
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        labels = torch.tensor(digits.target)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1))
        train, held_out = order[:1400], order[1400:]
        self.pairs = TwoViews(images[train], self.hparams.noise)
        few = train[: self.hparams.labelled]
        self.few = TensorDataset(images[few], labels[few])
        self.held_out = TensorDataset(images[held_out], labels[held_out])

    def train_dataloader(self) -> TRAIN_DATALOADERS:
        loaders = {
            "views": DataLoader(self.pairs, batch_size=self.hparams.batch_size, shuffle=True, drop_last=True),
            "labelled": DataLoader(self.few, batch_size=32, shuffle=True),
        }
        return CombinedLoader(loaders, mode="max_size_cycle")

    def val_dataloader(self) -> EVAL_DATALOADERS:
        return [DataLoader(self.few, batch_size=100), DataLoader(self.held_out, batch_size=100)]

    def predict_dataloader(self) -> EVAL_DATALOADERS:
        return DataLoader(self.held_out, batch_size=100)
