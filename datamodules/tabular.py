"""Two small tables of scikit-learn, one for classification and one for regression."""

from functools import cached_property
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, TensorDataset, random_split

from datamodules.loading import Loading
from lumen.errors import DataError


class Tabular(Loading):
    """Rows of raw numbers with targets: 60 % for training, 20 % for validation, 20 % for the test.

    A batch is ``[rows, targets]``: float32 of shape ``(batch, features)``, in the units of the table, and float32 of
    shape ``(batch,)``.

    Args:
        table: ``breast_cancer``: 30 measurements of the cells in 569 biopsies; the target is 1 if malignant, else 0.
            ``diabetes``: 10 measurements of 442 patients; the target is the progression within a year, 25 to 346.
        batch_size: Number of rows in a batch.
        split: Seed of the split: which rows are for training, validation and test.
        loading: Options of the loaders; see `datamodules.loading.Loading`.
    """

    def __init__(
        self, table: Literal["breast_cancer", "diabetes"], batch_size: int = 32, split: int = 0, **loading: Any
    ):
        super().__init__(**loading)
        self.save_hyperparameters()

    @cached_property
    def rows(self) -> TensorDataset:
        """The whole table, which is read at the first use."""
        try:
            from sklearn.datasets import load_breast_cancer, load_diabetes
        except ImportError as error:
            raise DataError("the tables come with scikit-learn. Run `pip install scikit-learn`.") from error
        if self.hparams.table == "diabetes":
            rows, targets = load_diabetes(return_X_y=True, scaled=False)
        else:
            rows, benign = load_breast_cancer(return_X_y=True)
            targets = 1 - benign
        return TensorDataset(torch.tensor(rows).float(), torch.tensor(targets).float())

    @property
    def features(self) -> int:
        """Number of features in a row. The models take ``features`` from the data module."""
        return self.rows.tensors[0].shape[1]

    def setup(self, stage: str) -> None:
        """Split the rows, equally in every run with the same ``split``."""
        generator = torch.Generator().manual_seed(self.hparams.split)
        self.train, self.val, self.test = random_split(self.rows, [0.6, 0.2, 0.2], generator)

    def train_dataloader(self) -> DataLoader:
        """Return the training rows, shuffled."""
        return self.loader(self.train, self.hparams.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """Return the validation rows, which choose the best checkpoint."""
        return self.loader(self.val, self.hparams.batch_size)

    def test_dataloader(self) -> DataLoader:
        """Return the test rows, which choose nothing."""
        return self.loader(self.test, self.hparams.batch_size)

    def predict_dataloader(self) -> DataLoader:
        """Return the test rows."""
        return self.test_dataloader()
