"""Loaders of every kind: their samples, random numbers and resume, and the refused ones."""

import math
import multiprocessing
import os
import random
import re
import shutil
import sys
import time
from importlib.util import find_spec
from itertools import count

import datasets
import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info
from torch import nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
    random_split,
)
from torch.utils.data.distributed import DistributedSampler

import lumen
from lumen.data.combined import list_loaders
from lumen.data.rank_checks import digest_batch
from lumen.errors import ConfigError, DataError
from tests.helpers.pages import find_programs
from tests.helpers.streams import Buffered
from tests.helpers.tasks import Saving, Seeing, as_lists, bare_trainer, make_numbers, quiet_trainer, read_batches

# ---------------------------------------------------------------------- samplers and batch samplers of the user


class Counted(Dataset):
    """Data set that counts loaded samples and draws."""

    def __init__(self, samples=20):
        self.loaded = []
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        self.loaded.append(index)
        return index + torch.rand(()).double()


class Sizes(Sampler):
    """Batch sampler with batches of one, two, three, four, one, ... random samples."""

    def __init__(self, samples=20):
        self.samples = samples

    def __iter__(self):
        order = torch.randperm(self.samples).tolist()
        for size in count():
            if not order:
                return
            yield order[: 1 + size % 4]
            del order[: 1 + size % 4]


class Numpy(Sampler):
    """Sampler that draws from its generators: numpy's, new and old."""

    def __init__(self):
        self.new, self.old = np.random.default_rng(), np.random.RandomState()

    def __iter__(self):
        yield from self.new.permutation(10).tolist()
        yield from self.old.permutation(10).tolist()


INDEXED = {
    "weighted": lambda data: DataLoader(data, 4, sampler=WeightedRandomSampler(torch.ones(20), 18)),
    "with replacement": lambda data: DataLoader(data, 4, sampler=RandomSampler(data, replacement=True)),
    "its own generators": lambda data: DataLoader(data, 4, sampler=Numpy()),
    "batches of varying size": lambda data: DataLoader(data, batch_sampler=Sizes()),
    "no batching": lambda data: DataLoader(data, batch_size=None, shuffle=True),
    "shuffled": lambda data: DataLoader(data, 4, shuffle=True),
}


@pytest.mark.parametrize("kind", INDEXED)
def test_resume_loads_no_consumed_samples(tmp_path, kind):
    whole = read_batches(tmp_path, INDEXED[kind](Counted()), max_epochs=2)
    per_epoch, path = len(whole.epochs[0]), tmp_path / "step"
    step = per_epoch + 3
    read_batches(tmp_path, INDEXED[kind](Counted()), max_steps=step, callbacks=[Saving(step, path)])
    data = Counted()
    resumed = read_batches(tmp_path, INDEXED[kind](data), max_epochs=2, resume=path)
    assert as_lists(resumed.epochs[1]) == as_lists(whole.epochs[1])[3:]
    sizes = [torch.as_tensor(batch).numel() for batch in whole.epochs[1][3:]]
    assert len(data.loaded) == sum(sizes) + sizes[0]  # The first batch draws random numbers, so Lumen makes it again.
    assert as_lists(whole.epochs[0]) != as_lists(whole.epochs[1])


def test_repeated_sample_is_augmented_twice(tmp_path):
    class First(Sampler):
        def __iter__(self):
            return iter([0] * 8)

        def __len__(self):
            return 8

    task = read_batches(tmp_path, DataLoader(Counted(), 4, sampler=First()))
    assert len(set(task.samples(0) + task.samples(1))) == 16


@pytest.mark.parametrize("kind", ["weighted", "batches of varying size", "no batching"])
def test_samples_and_draws_are_independent_of_workers(tmp_path, kind):
    expected = read_batches(tmp_path, INDEXED[kind](Counted())).epochs
    with_workers = INDEXED[kind](Counted())
    rebuilt = {"sampler": with_workers.sampler} if with_workers.batch_sampler is None else {}
    batching = {"batch_sampler": with_workers.batch_sampler} if with_workers.batch_sampler else {"batch_size": None}
    found = read_batches(tmp_path, DataLoader(Counted(), num_workers=2, **batching, **rebuilt)).epochs
    assert {epoch: as_lists(found[epoch]) for epoch in found} == {
        epoch: as_lists(expected[epoch]) for epoch in expected
    }


def test_varying_batches_are_weighted_by_samples(tmp_path):
    class Mean(Seeing):
        def training_step(self, batch):
            super().training_step(batch)
            return self.weight * batch[0].double().mean()

    task, data = Mean(), TensorDataset(torch.arange(10.0))
    batches = [[0], [1, 2, 3], [4, 5, 6, 7, 8, 9]]
    bare_trainer(tmp_path, max_epochs=1, accumulate_grad_batches=3).fit(task, DataLoader(data, batch_sampler=batches))
    assert task.weight.item() == pytest.approx(-0.1 * 4.5, rel=1e-6)


def test_endless_sampler_needs_only_a_limit(tmp_path):
    class Endless(Sampler):
        def __iter__(self):
            while True:
                yield from torch.randperm(20).tolist()

    whole = read_batches(tmp_path, DataLoader(Counted(), 4, sampler=Endless()), max_epochs=None, max_steps=13)
    assert len(whole.epochs[0]) == 13
    path = tmp_path / "step"
    options = {"max_epochs": 3, "limit_train_batches": 4}
    limited = read_batches(tmp_path, DataLoader(Counted(), 4, sampler=Endless()), **options)
    assert as_lists(limited.epochs[0]) == as_lists(whole.epochs[0])[:4]
    read_batches(
        tmp_path, DataLoader(Counted(), 4, sampler=Endless()), **options | {"max_steps": 6}, callbacks=[Saving(6, path)]
    )
    resumed = read_batches(tmp_path, DataLoader(Counted(), 4, sampler=Endless()), resume=path, **options)
    assert as_lists(resumed.epochs[1]) == as_lists(limited.epochs[1])[2:]
    assert as_lists(resumed.epochs[2]) == as_lists(limited.epochs[2])


class Epochs:
    """Sampler that records the epochs of set_epoch."""

    told = None

    def set_epoch(self, epoch):
        self.told = [*(self.told or []), epoch]


class EpochSampler(Epochs, Sampler):
    def __iter__(self):
        return iter(range(8))

    def __len__(self):
        return 8


class EpochStream(Epochs, IterableDataset):
    def __iter__(self):
        return iter(range(8))


def test_whatever_wants_to_know_the_epoch_is_told(tmp_path):
    sampler, inner, stream = EpochSampler(), EpochSampler(), EpochStream()
    batches = BatchSampler(inner, 3, drop_last=False)
    batches.set_epoch = Epochs.set_epoch.__get__(batches)
    subclass = type("Varying", (BatchSampler,), {})(inner, 3, False)
    for data in (
        DataLoader(make_numbers(8), 4, sampler=sampler),
        DataLoader(make_numbers(8), batch_sampler=subclass),
        DataLoader(stream, 4),
    ):
        read_batches(tmp_path, data, max_epochs=3)
    assert sampler.told == inner.told == stream.told == [0, 1, 2]


def test_distributed_sampler_is_replaced(tmp_path):
    """Lumen shards the samples without it."""
    data = make_numbers(20)
    sampler = DistributedSampler(data, num_replicas=2, rank=1)
    task = read_batches(tmp_path, DataLoader(data, 4, sampler=sampler))
    assert sorted(task.samples(0)) == sorted(task.samples(1)) == list(range(20))
    assert task.samples(0) != task.samples(1)


@pytest.mark.parametrize("kept_by", ["loader", "sampler"])
def test_a_generators_seed_decides_the_order(tmp_path, kept_by):
    def orders(seed, run_seed):
        data, generator = make_numbers(), torch.Generator().manual_seed(seed)
        if kept_by == "loader":
            shuffled = DataLoader(data, 4, shuffle=True, generator=generator)
        else:
            shuffled = DataLoader(data, 4, sampler=RandomSampler(data, generator=generator))
        task = read_batches(tmp_path, shuffled, seed=run_seed)
        return [task.samples(epoch) for epoch in range(2)]

    first, second = orders(1, 3)
    assert first != second
    assert sorted(first) == sorted(second) == list(range(20))
    assert orders(1, 4) == [first, second]
    assert orders(2, 3)[0] != first


