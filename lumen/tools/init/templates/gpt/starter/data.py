"""Text, in blocks of characters."""

from functools import cached_property
from pathlib import Path

import lumen
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset


class Text(lumen.DataModule):
    """Blocks of characters, and the same blocks one character later; the last tenth of the text is for validation.

    A batch is `[inputs, targets]`, both int64 of shape `(batch, block_size)`; to predict, it is the prompt alone.

    Args:
        path: A text file in UTF-8. Default: what Python's own `help()` says of the language.
        block_size: Characters in a block, which is as far as the model looks back.
        batch_size: Blocks in a batch.
        prompt: What `lumen predict` continues; its characters must occur in the text.
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
        """All characters that occur; the one at position i has the number i."""
        return "".join(sorted(set(self.text)))

    @property
    def vocab_size(self) -> int:
        """Number of characters. The model takes it from here, and `block_size` too."""
        return len(self.characters)

    def encode(self, text: str) -> Tensor:
        """Turn characters into their numbers, int64 of shape `(len(text),)`."""
        number = {character: i for i, character in enumerate(self.characters)}
        return torch.tensor([number[character] for character in text])

    def decode(self, ids: Tensor) -> str:
        """Turn numbers, of shape `(length,)`, back into text."""
        return "".join(self.characters[i] for i in ids.tolist())

    def setup(self, stage: str) -> None:
        """Cut the text: a training block may begin at any character, those of validation lie side by side."""
        ids = self.encode(self.text)
        cut = len(ids) * 9 // 10
        self.train = self.blocks(ids[:cut], step=1)
        self.val = self.blocks(ids[cut:], step=self.block_size)

    def blocks(self, ids: Tensor, step: int) -> TensorDataset:
        """All blocks that begin `step` characters after each other, with their targets."""
        windows = ids.unfold(0, self.block_size + 1, step)
        return TensorDataset(windows[:, :-1], windows[:, 1:])

    def train_dataloader(self) -> DataLoader:
        """Training blocks, shuffled."""
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """Validation blocks."""
        return DataLoader(self.val, self.batch_size)

    def predict_dataloader(self) -> DataLoader:
        """The prompt."""
        return DataLoader([self.encode(self.prompt)])
