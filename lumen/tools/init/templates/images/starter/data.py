"""Images and their labels."""

import lumen
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split


class Digits(lumen.DataModule):
    """The 1797 handwritten digits of scikit-learn: 80 % for training, 10 % for validation, 10 % for the test.

    A batch is `[images, labels]`: float32 of shape `(batch, 1, 8, 8)` in [0, 1], and int64 of shape `(batch,)`.

    Args:
        batch_size: Number of images in a batch.
        split: Seed of the random split into training, validation and test.
    """

    channels, classes = 1, 10  # The model takes both values from the data module.

    def __init__(self, batch_size: int = 64, split: int = 0):
        super().__init__()
        self.batch_size, self.split = batch_size, split

    def setup(self, stage: str) -> None:
        """Read and split the images. Your own images can be any `torch.utils.data.Dataset` of (image, label)."""
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        samples = TensorDataset(images, torch.tensor(digits.target))
        generator = torch.Generator().manual_seed(self.split)
        self.train, self.val, self.test = random_split(samples, [0.8, 0.1, 0.1], generator)

    def train_dataloader(self) -> DataLoader:
        """Return the training images, shuffled."""
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """Return the validation images, which choose the best checkpoint."""
        return DataLoader(self.val, self.batch_size)

    def test_dataloader(self) -> DataLoader:
        """Return the test images, which choose nothing."""
        return DataLoader(self.test, self.batch_size)
