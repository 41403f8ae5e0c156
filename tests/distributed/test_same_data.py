"""Data that differs between ranks is refused before the first step: splits, shuffles and shards of the user."""

import os
import random
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
import torch.distributed as dist
from datasets import Dataset as HuggingFaceSet
from datasets.distributed import split_dataset_by_node
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

import lumen
from lumen.errors import DataError
from tests.helpers.tasks import bare_trainer

SAMPLES = 40
NAMES = [f"class_{number}" for number in range(10)]


class Kept(Dataset):
    """Data set of numbers from 0, with one other attribute of any kind."""

    def __init__(self, kept, samples=SAMPLES):
        self.kept, self.samples = kept, samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        return torch.tensor([float(index)])


@dataclass
class Record:
    path: str
    label: int


class Shards(IterableDataset):
    """Stream whose first sample does not reveal that its shards are in a different order."""

    def __init__(self, names):
        self.names = names

    def __iter__(self):
        return iter(torch.zeros(8, 1))


class Sum(lumen.TaskModule):
    """Minimal task that trains and evaluates on any batch."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch):
        return self.weight.square()

    def validation_step(self, batch):
        self.log("val_loss", self.weight)

    def test_step(self, batch):
        self.log("test_loss", self.weight)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def make_unseeded_generator(rank):
    """Return a generator with different numbers on each rank, like an unseeded one."""
    return random.Random(rank)


def shuffle_items(items, rank):
    items = list(items)
    make_unseeded_generator(rank).shuffle(items)
    return items


def split(rank, of_val=0):
    numbers = TensorDataset(torch.arange(float(SAMPLES)))
    return random_split(numbers, [30, 10], torch.Generator().manual_seed(rank))[of_val]


def collate_with(vocabulary):
    def collate(samples):
        return torch.stack(samples) * len(vocabulary)

    return collate


def hugging_face():
    return HuggingFaceSet.from_dict({"x": list(range(SAMPLES))}).with_format("torch")


#: Data of each rank, by the cause of the difference, and where Lumen finds the difference.
DIFFERENT = {
    "random_split": (lambda rank: split(rank), "dataset.indices"),
    "a permutation of indices": (lambda rank: Kept(torch.randperm(SAMPLES)), "dataset.kept"),
    "numpy indices": (lambda rank: Kept(np.random.default_rng(rank).permutation(SAMPLES)), "dataset.kept"),
    "random data": (lambda rank: TensorDataset(torch.randn(SAMPLES, 3, 8, 8) + rank), "dataset.tensors.0"),
    "a list of samples": (lambda rank: [(torch.ones(3) * rank, 1)] * SAMPLES, "dataset"),
    "os.listdir": (lambda rank: Kept(shuffle_items([Path("data") / name for name in NAMES], rank)), "dataset.kept"),
    "samples of an ImageFolder": (
        lambda rank: Kept(shuffle_items([(f"data/{n}.png", n) for n in range(SAMPLES)], rank)),
        "dataset.kept",
    ),
    "a label map from a set": (
        lambda rank: Kept({name: number for number, name in enumerate(shuffle_items(NAMES, rank))}),
        "dataset.kept",
    ),
    "rows of pandas": (lambda rank: Kept(pandas.DataFrame({"x": range(SAMPLES)}).sample(frac=1)), "dataset.kept"),
    "train_test_split": (lambda rank: hugging_face().train_test_split(10)["train"], "dataset"),
    "split_dataset_by_node": (lambda rank: split_dataset_by_node(hugging_face(), rank, 2), "dataset"),
    "files of each rank": (lambda rank: Kept([f"{n}.png" for n in range(rank, 2 * SAMPLES, 2)]), "dataset.kept"),
    "records": (
        lambda rank: Kept(shuffle_items([Record(f"{n}.png", n) for n in range(SAMPLES)], rank)),
        "dataset.kept",
    ),
    "a sampler's indices": (
        lambda rank: {"sampler": SubsetRandomSampler(shuffle_items(range(SAMPLES), rank)[:30])},
        "sampler.indices",
    ),
    "files in an object": (lambda rank: Kept(Kept(shuffle_items(NAMES, rank))), "dataset.kept.kept"),
    "a stream's shards": (lambda rank: Shards(shuffle_items(NAMES, rank)), "dataset.names"),
    "weights of a sampler": (
        lambda rank: {"sampler": WeightedRandomSampler([1.0 + rank, *[1.0] * (SAMPLES - 1)], SAMPLES)},
        "sampler.weights",
    ),
    "a vocabulary of collate": (
        lambda rank: {"collate_fn": collate_with(shuffle_items(NAMES, rank))},
        "collate_fn.vocabulary",
    ),
}


def make_loader(kind, rank):
    made = DIFFERENT[kind][0](rank)
    options = made if isinstance(made, dict) else {}
    return DataLoader(Kept(None) if isinstance(made, dict) else made, 4, **options)


def catch_fit_error(tmp_path, kind):
    torch.manual_seed(dist.get_rank())
    np.random.seed(dist.get_rank())
    return catch_error(tmp_path, lambda trainer: trainer.fit(Sum(), make_loader(kind, dist.get_rank())))


def catch_error(tmp_path, call, **options):
    try:
        call(bare_trainer(tmp_path, devices=2, max_steps=1, **options))
    except DataError as error:
        return str(error)
    return None


@pytest.mark.parametrize("kind", DIFFERENT)
def test_data_that_differs_per_rank_is_refused(group, tmp_path, kind):
    first, second = group(2).run(catch_fit_error, tmp_path, kind)
    assert first == second
    assert f"rank 1 and rank 0 hold different data: {DIFFERENT[kind][1]} of the training data has" in first
    assert "lumen.seed_everything(1)" in first


def catch_evaluation_errors(tmp_path):
    same, differs = DataLoader(Kept(None), 4), DataLoader(split(dist.get_rank(), 1), 4)
    nested = {"a": same, "b": [DataLoader(Kept(None), 4), differs]}
    return [
        catch_error(tmp_path, lambda trainer: trainer.fit(Sum(), same, differs)),
        catch_error(tmp_path, lambda trainer: trainer.test(Sum(), [same, differs])),
        catch_error(tmp_path, lambda trainer: trainer.fit(Sum(), nested)),
    ]


def test_data_of_each_loader_is_compared(group, tmp_path):
    places = ["validation data", "test data 1", "training data 2"]
    for errors in group(2).run(catch_evaluation_errors, tmp_path):
        for error, place in zip(errors, places, strict=True):
            assert f"dataset.indices of the {place} has 10 items" in error


def fit_on_equal_data(tmp_path):
    """Train on the same samples on both ranks; other attributes may differ."""
    rank = dist.get_rank()
    files = Kept([f"/scratch/{rank}/{name}.png" for name in NAMES])
    files.rank, files.device, files.generator = rank, torch.device("cpu"), make_unseeded_generator(rank)
    files.model, files.library = torch.nn.Linear(2, 2), os
    files.paths = {name: name for name in shuffle_items(NAMES, rank)}  # a lookup table has no order
    files.settings = {"rank": rank, "world_size": 2}
    files.devices = ["cuda:0", "cuda:1"][:: 1 - 2 * rank]
    files.cache = [torch.ones(2) if index % 2 == rank else None for index in range(SAMPLES)]
    files.recent = dict.fromkeys(range(SAMPLES - rank), "read")
    files.recently = deque(shuffle_items(NAMES, rank))
    files.unreadable = Unreadable(NAMES)
    return outcome_of_fit(tmp_path, files)


class Unreadable(list):
    def __iter__(self):
        raise RuntimeError("read by its own method alone")


def outcome_of_fit(tmp_path, data):
    """Return the error of a fit, and its warnings about data that differs."""
    messages = []
    lumen.console.logger.addFilter(keep := lambda record: messages.append(record.getMessage()) or True)
    try:
        error = catch_error(tmp_path, lambda trainer: trainer.fit(Sum(), DataLoader(data, 4)), log_level="WARNING")
    finally:
        lumen.console.logger.removeFilter(keep)
    return error, [message for message in messages if "hold different data" in message]


def test_what_differs_next_to_equal_samples_is_allowed(group, tmp_path):
    """Ranks of real programs differ in folders, caches, settings, devices and lookup tables."""
    assert group(2).run(fit_on_equal_data, tmp_path) == [(None, []), (None, [])]


def warnings_of_other_collections(tmp_path):
    return outcome_of_fit(tmp_path, Kept([f"node-{dist.get_rank()}", "port"]))


def test_collections_that_are_no_samples_are_warned_of(group, tmp_path):
    for error, messages in group(2).run(warnings_of_other_collections, tmp_path):
        assert error is None
        assert [message.partition(" has ")[0] for message in messages] == [
            "rank 1 and rank 0 hold different data: dataset.kept of the training data"
        ]