class Nested(Sampler):
    """Sampler that draws lazily from a generator in a list, and from the state of another sampler."""

    def __init__(self, samples=20):
        self.samples = samples
        self.generators, self.inner = (
            [np.random.default_rng()],
            RandomSampler(range(samples), generator=train_with_own_loaders()),
        )

    def __iter__(self):
        for index in self.inner:
            yield (index + int(self.generators[0].integers(3))) % self.samples

    def __len__(self):
        return self.samples


def train_with_own_loaders():
    return torch.Generator().manual_seed(5)


def assert_resumes_everywhere(tmp_path, fit, **options):
    """Train without interruption, then resume from a checkpoint of each step: the later batches are equal."""
    whole = fit(**options)
    assert whole.global_steps
    for step in range(1, whole.global_steps):
        path = tmp_path / f"step-{step}"
        fit(**options, max_steps=step, callbacks=[Saving(step, path)])
        again = fit(**options, resume=path)
        for epoch, batches in again.epochs.items():
            assert as_lists(batches) == as_lists(whole.epochs[epoch])[-len(batches) :], (step, epoch)
        seen_after = sum(map(len, again.epochs.values())) + sum(map(len, whole.skipped.values()))
        assert seen_after >= whole.global_steps - step, step


class Tracked(Seeing):
    """Task that validates, may skip the rest of an epoch, and counts."""

    def __init__(self, skip=None):
        super().__init__()
        self.skip, self.skipped, self.validated, self.global_steps = skip, {}, [], 0

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if (self.current_epoch, batch_idx) == self.skip else None

    def on_train_end(self):
        self.global_steps = self.global_step

    def validation_step(self, batch):
        self.validated.append(as_lists([batch])[0])


def fitting(tmp_path, make, make_validation=None, skip=None):
    def fit(**options):
        task = Tracked(skip)
        trainer = bare_trainer(tmp_path, **{"max_epochs": 3, "num_sanity_val_steps": 0} | options)
        trainer.fit(task, make(), val_dataloaders=make_validation and make_validation())
        return task

    return fit


def test_sampler_with_nested_generators_resumes_exactly(tmp_path):
    assert_resumes_everywhere(tmp_path, fitting(tmp_path, lambda: DataLoader(Counted(), 4, sampler=Nested())))


def test_shared_sampler_is_not_disturbed_by_validation(tmp_path):
    def fit(**options):
        sampler, task = Nested(), Tracked()
        loaders = [DataLoader(Counted(), 4, sampler=sampler) for _ in range(2)]
        trainer = bare_trainer(tmp_path, **{"max_epochs": 2, "val_check_interval": 2} | options)
        trainer.fit(task, loaders[0], val_dataloaders=loaders[1])
        return task

    assert as_lists(fit().epochs[1]) == as_lists(fit(limit_val_batches=0).epochs[1])
    assert_resumes_everywhere(tmp_path, fit)


def test_a_samplers_generators_are_put_back(tmp_path):
    generator = train_with_own_loaders()
    generator.manual_seed(77)
    before = generator.get_state()
    read_batches(
        tmp_path, DataLoader(make_numbers(), 4, sampler=RandomSampler(range(20), replacement=True, generator=generator))
    )
    assert torch.equal(generator.get_state(), before)


def test_loader_with_custom_iterator_is_read_unchanged(tmp_path):
    class Negative(DataLoader):
        def _get_iterator(self):
            return (-batch[0] for batch in super()._get_iterator())

    task = read_batches(tmp_path, Negative(make_numbers(8), 4))
    assert as_lists(task.epochs[0]) == [[0, -1, -2, -3], [-4, -5, -6, -7]]


def test_indices_may_be_anything_a_data_set_takes(tmp_path):
    class Named(Dataset):
        def __getitem__(self, key):
            return float(len(key)) if isinstance(key, str) else float(sum(key))

    words, pairs = ["a", "bb", "ccc", "dddd"], [(1, 2), (3, 4)]
    assert read_batches(tmp_path, DataLoader(Named(), 2, sampler=words)).samples(0) == [1, 2, 3, 4]
    assert read_batches(tmp_path, DataLoader(Named(), 1, sampler=pairs)).samples(0) == [3, 7]
    lazily = DataLoader(make_numbers(8), batch_sampler=[iter([np.int64(1), 2]), iter([torch.tensor(3)])])
    assert read_batches(tmp_path, lazily, max_epochs=1).samples(0) == [1, 2, 3]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DataLoader(make_numbers(), batch_sampler=[[1], []]), r"a batch sampler gave \[\]"),
        (lambda: DataLoader(make_numbers(), batch_sampler=[1, 2]), "a batch sampler gave 1"),
        (
            lambda: DataLoader(make_numbers(), 4, sampler=iter([1, 2, 3])),
            "a list_iterator, which can be read only once",
        ),
        (lambda: DataLoader(Endless(), 4), "Endless has no length, and the loader has no sampler"),
        (lambda: "abc", "a loader is an iterable of batches, found str"),
        (lambda: torch.arange(4), "a loader is an iterable of batches, found Tensor"),
        (lambda: {"a": alphabet(3), "b": "abc"}, "found str"),
    ],
)
def test_what_is_no_loader_is_one_clear_error(tmp_path, make, message):
    with pytest.raises(DataError, match=message):
        read_batches(tmp_path, make())


class Endless(Dataset):
    def __getitem__(self, index):
        return index


# ---------------------------------------------------------------------- loaders that cannot resume


def test_other_loader_kind_in_mid_epoch_raises(tmp_path):
    makes = [
        lambda: DataLoader(make_numbers(20), 4),
        lambda: DataLoader(make_numbers(20), 4, sampler=list(range(20))),
        lambda: [torch.arange(4)] * 5,
        lambda: {"few": alphabet(8), "many": alphabet(12)},
        lambda: [alphabet(8), alphabet(12)],
    ]
    for number, before in enumerate(makes):
        for after in makes[:number] + makes[number + 1 :]:
            path = tmp_path / "step"
            shutil.rmtree(path, ignore_errors=True)
            options = {"max_steps": 2, "callbacks": [Saving(2, path)]}
            bare_trainer(tmp_path, **options).fit(Structures(), before())
            with pytest.raises(DataError, match="in the middle of an epoch"):
                bare_trainer(tmp_path, max_epochs=2, resume=path).fit(Structures(), after())


def test_other_loader_kind_is_accepted_at_next_epoch(tmp_path):
    path = tmp_path / "step"
    trainer = bare_trainer(tmp_path, max_steps=4, callbacks=[Saving(4, path)])
    trainer.fit(Structures(), [alphabet(8), alphabet(6)])
    task = Structures()
    bare_trainer(tmp_path, max_epochs=2, resume=path).fit(task, [alphabet(8), alphabet(6), alphabet(2)])
    assert len(task.epochs[1]) == 4


def resume_with(tmp_path, before, after, step=2):
    path = tmp_path / "step"
    read_batches(tmp_path, before, max_steps=step, callbacks=[Saving(step, path)])
    return read_batches(tmp_path, after, max_epochs=2, resume=path)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [({}, {"samples": 21}, r"was TensorDataset\(20\), is TensorDataset\(21\)"),
     ({"shuffle": True}, {}, r"'shuffled': 'at once'.* 'in order'"),
     ({"sampler": WeightedRandomSampler(torch.ones(20), 18)},
      {"sampler": WeightedRandomSampler(torch.arange(1.0, 21), 18)}, "the sampler now gives a different order")],
    ids=["data", "shuffling", "order of a sampler"],
)  # fmt: skip
def test_changed_loading_in_mid_epoch_raises(tmp_path, before, after, said):
    def data(samples=20, **options):
        return DataLoader(make_numbers(samples), 4, **options)

    with pytest.raises(DataError, match=said):
        resume_with(tmp_path, data(**before), data(**after))


