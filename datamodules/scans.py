"""Handwritten digits again, by other people and from another scanner; they come with scikit-learn."""

from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

from datamodules.loading import Loading
from lumen.errors import DataError


class Scans(Loading):
    """1,797 images of 8 x 8 pixels, enlarged to the 28 x 28 of MNIST; only a few of them are for training.

    They are the "Optical Recognition of Handwritten Digits" of E. Alpaydin and C. Kaynak, under the licence CC BY 4.0.

    A batch is ``[images, labels]``: float32 of shape ``(batch, 1, 28, 28)`` in [0, 1], and int64 of shape ``(batch,)``.

    Args:
        labelled: Images for training, as if somebody had to label them; all others are for validation.
        batch_size: Images in a training batch.
        loading: Options of the loaders; see `datamodules.loading.Loading`.
    """

    def __init__(self, labelled: int = 100, batch_size: int = 16, **loading: Any):
        super().__init__(**loading)
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        """Read the images, enlarge them and deal them, in every run the same."""
        images, h = scans(), self.hparams
        split = torch.Generator().manual_seed(0)
        self.train, self.val = random_split(images, [h.labelled, len(images) - h.labelled], split)

    def train_dataloader(self) -> DataLoader:
        """The few images for training, shuffled."""
        return self.loader(self.train, self.hparams.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """All others."""
        return self.loader(self.val, batch_size=256)

    def predict_dataloader(self) -> DataLoader:
        """Return the validation images again."""
        return self.val_dataloader()


def scans() -> TensorDataset:
    """All images and their digits; like those of MNIST 20 pixels high, with a black border.

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
