"""Order of samples, their augmentation, and the supported loaders."""

import multiprocessing
import operator
import random
import re
import time
import traceback
import tracemalloc
from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

import lumen
from lumen.data.adapter import Position
from lumen.data.loaders import adapt_loader
from lumen.data.permutation import Permutation, cut_steps, make_epoch_order
from lumen.errors import ConfigError, DataError
from tests.helpers.tasks import (
    Drawing,
    Saving,
    Seeing,
    as_lists,
    bare_trainer,
    make_numbers,
    quiet_trainer,
    read_batches,
)

# ---------------------------------------------------------------------- order


@pytest.mark.parametrize("length", [1, 2, 17, 1000])
def test_an_order_is_a_permutation_that_repeats(length):
    orders = [make_epoch_order(length, 3, epoch, shuffle=True) for epoch in range(4)]
    for epoch, order in enumerate(orders):
        assert sorted(order.tolist()) == list(range(length))
        assert torch.equal(order, make_epoch_order(length, 3, epoch, shuffle=True))
    if length == 1000:
        others = [*orders[1:], make_epoch_order(length, 4, 0, shuffle=True), torch.arange(length)]
        assert not any(torch.equal(orders[0], other) for other in others)
    assert list(make_epoch_order(length, 3, 5, shuffle=False)) == list(range(length))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 17, 1000, 4097, 70_000])
def test_permutation_is_complete_and_independent_of_slicing(length):
    whole = Permutation(length, 5)[0:length].tolist()
    assert sorted(whole) == list(range(length))
    again, pieces = Permutation(length, 5), []
    while len(pieces) < length:
        pieces += again[len(pieces) : len(pieces) + 1 + len(pieces) % 700].tolist()
    assert pieces == whole
    if length > 100:
        assert Permutation(length, 6)[0:100].tolist() != whole[:100]


def test_a_billion_samples_are_shuffled_without_memory():
    tracemalloc.start()
    order = make_epoch_order(10**9, 3, 0, shuffle=True)
    piece = order[999_000_000:999_004_096]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20
    assert len(set(piece.tolist())) == 4096
    assert 0 <= piece.min() < 10**7 < 99 * 10**7 < piece.max() < 10**9  # spread over all samples


@pytest.mark.parametrize("start_step", range(4))
@pytest.mark.parametrize(
    ("length", "batch_size", "step_size"), [(50, 8, 16), (50, 8, 20), (48, 8, 8), (3, 8, 24), (50, 16, 17)]
)
@pytest.mark.parametrize("drop_last", [True, False])
def test_steps_cover_epoch_once_from_any_start(length, batch_size, step_size, drop_last, start_step):
    def steps_from(start):
        indices = iter(range(start, length))
        cut = cut_steps(lambda n: list(islice(indices, n)), batch_size, step_size, drop_last=drop_last)
        return list(cut)

    start = min(start_step * step_size, length)
    steps = steps_from(start)
    assert steps == steps_from(0)[start_step:]
    batches = [batch for step in steps for batch in step]
    positions = [position for batch in batches for position in batch]
    dropped = length - start - len(positions)
    assert positions == list(range(start, start + len(positions)))
    assert all(0 < len(batch) <= batch_size for batch in batches)
    assert all(sum(map(len, step)) == step_size for step in steps[:-1])
    assert 0 <= dropped < batch_size if drop_last else dropped == 0


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(
    ("batch_size", "workers", "accumulate"), [(4, 0, 1), (4, 2, 1), (7, 0, 1), (7, 2, 2), (20, 0, 1), (3, 0, 3)]
)
def test_order_depends_only_on_seed_and_epoch(tmp_path, shuffle, batch_size, workers, accumulate):
    torch.manual_seed(batch_size)  # earlier draws have no effect
    data = DataLoader(make_numbers(), batch_size, shuffle=shuffle, num_workers=workers)
    task = read_batches(tmp_path, data, max_epochs=3, accumulate_grad_batches=accumulate)
    for epoch in range(3):
        assert task.samples(epoch) == list(map(int, make_epoch_order(20, 3, epoch, shuffle=shuffle)))


def test_shuffling_draws_nothing_from_the_global_generators():
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    adapter = adapt_loader(DataLoader(make_numbers(), 3, shuffle=True), seed=3)
    for epoch in range(2):
        assert (
            sum(micro.samples for window in adapter.iterate_windows(epoch, Position(), None) for micro in window) == 20
        )
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]


@pytest.mark.parametrize(("accumulate", "steps"), [(1, 2), (2, 1)])
def test_drop_last_drops_the_last_partial_batch(tmp_path, accumulate, steps):
    data = DataLoader(make_numbers(20), 8, shuffle=True, drop_last=True)
    task = read_batches(tmp_path, data, accumulate_grad_batches=accumulate)
    for epoch in range(2):
        assert [len(batch[0]) for batch in task.epochs[epoch]] == [8, 8]
        assert task.samples(epoch) == make_epoch_order(20, 3, epoch, shuffle=True)[:16].tolist()