def test_more_data_is_accepted_at_next_epoch(tmp_path):
    task = resume_with(tmp_path, DataLoader(make_numbers(20), 4), DataLoader(make_numbers(24), 4), step=5)
    assert len(task.samples(1)) == 24


# ---------------------------------------------------------------------- changed data


def split(seed, samples=100):
    """Return training and validation data."""
    return random_split(make_numbers(samples), [0.8, 0.2], generator=torch.Generator().manual_seed(seed))


class Kept(Dataset):
    """Data set that keeps a part as an attribute, like data sets with transforms."""

    def __init__(self, part):
        self.part = part

    def __len__(self):
        return len(self.part)

    def __getitem__(self, index):
        return self.part[index]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda part: part,
        Kept,
        lambda part: Subset(part, range(80)),
        lambda part: ConcatDataset([part, make_numbers(8)]),
    ],
    ids=["split", "in a data set", "in a subset", "in a concatenation"],
)
def test_changed_random_split_in_mid_epoch_raises(tmp_path, wrap):
    def make(seed):
        return DataLoader(wrap(split(seed)[0]), 8, shuffle=True)

    with pytest.raises(DataError, match=r"its training data differ .* was .* indices .*, is .* indices"):
        resume_with(tmp_path, make(0), make(1))
    assert resume_with(tmp_path / "same", make(0), make(0)).epochs


def test_changed_random_split_at_epoch_end_warns(tmp_path, caplog):
    def fit(seed, **options):
        training, validation = (DataLoader(part, 8) for part in split(seed))
        trainer = bare_trainer(tmp_path, max_epochs=2, log_level="WARNING", num_sanity_val_steps=0, **options)
        caplog.clear()
        trainer.fit(Tracked(), training, val_dataloaders=validation)
        return [line for line in caplog.messages if "differ from" in line]

    path = tmp_path / "step"
    assert fit(0, callbacks=[Saving(10, path)]) == fit(0, resume=path) == []
    of_training, of_validation = fit(1, resume=path)
    assert re.match(r"the training data differ from .* Subset\(80, indices ", of_training)
    assert re.match(r"the validation data differ from .* Subset\(20, indices ", of_validation)


class Splitting(lumen.DataModule):
    def setup(self, stage):
        self.training, self.validation = random_split(make_numbers(), [0.8, 0.2])

    def train_dataloader(self):
        return DataLoader(self.training, 2, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.validation, 2)


def test_random_split_in_setup_is_stable_across_resumes(tmp_path, caplog):
    path = tmp_path / "step"
    whole, again = Tracked(), Tracked()
    bare_trainer(tmp_path, max_epochs=2, seed=None, callbacks=[Saving(11, path)]).fit(whole, Splitting())
    bare_trainer(tmp_path, max_epochs=2, seed=None, resume=path, log_level="WARNING").fit(again, Splitting())
    assert as_lists(again.epochs[1]) == as_lists(whole.epochs[1])[3:]
    assert "data differ from" not in caplog.text


# ---------------------------------------------------------------------- data that grows and shrinks


class Replay(lumen.DataModule):
    """Replay buffer with another length in every epoch, and more samples in the middle of an epoch."""

    def __init__(self, lengths=(8, 14, 5), in_epoch=0, sampler=None, **options):
        self.samples, self.lengths, self.in_epoch = list(range(lengths[0])), lengths, in_epoch
        self.sampler, self.options = sampler, options

    def train_dataloader(self):
        sampler = self.sampler and self.sampler(self.samples)
        return DataLoader(self.samples, 2, shuffle=sampler is None, sampler=sampler, **self.options)

    def resize(self, length):
        self.samples[:] = [*self.samples, *range(len(self.samples), length)][:length]

    def state_dict(self):
        return {"samples": len(self.samples)}

    def load_state_dict(self, state):
        self.resize(state["samples"])


class Resizing(Tracked):
    """Task that resizes the data for the next epoch, and adds one sample in every step."""

    def __init__(self, hook="on_train_epoch_end"):
        super().__init__()
        self.totals, self.hook = [], hook

    def on_train_epoch_start(self):
        if self.hook == "on_train_epoch_start":
            self._resize(self.current_epoch)
        self.totals.append(self.trainer.num_training_batches)

    def on_train_epoch_end(self):
        if self.hook == "on_train_epoch_end":
            self._resize(self.current_epoch + 1)

    def on_before_zero_grad(self, optimizer):
        data = self.trainer.datamodule
        data.resize(len(data.samples) + data.in_epoch)

    def _resize(self, epoch):
        data = self.trainer.datamodule
        data.resize((*data.lengths, 0)[epoch])


WORKERS = [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}]


@pytest.mark.parametrize("options", WORKERS, ids=["no workers", "workers", "persistent workers"])
@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_train_epoch_start"])
def test_epoch_has_the_samples_present_at_its_start(tmp_path, hook, options):
    task, data = Resizing(hook), Replay(**options)
    bare_trainer(tmp_path, max_epochs=3).fit(task, data)
    assert [sorted(task.samples(epoch)) for epoch in range(3)] == [[*range(length)] for length in data.lengths]
    if hook == "on_train_epoch_end":
        assert task.totals == [4, 7, 3]


class Shuffling(Sampler):
    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(torch.randperm(len(self.samples)).tolist())

    def __len__(self):
        return len(self.samples)


@pytest.mark.parametrize(
    ("in_epoch", "sampler"), [(0, None), (1, None), (0, Shuffling)], ids=["between", "within", "with a sampler"]
)
def test_growing_data_resumes_exactly_from_every_step(tmp_path, in_epoch, sampler):
    def fit(**options):
        task = Resizing()
        bare_trainer(tmp_path, **{"max_epochs": 3} | options).fit(task, Replay((8, 14, 5), in_epoch, sampler))
        return task

    assert [len(batches) for batches in fit().epochs.values()] == [4, 7, 3]
    assert_resumes_everywhere(tmp_path, fit)


def test_validation_data_may_grow(tmp_path):
    data, task = list(range(3)), Tracked()
    task.on_train_epoch_start = lambda: data.append(len(data))
    bare_trainer(tmp_path, max_epochs=2, num_sanity_val_steps=0).fit(
        task, DataLoader(make_numbers(4), 4), val_dataloaders=DataLoader(data, 1)
    )
    assert task.validated == [[0], [1], [2], [3], [0], [1], [2], [3], [4]]


@pytest.mark.parametrize("options", WORKERS[:2], ids=["no workers", "workers"])
def test_data_shrinking_in_mid_epoch_raises(tmp_path, options):
    data = Replay((8,), -3, sampler=lambda samples: range(len(samples)))
    if options:  # workers have a copy: their sampler counts too far
        data = Replay((8,), sampler=lambda samples: range(9), **options)
    with pytest.raises(DataError, match=r"epoch needs sample \d, but list has only [258] samples"):
        bare_trainer(tmp_path, max_epochs=1).fit(Resizing(), data)


def test_missing_rows_of_tensor_dataset_raise(tmp_path):
    with pytest.raises(DataError, match=r"this epoch needs sample 5, but TensorDataset has only 4"):
        read_batches(tmp_path, DataLoader(make_numbers(4), 2, sampler=[0, 1, 2, 5]))


def test_index_error_of_a_dataset_passes_through(tmp_path):
    class Wrong(Counted):
        def __getitem__(self, index):
            return [0][index + 1]

    with pytest.raises(IndexError, match="list index out of range"):
        read_batches(tmp_path, DataLoader(Wrong(), 2))


# ---------------------------------------------------------------------- streams


class Counting(IterableDataset):
    """Stream that knows its position."""

    def __init__(self):
        self.place, self.read = 0, 0

    def __iter__(self):
        while self.place < 20:
            self.place += 1
            self.read += 1
            yield self.place + torch.rand(()).double()
        self.place = 0

    def state_dict(self):
        return {"place": torch.tensor(self.place)}

    def load_state_dict(self, state):
        self.place = int(state["place"])


