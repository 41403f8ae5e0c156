"""Images and their labels."""

import lumen
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split


def augment(image: Tensor) -> Tensor:
    """Return an image of shape `(channels, height, width)` at a random place and with a random contrast."""
    _, height, width = image.shape
    top, left = torch.randint(3, (2,)).tolist()
    moved = F.pad(image, (1, 1, 1, 1))[:, top : top + height, left : left + width]
    return moved * torch.empty(1).uniform_(0.8, 1.2)


class Augmented(Dataset):
    """Images that look different in each epoch. Lumen seeds the random numbers of each image, also in workers."""

    def __init__(self, samples: Dataset):
        self.samples = samples

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return an augmented image and its label."""
        image, label = self.samples[index]
        return augment(image), label


class Digits(lumen.DataModule):
    """The 1797 handwritten digits of scikit-learn: 80 % for training, 10 % for validation, 10 % for the test.

    A batch is `[images, labels]`: float32 of shape `(batch, 1, 8, 8)`, white on 0, and int64 of shape `(batch,)`.

    Args:
        batch_size: Number of images in a batch.
        augment: True to augment the training images.
        split: Seed of the random split into training, validation and test.
    """

    channels, classes = 1, 10  # The model takes both values from the data module.

    def __init__(self, batch_size: int = 64, *, augment: bool = True, split: int = 0):
        super().__init__()
        self.batch_size, self.augment, self.split = batch_size, augment, split

    def setup(self, stage: str) -> None:
        """Read and split the images. Your own images can be any `torch.utils.data.Dataset` of (image, label)."""
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        samples = TensorDataset(images, torch.tensor(digits.target))
        generator = torch.Generator().manual_seed(self.split)
        train, self.val, self.test = random_split(samples, [0.8, 0.1, 0.1], generator)
        self.train = Augmented(train) if self.augment else train

    def train_dataloader(self) -> DataLoader:
        """Return the training images, shuffled."""
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """Return the validation images, which choose the best checkpoint."""
        return DataLoader(self.val, self.batch_size)

    def test_dataloader(self) -> DataLoader:
        """Return the test images, which choose nothing."""
        return DataLoader(self.test, self.batch_size)

    def predict_dataloader(self) -> DataLoader:
        """Return the test images."""
        return self.test_dataloader()
