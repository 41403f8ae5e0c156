"""A table: rows of numbers and their classes."""

import csv
from functools import cached_property

import lumen
import torch
from torch.utils.data import DataLoader, TensorDataset, random_split


class Table(lumen.DataModule):
    """The rows of a CSV file: 60 % for training, 20 % for validation, 20 % for the test.

    A batch is `[rows, labels]`: float32 of shape `(batch, features)`, and int64 of shape `(batch,)`.

    Args:
        path: A CSV file with the names of its columns in the first line. All columns but `target` hold numbers.
        target: Name of the column that holds the class.
        batch_size: Number of rows in a batch.
        split: Seed of the random split into training, validation and test.
    """

    def __init__(self, path: str, target: str, batch_size: int = 16, split: int = 0):
        super().__init__()
        self.path, self.target, self.batch_size, self.split = path, target, batch_size, split

    @cached_property
    def lines(self) -> list[dict[str, str]]:
        """The lines of the file, as texts by the names of the columns."""
        with open(self.path, newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    @cached_property
    def names(self) -> list[str]:
        """The names of the classes, sorted. The position of a name is its label."""
        return sorted({line[self.target] for line in self.lines})

    @property
    def classes(self) -> int:
        """Number of classes. The model takes this value and `features` from the data module."""
        return len(self.names)

    @property
    def features(self) -> int:
        """Number of features in a row."""
        return len(self.lines[0]) - 1

    def setup(self, stage: str) -> None:
        """Read and split the rows."""
        rows = [[float(text) for name, text in line.items() if name != self.target] for line in self.lines]
        labels = [self.names.index(line[self.target]) for line in self.lines]
        samples = TensorDataset(torch.tensor(rows), torch.tensor(labels))
        generator = torch.Generator().manual_seed(self.split)
        self.train, self.val, self.test = random_split(samples, [0.6, 0.2, 0.2], generator)

    def train_dataloader(self) -> DataLoader:
        """Return the training rows, shuffled."""
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """Return the validation rows, which choose the best checkpoint."""
        return DataLoader(self.val, self.batch_size)

    def test_dataloader(self) -> DataLoader:
        """Return the test rows, which choose nothing."""
        return DataLoader(self.test, self.batch_size)

    def predict_dataloader(self) -> DataLoader:
        """Return the test rows."""
        return self.test_dataloader()
