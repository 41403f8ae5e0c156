"""The digits of scikit-learn: 1,797 images of 8 x 8 pixels."""

from typing import Any
from collections.abc import Sequence

import torch
from lightning import LightningDataModule
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split


class DigitsDataModule(LightningDataModule):
    """Loaders of training, validation and test images."""

    def __init__(
        self,
        split: Sequence[int] = (1297, 250, 250),
        batch_size: int = 64,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.data_train: Dataset | None = None
        self.data_val: Dataset | None = None
        self.data_test: Dataset | None = None
        self.batch_size_per_device = batch_size

    def setup(self, stage: str | None = None) -> None:
        if self.trainer is not None:
            if self.hparams.batch_size % self.trainer.world_size != 0:
                raise RuntimeError("The batch size is not divisible by the number of devices.")
            self.batch_size_per_device = self.hparams.batch_size // self.trainer.world_size
        if not self.data_train:
            digits = load_digits()
            images = torch.tensor(digits.images / 16, dtype=torch.float32)
            self.data_train, self.data_val, self.data_test = random_split(
                TensorDataset(images, torch.tensor(digits.target)),
                lengths=self.hparams.split,
                generator=torch.Generator().manual_seed(42),
            )

    def _loader(self, dataset: Dataset, shuffle: bool) -> DataLoader[Any]:
        return DataLoader(
            dataset,
            batch_size=self.batch_size_per_device,
            num_workers=self.hparams.num_workers,
            pin_memory=self.hparams.pin_memory,
            shuffle=shuffle,
        )

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.data_train, True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.data_val, False)

    def test_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.data_test, False)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass
