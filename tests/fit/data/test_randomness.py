"""Random numbers of torch, numpy and `random` in every stage and loader: independent, and repeatable."""

import pickle
import random
from dataclasses import dataclass
from functools import partial
from itertools import combinations

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from lumen.data.seeded_dataset import BatchRequest, SeededDataset
from lumen.errors import ConfigError
from lumen.random import Domain, make_key, seed_generators
from tests.helpers.tasks import Saving, Seeing, as_lists, bare_trainer, read_batches

# ---------------------------------------------------------------------- the generators of torch, numpy and `random`

BITS = 24  # with more bits, torch and numpy make a number in different ways


def draw_first_words():
    """Return the first number of `BITS` bits that each global generator draws."""
    return [int(torch.randint(0, 2**BITS, ())), int(np.random.randint(0, 2**BITS)), random.getrandbits(BITS)]


def split_bits(words):
    """Return the bits of every word as float64 of shape (words, BITS)."""
    return (np.asarray(words)[:, None] >> np.arange(BITS) & 1).astype(np.float64)


def assert_independent(columns):
    """Assert that the bits of a column are unrelated, and that two columns are rarely equal, as by chance."""
    samples, bits = len(columns[0]), np.concatenate([split_bits(column) for column in columns], axis=1)
    correlation = np.corrcoef(bits, rowvar=False) - np.eye(BITS * len(columns))
    assert np.abs(correlation).max() < 6 / samples**0.5
    for first, second in combinations(np.asarray(columns), 2):
        for kept in (1, 2, 4, 8):
            for shift in (0, BITS - kept):  # the lower bits, the higher bits
                same = ((first ^ second) >> shift & (2**kept - 1)) == 0
                assert abs(same.mean() - 0.5**kept) < 6 * (0.5**kept / samples) ** 0.5
        assert (first == second).sum() <= 3


def draw_for_keys(draw, keys=20_000):
    """Return the draws of a function for each of many keys, of shape (draws, keys)."""
    rows = []
    for number in range(keys):
        seed_generators(make_key(7, Domain.SAMPLE, 0, number))
        rows.append(draw())
    return np.array(rows).T


def test_torch_numpy_and_random_draw_independent_words():
    assert_independent(draw_for_keys(draw_first_words))


def shuffled(items):
    random.shuffle(items)
    return items


DRAWS = {
    "floats": lambda: [float(torch.rand(())), np.random.rand(), random.random()],
    "normals": lambda: [float(torch.randn(())), np.random.randn(), random.gauss(0, 1)],
    "coins": lambda: [int(torch.randint(0, 2, ())), np.random.choice(2), random.choice([0, 1])],
    "permutations": lambda: [int(torch.randperm(2)[0]), np.random.permutation(2)[0], shuffled([0, 1])[0]],
    "coins by chance": lambda: [float(torch.rand(()) < 0.5), np.random.rand() < 0.5, random.random() < 0.5],
}


@pytest.mark.parametrize("kind", DRAWS)
def test_draws_of_different_libraries_are_uncorrelated(kind):
    columns = draw_for_keys(DRAWS[kind])
    correlation = np.corrcoef(columns) - np.eye(3)
    assert np.abs(correlation).max() < 5 / 20_000**0.5


# ---------------------------------------------------------------------- stages and loaders


class Words(Dataset):
    """Data set whose samples are their index and the first words of the three generators."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        return torch.tensor([index, *draw_first_words()])


class Stream(IterableDataset):
    """Stream of batches that are drawn at reading, without stored data."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        for index in range(self.samples):
            yield torch.tensor([index, *draw_first_words()])


class Choosing(Sampler):
    """Sampler that draws samples from its generator."""

    def __init__(self, samples):
        self.samples, self.generator = samples, np.random.default_rng(1)

    def __iter__(self):
        return iter(self.generator.permutation(self.samples).tolist())

    def __len__(self):
        return self.samples


class Looking(Seeing):
    """Task that records every pass of every stage and loader."""

    def __init__(self):
        super().__init__()
        self.passes = {}
        self.number = 0

    def keep(self, name, batch):
        self.passes.setdefault((name, self.number), []).append(batch)

    def training_step(self, batch, batch_idx):
        self.keep("train", batch)
        return self.weight.square()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.keep(f"validate {dataloader_idx}", batch)

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        self.keep(f"test {dataloader_idx}", batch)

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        self.keep(f"predict {dataloader_idx}", batch)

    def on_train_epoch_end(self):
        self.number += 1

    def rows(self, name, number=0):
        return torch.cat(self.passes[name, number])


