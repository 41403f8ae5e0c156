"""The wines of scikit-learn: 178 of three cultivars."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.types import EVAL_DATALOADERS, TRAIN_DATALOADERS
from sklearn.datasets import load_wine
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, TensorDataset


class WineData(LightningDataModule):
    """Standardized measurements, split by cultivar.

    Args:
        batch_size: Wines in a batch.
        test_size: Share of the wines in the test set.
        noise: Deviation of the noise on each training sample.
        seed: Seed of the splits.
    """

    def __init__(self, batch_size: int = 16, test_size: float = 0.2, noise: float = 0.0, seed: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.n_features = 13
        self.n_classes = 3

    def setup(self, stage: str) -> None:
        wines = load_wine()
        rest, test, rest_of, test_of = train_test_split(
            wines.data, wines.target, test_size=self.hparams.test_size, stratify=wines.target,
            random_state=self.hparams.seed,
        )  # fmt: skip
        train, val, train_of, val_of = train_test_split(
            rest, rest_of, test_size=0.25, stratify=rest_of, random_state=self.hparams.seed
        )
        self.mean = torch.tensor(train.mean(0), dtype=torch.float32)
        self.std = torch.tensor(train.std(0), dtype=torch.float32)
        self.sets = {
            name: TensorDataset(torch.tensor(x, dtype=torch.float32), torch.tensor(y))
            for name, x, y in (("train", train, train_of), ("val", val, val_of), ("test", test, test_of))
        }

    def train_dataloader(self) -> TRAIN_DATALOADERS:
        return DataLoader(self.sets["train"], batch_size=self.hparams.batch_size, shuffle=True)

    def val_dataloader(self) -> EVAL_DATALOADERS:
        return DataLoader(self.sets["val"], batch_size=self.hparams.batch_size)

    def test_dataloader(self) -> EVAL_DATALOADERS:
        return DataLoader(self.sets["test"], batch_size=self.hparams.batch_size)

    def predict_dataloader(self) -> EVAL_DATALOADERS:
        return self.test_dataloader()

    def on_after_batch_transfer(self, batch, dataloader_idx: int):
        features, labels = batch
        features = (features - self.mean.to(features.device)) / self.std.to(features.device)
        if self.trainer.training and self.hparams.noise:
            features = features + self.hparams.noise * torch.randn_like(features)
        return features, labels
