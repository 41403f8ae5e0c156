"""A user's data set with everything random in it keyed: what a sample draws depends on nothing but its place."""

from __future__ import annotations

from typing import Any, NamedTuple, final

from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from lumen.random import Domain, make_key, seed_generators


class Draw(NamedTuple):
    """What a worker is handed: everything that a micro-batch's samples and their randomness depend on.

    Attributes:
        epoch: Of the order.
        start: Position of the first sample in the epoch.
        indices: Of the samples in the data set: whatever it takes.
        by_place: An index may come twice in an epoch, so samples are keyed by position instead of by index.
    """

    epoch: int
    start: int
    indices: list[Any]
    by_place: bool


def can_draw(dataset: Any) -> bool:
    """Whether fetching from a data set may use random numbers; `draws_randomness = False` on it says no."""
    if type(dataset) is Subset:
        return can_draw(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return any(can_draw(part) for part in dataset.datasets)
    return type(dataset) is not TensorDataset and getattr(dataset, "draws_randomness", True)


def _fetches_many(dataset: Any) -> bool:
    """Whether a data set fetches a micro-batch at once in a way of its own; a `Subset` passes on what it is part of."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return hasattr(dataset, "__getitems__")


@final
class KeyedDataset(Dataset[Any]):
    """Fetches a whole micro-batch, with the generators keyed for each sample and then for the collate function.

    Args:
        dataset: The user's.
        seed: Of the run.
        collates: The collate function may use random numbers.
    """

    def __init__(self, dataset: Any, seed: int, collates: bool) -> None:
        self.dataset = dataset
        self.seed = seed
        self.draws = can_draw(dataset)
        self.collates = collates
        self.fetch_many = None if self.draws and not _fetches_many(dataset) else getattr(dataset, "__getitems__", None)

    def __getitem__(self, draw: Draw) -> Any:
        """The one sample of a draw: where the loader does not make batches."""
        return self._fetch(draw)[0]

    def __getitems__(self, draw: Draw) -> list[Any]:
        return self._fetch(draw)

    def _fetch(self, draw: Draw) -> list[Any]:
        if self.fetch_many is not None:
            if self.draws:
                seed_generators(make_key(self.seed, Domain.SAMPLE, draw.epoch, draw.start))
            samples = self.fetch_many(draw.indices)
        elif self.draws:
            samples = []
            for place, index in enumerate(draw.indices, draw.start):
                seed_generators(make_key(self.seed, Domain.SAMPLE, draw.epoch, place if draw.by_place else index))
                samples.append(self.dataset[index])
        else:
            samples = [self.dataset[index] for index in draw.indices]
        if self.collates:
            seed_generators(make_key(self.seed, Domain.COLLATE, draw.epoch, draw.start))
        return samples  # type: ignore[no-any-return]