LOADERS = {
    "map-style": lambda samples: DataLoader(Words(samples), samples),
    "with workers": lambda samples: DataLoader(Words(samples), 4, num_workers=2),
    "shuffled": lambda samples: DataLoader(Words(samples), 4, shuffle=True),
    "a sampler": lambda samples: DataLoader(Words(samples), 4, sampler=WeightedRandomSampler([1.0] * samples, samples)),
    "a sampler with a generator": lambda samples: DataLoader(Words(samples), 4, sampler=Choosing(samples)),
    "a stream": lambda samples: DataLoader(Stream(samples), 4),
    "a stream with workers": lambda samples: DataLoader(Stream(samples), 4, num_workers=1),
}


def train_in_all_stages(tmp_path, make, samples):
    """Train for two epochs with a validation after each; then validate, test and predict with new loaders."""
    task = Looking()
    trainer = bare_trainer(tmp_path, max_epochs=2, num_sanity_val_steps=0)
    trainer.fit(task, make(samples), val_dataloaders=[make(samples), make(samples)])
    for name in ("validate", "test", "predict"):
        getattr(trainer, name)(task, [make(samples), make(samples)])
    return task


STAGES = [("train", 0), ("train", 1), *((f"{stage} {loader}", 2) for stage in ("test", "predict") for loader in (0, 1))]
STAGES += [("validate 0", 0), ("validate 1", 0)]


@pytest.fixture(scope="module", params=LOADERS)
def recorded_passes(request, tmp_path_factory):
    """Return the records of one kind of loader in all stages."""
    return request.param, train_in_all_stages(tmp_path_factory.mktemp("looked"), LOADERS[request.param], 32)


@pytest.mark.slow
def test_stages_and_loaders_draw_different_numbers(recorded_passes):
    kind, task = recorded_passes
    rows = [task.rows(name, number) for name, number in STAGES]
    words = [set(each[:, 1:].flatten().tolist()) for each in rows]
    assert all(len(each) >= 95 for each in words)  # with 24 bits, some numbers occur twice
    assert len(set.union(*words)) >= 96 * len(STAGES) - 2
    if kind in ("shuffled", "a sampler", "a sampler with a generator"):
        orders = {tuple(each[:, 0].tolist()) for each in rows}
        assert len(orders) == len(STAGES)


def test_every_validation_draws_alike_after_the_fit_too(recorded_passes):
    _, task = recorded_passes
    for loader in ("validate 0", "validate 1"):
        first = task.rows(loader, 0)
        assert torch.equal(first, task.rows(loader, 1))
        assert torch.equal(first, task.rows(loader, 2))  # from trainer.validate


@pytest.mark.slow
def test_draws_of_stages_loaders_and_epochs_are_independent(tmp_path):
    task = train_in_all_stages(tmp_path, LOADERS["map-style"], 2_000)
    columns = [task.rows(name, number)[:, word].numpy() for name, number in STAGES for word in (1, 2, 3)]
    assert_independent(columns)


def test_domains_seeds_and_epochs_draw_independently():
    def words(*key):
        rows = []
        for number in range(1_000):
            seed_generators(make_key(*key, number))
            rows.append(draw_first_words())
        return np.array(rows).T

    kinds = [(7, domain) for domain in Domain] + [(8, Domain.SAMPLE), (7, Domain.SAMPLE, 0), (7, Domain.SAMPLE, 1)]
    assert_independent([column for kind in kinds for column in words(*kind)])


# ---------------------------------------------------------------------- seeds


def test_distinct_seeds_have_distinct_keys():
    seeds = [0, 1, 2**31, 2**32, 2**32 + 1, 2**63 - 1, 2**63, 2**64 - 1]
    for words in ((), (0,), (3, 17)):
        assert len({make_key(seed, Domain.ORDER, *words) for seed in seeds}) == len(seeds)


@pytest.mark.parametrize("seed", [-1, 2**64, 2**64 + 7])
def test_seeds_outside_64_bits_are_rejected(seed):
    with pytest.raises(ConfigError, match=r"seed: expected an integer from 0 to 2\*\*64 - 1, found"):
        make_key(seed, Domain.ORDER)


def test_the_largest_seed_trains(tmp_path):
    task = read_batches(tmp_path, DataLoader(Words(4), 4, shuffle=True), seed=2**63 - 1)
    assert {row[0] for row in task.samples(0)} == {0, 1, 2, 3}


