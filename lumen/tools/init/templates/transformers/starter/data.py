"""Texts and their kinds."""

import unicodedata
from functools import cached_property

import lumen
import torch
from torch import Tensor
from torch.utils.data import DataLoader, random_split
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerBase

KINDS = {"L": "letter", "M": "mark", "N": "number", "P": "punctuation", "S": "symbol"}


class Names(lumen.DataModule):
    """Names of Unicode characters, such as SNOWMAN, with their kinds as labels; a tenth is for validation.

    A batch is a dictionary of int64: `input_ids` and `attention_mask` of shape `(batch, time)`, `labels` of `(batch,)`.

    Args:
        tokenizer: A name or a directory for `from_pretrained`. Default: each byte of a text is a token.
        max_length: Largest number of tokens of a text. Longer texts are truncated.
        batch_size: Number of texts in a batch.
        text: Text whose kind `lumen predict` predicts.
        split: Seed of the random split into training and validation.
    """

    kinds = tuple(KINDS.values())
    classes = len(kinds)  # The model takes this value and `vocab_size` from the data module.

    def __init__(
        self,
        tokenizer: str | None = None,
        max_length: int = 48,
        batch_size: int = 64,
        text: str = "SNOWMAN",
        split: int = 0,
    ):
        super().__init__()
        self.tokenizer_name, self.max_length, self.text = tokenizer, max_length, text
        self.batch_size, self.split = batch_size, split

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the texts."""
        name = self.tokenizer_name
        return ByT5Tokenizer() if name is None else AutoTokenizer.from_pretrained(name)

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return len(self.tokenizer)

    def setup(self, stage: str) -> None:
        """Read and split the texts. Your own texts can be any sequence of (text, label)."""
        letters, characters = list(KINDS), map(chr, range(0x3000))
        named = [(unicodedata.name(each, ""), unicodedata.category(each)[0]) for each in characters]
        samples = [(name, letters.index(letter)) for name, letter in named if name and letter in letters]
        self.train, self.val = random_split(samples, [0.9, 0.1], torch.Generator().manual_seed(self.split))

    def tokenize(self, texts: list[str]) -> dict[str, Tensor]:
        """Return a batch of texts without labels, padded to the longest text."""
        return self.tokenizer(texts, padding=True, truncation=True, max_length=self.max_length, return_tensors="pt")

    def collate(self, samples: list[tuple[str, int]]) -> dict[str, Tensor]:
        """Return a batch of texts and their labels."""
        texts, labels = zip(*samples, strict=True)
        return {**self.tokenize(list(texts)), "labels": torch.tensor(labels)}

    def train_dataloader(self) -> DataLoader:
        """Return the training texts, shuffled."""
        return DataLoader(self.train, self.batch_size, shuffle=True, collate_fn=self.collate)

    def val_dataloader(self) -> DataLoader:
        """Return the validation texts."""
        return DataLoader(self.val, self.batch_size, collate_fn=self.collate)

    def predict_dataloader(self) -> DataLoader:
        """Return the text to predict."""
        return DataLoader([self.text], collate_fn=self.tokenize)