# ---------------------------------------------------------------------- augmentation


class Changed(Subset):
    """Subset that augments, over data that cannot draw."""

    def __getitem__(self, index):
        return super().__getitem__(index)[0] + torch.randn(()), index

    def __getitems__(self, indices):
        return [self[operator.index(index)] for index in indices]


class ChangedTogether(ConcatDataset):
    def __getitem__(self, index):
        return super().__getitem__(index)[0] + torch.randn(()), index


class Transformed(Dataset):
    """Data set that draws in each sample, at any place among wrappers."""

    def __init__(self, samples=20, first=0):
        self.samples, self.first = samples, first

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        return torch.tensor([torch.rand(()), np.random.rand(), random.random()]), self.first + index


class FetchingMany(Transformed):
    def __getitems__(self, indices):
        noise = torch.rand(len(indices))
        return [(noise[place], index) for place, index in enumerate(indices)]


def collate_with_noise(samples):
    fields = default_collate(samples)
    return [torch.rand(len(samples)) + np.random.rand() + random.random(), *fields[1:]]


def list_draws_by_index(task, epoch):
    """Return the draws of each sample (its last field) by number."""
    drawn = {}
    for batch in task.epochs[epoch]:
        for value, index in zip(batch[0], batch[-1].tolist(), strict=True):
            drawn[index] = value.tolist()
    assert sorted(drawn) == list(range(20))
    return drawn


PER_SAMPLE = {
    "draws from three libraries": (Drawing(20), None),
    "a whole subset": (Subset(Transformed(), range(20)), None),
    "a subset of a subset": (Subset(Subset(Transformed(40), range(30)), range(20)), None),
    "parts that augment together": (ChangedTogether([make_numbers(10), make_numbers(10)]), None),
    "tensors and drawing data": (Subset(ConcatDataset([Transformed(10), Transformed(10, first=10)]), range(20)), None),
}
PER_BATCH = {
    "a subset that augments": (Changed(make_numbers(), range(20)), None),
    "fetches many at once": (FetchingMany(), None),
    "draws and collates with noise": (Transformed(), collate_with_noise),
    "only collates with noise": (TensorDataset(torch.zeros(20), torch.arange(20)), collate_with_noise),
}


@pytest.mark.parametrize("data", PER_SAMPLE)
def test_augmentation_belongs_to_the_sample(tmp_path, data):
    """Augmentation is equal for any workers and batches and in a second run, and differs between epochs and samples."""
    dataset, collate = PER_SAMPLE[data]
    runs = [
        read_batches(tmp_path, DataLoader(dataset, batch_size, shuffle=True, num_workers=workers, collate_fn=collate))
        for batch_size, workers in [(4, 0), (4, 2), (7, 0), (4, 0)]
    ]
    for epoch in range(2):
        drawn = [list_draws_by_index(task, epoch) for task in runs]
        assert drawn[0] == drawn[1] == drawn[2] == drawn[3]
        for numbers_of_library in torch.tensor([*drawn[0].values()]).reshape(20, -1).T.tolist():
            assert len(set(numbers_of_library)) == 20
    first, second = list_draws_by_index(runs[0], 0), list_draws_by_index(runs[0], 1)
    assert all(first[index] != second[index] for index in first)


@pytest.mark.parametrize("data", PER_BATCH)
def test_batch_draws_are_independent_of_workers(tmp_path, data):
    dataset, collate = PER_BATCH[data]
    runs = [
        read_batches(tmp_path, DataLoader(dataset, 4, shuffle=True, num_workers=workers, collate_fn=collate))
        for workers in (0, 2, 1, 0)
    ]
    for epoch in range(2):
        drawn = [list_draws_by_index(task, epoch) for task in runs]
        assert drawn[0] == drawn[1] == drawn[2] == drawn[3]
    assert list_draws_by_index(runs[0], 0) != list_draws_by_index(runs[0], 1)


def test_another_seed_draws_something_else(tmp_path):
    runs = [read_batches(tmp_path, DataLoader(Transformed(), 4), seed=seed) for seed in (1, 2)]
    first, second = (list_draws_by_index(task, 0) for task in runs)
    assert all(first[index] != second[index] for index in first)


class Seeds(Dataset):
    """Data set whose samples are the seed of torch's generator at their fetch."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.initial_seed()


def test_samples_that_read_a_seed_are_seeded(tmp_path):
    for dataset in (Seeds(), Subset(Seeds(), range(8))):
        task = read_batches(tmp_path, DataLoader(dataset, 4), max_epochs=1)
        assert len(set(task.samples(0)[:4])) == 4


# ---------------------------------------------------------------------- attributes of the user's loader


class Marked(Dataset):
    """Data set whose samples name the worker that fetched them and the mark of `worker_init_fn`."""

    mark = -1

    def __len__(self):
        return 16

    def __getitem__(self, index):
        info = get_worker_info()
        assert info.dataset is self
        return torch.tensor([self.mark, info.id, info.num_workers])


class OddFirst(Sampler):
    """Sampler of the user that draws from all three libraries."""

    def __iter__(self):
        shift = int(torch.randint(20, ())) + int(np.random.randint(20)) + random.randrange(20)
        yield from ((index + shift) % 20 for index in [*range(1, 20, 2), *range(0, 20, 2)])

    def __len__(self):
        return 20


class MarkWorker:
    """Callable `worker_init_fn` that sets the mark of its worker's data set and writes a line for each call."""

    def __init__(self, record):
        self.record = record

    def __call__(self, worker_id):
        get_worker_info().dataset.mark = 100 + worker_id
        with self.record.open("a") as file:
            file.write(f"{worker_id}\n")