# ---------------------------------------------------------------------- generators in objects


class Slotted:
    """Data set with a generator in a slot, outside of `__dict__`."""

    __slots__ = ("__mine",)

    def __init__(self, generator):
        self.__mine = generator

    def __call__(self):
        return draw(self.__mine)


@dataclass
class Recipe:
    """Data class with a generator as a field."""

    generator: object

    def __call__(self):
        return draw(self.generator)


class Compose:
    """Transforms in sequence; the number of the last one counts."""

    def __init__(self, *transforms):
        self.transforms = transforms

    def __call__(self):
        return [transform() for transform in self.transforms][-1]


def draw(generator):
    """Return a number of 24 bits from any kind of generator."""
    if isinstance(generator, torch.Generator):
        return int(torch.randint(0, 2**BITS, (), generator=generator))
    if isinstance(generator, random.Random):
        return generator.getrandbits(BITS)
    if isinstance(generator, np.random.BitGenerator):
        return int(generator.random_raw() % 2**BITS)
    return int((generator.integers if isinstance(generator, np.random.Generator) else generator.randint)(0, 2**BITS))


def closure(generator):
    return lambda: draw(generator)


GENERATOR = np.random.default_rng(5)


def from_a_global_variable():
    return draw(GENERATOR)


class ByClass:
    """Transform whose class holds the generator."""

    generator = np.random.RandomState(3)

    def __call__(self):
        return draw(self.generator)


PLACES = {
    "a torch.Generator": lambda: Recipe(torch.Generator().manual_seed(3)),
    "a numpy Generator": lambda: Recipe(np.random.default_rng(3)),
    "a numpy Generator without a seed": lambda: Recipe(np.random.default_rng()),
    "a RandomState": lambda: Recipe(np.random.RandomState(3)),
    "a bit generator": lambda: Recipe(np.random.Philox(3)),
    "a random.Random": lambda: Recipe(random.Random(3)),
    "slots": lambda: Slotted(np.random.default_rng(3)),
    "a list of transforms": lambda: Compose(Slotted(random.Random(3)), Compose(Recipe(np.random.default_rng(3)))),
    "a partial": lambda: partial(draw, np.random.default_rng(3)),
    "a dictionary": lambda: partial(lambda made: draw(made["deep"][0]), {"deep": (random.Random(3),)}),
    "a bound method": lambda: Recipe(np.random.default_rng(3)).__call__,
    "a closure": lambda: closure(np.random.default_rng(3)),
    "a global variable": lambda: from_a_global_variable,
    "a class": ByClass,
}


class Transformed(Dataset):
    """Data set whose samples are their index and the draw of a transform."""

    def __init__(self, transform, samples=16):
        self.transform, self.samples = transform, samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        return torch.tensor([index, self.transform()])


class Lazy(Transformed):
    """Transform that makes its generator at its first use, as recommended for workers."""

    def __init__(self, samples=16):
        super().__init__(None, samples)

    def __getitem__(self, index):
        self.transform = self.transform or Recipe(np.random.default_rng())
        return super().__getitem__(index)


def collate_with(generator, samples):
    return torch.stack(samples) + torch.tensor([0, draw(generator)])


def made_of(place):
    return Lazy() if place == "made in __getitem__" else Transformed(PLACES[place]())


def drawn_by_index(task, epoch):
    return {index: number for batch in task.epochs[epoch] for index, number in batch.tolist()}


@pytest.mark.parametrize("place", [*PLACES, "made in __getitem__"])
def test_generator_in_dataset_is_keyed_by_sample(tmp_path, place):
    whole = read_batches(tmp_path, DataLoader(made_of(place), 4, shuffle=True), callbacks=[Saving(6, tmp_path / "six")])
    first, second = drawn_by_index(whole, 0), drawn_by_index(whole, 1)
    assert len(set(first.values()) | set(second.values())) == 32
    resumed = read_batches(tmp_path, DataLoader(made_of(place), 4, shuffle=True), resume=tmp_path / "six")
    assert as_lists(resumed.epochs[1]) == as_lists(whole.epochs[1])[2:]
    assert len(resumed.epochs[1]) == 2


RECORDS = {
    "a long list": lambda: [{"boxes": [[1.0], [2.0], [3.0], [4.0], [5.0], [6.0], [7.0], [8.0]]} for _ in range(1024)],
    "short lists in short lists": lambda: [[[[[1.0]] for _ in range(60)] for _ in range(60)] for _ in range(3)],
}