class CountingBatches(Counting):
    """Loader of the user with a position: an iterable of batches."""

    def __iter__(self):
        for sample in super().__iter__():
            yield sample.reshape(1)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("kind", ["a data set with a state", "a loader with a state"])
def test_stateful_stream_resumes_from_its_state(tmp_path, kind, accumulate):
    def make():
        stream = Counting() if kind == "a data set with a state" else CountingBatches()
        return stream, DataLoader(stream, 2) if kind == "a data set with a state" else stream

    options = {"max_epochs": 3, "accumulate_grad_batches": accumulate}
    whole = read_batches(tmp_path, make()[1], **options)
    per_epoch = len(whole.epochs[0])
    steps = -(-per_epoch // accumulate)
    for step in (steps + 1, 2 * steps):
        path = tmp_path / f"step-{step}"
        read_batches(tmp_path, make()[1], **options | {"max_steps": step}, callbacks=[Saving(step, path)])
        stream, data = make()
        resumed = read_batches(tmp_path, data, resume=path, **options)
        for epoch, batches in resumed.epochs.items():
            assert as_lists(batches) == as_lists(whole.epochs[epoch])[-len(batches) :]
        assert stream.read == 20 * (3 - step / steps) if step % steps == 0 else stream.read < 40


class BufferedBatches(Buffered):
    """Loader of the user with a shuffle buffer."""

    def __iter__(self):
        return (torch.tensor([sample]) for sample in super().__iter__())


STREAMS = {
    "a data set": lambda: DataLoader(Buffered(), 4),
    "a loader": lambda: BufferedBatches(6),
    "in a combination": lambda: lumen.CombinedLoader([DataLoader(Buffered(), 4), alphabet(8)], "min_size"),
    "without a state": lambda: DataLoader(Numbered(), 4),
}


class Numbered(IterableDataset):
    def __iter__(self):
        return iter(range(22))


@pytest.mark.parametrize("skip", [None, (0, 2), (1, 0)])
@pytest.mark.parametrize("limit", [None, 3, 6])
@pytest.mark.parametrize("kind", STREAMS)
def test_streams_resume_exactly_from_every_step(tmp_path, kind, limit, skip):
    fit = fitting(tmp_path, STREAMS[kind], skip=skip)
    if kind == "in a combination":
        fit = combined_fit(tmp_path, skip)
    assert_resumes_everywhere(tmp_path, fit, limit_train_batches=limit)


def combined_fit(tmp_path, skip):
    class Flat(Tracked):
        def training_step(self, batch):
            return super().training_step(torch.cat([part.flatten() for part in (batch[0], batch[1][0])]))

    def fit(**options):
        task = Flat(skip)
        bare_trainer(tmp_path, **{"max_epochs": 3} | options).fit(task, STREAMS["in a combination"]())
        return task

    return fit


def test_stream_cut_exactly_at_its_end_restarts(tmp_path):
    task = read_batches(tmp_path, DataLoader(Counting(), 2), limit_train_batches=10, max_epochs=4)
    assert [len(task.epochs[epoch]) for epoch in range(4)] == [10] * 4
    task = read_batches(tmp_path, DataLoader(Counting(), 2), limit_train_batches=5, max_epochs=None, max_steps=25)
    assert [len(task.epochs[epoch]) for epoch in range(5)] == [5] * 5
    assert [int(number) for number in task.samples(0) + task.samples(1)] == list(range(1, 21))


def test_combination_loses_no_stream_samples_between_epochs(tmp_path):
    task = Structures()
    stream = DataLoader(Counting(), 2)
    bare_trainer(tmp_path, max_epochs=3).fit(task, lumen.CombinedLoader([alphabet(6), stream], "min_size"))
    numbers_seen = [int(n) for epoch in range(3) for batch, _ in task.epochs[epoch] for n in batch[1].tolist()]
    assert numbers_seen == list(range(1, 19))


@pytest.mark.parametrize("options", [{}, {"num_sanity_val_steps": 2}, {"limit_val_batches": 2}])
def test_every_validation_reads_a_stream_from_its_beginning(tmp_path, options):
    fit = fitting(tmp_path, lambda: DataLoader(make_numbers(8), 4), lambda: DataLoader(Buffered(12), 2))
    task = fit(**options)
    sanity, per_pass = options.get("num_sanity_val_steps", 0), options.get("limit_val_batches", 6)
    assert len(task.validated) == sanity + 3 * per_pass
    passes = task.validated[sanity:]
    assert passes[:per_pass] == passes[per_pass : 2 * per_pass] == passes[2 * per_pass :]


def test_generator_cannot_be_reused_or_resumed(tmp_path):
    fit = fitting(tmp_path, lambda: DataLoader(make_numbers(8), 4), lambda: (torch.zeros(2) for _ in range(3)))
    with pytest.raises(DataError, match="a generator, which can be read only once"):
        fit(num_sanity_val_steps=1, max_epochs=1)
    path = tmp_path / "step"
    endless = fitting(tmp_path, lambda: iter(lambda: torch.zeros(2), None))
    endless(limit_train_batches=3, max_steps=5, callbacks=[Saving(5, path)])
    with pytest.raises(DataError, match="a callable_iterator, which can be read only once"):
        endless(limit_train_batches=3, resume=path)


@pytest.mark.parametrize("kind", ["a data set", "without a state"])
def test_overfitting_repeats_the_first_batches_of_a_stream(tmp_path, kind):
    task = read_batches(tmp_path, STREAMS[kind](), overfit_batches=2, max_epochs=3)
    epochs = [as_lists(task.epochs[epoch]) for epoch in range(3)]
    assert epochs[0] == epochs[1] == epochs[2]


def test_a_stateful_loader_is_not_read_again(tmp_path):
    class Watching(CountingBatches):
        loads = 0

        def load_state_dict(self, state):
            self.loads += 1
            super().load_state_dict(state)

    path, data = tmp_path / "step", Watching()
    read_batches(tmp_path, data, max_epochs=3)
    assert data.loads == 0  # no epoch was cut, so no state is loaded
    read_batches(tmp_path, Watching(), max_steps=25, callbacks=[Saving(25, path)])
    data = Watching()
    read_batches(tmp_path, data, max_epochs=2, resume=path)
    assert (data.loads, data.read) == (1, 15)


class NoisyStream(IterableDataset):
    def __iter__(self):
        for number in range(8):
            yield number + torch.rand(()).double()


@pytest.mark.parametrize("persistent", [False, True])
def test_draws_of_stream_workers_are_independent_of_epochs(tmp_path, persistent):
    def make():
        return DataLoader(NoisyStream(), 4, num_workers=1, persistent_workers=persistent)

    path = tmp_path / "step"
    whole = read_batches(tmp_path, make())
    read_batches(tmp_path, make(), max_steps=2, callbacks=[Saving(2, path)])
    assert as_lists(read_batches(tmp_path, make(), resume=path).epochs[1]) == as_lists(whole.epochs[1])


def test_stateless_stream_is_reread_with_a_warning(tmp_path, caplog):
    class Forgetful(IterableDataset):
        read = 0

        def __iter__(self):
            for number in range(20):
                self.read += 1
                yield number

    path = tmp_path / "step"
    read_batches(tmp_path, DataLoader(Forgetful(), 4), max_steps=8, callbacks=[Saving(8, path)])
    stream = Forgetful()
    task = read_batches(tmp_path, DataLoader(stream, 4), max_epochs=2, resume=path, log_level="WARNING")
    assert as_lists(task.epochs[1]) == [[12, 13, 14, 15], [16, 17, 18, 19]]
    assert stream.read == 20
    assert caplog.text.count("3 batches of this epoch again") == 1
    assert "state_dict" in caplog.text


def test_streams_reread_in_another_order_are_reported(tmp_path, caplog):
    class Unseeded(IterableDataset):
        def __iter__(self):
            return iter(random.Random().sample(range(64), 64))

    path = tmp_path / "step"
    read_batches(tmp_path, DataLoader(Unseeded(), 4), max_steps=8, callbacks=[Saving(8, path)])
    read_batches(tmp_path, DataLoader(Unseeded(), 4), max_steps=9, resume=path, log_level="WARNING")
    assert caplog.text.count("Unseeded gives different batches when it is read again: the first 8 of this epoch") == 1


@pytest.mark.parametrize(
    "batch",
    [
        torch.randn(2, 3, 40, 40).to(memory_format=torch.channels_last),
        torch.randn(9, 5).bfloat16(),
        torch.randn(4, 1).expand(4, 6),
        torch.randn(5, requires_grad=True),
        torch.tensor(3.0),
    ],
    ids=["channels_last", "bfloat16", "expanded", "with gradient", "scalar"],
)
def test_digests_of_batches_depend_on_values_alone(batch):
    assert digest_batch(batch, most=64) == digest_batch(
        batch.detach().clone(memory_format=torch.contiguous_format), most=64
    )
    assert digest_batch(batch, most=64) != digest_batch(batch.detach() + 1, most=64)


class KeepsIterator(DataLoader):
    """Loader with one iterator for all epochs, like timm's MultiEpochsDataLoader."""

    def __iter__(self):
        self.kept = vars(self).get("kept") or super().__iter__()
        yield from (next(self.kept) for _ in range(2))


@pytest.mark.parametrize(("kind", "warnings"), [(KeepsIterator, 1), (DataLoader, 0)])
def test_overfitting_on_changing_batches_is_reported(tmp_path, caplog, kind, warnings):
    loader = kind(list(range(24)), 4)
    read_batches(tmp_path, loader, max_epochs=3, overfit_batches=2, log_level="WARNING")
    assert caplog.text.count(f"{kind.__name__} gives different batches in each pass") == warnings


def test_a_shuffle_buffer_of_hugging_face_resumes_exactly(tmp_path, caplog):
    """The state of its data set lacks the buffer."""

    def shuffled():
        stream = datasets.Dataset.from_dict({"x": list(range(40))}).to_iterable_dataset(num_shards=4)
        return DataLoader(stream.shuffle(seed=1, buffer_size=10).with_format("torch"), 4, collate_fn=list_numbers)

    whole, path = read_batches(tmp_path, shuffled(), max_epochs=2), tmp_path / "step"
    read_batches(tmp_path, shuffled(), max_steps=13, callbacks=[Saving(13, path)])
    rest = read_batches(tmp_path, shuffled(), max_epochs=2, resume=path, log_level="WARNING")
    assert as_lists(rest.epochs[1]) == as_lists(whole.epochs[1])[3:]
    assert caplog.text.count("3 batches of this epoch again") == 1
    assert "other batches" not in caplog.text


def list_numbers(samples):
    return torch.stack([each["x"] for each in samples])


class Plainly(IterableDataset):
    """Stream without a state that divides itself among workers."""

    def __init__(self, samples=24):
        self.samples = samples

    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(first, self.samples, step))