@pytest.mark.parametrize(("persistent", "starts"), [(False, 3), (True, 1)])
def test_a_worker_is_prepared_as_the_user_says(tmp_path, persistent, starts):
    record = tmp_path / "record"
    data = DataLoader(
        Marked(), 4, num_workers=2, worker_init_fn=MarkWorker(record), persistent_workers=persistent, prefetch_factor=3
    )
    task = read_batches(tmp_path, data, max_epochs=3)
    for epoch in range(3):
        found = torch.cat(task.epochs[epoch]).tolist()
        assert found == [[100 + worker, worker, 2] for worker in (0, 1, 0, 1) for _ in range(4)]
    assert Counter(record.read_text().split()) == {"0": starts, "1": starts}


class WorkerSeeds(Dataset):
    """Data set whose samples are the seed of the worker that fetched them."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return get_worker_info().seed


def test_workers_get_seeds_of_their_own_that_repeat(tmp_path):
    """Generators that a user makes in `worker_init_fn` get a different stream for each worker and each epoch."""
    runs = [read_batches(tmp_path, DataLoader(WorkerSeeds(), 4, num_workers=2)) for _ in range(2)]
    first, second = [[task.samples(epoch)[::4] for epoch in range(2)] for task in runs]
    assert first == second
    assert len({seed for seeds in first for seed in seeds}) == 4


class Broken(Transformed):
    """Data set with a sample that cannot be fetched."""

    def __init__(self, is_broken):
        super().__init__()
        self.is_broken = is_broken

    def __getitem__(self, index):
        if index == 11 and self.is_broken:
            raise ZeroDivisionError("sample 11 is broken")
        return super().__getitem__(index)


@pytest.mark.slow
def test_workers_may_be_spawned(tmp_path):
    data = DataLoader(Drawing(20), 5, shuffle=True, num_workers=1, multiprocessing_context="spawn")
    spawned, here = (
        read_batches(tmp_path, data, max_epochs=1),
        read_batches(tmp_path, DataLoader(Drawing(20), 5, shuffle=True), max_epochs=1),
    )
    assert list_draws_by_index(spawned, 0) == list_draws_by_index(here, 0)


class Recorded(Dataset):
    """Data set that writes a line when it loads a sample."""

    def __init__(self, record):
        self.record = record

    def __len__(self):
        return 20

    def __getitem__(self, index):
        with self.record.open("a") as file:
            file.write(f"{index}\n")
        return index


def test_a_worker_loads_prefetch_factor_batches_ahead(tmp_path):
    class Waiting(Seeing):
        loaded = 0

        def training_step(self, batch):
            patience = 10_000
            while self.loaded < 1 + 6 and (patience := patience - 1):  # torch's default would end at 1 + 2
                time.sleep(0.01)
                self.loaded = len(record.read_text().splitlines())
            return super().training_step(batch)

    record, task = tmp_path / "record", Waiting()
    bare_trainer(tmp_path, max_steps=1).fit(task, DataLoader(Recorded(record), 1, num_workers=1, prefetch_factor=6))
    assert task.loaded >= 1 + 6


class Late(Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        time.sleep(1)
        return index


def test_a_loader_that_times_out_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match=r"DataLoader timed out after 0\.2 seconds"):
        read_batches(tmp_path, DataLoader(Late(), num_workers=1, timeout=0.2))


class Collating(lumen.DataModule):
    """Data module whose collate function is its own method, so that spawned workers receive the data module."""

    def collate(self, samples):
        return default_collate(samples)

    def train_dataloader(self):
        return DataLoader(Drawing(8), 4, num_workers=1, multiprocessing_context="spawn", collate_fn=self.collate)


@pytest.mark.slow
def test_spawned_workers_get_data_module_without_run(tmp_path):
    task = Seeing()
    bare_trainer(tmp_path, max_epochs=1).fit(task, Collating())
    assert len(task.epochs[0]) == 2


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("fails", ["no", "step", "sample"])
@pytest.mark.parametrize("sampler", [None, OddFirst])
def test_no_worker_outlives_its_run(tmp_path, persistent, fails, sampler):
    before = multiprocessing.active_children()  # processes of other tests

    class Failing(Seeing):
        def training_step(self, batch):
            assert len(multiprocessing.active_children()) == len(before) + 2
            if fails == "step" and self.global_step == 3:
                raise ZeroDivisionError
            return super().training_step(batch)

    trainer, task = bare_trainer(tmp_path, max_epochs=2), Failing()
    data = DataLoader(
        Broken(fails == "sample"), 4, sampler=sampler and sampler(), num_workers=2, persistent_workers=persistent
    )
    if fails == "no":
        trainer.fit(task, data)
    else:
        with pytest.raises(ZeroDivisionError):
            trainer.fit(task, data)
    assert set(multiprocessing.active_children()) <= set(before)
    assert trainer.num_training_batches == 5
    if fails != "sample":
        assert len(list(data)) == 5  # the loader can be read again
        if persistent:
            data._iterator._shutdown_workers()


def test_the_workers_of_a_validation_end_with_it(tmp_path):
    before = multiprocessing.active_children()

    class Counting(Seeing):
        found = ()

        def training_step(self, batch):
            self.found += (len(multiprocessing.active_children()) - len(before),)
            return super().training_step(batch)

        def validation_step(self, batch):
            pass

    task = Counting()
    bare_trainer(tmp_path, max_epochs=2).fit(
        task,
        DataLoader(make_numbers(4), 4, num_workers=1),
        val_dataloaders=DataLoader(make_numbers(4), 4, num_workers=2),
    )
    assert task.found == (1, 1)


def test_pinning_without_an_accelerator_is_left_out_quietly(tmp_path):
    task = read_batches(tmp_path, DataLoader(make_numbers(), 4, pin_memory=True))
    assert not task.epochs[0][0][0].is_pinned() or torch.accelerator.is_available()


@pytest.mark.parametrize("workers", [0, 2])
def test_dataset_error_is_raised_by_the_run(tmp_path, workers):
    with pytest.raises(ZeroDivisionError, match="sample 11 is broken"):
        read_batches(tmp_path, DataLoader(Broken(True), 4, num_workers=workers))


# ---------------------------------------------------------------------- other loaders, read unchanged


class BySize(Sampler):
    """Batch sampler with batches of one, two, three, ... samples, in random order."""

    def __iter__(self):
        order = torch.randperm(20).tolist()
        while order:
            size = 1 + random.randrange(5)
            yield order[:size]
            del order[:size]


class Stream(IterableDataset):
    """Stream without a length, split over workers, that draws random numbers."""

    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, 20, step):
            yield index + torch.rand(()).double()


class CountedStream(Stream):
    def __len__(self):
        return 20


class Batches:
    """Iterable of batches."""

    def __iter__(self):
        return iter(torch.randperm(20).split(4))


class Thinning(DataLoader):
    """Loader that skips batches: Lumen keeps its iteration."""

    def __iter__(self):
        return (batch for number, batch in enumerate(super().__iter__()) if number % 2)


def iterate_samples():
    return torch.Generator().manual_seed(5)


OTHER_LOADERS = {
    "a sampler": lambda: DataLoader(make_numbers(), 4, sampler=OddFirst()),
    "a sampler and workers": lambda: DataLoader(make_numbers(), 4, sampler=OddFirst(), num_workers=2),
    "weighted": lambda: DataLoader(make_numbers(), 4, sampler=WeightedRandomSampler(torch.arange(20.0), 18)),
    "weighted, its own generator": lambda: DataLoader(
        make_numbers(), 4, sampler=WeightedRandomSampler(torch.arange(20.0), 18, generator=iterate_samples())
    ),
    "with replacement, its own generator": lambda: DataLoader(
        make_numbers(),
        4,
        sampler=RandomSampler(range(20), replacement=True, generator=iterate_samples()),
        generator=iterate_samples(),
    ),
    "a subset in random order": lambda: DataLoader(make_numbers(40), 4, sampler=SubsetRandomSampler(range(10, 28))),
    "batches of varying size": lambda: DataLoader(make_numbers(), batch_sampler=BySize()),
    "a standard batch sampler": lambda: DataLoader(make_numbers(), batch_sampler=BatchSampler(OddFirst(), 4, False)),
    "a batch sampler, its own generator": lambda: DataLoader(
        make_numbers(),
        batch_sampler=BatchSampler(RandomSampler(range(20), generator=iterate_samples()), 4, False),
        num_workers=1,
    ),
    "samples instead of batches": lambda: DataLoader(make_numbers(12), batch_size=None),
    "a stream": lambda: DataLoader(Stream(), 4),
    "a stream and workers": lambda: DataLoader(Stream(), 4, num_workers=2),
    "a stream of known length": lambda: DataLoader(CountedStream(), 4),
    "batches": Batches,
    "a list of batches": lambda: [torch.arange(4) + 10 * number for number in range(5)],
    "a loader with its own iteration": lambda: Thinning(make_numbers(), 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHER_LOADERS)
def test_a_loader_of_another_kind_repeats_and_resumes(tmp_path, kind):
    """Two runs see the same batches, and so does a run resumed in the middle or at the end of an epoch."""
    whole = read_batches(tmp_path, OTHER_LOADERS[kind](), max_epochs=3)
    again = read_batches(tmp_path, OTHER_LOADERS[kind](), max_epochs=3)
    expected = {epoch: as_lists(batches) for epoch, batches in whole.epochs.items()}
    assert {epoch: as_lists(batches) for epoch, batches in again.epochs.items()} == expected
    per_epoch = [len(batches) for batches in expected.values()]
    if kind not in ("a list of batches", "samples instead of batches", "a loader with its own iteration"):
        assert expected[0] != expected[1] != expected[2]

    for step in (per_epoch[0], per_epoch[0] + 2):
        path = tmp_path / f"step-{step}"
        read_batches(tmp_path, OTHER_LOADERS[kind](), max_steps=step, callbacks=[Saving(step, path)])
        resumed = read_batches(tmp_path, OTHER_LOADERS[kind](), max_epochs=3, resume=path)
        consumed = step - per_epoch[0]
        assert as_lists(resumed.epochs[1]) == expected[1][consumed:]
        assert as_lists(resumed.epochs[2]) == expected[2]


@pytest.mark.parametrize("kind", ["weighted", "batches of varying size", "a stream", "batches"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_other_loaders_accumulate_and_allow_short_steps(tmp_path, kind, accumulate, caplog):
    options = {"max_epochs": 2, "accumulate_grad_batches": accumulate, "log_level": "WARNING"}
    task, trainer = Seeing(), bare_trainer(tmp_path, **options)
    trainer.fit(task, OTHER_LOADERS[kind]())
    assert caplog.text.count("Lumen did not draw these batches") == (kind in ("a stream", "batches"))
    assert trainer.global_step == sum(-(-len(batches) // accumulate) for batches in task.epochs.values())


@pytest.mark.parametrize(
    ("sampler", "indices"),
    [
        (SequentialSampler(range(5)), range(5)),
        (RandomSampler(range(5)), range(5)),
        (RandomSampler(range(20), num_samples=7), None),
        (DistributedSampler(range(4), num_replicas=1, rank=0, shuffle=False), range(4)),
    ],
)
def test_samplers_over_a_subset_are_respected(tmp_path, sampler, indices):
    task = read_batches(tmp_path, DataLoader(make_numbers(20), 2, sampler=sampler))
    for epoch in range(2):
        samples = task.samples(epoch)
        assert len(samples) == len(sampler)
        if indices is not None:
            assert sorted(samples) == list(indices)


def test_batch_weight_defaults_to_first_dimension(tmp_path):
    class Weighed(Seeing):
        def training_step(self, batch):
            super().training_step(batch)
            return self.weight * batch[0].mean()

    task = Weighed()
    batches = [[torch.full((size,), float(size))] for size in (1, 2, 5)]
    bare_trainer(tmp_path, max_epochs=1, accumulate_grad_batches=3).fit(task, batches)
    assert task.weight.item() == pytest.approx(-0.1 * (1 * 1 + 2 * 2 + 5 * 5) / 8, rel=1e-6)


class Fetching(Dataset):
    """Data set that returns many samples at once in a loader of batches, and takes a list of indices as one index."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.tensor(index) + torch.rand(()).double()

    def __getitems__(self, indices):
        return [self[operator.index(index)] for index in indices]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_list_of_indices_may_be_one_item(tmp_path, workers):
    """Lumen, like torch, reads the items of batch_size=None by `__getitem__` alone."""

    def loader():
        sampler = BatchSampler(SequentialSampler(range(12)), 4, drop_last=False)
        return DataLoader(Fetching(), batch_size=None, sampler=sampler, num_workers=workers)

    whole = read_batches(tmp_path, loader(), callbacks=[Saving(4, tmp_path / "four")])
    assert [int(number) for number in whole.samples(0)] == list(range(12))
    resumed = read_batches(tmp_path, loader(), resume=tmp_path / "four")
    assert as_lists(resumed.epochs[1]) == as_lists(whole.epochs[1])[1:]