@pytest.mark.parametrize("kind", RECORDS)
def test_records_hide_no_generator_of_a_transform(tmp_path, caplog, kind):
    class Recorded(Transformed):
        def __init__(self):
            self.records = RECORDS[kind]()
            super().__init__(Compose(lambda: 0, Compose(Recipe(np.random.default_rng(3)))))

    options = {"max_epochs": 1, "log_level": "WARNING"}
    whole = read_batches(tmp_path, DataLoader(Recorded(), 4), callbacks=[Saving(2, tmp_path / "two")], **options)
    resumed = read_batches(tmp_path, DataLoader(Recorded(), 4), resume=tmp_path / "two", **options)
    assert as_lists(resumed.epochs[0]) == as_lists(whole.epochs[0])[2:]
    assert "stops searching" not in caplog.text


def test_a_search_that_stops_is_one_warning(tmp_path, caplog):
    class Vast(Transformed):
        def __init__(self):
            super().__init__(lambda: 0)
            vars(self).update({f"part_{number}": [] for number in range(9000)})

    read_batches(tmp_path, DataLoader(Vast(), 4), log_level="WARNING")
    (message,) = (message for message in caplog.messages if "stops searching" in message)
    assert message.startswith("Lumen stops searching dataset (Vast) after 8192 objects: it neither seeds")


@pytest.mark.parametrize("place", ["a numpy Generator without a seed", "a torch.Generator", "made in __getitem__"])
def test_generator_draws_are_independent_of_workers(tmp_path, place):
    runs = [read_batches(tmp_path, DataLoader(made_of(place), 4, num_workers=number)) for number in (0, 2)]
    for epoch in (0, 1):
        assert drawn_by_index(runs[0], epoch) == drawn_by_index(runs[1], epoch)


def test_what_a_worker_replaces_is_keyed_too(tmp_path):
    def renew(worker):
        torch.utils.data.get_worker_info().dataset.transform.generator = np.random.default_rng(worker)

    runs = [
        read_batches(tmp_path, DataLoader(made_of("a numpy Generator"), 4, num_workers=number, worker_init_fn=init))
        for number, init in [(0, None), (2, renew)]
    ]
    assert drawn_by_index(runs[0], 1) == drawn_by_index(runs[1], 1)


def test_what_a_hook_replaces_is_keyed_too(tmp_path):
    class Renewing(Seeing):
        def on_train_epoch_start(self):
            data.transform.generator = np.random.default_rng()

    runs = []
    for _ in range(2):
        data = made_of("a numpy Generator")
        runs.append(Renewing())
        bare_trainer(tmp_path, max_epochs=2).fit(runs[-1], DataLoader(data, 4))
    assert drawn_by_index(runs[0], 1) == drawn_by_index(runs[1], 1)


def test_dataset_and_global_generators_draw_independently(tmp_path):
    class Several(Dataset):
        def __init__(self):
            self.kept = [np.random.default_rng(1), np.random.default_rng(1), random.Random(1), torch.Generator()]
            self.kept += [np.random.RandomState(1), np.random.MT19937(1)]

        def __len__(self):
            return 2_000

        def __getitem__(self, index):
            return torch.tensor([*draw_first_words(), *map(draw, self.kept)])

    task = read_batches(tmp_path, DataLoader(Several(), 2_000), max_epochs=1)
    assert_independent(list(task.epochs[0][0].numpy().T))


def test_generator_in_collate_is_keyed_by_batch(tmp_path):
    def fit(**options):
        collate = partial(collate_with, np.random.default_rng())
        return read_batches(tmp_path, DataLoader(Transformed(lambda: 0), 4, collate_fn=collate), **options)

    whole = fit(callbacks=[Saving(6, tmp_path / "six")])
    assert len({number for epoch in (0, 1) for number in drawn_by_index(whole, epoch).values()}) == 8
    assert as_lists(fit(resume=tmp_path / "six").epochs[1]) == as_lists(whole.epochs[1])[2:]


def test_kept_generators_are_put_back_after_a_run(tmp_path):
    kept = np.random.default_rng(3), torch.Generator().manual_seed(3)
    for generator in kept:
        read_batches(tmp_path, DataLoader(Transformed(Recipe(generator)), 4))
        read_batches(tmp_path, DataLoader(Numbers(generator), 4))
    assert [draw(generator) for generator in kept] == [
        draw(np.random.default_rng(3)), draw(torch.Generator().manual_seed(3))
    ]  # fmt: skip


