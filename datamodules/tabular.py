"""Two small tables that come with scikit-learn: one to classify, one for regression."""

from functools import cached_property
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, TensorDataset, random_split

from datamodules.loading import Loading
from lumen.errors import DataError


class Tabular(Loading):
    """Rows of raw numbers, and what to tell from each; 60 % for training, 20 % for validation, 20 % for the test.

    A batch is ``[rows, targets]``: float32 of shape ``(batch, features)``, in the units of the table, and float32 of
    shape ``(batch,)``.

    Args:
        table: ``breast_cancer``: 30 measurements of the cells in 569 biopsies, and 1 for a malignant one, else 0.
            ``diabetes``: 10 of 442 patients, and how far the disease went on within a year, from 25 to 346.
        batch_size: Rows in a batch.
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
        """The whole table, read when it is first asked for."""
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
        """Numbers in a row; the models get their ``features`` from here."""
        return self.rows.tensors[0].shape[1]

    def setup(self, stage: str) -> None:
        """Deal the rows, the same way in every run with the same ``split``."""
        generator = torch.Generator().manual_seed(self.hparams.split)
        self.train, self.val, self.test = random_split(self.rows, [0.6, 0.2, 0.2], generator)

    def train_dataloader(self) -> DataLoader:
        """The training rows, shuffled."""
        return self.loader(self.train, self.hparams.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """The validation rows, which choose the best checkpoint."""
        return self.loader(self.val, self.hparams.batch_size)

    def test_dataloader(self) -> DataLoader:
        """The test rows, which nothing was chosen by."""
        return self.loader(self.test, self.hparams.batch_size)

    def predict_dataloader(self) -> DataLoader:
        """The test rows again."""
        return self.test_dataloader()