class Cut:
    """Loader of batches of a class without a state."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        return iter(torch.arange(24).split(self.size))


class StatefulCut(Cut):
    """Loader that counts its batches, as the warning proposes."""

    place = 0

    def __iter__(self):
        for batch in list(super().__iter__())[self.place :]:
            self.place += 1
            yield batch
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def torchdatas(data, workers):
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(data, 4, num_workers=workers)


def read_documented_stream():
    """Return the stream with a state that the page on loaders shows."""
    given = {"torch": torch}
    exec(find_programs()[1], given)
    return given["Numbers"](24)


def train_by_steps(tmp_path, make):
    """Return the batches of a run that is killed after every third step, by epoch."""
    parts = {0: [], 1: []}
    for end in (3, 6, 9, 12):
        options = {"max_steps": end, "callbacks": [Saving(end, tmp_path / f"step-{end}")], "log_level": "WARNING"}
        task = read_batches(tmp_path, make(), resume=tmp_path / f"step-{end - 3}" if end > 3 else None, **options)
        for epoch, batches in task.epochs.items():
            parts[epoch] += as_lists(batches)
    return parts


ADVICE = {
    "a stream": (
        lambda: DataLoader(Plainly(), 4),
        "Plainly has no state_dict.* give Plainly state_dict and load_state_dict.$",
        lambda: DataLoader(read_documented_stream(), 4),
    ),
    "workers": (
        lambda: DataLoader(Plainly(), 4, num_workers=2),
        "give Plainly state_dict and load_state_dict and read Plainly with torchdata's StatefulDataLoader.$",
        lambda: torchdatas(read_documented_stream(), 2),
    ),
    "a stream with a state and workers": (
        lambda: DataLoader(read_documented_stream(), 4, num_workers=2),
        "DataLoader has no state_dict.* To avoid this, read Numbers with torchdata's StatefulDataLoader.$",
        lambda: torchdatas(read_documented_stream(), 2),
    ),
    "any iterable": (
        lambda: Cut(4),
        "Cut has no state_dict.* give Cut state_dict and load_state_dict.$",
        lambda: StatefulCut(4),
    ),
}


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if "workers" in kind else kind for kind in ADVICE]
)
def test_advice_for_streams_without_state_works(tmp_path, caplog, kind):
    make, advice, advised = ADVICE[kind]
    read_batches(tmp_path, make(), max_steps=2, callbacks=[Saving(2, tmp_path / "step-2")])
    read_batches(tmp_path, make(), resume=tmp_path / "step-2", log_level="WARNING")
    assert re.search(advice, caplog.text, re.MULTILINE)
    caplog.clear()
    whole = read_batches(tmp_path, advised())
    assert train_by_steps(tmp_path, advised) == {epoch: as_lists(batches) for epoch, batches in whole.epochs.items()}
    assert "read once more" not in caplog.text


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_torchdata_loader_with_stateless_stream_resumes(tmp_path, caplog, workers):
    """torchdata's state of such a stream fails when it is restored for the second time."""
    whole = read_batches(tmp_path, torchdatas(Plainly(), workers))
    parts = train_by_steps(tmp_path, lambda: torchdatas(Plainly(), workers))
    assert parts == {epoch: as_lists(batches) for epoch, batches in whole.epochs.items()}
    assert caplog.text.count("Plainly has no state_dict") == 2


class Late(Plainly):
    """Data set whose first worker waits until the second worker has made a batch."""

    def __init__(self, path):
        super().__init__(8)
        self.path = path

    def __iter__(self):
        is_first = get_worker_info().id == 0
        for place, number in enumerate(super().__iter__()):
            if not is_first and place == 3:
                self.path.touch()
            while is_first and not self.path.exists():
                time.sleep(0.001)
            yield number


class Delegating(DataLoader):
    """Loader that delegates to one whose workers start with the first batch."""

    def __iter__(self):
        yield from super().__iter__()


@pytest.mark.parametrize("kind", [DataLoader, Delegating])
def test_batches_of_a_streams_workers_come_in_order(tmp_path, caplog, kind):
    """Ranks that read a stream, and resumed runs that read a stream again, must get the same batches."""
    loader = kind(Late(tmp_path / "made"), 2, num_workers=2, in_order=False)
    task = read_batches(tmp_path, loader, max_epochs=1, log_level="WARNING")
    assert as_lists(task.epochs[0]) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert caplog.text.count("setting in_order=True") == 1


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (lambda: DataLoader(Plainly(), 4), lambda: DataLoader(Plainly(), 2), "batch_size was 4, is 2"),
        (lambda: DataLoader(Plainly(), 2), lambda: DataLoader(Plainly(), 4), "batch_size was 2, is 4"),
        (lambda: DataLoader(Plainly(), 4), lambda: DataLoader(Plainly(), 4, num_workers=2), "num_workers was 0, is 2"),
        (lambda: Cut(4), lambda: Cut(2), "had 8 samples, but now have 4"),
        (lambda: DataLoader(Plainly(), 4), lambda: DataLoader(Plainly(4), 4), "but the epoch now has only 1"),
        (
            lambda: [DataLoader(Plainly(), 4), DataLoader(Plainly(), 4)],
            lambda: [DataLoader(Plainly(), 4), DataLoader(Plainly(), 2)],
            "batch_size was 4, is 2",
        ),
    ],
    ids=["smaller", "larger", "workers", "unknown", "shorter", "one of several"],
)
def test_rebatched_stateless_stream_in_mid_epoch_raises(tmp_path, before, after, message):
    with pytest.raises(DataError, match=f"which has no state_dict.*{message}.*Samples would be missing or repeated"):
        resume_with(tmp_path, before(), after())