class Graphs:
    """Batch of a class in which Lumen finds no tensors, like PyTorch Geometric's."""

    def __init__(self, size):
        self.nodes = torch.ones(size)


def test_a_warning_says_how_batches_are_counted(tmp_path, caplog):
    bare_trainer(tmp_path, max_epochs=2, log_level="WARNING").fit(Seeing(), [Graphs(3), torch.ones(3), Graphs(2)])
    found = [message for message in caplog.messages if "did not draw these batches" in message]
    first, second = (re.search("so a batch counts (.*?)[.] Return", message)[1] for message in found)
    assert first == "1 sample, because Lumen finds no tensor with a dimension in a Graphs"
    assert second == "as many samples as dimension 0 of its first tensor"


class Unsized:
    """Base class whose length raises an error, like PyTorch Geometric's batch samplers."""

    def __len__(self):
        raise ValueError("the number of steps is ambiguous")


class UnsizedBatches(Unsized, BySize):
    """Batch sampler with batches of varying size."""


class UnsizedStream(Unsized, Stream):
    """Stream that draws random numbers."""


class UnsizedNumbers(Unsized, Dataset):
    """Map-style data of numbers."""

    def __getitem__(self, index):
        return index


UNSIZED = {
    "a batch sampler": lambda: DataLoader(make_numbers(), batch_sampler=UnsizedBatches()),
    "a stream": lambda: DataLoader(UnsizedStream(), 4),
    "a data set": lambda: DataLoader(UnsizedNumbers(), 4, sampler=list(range(20))),
    "any iterable": type("UnsizedIterable", (Unsized, Batches), {}),
}


