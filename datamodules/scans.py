"""Handwritten digits of other writers and another scanner, from scikit-learn."""

from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

from datamodules.loading import Loading
from lumen.errors import DataError


class Scans(Loading):
    """1,797 images of 8 x 8 pixels, enlarged to 28 x 28 as in MNIST, of which a few are for training.

    The images are the "Optical Recognition of Handwritten Digits" of E. Alpaydin and C. Kaynak, under the licence
    CC BY 4.0.

    A batch is ``[images, labels]``: float32 of shape ``(batch, 1, 28, 28)`` in [0, 1], and int64 of shape ``(batch,)``.

    Args:
        labelled: Number of training images, as if labels were expensive. All other images are for validation.
        batch_size: Number of images in a training batch.
        loading: Options of the loaders; see `datamodules.loading.Loading`.
    """

    def __init__(self, labelled: int = 100, batch_size: int = 16, **loading: Any):
        super().__init__(**loading)
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        """Read, enlarge and split the images, equally in every run."""
        images, h = scans(), self.hparams
        split = torch.Generator().manual_seed(0)
        self.train, self.val = random_split(images, [h.labelled, len(images) - h.labelled], split)

    def train_dataloader(self) -> DataLoader:
        """Return the training images, shuffled."""
        return self.loader(self.train, self.hparams.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """Return all other images."""
        return self.loader(self.val, batch_size=256)

    def predict_dataloader(self) -> DataLoader:
        """Return the validation images."""
        return self.val_dataloader()


def scans() -> TensorDataset:
    """Return all images and their digits, 20 pixels high with a black border, as in MNIST.

    Raises:
        DataError: The package is missing.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError("the images come with scikit-learn. Run `pip install scikit-learn`.") from error
    pixels, digits = load_digits(return_X_y=True)
    images = torch.tensor(pixels).float().view(-1, 1, 8, 8) / 16
    enlarged = F.interpolate(images, size=(20, 20), mode="bilinear")
    return TensorDataset(F.pad(enlarged, (4, 4, 4, 4)), torch.tensor(digits))