def test_rebatched_stateless_stream_is_accepted_at_next_epoch(tmp_path):
    task = resume_with(tmp_path, DataLoader(Plainly(), 4), DataLoader(Plainly(), 2, num_workers=1), step=6)
    assert as_lists(task.epochs.pop(1)) == torch.arange(24).reshape(12, 2).tolist()
    assert not task.epochs


def test_rebatched_stateful_stream_is_accepted_in_mid_epoch(tmp_path):
    task = resume_with(tmp_path, DataLoader(Counting(), 2), DataLoader(Counting(), 4))
    assert [int(number) for number in task.samples(0)] == list(range(5, 21))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_torchdata_map_style_loader_equals_dataloader(tmp_path):
    from torchdata.stateful_dataloader import StatefulDataLoader

    plain_loader, stateful = DataLoader(Counted(), 4, shuffle=True), StatefulDataLoader(Counted(), 4, shuffle=True)
    assert as_lists(read_batches(tmp_path, stateful).epochs[1]) == as_lists(
        read_batches(tmp_path, plain_loader).epochs[1]
    )


@pytest.mark.parametrize("promised", [12, 30])
def test_stream_with_wrong_length_is_read_completely(tmp_path, promised):
    class Wrong(Counting):
        def __len__(self):
            return promised

    task = read_batches(tmp_path, DataLoader(Wrong(), 2))
    assert [len(task.epochs[epoch]) for epoch in range(2)] == [10, 10]


# ---------------------------------------------------------------------- several training loaders


def alphabet(samples, first=0):
    return DataLoader(TensorDataset(torch.arange(first, first + samples)), 2)


EXPECTED = {
    "max_size_cycle": [([0, 1], [100, 101]), ([2], [102, 103]), ([0, 1], [104, 105]), ([2], [106])],
    "min_size": [([0, 1], [100, 101]), ([2], [102, 103])],
    "max_size": [([0, 1], [100, 101]), ([2], [102, 103]), (None, [104, 105]), (None, [106])],
}


class Structures(Seeing):
    """Task that records the structure of its batches, and their loaders."""

    def training_step(self, batch, batch_idx, dataloader_idx):
        self.epochs.setdefault(self.current_epoch, []).append((batch, dataloader_idx))
        return self.weight.square()


def content(batch):
    return None if batch is None else batch[0].tolist()


@pytest.mark.parametrize("mode", EXPECTED)
@pytest.mark.parametrize("structure", [dict, list, tuple])
def test_several_loaders_are_read_together(tmp_path, mode, structure):
    loaders = [alphabet(3), alphabet(7, 100)]
    given = {"few": loaders[0], "many": loaders[1]} if structure is dict else structure(loaders)
    task, trainer = Structures(), bare_trainer(tmp_path, max_epochs=2)
    trainer.fit(task, lumen.CombinedLoader(given, mode))
    for epoch in range(2):
        batches = [batch for batch, _ in task.epochs[epoch]]
        if structure is dict:
            assert all(list(batch) == ["few", "many"] for batch in batches)
            batches = [tuple(batch.values()) for batch in batches]
        assert [tuple(map(content, batch)) for batch in batches] == EXPECTED[mode]
    assert trainer.num_training_batches == len(EXPECTED[mode])


def list_contents(batch):
    """Return a nested batch with the values of its tensors."""
    if isinstance(batch, dict):
        return {key: list_contents(part) for key, part in batch.items()}
    nested = isinstance(batch, list) and not all(isinstance(part, torch.Tensor) for part in batch)
    return [list_contents(part) for part in batch] if nested else content(batch)


NESTED = {
    "max_size_cycle": [
        {"pair": [[0, 1], [100, 101]], "deep": {"one": [200, 201]}},
        {"pair": [[2], [102, 103]], "deep": {"one": [202, 203]}},
        {"pair": [[0, 1], [104, 105]], "deep": {"one": [204]}},
    ],
    "max_size": [
        {"pair": [[0, 1], [100, 101]], "deep": {"one": [200, 201]}},
        {"pair": [[2], [102, 103]], "deep": {"one": [202, 203]}},
        {"pair": [None, [104, 105]], "deep": {"one": [204]}},
    ],
    "min_size": [
        {"pair": [[0, 1], [100, 101]], "deep": {"one": [200, 201]}},
        {"pair": [[2], [102, 103]], "deep": {"one": [202, 203]}},
    ],
    "sequential": [[0, 1], [2], [100, 101], [102, 103], [104, 105], [200, 201], [202, 203], [204]],
}


@pytest.mark.parametrize("mode", NESTED)
def test_mode_applies_to_all_nested_loaders(tmp_path, mode):
    nested = {"pair": [alphabet(3), alphabet(6, 100)], "deep": {"one": alphabet(5, 200)}}
    task, trainer = Structures(), bare_trainer(tmp_path, max_epochs=1)
    trainer.fit(task, lumen.CombinedLoader(nested, mode))
    assert [list_contents(batch) for batch, _ in task.epochs[0]] == NESTED[mode]
    assert trainer.num_training_batches == len(NESTED[mode])
    if mode == "sequential":
        assert [number for _, number in task.epochs[0]] == [0, 0, 1, 1, 1, 2, 2, 2]


def test_shorter_nested_loader_restarts_independently(tmp_path):
    task = Structures()
    bare_trainer(tmp_path, max_epochs=1).fit(task, [[alphabet(2), alphabet(4, 100)], [alphabet(6, 200)]])
    assert [list_contents(batch) for batch, _ in task.epochs[0]] == [
        [[[0, 1], [100, 101]], [[200, 201]]],
        [[[0, 1], [102, 103]], [[202, 203]]],
        [[[0, 1], [100, 101]], [[204, 205]]],
    ]


def test_nested_combination_keeps_its_mode(tmp_path):
    task, inner = Structures(), lumen.CombinedLoader([alphabet(2, 100), alphabet(8, 200)], "min_size")
    bare_trainer(tmp_path, max_epochs=1).fit(task, lumen.CombinedLoader([alphabet(4), inner], "max_size"))
    assert [list_contents(batch) for batch, _ in task.epochs[0]] == [[[0, 1], [[100, 101], [200, 201]]], [[2, 3], None]]


def test_list_of_batches_is_one_loader(tmp_path):
    task = Structures()
    bare_trainer(tmp_path, max_epochs=1).fit(task, [[torch.tensor([1]), torch.tensor([2])], [alphabet(4)]])
    assert [(batch[0].item(), list_contents(batch[1])) for batch, _ in task.epochs[0]] == [(1, [[0, 1]]), (2, [[2, 3]])]


def test_nested_loaders_resume_in_mid_epoch(tmp_path):
    def nested():
        return lumen.CombinedLoader({"pair": [alphabet(3), alphabet(7, 100)], "one": alphabet(9, 200)}, "min_size")

    whole, resumed = Structures(), Structures()
    bare_trainer(tmp_path, max_epochs=1).fit(whole, lumen.CombinedLoader(nested().iterables, "max_size_cycle"))
    saver = lumen.ModelCheckpoint(every_n_train_steps=1, keep_last=-1)
    quiet_trainer(tmp_path, max_steps=2, callbacks=[saver]).fit(Structures(), nested().iterables)
    with pytest.raises(DataError, match=r"of pair.0, pair.1, one loaders combined by max_size_cycle; now .* min_size"):
        quiet_trainer(tmp_path, max_epochs=1, resume=saver.last_model_path).fit(Structures(), nested())
    quiet_trainer(tmp_path, max_epochs=1, resume="auto").fit(resumed, nested().iterables)
    expected = [list_contents(batch) for batch, _ in whole.epochs[0]]
    assert [list_contents(batch) for batch, _ in resumed.epochs[0]] == expected[2:]