@pytest.mark.parametrize("kind", UNSIZED)
def test_a_length_that_raises_is_unknown(tmp_path, kind):
    task, trainer = Seeing(), bare_trainer(tmp_path, max_epochs=2)
    trainer.fit(task, UNSIZED[kind]())
    assert sorted(map(int, task.samples(1))) == list(range(20))


@pytest.mark.parametrize(("limit", "batches"), [(3, 3), (1, 1)])
def test_an_endless_stream_needs_only_a_limit(tmp_path, limit, batches):
    class Endless:
        taken = 0

        def __iter__(self):
            while True:
                self.taken += 1
                yield torch.zeros(4)

    stream = Endless()
    task = read_batches(tmp_path, stream, limit_train_batches=limit, max_epochs=3)
    assert [len(task.epochs[epoch]) for epoch in range(3)] == [batches] * 3
    assert stream.taken == 3 * batches
    assert len(read_batches(tmp_path, Endless(), max_epochs=None, max_steps=7).epochs[0]) == 7


@pytest.mark.parametrize("batch_size", [None, 5])
def test_impossible_global_batch_size_raises(tmp_path, batch_size):
    data = DataLoader(Stream(), batch_size)
    with pytest.raises(ConfigError, match=f"global_batch_size: 8 is not a multiple of the batch size {batch_size}"):
        read_batches(tmp_path, data, global_batch_size=8)


