"""Requests and surnames, packed: several texts in each row, with little padding."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from datamodules.surnames import Surnames
from lumen.errors import DataError

END = 0


class PackedSurnames(Surnames):
    """Names of `Surnames`, each after a request for its country: ``Finnish: Virtanen``.

    A sample is a name. A batch is the dictionary that `pack` returns for several names.

    Args:
        row: Number of tokens in a row. No text may be longer.
        request_weight: Weight of a request's tokens in the loss. Tokens of names have weight 1.
        options: Options of `datamodules.surnames.Surnames`.
    """

    def __init__(self, row: int = 128, request_weight: float = 0.0, **options: Any):
        super().__init__(**options)
        self.save_hyperparameters()

    def train_dataloader(self) -> DataLoader:
        """Return the training names, shuffled, then packed batch by batch."""
        return self.loader(self.train, self.hparams.batch_size, shuffle=True, collate_fn=self.collate)

    def val_dataloader(self) -> DataLoader:
        """Return the validation names, packed."""
        return self.loader(self.val, self.hparams.batch_size, collate_fn=self.collate)

    def predict_dataloader(self) -> DataLoader:
        """Return a request for each country."""
        return DataLoader([request(origin) for origin in self.origins], batch_size=1, collate_fn=lambda texts: texts[0])

    def collate(self, samples: list[tuple[str, int]]) -> dict[str, Any]:
        """Convert names to requests and answers, and pack the texts."""
        texts = [(request(self.origins[origin]), [*name.encode(), END]) for name, origin in samples]
        return pack(texts, self.hparams.row, self.hparams.request_weight)


def request(origin: str) -> list[int]:
    """Return the tokens (bytes) of a request for a name."""
    return list(f"{origin}: ".encode())


def pack(texts: list[tuple[list[int], list[int]]], row: int, request_weight: float = 0.0) -> dict[str, Any]:
    """Pack texts into rows, the longest text first, each into the first row with enough room.

    Args:
        texts: Pairs of a request and its answer, as tokens. Neither is empty.
        row: Number of tokens in a row.
        request_weight: Weight of a request's tokens. Tokens of answers have weight 1.

    Returns:
        ``ids``, ``targets`` (the next tokens), ``positions`` (from 0 in each text) and ``texts`` (the number of each
        token's text, 0 for padding), all int64 of shape ``(rows, row)``; ``weights`` of the targets, float32 of the
        same shape; and ``weight``, the sum of the weights, a float.

    Raises:
        DataError: A text is longer than a row.
    """
    rows: list[list[tuple[list[int], int]]] = []
    for question, answer in sorted(texts, key=lambda text: -len(text[0]) - len(text[1])):
        length = len(question) + len(answer) - 1  # The last token is a target only.
        if length > row:
            raise DataError(f"a text has {length} tokens, a row has {row}. Make data.row larger, or cut the text.")
        places = (each for each in rows if sum(len(ids) - 1 for ids, _ in each) + length <= row)
        place = next(places, None)
        if place is None:
            rows.append(place := [])
        place.append((question + answer, len(question)))
    batch = {name: torch.zeros(len(rows), row, dtype=torch.int64) for name in ("ids", "targets", "positions", "texts")}
    weights = torch.zeros(len(rows), row)
    for number, texts_of_row in enumerate(rows):
        at = 0
        for text, (ids, question_length) in enumerate(texts_of_row, start=1):
            span = slice(at, at := at + len(ids) - 1)
            batch["ids"][number, span] = torch.tensor(ids[:-1])
            batch["targets"][number, span] = torch.tensor(ids[1:])
            batch["positions"][number, span] = torch.arange(len(ids) - 1)
            batch["texts"][number, span] = text
            weights[number, span] = weights_of(len(ids) - 1, question_length, request_weight)
    return batch | {"weights": weights, "weight": weights.sum().item()}


def weights_of(length: int, question_length: int, request_weight: float) -> Tensor:
    """Return the weights of a text's targets, of which the first ``question_length - 1`` belong to the request."""
    return torch.where(torch.arange(length) < question_length - 1, request_weight, 1.0)
