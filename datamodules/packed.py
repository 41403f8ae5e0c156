"""Surnames on request, packed: texts of different lengths side by side in rows, with hardly any padding."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from datamodules.surnames import Surnames
from lumen.errors import DataError

END = 0


class PackedSurnames(Surnames):
    """The names of `Surnames`, each behind the request for it: ``Finnish: Virtanen``.

    A sample is a name; a batch is the dictionary that `pack` makes of several.

    Args:
        row: Tokens in a row; no text may be longer.
        request_weight: What a token of a request counts in the loss; one of a name counts 1.
        options: Those of `datamodules.surnames.Surnames`.
    """

    def __init__(self, row: int = 128, request_weight: float = 0.0, **options: Any):
        super().__init__(**options)
        self.save_hyperparameters()

    def train_dataloader(self) -> DataLoader:
        """The training names, shuffled one by one and packed batch by batch."""
        return self.loader(self.train, self.hparams.batch_size, shuffle=True, collate_fn=self.collate)

    def val_dataloader(self) -> DataLoader:
        """The validation names, packed."""
        return self.loader(self.val, self.hparams.batch_size, collate_fn=self.collate)

    def predict_dataloader(self) -> DataLoader:
        """A request for each country."""
        return DataLoader([request(origin) for origin in self.origins], batch_size=1, collate_fn=lambda texts: texts[0])

    def collate(self, samples: list[tuple[str, int]]) -> dict[str, Any]:
        """Write the names as texts, and pack these."""
        texts = [(request(self.origins[origin]), [*name.encode(), END]) for name, origin in samples]
        return pack(texts, self.hparams.row, self.hparams.request_weight)


def request(origin: str) -> list[int]:
    """The tokens that ask for a name, bytes."""
    return list(f"{origin}: ".encode())


def pack(texts: list[tuple[list[int], list[int]]], row: int, request_weight: float = 0.0) -> dict[str, Any]:
    """Lay texts into as few rows as they fit in when each goes to the first that has room, the longest first.

    Args:
        texts: Pairs of a request and its answer, as tokens; neither is empty.
        row: Tokens in a row.
        request_weight: What a token of a request counts; one of an answer counts 1.

    Returns:
        ``ids``, ``targets`` (the token after each), ``positions`` (from 0 in each text) and ``texts`` (whose each token
        is, 0 is padding), all int64 of shape ``(rows, row)``; ``weights`` of the targets, float32 of that shape; and
        ``weight``, their sum, a float.

    Raises:
        DataError: A text is longer than a row.
    """
    rows: list[list[tuple[list[int], int]]] = []
    for asked, answer in sorted(texts, key=lambda text: -len(text[0]) - len(text[1])):
        length = len(asked) + len(answer) - 1  # what is read; the last token is only written
        if length > row:
            raise DataError(f"a text has {length} tokens, a row has {row}. Make data.row larger, or cut the text.")
        places = (each for each in rows if sum(len(ids) - 1 for ids, _ in each) + length <= row)
        place = next(places, None)
        if place is None:
            rows.append(place := [])
        place.append((asked + answer, len(asked)))
    batch = {name: torch.zeros(len(rows), row, dtype=torch.int64) for name in ("ids", "targets", "positions", "texts")}
    weights = torch.zeros(len(rows), row)
    for number, texts_of_row in enumerate(rows):
        at = 0
        for text, (ids, asked_length) in enumerate(texts_of_row, start=1):
            here = slice(at, at := at + len(ids) - 1)
            batch["ids"][number, here] = torch.tensor(ids[:-1])
            batch["targets"][number, here] = torch.tensor(ids[1:])
            batch["positions"][number, here] = torch.arange(len(ids) - 1)
            batch["texts"][number, here] = text
            weights[number, here] = weights_of(len(ids) - 1, asked_length, request_weight)
    return batch | {"weights": weights, "weight": weights.sum().item()}


def weights_of(length: int, asked: int, request_weight: float) -> Tensor:
    """Weights of the targets of a text: the first ``asked - 1`` are of the request."""
    return torch.where(torch.arange(length) < asked - 1, request_weight, 1.0)