def test_global_batch_of_several_batches_works(tmp_path):
    trainer = bare_trainer(tmp_path, max_epochs=1, global_batch_size=8)
    trainer.fit(Seeing(), DataLoader(Stream(), 4))
    assert trainer.global_step == 3


def test_global_batch_is_cut_from_a_user_sampler(tmp_path):
    trainer, task = bare_trainer(tmp_path, max_epochs=1, global_batch_size=10), Seeing()
    trainer.fit(task, DataLoader(make_numbers(), 4, sampler=OddFirst()))
    assert trainer.global_step == 2
    assert [len(batch[0]) for batch in task.epochs[0]] == [4, 4, 2, 4, 4, 2]


# ---------------------------------------------------------------------- empty data


class Silent(IterableDataset):
    def __iter__(self):
        return iter(())


EMPTY = {
    "no samples": (lambda: DataLoader(TensorDataset(torch.empty(0, 6)), 4), "TensorDataset has no samples"),
    "fewer than one batch": (
        lambda: DataLoader(make_numbers(3), 4, drop_last=True),
        "TensorDataset has 3 samples, fewer than the batch_size 4, and drop_last=True omits a batch that is not f",
    ),
    "a part of them": (
        lambda: DataLoader(make_numbers(9), 4, drop_last=True, sampler=SubsetRandomSampler([1, 2])),
        "SubsetRandomSampler has 2 samples, fewer than the batch_size 4, and drop_last=True",
    ),
    "an empty list": (list, "list gave no batch"),
    "an empty sampler": (
        lambda: DataLoader(Subset(make_numbers(), []), 4, sampler=SubsetRandomSampler([])),
        "SubsetRandomSampler has no samples",
    ),
    "an empty batch sampler": (
        lambda: DataLoader(make_numbers(), batch_sampler=[]),
        "the list of the loader returns no indices",
    ),
    "an empty stream": (lambda: DataLoader(Silent(), 4), "Silent gave no batch"),
    "a stream of less than a batch": (
        lambda: DataLoader(Stream(), 40, drop_last=True),
        "Stream gave no samples, or fewer than the batch_size 40, which drop_last=True omits",
    ),
    "loaders": (
        lambda: lumen.CombinedLoader(
            {"a": DataLoader(make_numbers(2), 4, drop_last=True), "b": DataLoader(make_numbers(2), 1)}, "min_size"
        ),
        "a: TensorDataset has 2 samples, fewer than the batch_size 4",
    ),
}


@pytest.mark.parametrize("kind", EMPTY)
@pytest.mark.parametrize("limit", [{"max_epochs": 2}, {"max_steps": 2}])
def test_empty_training_loader_raises_and_names_the_cause(tmp_path, kind, limit):
    make, why = EMPTY[kind]
    task = Seeing()
    with pytest.raises(DataError, match=f"there is no batch to train on: {why}"):
        bare_trainer(tmp_path, **limit).fit(task, make())
    assert task.epochs == {}


def test_known_empty_loader_raises_before_writing(tmp_path):
    with pytest.raises(DataError, match="there is no batch to train on"):
        quiet_trainer(tmp_path, max_epochs=1).fit(Seeing(), EMPTY["no samples"][0]())
    assert not (tmp_path / "runs" / "run").exists()