def test_an_evaluation_refuses_loaders_in_loaders(tmp_path):
    for nested in ([[alphabet(3), alphabet(7)], alphabet(2)], {"a": {"b": alphabet(3)}}, [[[alphabet(3)]]]):
        with pytest.raises(DataError, match="val_dataloader: a list or dictionary of loaders contains"):
            bare_trainer(tmp_path).validate(type("Task", (Seeing,), {"validation_step": print})(), nested)


def test_loaders_and_repeats_are_shuffled_differently(tmp_path):
    def shuffled(samples):
        return DataLoader(TensorDataset(torch.arange(samples)), samples, shuffle=True)

    task = Structures()
    bare_trainer(tmp_path, max_epochs=1).fit(
        task, [shuffled(12), shuffled(12), DataLoader(TensorDataset(torch.arange(24)), 12)]
    )
    (first, second, _), (again, _, _) = [batch for batch, _ in task.epochs[0]]
    assert content(first) != content(second)
    assert content(first) != content(again)
    assert sorted(content(first)) == sorted(content(again)) == list(range(12))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize(
    ("stateful", "workers"), [(False, 0), (True, 0), pytest.param(True, 2, marks=pytest.mark.slow)]
)
def test_documented_stream_resumes_exactly_from_every_step(tmp_path, stateful, workers):
    from torchdata.stateful_dataloader import StatefulDataLoader

    given = {"torch": torch}
    exec(find_programs()[1], given)
    kind = StatefulDataLoader if stateful else DataLoader
    fit = fitting(tmp_path, lambda: kind(given["Numbers"](22), 4, num_workers=workers))
    assert sorted(fit(max_epochs=1).samples(0)) == list(range(22))
    assert_resumes_everywhere(tmp_path, fit)


def test_the_snippet_in_the_documentation_runs(tmp_path):
    snippet = find_programs("docs/guides/multiple-dataloaders.md")[1]
    given = {"lumen": lumen, "labelled": alphabet(3), "unlabelled": alphabet(7)}
    exec(snippet, given)
    task = type("Snippet", (Structures,), {"train_dataloader": given["train_dataloader"]})()
    bare_trainer(tmp_path, max_epochs=1).fit(task)
    assert [list(batch) for batch, _ in task.epochs[0]] == [["labelled", "unlabelled"]] * 2


def test_restarted_loader_keeps_the_epoch_number(tmp_path):
    sampler = EpochSampler()
    bare_trainer(tmp_path, max_epochs=2).fit(
        Structures(), [DataLoader(make_numbers(8), 4, sampler=sampler), alphabet(10)]
    )
    assert sampler.told == [0, 0, 0, 1, 1, 1]


def test_invalid_combinations_raise_clear_errors(tmp_path):
    loaders = [alphabet(3), alphabet(7)]
    with pytest.raises(ConfigError, match="no mode is named 'zip'; there are max_size_cycle"):
        lumen.CombinedLoader(loaders, "zip")
    with pytest.raises(ConfigError, match="no loaders were given"):
        lumen.CombinedLoader([])
    with pytest.raises(ConfigError, match="one loader is given twice"):
        lumen.CombinedLoader([loaders[0], loaders[0]])
    with pytest.raises(ConfigError, match="global_batch_size: 4 is ambiguous for 2 training loaders"):
        bare_trainer(tmp_path, max_epochs=1, global_batch_size=4).fit(Structures(), loaders)
    with pytest.raises(DataError, match="one of several training loaders is empty"):
        bare_trainer(tmp_path, max_epochs=1).fit(Structures(), [alphabet(0), alphabet(7)])


# ---------------------------------------------------------------------- several validation loaders


class Validated(lumen.TaskModule):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def training_step(self, batch):
        return self.weight.square()

    def validation_step(self, batch, batch_idx, dataloader_idx):
        self.log("mean", batch[0].float().mean())
        self.log("both", batch[0].float().mean(), add_dataloader_idx=False)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_named_validation_loaders_give_named_values(tmp_path):
    trainer = quiet_trainer(tmp_path, max_epochs=1, callbacks=[lumen.EarlyStopping("mean/noisy")])
    named = {"clean": alphabet(4), "noisy": alphabet(3, 100)}
    trainer.fit(Validated(), alphabet(4), val_dataloaders=named)
    values = {name: value.item() for name, value in trainer.callback_metrics.items()}
    assert values == {"mean/clean": 1.5, "mean/noisy": 101.0, "both": pytest.approx((4 * 1.5 + 3 * 101) / 7)}
    clean, noisy = trainer.validate(Validated(), named)
    assert (set(clean), set(noisy)) == ({"mean/clean", "both"}, {"mean/noisy", "both"})


# ---------------------------------------------------------------------- the same batches, and reloaded loaders


@pytest.mark.parametrize("kind", ["shuffled", "weighted", "batches of varying size"])
def test_overfitting_repeats_the_same_batches_in_every_epoch(tmp_path, kind):
    class Counts(Seeing):
        validated = 0

        def validation_step(self, batch):
            self.validated += 1

    task = Counts()
    trainer = bare_trainer(tmp_path, max_epochs=3, overfit_batches=2)
    trainer.fit(task, INDEXED[kind](Counted()), val_dataloaders=alphabet(20))
    batches = [as_lists(task.epochs[epoch]) for epoch in range(3)]
    assert batches[0] == batches[1] == batches[2]
    assert len(batches[0]) == 2
    assert task.validated == 2 + 3 * 2  # including the sanity check


def test_overfit_fraction_counts_batches_per_loader(tmp_path):
    task = Seeing()
    bare_trainer(tmp_path, max_epochs=2, overfit_batches=0.4).fit(task, alphabet(20))
    assert [len(task.epochs[epoch]) for epoch in range(2)] == [4, 4]


class Growing(Seeing):
    """Task whose loader grows with the epoch."""

    def __init__(self):
        super().__init__()
        self.made, self.made_for_validation = [], []

    def train_dataloader(self):
        self.made.append(self.current_epoch)
        return alphabet(2 + 2 * self.current_epoch)

    def val_dataloader(self):
        self.made_for_validation.append(self.current_epoch)
        return alphabet(2)

    def validation_step(self, batch):
        pass


def test_loaders_are_reloaded_every_n_epochs(tmp_path):
    task = Growing()
    bare_trainer(tmp_path, max_epochs=5, reload_dataloaders_every_n_epochs=2).fit(task)
    assert task.made == task.made_for_validation == [0, 2, 4]
    assert [len(task.epochs[epoch]) for epoch in range(5)] == [1, 1, 3, 3, 5]


def test_resumed_run_reloads_the_same_loader(tmp_path):
    path, options = tmp_path / "step", {"max_epochs": 5, "reload_dataloaders_every_n_epochs": 2}
    bare_trainer(tmp_path, **options | {"max_steps": 7, "callbacks": [Saving(7, path)]}).fit(Growing())
    task = Growing()
    bare_trainer(tmp_path, resume=path, **options).fit(task)
    assert task.made == [2, 4]
    assert {epoch: len(batches) for epoch, batches in task.epochs.items()} == {3: 1, 4: 5}


@pytest.mark.parametrize("every", [0, 2, 3])
def test_resumed_run_reads_same_reloaded_data(tmp_path, every):
    class Random(Tracked):
        made = ()

        def train_dataloader(self):
            self.made += (self.current_epoch,)
            return alphabet(6 + 2 * self.current_epoch, int(torch.randint(1000, ())))

    def fit(**options):
        task = Random()
        bare_trainer(tmp_path, **{"max_epochs": 5, "reload_dataloaders_every_n_epochs": every} | options).fit(task)
        return task

    assert fit().made == tuple(range(0, 5, every) if every else [0])
    assert_resumes_everywhere(tmp_path, fit)


