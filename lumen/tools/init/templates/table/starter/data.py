"""A table: rows of numbers, and the class of each."""

import csv
from functools import cached_property

import lumen
import torch
from torch.utils.data import DataLoader, TensorDataset, random_split


class Table(lumen.DataModule):
    """The rows of a CSV file; of ten, six are for training, two for validation, two for the test.

    A batch is `[rows, labels]`: float32 of shape `(batch, features)`, and int64 of shape `(batch,)`.

    Args:
        path: A CSV file whose first line has the names of its columns, which are numbers but for one.
        target: The column that has the class.
        batch_size: Rows in a batch.
        split: Seed that says which rows are for what.
    """

    def __init__(self, path: str, target: str, batch_size: int = 16, split: int = 0):
        super().__init__()
        self.path, self.target, self.batch_size, self.split = path, target, batch_size, split

    @cached_property
    def lines(self) -> list[dict[str, str]]:
        """The file, line by line."""
        with open(self.path, newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    @cached_property
    def names(self) -> list[str]:
        """The names of the classes; the one at position i has the label i."""
        return sorted({line[self.target] for line in self.lines})

    @property
    def classes(self) -> int:
        """Number of classes. The model takes it from here, and `features` too."""
        return len(self.names)

    @property
    def features(self) -> int:
        """Numbers in a row."""
        return len(self.lines[0]) - 1

    def setup(self, stage: str) -> None:
        """Deal the rows."""
        rows = [[float(text) for name, text in line.items() if name != self.target] for line in self.lines]
        labels = [self.names.index(line[self.target]) for line in self.lines]
        samples = TensorDataset(torch.tensor(rows), torch.tensor(labels))
        generator = torch.Generator().manual_seed(self.split)
        self.train, self.val, self.test = random_split(samples, [0.6, 0.2, 0.2], generator)

    def train_dataloader(self) -> DataLoader:
        """Training rows, shuffled."""
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """Validation rows, by which the best checkpoint is chosen."""
        return DataLoader(self.val, self.batch_size)

    def test_dataloader(self) -> DataLoader:
        """Test rows, by which nothing is chosen."""
        return DataLoader(self.test, self.batch_size)

    def predict_dataloader(self) -> DataLoader:
        """The test rows again."""
        return self.test_dataloader()
