"""Surnames of eight countries, as the package Faker collected them."""

from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Subset, random_split

from datamodules.loading import Loading
from lumen.errors import ConfigError, DataError

LOCALES = {
    "Austrian": "de_AT",
    "Croatian": "hr_HR",
    "Dutch": "nl_NL",
    "Finnish": "fi_FI",
    "Italian": "it_IT",
    "Kenyan": "en_KE",
    "Slovak": "sk_SK",
    "Spanish": "es_ES",
}


class Surnames(Loading):
    """About 8,000 surnames, of which a fifth is for validation, and where they are from.

    A name is a sequence of bytes, its UTF-8: so there is no vocabulary to keep, and no letter is unknown. Names
    differ in length; `collate` pads the shorter ones of a batch.

    A batch is ``(letters, lengths, labels)``: bytes, int64 of shape ``(batch, longest)``, 0 where a name has ended;
    their numbers, a list, which stays on the host, where packing wants it; and positions in ``origins``, int64 of shape
    ``(batch,)``. A prediction batch is ``(letters, lengths)``.

    Args:
        batch_size: Names in a batch.
        names: Of which ``predict`` says where they are from.
        labelled: Names to learn from, as if somebody had to look up where each is from; None for all that there are.
        only: Names of this one of the ``origins`` only; None for those of all.
        loading: Options of the loaders; see `datamodules.loading.Loading`.
    """

    def __init__(
        self,
        batch_size: int = 64,
        names: Sequence[str] = ("Vivaldi", "Cervantes", "Hundertwasser", "Rembrandt", "Sibelius", "Kipchoge"),
        labelled: int | None = None,
        only: str | None = None,
        **loading: Any,
    ):
        super().__init__(**loading)
        self.save_hyperparameters()
        self.origins = list(LOCALES)
        if only not in (None, *self.origins):
            raise ConfigError(f"only: there are no names from {only!r}. Choose one of {', '.join(self.origins)}.")

    def setup(self, stage: str) -> None:
        """Deal the names to training and validation, in every run the same."""
        names, only = labelled_names(), self.hparams.only
        dealt = random_split(names, [0.8, 0.2], torch.Generator().manual_seed(0))  # before any is left out
        train, val = ([i for i in part.indices if only in (None, self.origins[names[i][1]])] for part in dealt)
        self.train, self.val = Subset(names, train[: self.hparams.labelled]), Subset(names, val)

    def train_dataloader(self) -> DataLoader:
        """The training names, shuffled."""
        return self.loader(self.train, self.hparams.batch_size, shuffle=True, collate_fn=collate)

    def val_dataloader(self) -> DataLoader:
        """The validation names."""
        return self.loader(self.val, self.hparams.batch_size, collate_fn=collate)

    def predict_dataloader(self) -> DataLoader:
        """The names to guess at."""
        if not all(self.hparams.names):
            raise DataError("one of the names is empty: there is nothing to read. Give each a letter at least.")
        return DataLoader(self.hparams.names, self.hparams.batch_size, collate_fn=pad)


def collate(samples: list[tuple[str, int]]) -> tuple[Tensor, list[int], Tensor]:
    """Make a batch of names and the positions of their origins."""
    names, labels = zip(*samples, strict=True)
    return *pad(names), torch.tensor(labels)


def pad(names: Sequence[str]) -> tuple[Tensor, list[int]]:
    """Write names below each other, filled up with 0 to the length of the longest.

    Returns:
        Their bytes, int64 of shape ``(names, longest)``; and how many each name has.
    """
    rows = [torch.tensor(list(name.encode())) for name in names]
    return pad_sequence(rows, batch_first=True), [len(row) for row in rows]


def labelled_names() -> list[tuple[str, int]]:
    """The surnames that one of the countries has and no other, and its position in ``LOCALES``; sorted.

    Raises:
        DataError: The package is missing.
    """
    try:
        providers = [import_module(f"faker.providers.person.{locale}").Provider for locale in LOCALES.values()]
    except ImportError as error:
        raise DataError("the names come with the package Faker, which is missing. Run `pip install Faker`.") from error
    countries = [set(provider.last_names) for provider in providers]
    found_in = Counter(name for names in countries for name in names)
    return sorted((name, label) for label, names in enumerate(countries) for name in names if found_in[name] == 1)