class Buffer(Dataset):
    """Data set over a given list."""

    def __init__(self):
        self.samples = []

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start", "on_train_epoch_start"])
@pytest.mark.parametrize("fills", [True, False])
def test_buffer_may_be_filled_at_training_start(tmp_path, hook, fills):
    class Filling(lumen.Callback):
        pass

    buffer, task = Buffer(), Seeing()
    setattr(Filling, hook, lambda *_: buffer.samples.extend([len(buffer.samples)] * fills))
    trainer = bare_trainer(tmp_path, max_epochs=2, callbacks=[Filling()])
    if fills:
        trainer.fit(task, DataLoader(buffer, 1))
        assert task.samples(0) == [0]
    else:
        with pytest.raises(DataError, match="there is no batch to train on: Buffer has no samples"):
            trainer.fit(task, DataLoader(buffer, 1))


class Logging(Seeing):
    """Task that logs in every stage."""

    def training_step(self, batch):
        self.log("loss", 1.0)
        return super().training_step(batch)

    def validation_step(self, batch):
        self.log("val_loss", 1.0)

    test_step = predict_step = validation_step


@pytest.mark.parametrize("kind", sorted(EMPTY.keys() - {"loaders"}))
def test_an_empty_evaluation_loader_is_one_warning(tmp_path, kind, caplog):
    make, why = EMPTY[kind]
    trainer = bare_trainer(tmp_path, max_epochs=3, log_level="WARNING")
    trainer.fit(
        Logging(),
        DataLoader(make_numbers(8), 4),
        val_dataloaders={"good": DataLoader(make_numbers(8), 4), "bad": make()},
    )
    assert trainer.global_step == 6
    assert caplog.text.count("is empty") == 1
    assert f"the loader bad to validate is empty: {why}" in caplog.text
    assert set(trainer.callback_metrics) == {"val_loss/good", "loss"}
    for stage in ("validate", "test", "predict") if kind != "an empty list" else ():  # an object that is not a loader
        caplog.clear()
        getattr(trainer, stage)(Logging(), make())
        assert caplog.text.count(f"the loader to {stage} is empty: {why}") == 1


@pytest.mark.parametrize("callback", [lumen.EarlyStopping("val_loss"), lumen.ModelCheckpoint(monitor="val_loss")])
def test_monitor_of_an_empty_loader_raises(tmp_path, callback):
    trainer = quiet_trainer(tmp_path, max_epochs=3, callbacks=[callback])
    with pytest.raises(
        ConfigError, match=r"'val_loss' was never logged; .* the loader to validate is empty: TensorData"
    ):
        trainer.fit(Logging(), DataLoader(make_numbers(8), 4), EMPTY["fewer than one batch"][0]())


def test_one_pass_iterator_raises_in_second_epoch(tmp_path):
    trainer = bare_trainer(tmp_path, max_epochs=2)
    with pytest.raises(DataError, match="a generator, which can be read only once"):
        trainer.fit(Seeing(), (torch.zeros(4) for _ in range(3)))
    assert trainer.global_step == 3
    endless = iter(lambda: torch.zeros(4), None)
    task = read_batches(tmp_path, endless, max_epochs=3, limit_train_batches=2)
    assert [len(task.epochs[epoch]) for epoch in range(3)] == [2, 2, 2]


# ---------------------------------------------------------------------- StopIteration in a sample does not end the data


class Stopping(Dataset):
    """Data set that raises StopIteration at one sample, like `next` on an empty iterator."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return index if index != 9 else next(iter(()))


class StoppingAtOnce(Stopping):
    def __getitems__(self, indices):
        return [self[operator.index(index)] for index in indices]


class StoppingInside(IterableDataset):
    def __iter__(self):
        for index in range(20):
            yield Stopping()[index]


def stops(samples):
    return torch.tensor([Stopping()[sample] for sample in samples])


STOPPING = {
    "a sample": (lambda **how: DataLoader(Stopping(), 4, **how), "Stopping raised StopIteration at the samples 8, 9"),
    "several samples": (lambda **how: DataLoader(StoppingAtOnce(), 4, **how), "StoppingAtOnce raised StopIteration at"),
    "a single sample": (lambda **how: DataLoader(Stopping(), None, **how), "Stopping raised StopIteration at the sam"),
    "a collate function": (
        lambda **how: DataLoader(range(20), 4, collate_fn=stops, **how),
        "range raised StopIteration at the samples 8, 9",
    ),
    "a stream": (
        lambda **how: DataLoader(StoppingInside(), 4, **how),
        "StoppingInside raised StopIteration after [0-9] batches of the epoch",
    ),
    "a stream's collate function": (
        lambda **how: DataLoader(Counted(), 4, collate_fn=stops, **how),
        "Counted raised StopIteration in its collate function",
    ),
}


class Counted(IterableDataset):
    def __iter__(self):
        return iter(range(20))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", STOPPING)
@pytest.mark.parametrize("stage", ["fit", "validate"])
def test_stop_iteration_in_data_raises(tmp_path, kind, workers, stage):
    make, message = STOPPING[kind]
    options = {"max_epochs": 1} if stage == "fit" else {}
    task = Logging()
    with pytest.raises(DataError, match=message) as caught:
        getattr(bare_trainer(tmp_path, **options), stage)(task, make(num_workers=workers))
    shown = "".join(traceback.format_exception(caught.value))
    assert "next(iter(()))" in shown  # the traceback names the place of the error


# ---------------------------------------------------------------------- iterables that are their own iterators


class Restarting:
    """Iterator whose `__iter__` restarts and returns itself, like a prefetcher's."""

    def __init__(self, batches=5):
        self.batches, self.at = batches, 0

    def __len__(self):
        return self.batches

    def __iter__(self):
        self.at = 0
        return self

    def __next__(self):
        if self.at == self.batches:
            raise StopIteration
        self.at += 1
        return torch.tensor([float(self.at)])