# ---------------------------------------------------------------------- batches and workers


def test_a_batch_may_be_a_list_of_samples(tmp_path):
    class Listed(Seeing):
        def training_step(self, batch):
            assert all(isinstance(sample, tuple) for sample in batch)
            self.epochs.setdefault(self.current_epoch, []).append(torch.stack([sample[0] for sample in batch]))
            return self.weight * torch.stack([sample[0] for sample in batch]).double().mean()

    listed, trainer = Listed(), bare_trainer(tmp_path, max_epochs=1, global_batch_size=20)
    trainer.fit(listed, DataLoader(make_numbers(20), 8, collate_fn=lambda samples: samples))
    assert listed.weight.item() == pytest.approx(-0.1 * 9.5, rel=1e-6)  # three batches, 8 + 8 + 4


class Own:
    """Batch of an unknown class, which pins itself."""

    def __init__(self, samples):
        self.numbers, self.pinned = torch.stack([sample[0] for sample in samples]), 0

    def pin_memory(self):
        self.pinned += 1
        return self


@pytest.mark.parametrize("pins", [True, False])
def test_custom_batch_uses_its_pin_memory_method(tmp_path, monkeypatch, pins):
    class Owned(Seeing):
        def training_step(self, batch):
            self.epochs.setdefault(self.current_epoch, []).append(batch.pinned)
            return self.weight * batch.numbers.double().mean()

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)  # these two decide whether to pin
    owned = Owned()
    bare_trainer(tmp_path, max_epochs=1).fit(owned, DataLoader(make_numbers(20), 8, collate_fn=Own, pin_memory=pins))
    assert owned.epochs[0] == [pins] * 3


OPENCV = """
import os

threads = int(os.environ.get("OPENCV_FOR_THREADS_NUM", 2))


def getNumThreads():
    return threads


def setNumThreads(number):
    global threads
    threads = max(number, 1)
"""


@pytest.fixture
def opencv(tmp_path, monkeypatch):
    """Return OpenCV, or without it a package that reads the same variable on import."""
    if find_spec("cv2") is None:
        (folder := tmp_path / "packages").mkdir()
        (folder / "cv2.py").write_text(OPENCV)
        monkeypatch.syspath_prepend(folder)
    yield
    sys.modules.pop("cv2", None)


class Threads(Dataset):
    """Data set that returns the number of threads of a worker's libraries, imported before or later."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        import cv2

        pools = [pool["num_threads"] for pool in threadpool_info()]
        later = int(os.environ["OMP_NUM_THREADS"])
        return torch.tensor(max([torch.get_num_threads(), cv2.getNumThreads(), later, *pools]))


class ThreadStream(IterableDataset):
    def __iter__(self):
        return (Threads()[0] for _ in range(4))


@pytest.mark.parametrize("data", [Threads, ThreadStream])
@pytest.mark.parametrize("imported", ["in the worker", "before"])
def test_a_worker_uses_one_thread(tmp_path, monkeypatch, opencv, data, imported):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # A launcher sets it for the step, not for the workers.
    if imported == "before":
        import cv2

        cv2.setNumThreads(2)
    assert np.ones((2, 2)).sum() == 4  # numpy and its BLAS are loaded
    loader = DataLoader(data(), 2, num_workers=1)
    task = read_batches(tmp_path, loader)
    assert task.samples(0) == [1, 1, 1, 1]
    assert loader.worker_init_fn is None


class Stuck(Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        time.sleep(60 if index > 8 else 0)
        return index


@pytest.mark.slow
def test_stuck_worker_ends_with_the_run(tmp_path):
    class Failing(Seeing):
        def training_step(self, batch):
            raise ZeroDivisionError

    before = multiprocessing.active_children()  # processes of other tests
    with pytest.raises(ZeroDivisionError):
        bare_trainer(tmp_path, max_epochs=1).fit(Failing(), DataLoader(Stuck(), 4, num_workers=1))
    assert set(multiprocessing.active_children()) <= set(before)


def test_user_worker_init_fn_runs_last(tmp_path, opencv):
    from threadpoolctl import threadpool_limits

    task = read_batches(
        tmp_path, DataLoader(Threads(), 2, num_workers=1, worker_init_fn=lambda worker: threadpool_limits(2) and None)
    )
    assert max(task.samples(0)) == (2 if any(pool["num_threads"] for pool in threadpool_info()) else 1)


# ---------------------------------------------------------------------- several loaders in manual optimization


def take_number(batch):
    return int(batch) if isinstance(batch, torch.Tensor) else batch


HAND = {
    "min_size": [(0, 10, "x"), (1, 11, "y")],
    "max_size": [(0, 10, "x"), (1, 11, "y"), (None, 12, "z"), (None, None, "w")],
    "max_size_cycle": [(0, 10, "x"), (1, 11, "y"), (0, 12, "z"), (1, 10, "w")],
}


@pytest.mark.parametrize("mode", HAND)
def test_several_loaders_are_iterated_by_hand(mode):
    combined = lumen.CombinedLoader({"a": range(2), "b": DataLoader(range(10, 13)), "c": "xyzw"}, mode)
    for _ in range(2):
        passed = list(combined)
        assert [(batch["a"], take_number(batch["b"]), batch["c"]) for batch, _, _ in passed] == HAND[mode]
        assert [places for _, *places in passed] == [[number, 0] for number in range(len(passed))]
    assert len(combined) == len(HAND[mode])
    assert combined.flattened == [*combined.iterables.values()]
    combined.reset()


def test_sequential_mode_yields_dataloader_index():
    combined = lumen.CombinedLoader([range(2), lumen.CombinedLoader([range(3), "xy"])], "sequential")
    assert list(combined) == [(0, 0, 0), (1, 1, 0), ([0, "x"], 0, 1), ([1, "y"], 1, 1)]
    assert len(combined) == 4


@pytest.mark.parametrize(
    ("mode", "limits", "sizes"),
    [
        ("min_size", 1, 1), ("max_size", [1, 3], 3), ("sequential", [1, None], 5), ("max_size_cycle", math.inf, 4),
        ("sequential", 0, 0),
    ],
)  # fmt: skip
def test_limits_cut_each_manually_iterated_loader(mode, limits, sizes):
    combined = lumen.CombinedLoader([range(2), "xyzw"], mode)
    combined.limits = limits
    assert len(list(combined)) == len(combined) == sizes


def test_what_cannot_be_iterated_by_hand_is_told(tmp_path):
    combined = lumen.CombinedLoader([range(2), (each for each in "ab")])
    with pytest.raises(TypeError, match="generator, one of its loaders, has no length"):
        len(combined)
    with pytest.raises(ConfigError, match="3 limits are given for 2 loaders"):
        combined.limits = [1, 2, 3]
    with pytest.raises(DataError, match="list, one of its loaders, returns no batch"):
        list(lumen.CombinedLoader({"a": range(2), "b": []}, "max_size_cycle"))
    combined.limits = 1
    with pytest.raises(
        ConfigError, match=r"limits apply to iteration in user code only. For a run use limit_train_batches"
    ):
        bare_trainer(tmp_path, max_epochs=1).fit(Structures(), combined)


def test_workers_that_loaders_keep_end_with_a_reset():
    kept = DataLoader(range(4), num_workers=1, persistent_workers=True)
    combined = lumen.CombinedLoader([kept, lumen.CombinedLoader([range(4)])])
    assert len(list(combined)) == 4
    (worker,) = kept._iterator._workers
    combined.reset()
    assert not worker.is_alive()
    assert len(list(combined)) == 4
    combined.reset()


def test_loaders_in_collections_have_names():
    a, b, c = (DataLoader(range(4)) for _ in range(3))
    given = {"x": [a, b], "y": lumen.CombinedLoader({"z": c})}
    assert list_loaders(given) == [("x/0", a), ("x/1", b), ("y/z", c)]
    batches = [torch.zeros(2)]
    assert list_loaders(batches) == [("", batches)]
    assert list_loaders(None) == []
