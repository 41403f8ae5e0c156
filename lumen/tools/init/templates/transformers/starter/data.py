"""Texts, and what kind each is."""

import unicodedata
from functools import cached_property

import lumen
import torch
from torch import Tensor
from torch.utils.data import DataLoader, random_split
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerBase

KINDS = {"L": "letter", "M": "mark", "N": "number", "P": "punctuation", "S": "symbol"}


class Names(lumen.DataModule):
    """Names of characters in Unicode, such as SNOWMAN, each with the number of its kind; a tenth is for validation.

    A batch is a dictionary of int64: `input_ids` and `attention_mask` of shape `(batch, time)`, `labels` of `(batch,)`.

    Args:
        tokenizer: A directory or a name that `from_pretrained` takes. Default: a token is a byte.
        longest: Tokens of a text at most; the rest is cut off.
        batch_size: Texts in a batch.
        split: Seed that says which texts are for validation.
    """

    classes = len(KINDS)  # the model takes it from here, and `vocab_size` too

    def __init__(self, tokenizer: str | None = None, longest: int = 48, batch_size: int = 64, split: int = 0):
        super().__init__()
        self.name, self.longest, self.batch_size, self.split = tokenizer, longest, batch_size, split

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """What makes tokens of text."""
        return ByT5Tokenizer() if self.name is None else AutoTokenizer.from_pretrained(self.name)

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return len(self.tokenizer)

    def setup(self, stage: str) -> None:
        """Read the texts and deal them. Your own: any sequence of (text, label)."""
        kinds, characters = list(KINDS), map(chr, range(0x3000))
        named = [(unicodedata.name(each, ""), unicodedata.category(each)[0]) for each in characters]
        samples = [(name, kinds.index(kind)) for name, kind in named if name and kind in kinds]
        self.train, self.val = random_split(samples, [0.9, 0.1], torch.Generator().manual_seed(self.split))

    def collate(self, samples: list[tuple[str, int]]) -> dict[str, Tensor]:
        """Make a batch of some samples, as long as the longest of them."""
        texts, labels = zip(*samples, strict=True)
        tokens = self.tokenizer(
            list(texts), padding=True, truncation=True, max_length=self.longest, return_tensors="pt"
        )
        return {**tokens, "labels": torch.tensor(labels)}

    def train_dataloader(self) -> DataLoader:
        """Training texts, shuffled."""
        return DataLoader(self.train, self.batch_size, shuffle=True, collate_fn=self.collate)

    def val_dataloader(self) -> DataLoader:
        """Validation texts."""
        return DataLoader(self.val, self.batch_size, collate_fn=self.collate)
