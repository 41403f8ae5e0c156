"""What is drawn: by torch, numpy and `random`, in every stage and of every loader, independent and the same again."""

import random
from itertools import combinations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, WeightedRandomSampler

from lumen.errors import ConfigError
from lumen.random import Domain, make_key, seed_generators
from tests.tasks import Seeing, bare_trainer, seen

# ---------------------------------------------------------------------- the generators of torch, numpy and `random`

BITS = 24  # of more, torch and numpy make a number in different ways


def first_words():
    """The first number that each global generator draws, of `BITS` bits."""
    return [int(torch.randint(0, 2**BITS, ())), int(np.random.randint(0, 2**BITS)), random.getrandbits(BITS)]


def bits_of(words):
    """The bits of every word: float64 of shape (words, BITS)."""
    return (np.asarray(words)[:, None] >> np.arange(BITS) & 1).astype(np.float64)


def assert_independent(columns):
    """No bit of a column is related to any other bit, nor are two columns equal more often than chance makes them."""
    samples, bits = len(columns[0]), np.concatenate([bits_of(column) for column in columns], axis=1)
    correlation = np.corrcoef(bits, rowvar=False) - np.eye(BITS * len(columns))
    assert np.abs(correlation).max() < 6 / samples**0.5
    for first, second in combinations(np.asarray(columns), 2):
        for kept in (1, 2, 4, 8):
            for shift in (0, BITS - kept):  # the lower bits, the higher bits
                same = ((first ^ second) >> shift & (2**kept - 1)) == 0
                assert abs(same.mean() - 0.5**kept) < 6 * (0.5**kept / samples) ** 0.5
        assert (first == second).sum() <= 3


def drawn(draw, keys=20_000):
    """What a function draws for each of many keys: shape (what it draws, keys)."""
    rows = []
    for number in range(keys):
        seed_generators(make_key(7, Domain.SAMPLE, 0, number))
        rows.append(draw())
    return np.array(rows).T


def test_torch_numpy_and_random_draw_independent_words():
    assert_independent(drawn(first_words))


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
def test_what_is_drawn_by_one_library_says_nothing_of_what_the_others_draw(kind):
    columns = drawn(DRAWS[kind])
    correlation = np.corrcoef(columns) - np.eye(3)
    assert np.abs(correlation).max() < 5 / 20_000**0.5


# ---------------------------------------------------------------------- stages and loaders


class Words(Dataset):
    """Each sample is its index and the first words of the three generators."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        return torch.tensor([index, *first_words()])


class Stream(IterableDataset):
    """Batches drawn as they come: nothing in them is data."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        for index in range(self.samples):
            yield torch.tensor([index, *first_words()])


class Choosing(Sampler):
    """Draws which samples come, from a generator of its own."""

    def __init__(self, samples):
        self.samples, self.generator = samples, np.random.default_rng(1)

    def __iter__(self):
        return iter(self.generator.permutation(self.samples).tolist())

    def __len__(self):
        return self.samples


class Looking(Seeing):
    """Keeps what every pass of every stage and loader is given."""

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


def look(tmp_path, make, samples):
    """Train for two epochs, validating after each, then validate, test and predict with loaders made anew."""
    task = Looking()
    trainer = bare_trainer(tmp_path, max_epochs=2, num_sanity_val_steps=0)
    trainer.fit(task, make(samples), val_dataloaders=[make(samples), make(samples)])
    for name in ("validate", "test", "predict"):
        getattr(trainer, name)(task, [make(samples), make(samples)])
    return task


STAGES = [("train", 0), ("train", 1), *((f"{stage} {loader}", 2) for stage in ("test", "predict") for loader in (0, 1))]
STAGES += [("validate 0", 0), ("validate 1", 0)]


@pytest.fixture(scope="module", params=LOADERS)
def looked(request, tmp_path_factory):
    """What a kind of loader gave in all stages."""
    return request.param, look(tmp_path_factory.mktemp("looked"), LOADERS[request.param], 32)


def test_every_stage_and_loader_draws_numbers_of_its_own(looked):
    kind, task = looked
    rows = [task.rows(name, number) for name, number in STAGES]
    words = [set(each[:, 1:].flatten().tolist()) for each in rows]
    assert all(len(each) >= 95 for each in words)  # of 24 bits, some come twice
    assert len(set.union(*words)) >= 96 * len(STAGES) - 2
    if kind in ("shuffled", "a sampler", "a sampler with a generator"):
        orders = {tuple(each[:, 0].tolist()) for each in rows}
        assert len(orders) == len(STAGES)


def test_every_validation_draws_alike_after_the_fit_too(looked):
    _, task = looked
    for loader in ("validate 0", "validate 1"):
        first = task.rows(loader, 0)
        assert torch.equal(first, task.rows(loader, 1))
        assert torch.equal(first, task.rows(loader, 2))  # by trainer.validate


def test_draws_of_stages_loaders_and_epochs_are_independent(tmp_path):
    task = look(tmp_path, LOADERS["map-style"], 2_000)
    columns = [task.rows(name, number)[:, word].numpy() for name, number in STAGES for word in (1, 2, 3)]
    assert_independent(columns)


def test_domains_seeds_and_epochs_draw_independently():
    def words(*key):
        rows = []
        for number in range(1_000):
            seed_generators(make_key(*key, number))
            rows.append(first_words())
        return np.array(rows).T

    kinds = [(7, domain) for domain in Domain] + [(8, Domain.SAMPLE), (7, Domain.SAMPLE, 0), (7, Domain.SAMPLE, 1)]
    assert_independent([column for kind in kinds for column in words(*kind)])


# ---------------------------------------------------------------------- seeds


def test_distinct_seeds_have_distinct_keys():
    seeds = [0, 1, 2**31, 2**32, 2**32 + 1, 2**63 - 1, 2**63, 2**64 - 1]
    for words in ((), (0,), (3, 17)):
        assert len({make_key(seed, Domain.ORDER, *words) for seed in seeds}) == len(seeds)


@pytest.mark.parametrize("seed", [-1, 2**64, 2**64 + 7])
def test_no_key_is_made_of_a_seed_that_another_one_stands_for(seed):
    with pytest.raises(ConfigError, match=r"a key is made of a seed from 0 to 2\*\*64 - 1, found"):
        make_key(seed, Domain.ORDER)


def test_the_largest_seed_trains(tmp_path):
    task = seen(tmp_path, DataLoader(Words(4), 4, shuffle=True), seed=2**63 - 1)
    assert {row[0] for row in task.samples(0)} == {0, 1, 2, 3}