class Numbers(IterableDataset):
    """Stream of numbers from generators, in turn."""

    def __init__(self, *generators):
        self.generators = generators

    def __iter__(self):
        for _ in range(8):
            yield torch.tensor([draw(generator) for generator in self.generators])


class Halves(Sampler):
    """Batch sampler of two samples from each half of the data; a sampler with its generator shuffles each half."""

    def __init__(self, first, second):
        self.samplers = [SubsetRandomSampler(range(16), first), SubsetRandomSampler(range(16, 32), second)]

    def __iter__(self):
        for first, second in zip(*self.samplers, strict=True):
            yield [first, second]


def torchs(seed):
    return torch.Generator().manual_seed(seed)


def test_sampler_generators_draw_independently_by_their_seeds(tmp_path):
    def batches(*seeds):
        data = DataLoader(TensorDataset(torch.arange(32)), batch_sampler=Halves(*map(torchs, seeds)))
        return [batch[0].tolist() for epoch in read_batches(tmp_path, data).epochs.values() for batch in epoch]

    one_and_two = batches(1, 2)
    assert sum(second - first == 16 for first, second in one_and_two) < 8  # of 32 values
    assert one_and_two == batches(1, 2)
    assert one_and_two != batches(1, 3)
    assert sum(second - first == 16 for first, second in batches(1, 1)) < 8


def test_stream_generators_draw_independently_by_their_seeds(tmp_path):
    def numbers(*generators):
        return [batch.tolist() for batch in read_batches(tmp_path, DataLoader(Numbers(*generators), 8)).epochs[0]]

    for make in (torchs, np.random.default_rng):
        ((*rows,),) = numbers(make(1), make(2))
        assert all(first != second for first, second in rows)
        assert [rows] == numbers(make(1), make(2))
        assert [rows] != numbers(make(1), make(3))
    assert numbers(np.random.default_rng()) == numbers(np.random.default_rng())  # without a seed to derive one from


class Deeper(Sampler):
    """Sampler that shuffles by a generator in another object."""

    def __init__(self, keeper):
        self.keeper = keeper

    def __iter__(self):
        first = self.keeper() % 16
        return iter([(first + 5 * number) % 16 for number in range(16)])

    def __len__(self):
        return 16


@pytest.mark.parametrize("place", ["slots", "a list of transforms", "a partial", "a closure"])
def test_nested_generator_in_sampler_is_keyed_by_epoch(tmp_path, place):
    def fit(**options):
        data = DataLoader(TensorDataset(torch.arange(16)), 4, sampler=Deeper(PLACES[place]()))
        return read_batches(tmp_path, data, max_epochs=4, **options)

    whole = fit(callbacks=[Saving(6, tmp_path / "six")])
    assert len({tuple(whole.samples(epoch)) for epoch in range(4)}) > 1
    resumed = fit(resume=tmp_path / "six")
    assert [resumed.samples(epoch) for epoch in (1, 2, 3)] == [
        whole.samples(1)[8:], whole.samples(2), whole.samples(3)
    ]  # fmt: skip


def test_unseedable_generator_warns(tmp_path, caplog):
    read_batches(tmp_path, DataLoader(Transformed(Recipe(random.SystemRandom())), 4), log_level="WARNING")
    messages = [message for message in caplog.messages if "cannot be seeded" in message]
    assert len(messages) == 1
    assert messages[0].startswith("dataset.transform.generator is a SystemRandom, which cannot be seeded")


def test_data_that_keep_no_generator_cost_nothing_more():
    for data in (Words(8), TensorDataset(torch.arange(8)), Transformed(lambda: random.getrandbits(8))):
        keyed = SeededDataset(data, default_collate, 7, single=False)
        keyed.__getitems__(BatchRequest(0, 0, [0, 1], by_place=False))
        assert keyed.kept_generators.seed_function is seed_generators


def test_pickled_dataset_rekeys_generators_in_worker():
    here = SeededDataset(Transformed(Recipe(np.random.default_rng(3))), default_collate, 7, single=False)
    drawn_here = here.__getitems__(BatchRequest(0, 0, [0, 1], by_place=False))
    there = pickle.loads(pickle.dumps(here))
    assert not there.kept_generators.generators
    there.should_watch = True  # pickled before any sample is read
    assert torch.equal(there.__getitems__(BatchRequest(0, 0, [0, 1], by_place=False)), drawn_here)
