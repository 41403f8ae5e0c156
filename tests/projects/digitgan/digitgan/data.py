"""The digits of scikit-learn: 1797 images of 8 x 8 pixels."""

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split


class DigitsDataModule(L.LightningDataModule):
    """Images between -1 and 1, shape (1, 8, 8), with their classes."""

    def __init__(self, batch_size: int = 64, val_fraction: float = 0.1, num_workers: int = 0):
        super().__init__()
        self.save_hyperparameters()

    def prepare_data(self):
        load_digits()  # raises an error here, on one process only, if scikit-learn came without its data

    def setup(self, stage: str):
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
        labels = torch.tensor(digits.target)
        both = TensorDataset(images, labels)
        self.train_set, self.val_set = random_split(
            both,
            [1 - self.hparams.val_fraction, self.hparams.val_fraction],
            generator=torch.Generator().manual_seed(0),
        )

    def train_dataloader(self):
        return DataLoader(
            self.train_set,
            batch_size=self.hparams.batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=self.hparams.num_workers,
        )

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=self.hparams.batch_size, num_workers=self.hparams.num_workers)

    def predict_dataloader(self):
        classes = torch.arange(10).repeat_interleave(2)
        return DataLoader(TensorDataset(classes), batch_size=10)
