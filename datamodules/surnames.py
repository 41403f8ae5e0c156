"""Surnames of eight countries, from the package Faker."""

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
    """About 8,000 surnames and their countries; a fifth is for validation.

    A name is a sequence of UTF-8 bytes, so no vocabulary is needed and no letter is unknown. Names have different
    lengths; `collate` pads the shorter names of a batch.

    A batch is ``(letters, lengths, labels)``: bytes, int64 of shape ``(batch, longest)``, padded with 0; the number of
    bytes of each name, a list on the host, as packing needs it; and positions in ``origins``, int64 of shape
    ``(batch,)``. A prediction batch is ``(letters, lengths)``.

    Args:
        batch_size: Number of names in a batch.
        names: Names whose origins ``predict`` finds.
        labelled: Number of training names, as if labels were expensive, or None for all.
        only: The origin of all names, one of ``origins``, or None for all origins.
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
        """Split the names, equally in every run."""
        names, only = labelled_names(), self.hparams.only
        parts = random_split(names, [0.8, 0.2], torch.Generator().manual_seed(0))  # before `only` selects names
        train, val = ([i for i in part.indices if only in (None, self.origins[names[i][1]])] for part in parts)
        self.train, self.val = Subset(names, train[: self.hparams.labelled]), Subset(names, val)

    def train_dataloader(self) -> DataLoader:
        """Return the training names, shuffled."""
        return self.loader(self.train, self.hparams.batch_size, shuffle=True, collate_fn=collate)

    def val_dataloader(self) -> DataLoader:
        """Return the validation names."""
        return self.loader(self.val, self.hparams.batch_size, collate_fn=collate)

    def predict_dataloader(self) -> DataLoader:
        """Return the names whose origins to find."""
        if not all(self.hparams.names):
            raise DataError("data.names has an empty name. Give each name at least one letter.")
        return DataLoader(self.hparams.names, self.hparams.batch_size, collate_fn=pad)


def collate(samples: list[tuple[str, int]]) -> tuple[Tensor, list[int], Tensor]:
    """Make a batch of names and the positions of their origins."""
    names, labels = zip(*samples, strict=True)
    return *pad(names), torch.tensor(labels)


def pad(names: Sequence[str]) -> tuple[Tensor, list[int]]:
    """Return names as rows of bytes, padded with 0 to the longest name.

    Returns:
        The bytes, int64 of shape ``(names, longest)``, and the number of bytes of each name.
    """
    rows = [torch.tensor(list(name.encode())) for name in names]
    return pad_sequence(rows, batch_first=True), [len(row) for row in rows]


def labelled_names() -> list[tuple[str, int]]:
    """Return the surnames of exactly one country, with its position in ``LOCALES``, sorted.

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
