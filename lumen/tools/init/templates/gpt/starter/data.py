"""Text, in blocks of characters."""

from functools import cached_property
from pathlib import Path

import lumen
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset


class Text(lumen.DataModule):
    """Blocks of characters, with the same blocks one character later as targets.

    The last tenth of the text is for validation. A batch is `[inputs, targets]`, both int64 of shape
    `(batch, block_size)`. A batch to predict is the prompt alone.

    Args:
        path: A text file in UTF-8. Default: the texts of Python's own `help()` on the language.
        block_size: Number of characters in a block. The model looks back as far.
        batch_size: Number of blocks in a batch.
        prompt: Text that `lumen predict` continues. All its characters must occur in the text of `path`.
    """

    def __init__(self, path: str | None = None, block_size: int = 64, batch_size: int = 32, prompt: str = "The "):
        super().__init__()
        self.path, self.block_size, self.batch_size, self.prompt = path, block_size, batch_size, prompt

    @cached_property
    def text(self) -> str:
        """The whole text."""
        if self.path is not None:
            return Path(self.path).read_text(encoding="utf-8")
        from pydoc_data.topics import topics

        return "\n".join(topics.values())

    @cached_property
    def characters(self) -> str:
        """All distinct characters, sorted. The position of a character is its id."""
        return "".join(sorted(set(self.text)))

    @property
    def vocab_size(self) -> int:
        """Number of distinct characters. The model takes this value and `block_size` from the data module."""
        return len(self.characters)

    def encode(self, text: str) -> Tensor:
        """Return the ids of characters, int64 of shape `(len(text),)`."""
        ids = {character: i for i, character in enumerate(self.characters)}
        return torch.tensor([ids[character] for character in text])

    def decode(self, ids: Tensor) -> str:
        """Return the text of ids of shape `(length,)`."""
        return "".join(self.characters[i] for i in ids.tolist())

    def setup(self, stage: str) -> None:
        """Split the text. Training blocks begin at every character; validation blocks do not overlap."""
        ids = self.encode(self.text)
        cut = len(ids) * 9 // 10
        self.train = self.make_blocks(ids[:cut], stride=1)
        self.val = self.make_blocks(ids[cut:], stride=self.block_size)

    def make_blocks(self, ids: Tensor, stride: int) -> TensorDataset:
        """Return blocks that begin `stride` characters apart, with their targets."""
        windows = ids.unfold(0, self.block_size + 1, stride)
        return TensorDataset(windows[:, :-1], windows[:, 1:])

    def train_dataloader(self) -> DataLoader:
        """Return the training blocks, shuffled."""
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """Return the validation blocks."""
        return DataLoader(self.val, self.batch_size)

    def predict_dataloader(self) -> DataLoader:
        """Return the prompt."""
        return DataLoader([self.encode(self.prompt)])