class Exhausted(Restarting):
    """Iterator that only seems to restart."""

    def __iter__(self):
        assert self.batches
        return self


class Once(Restarting):
    def __iter__(self):
        return self


class Validated(Seeing):
    """Task that records the batches of each validation."""

    def on_validation_epoch_start(self):
        self.validated = [*getattr(self, "validated", []), []]

    def validation_step(self, batch):
        self.validated[-1].append(batch.item())

    test_step = validation_step


@pytest.mark.parametrize("limit", [None, 3])
def test_restarting_loader_that_returns_itself_works(tmp_path, limit):
    task, all_of_it = Validated(), [1.0, 2.0, 3.0, 4.0, 5.0][:limit]
    trainer = bare_trainer(tmp_path, max_epochs=3, limit_train_batches=limit, limit_val_batches=limit)
    trainer.fit(task, Restarting(), Restarting())
    assert [task.samples(epoch) for epoch in range(3)] == [all_of_it] * 3
    assert task.validated == [[1.0, 2.0]] + [all_of_it] * 3  # the sanity check is first
    task.validated = []
    for _ in range(2):
        trainer.validate(task, loader := Restarting())
        trainer.validate(task, loader)
    assert task.validated == [all_of_it] * 4


def test_restarting_loaders_combine_in_parallel_and_sequentially(tmp_path):
    class Both(Seeing):
        def samples(self, epoch):
            return [tuple(part if part is None else part.item() for part in batch) for batch in self.epochs[epoch]]

    task = Both()
    bare_trainer(tmp_path, max_epochs=2).fit(task, [Restarting(2), Restarting(5)])
    assert task.samples(0) == task.samples(1) == [(1, 1), (2, 2), (1, 3), (2, 4), (1, 5)]
    task = read_batches(tmp_path, lumen.CombinedLoader([Restarting(2), Restarting(3)], "sequential"))
    assert task.samples(0) == task.samples(1) == [1, 2, 1, 2, 3]


@pytest.mark.parametrize("kind", [Exhausted, Once])
def test_exhausted_loader_raises_instead_of_being_empty(tmp_path, kind):
    with pytest.raises(DataError, match=f"a {kind.__name__}, which can be read only once"):
        read_batches(tmp_path, kind())
    with pytest.raises(DataError, match=f"a {kind.__name__}, which can be read only once"):
        bare_trainer(tmp_path, max_epochs=2, num_sanity_val_steps=-1).fit(Validated(), Restarting(), kind())


def test_shared_loader_within_an_epoch_raises(tmp_path):
    task, both = Validated(), Restarting()
    bare_trainer(tmp_path, max_epochs=2).fit(task, both, both)
    assert [task.samples(epoch) for epoch in range(2)] == task.validated[1:] == [[1.0, 2.0, 3.0, 4.0, 5.0]] * 2
    with pytest.raises(DataError, match="training and validation read one Restarting"):
        bare_trainer(tmp_path, max_epochs=2, val_check_interval=2).fit(Validated(), both, both)


class RestartingIndices:
    """Sampler that is an iterator."""

    def __init__(self, indices):
        self.indices = indices

    def __len__(self):
        return len(self.indices)

    def __iter__(self):
        self.rest = list(self.indices)
        return self

    def __next__(self):
        if not self.rest:
            raise StopIteration
        return self.rest.pop(0)


def test_a_sampler_may_begin_anew_and_return_itself(tmp_path):
    task = read_batches(tmp_path, DataLoader(make_numbers(), 2, sampler=RestartingIndices([3, 1, 2])))
    assert task.samples(0) == task.samples(1) == [3, 1, 2]
    task = read_batches(tmp_path, DataLoader(make_numbers(), batch_sampler=RestartingIndices([[3, 1], [2]])))
    assert task.samples(0) == task.samples(1) == [3, 1, 2]


def test_one_pass_sampler_raises_in_second_validation(tmp_path):
    validated = DataLoader(make_numbers(), 1, sampler=(number for number in range(3)))
    with pytest.raises(DataError, match="a generator, which can be read only once"):
        bare_trainer(tmp_path, max_epochs=1).fit(Logging(), DataLoader(make_numbers(8), 4), validated)
