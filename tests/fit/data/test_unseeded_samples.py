"""Lazy seeding of samples: once a sample draws, its draws equal the draws of a run that seeds all samples."""

import random
import types
from collections import Counter

import numpy as np
import pytest
import torch
from torch.random import get_rng_state as state_by_another_name
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

import lumen
from lumen.internals.generator_memory import MEMORIES, UnreadableMemory
from lumen.random import Domain, seed_generators, seed_unless_unused
from tests.helpers.tasks import Saving, Seeing, bare_trainer, read_batches

helpers = types.ModuleType("helpers_of_a_user")
exec(  # like a file of the user
    """
import torch

class Draw:
    @property
    def number(self):
        with torch.random.fork_rng(devices=[]):
            return torch.rand(())
""",
    vars(helpers),
)


def reseeded(index):
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    return float(torch.rand(())) + np.random.rand() + random.random()


def drawn_and_reseeded(index):
    drawn = float(torch.rand(())) + np.random.rand() + random.random()
    reseeded(index)
    return drawn


def forked(index):
    with torch.random.fork_rng(devices=[]):
        return float(torch.rand(()))


def isolated(index):
    with lumen.isolate_rng():
        return random.random()


def put_back(index):
    state = np.random.get_state()
    drawn = np.random.rand()
    np.random.set_state(state)
    return drawn


def put_back_once(index):
    if index != 17:
        return 0.0
    state = random.getstate()
    drawn = random.random()
    random.setstate(state)
    return drawn


def drawn_until_it_succeeds(index):
    for attempt in range(1000):
        try:
            if random.random() < 0.5:
                raise OSError("not yet")
        except OSError:
            continue
        return float(attempt)
    return -1.0


def raises_or_draws(index):
    if index == 17 and np.random.rand() < 0.5:
        np.random.rand()
    return np.random.rand()


#: Draws of a sample, by kind.
SAMPLES = {
    "nothing": lambda index: index * 0.5,
    "from torch": lambda index: float(torch.rand(())),
    "from numpy": lambda index: np.random.rand(),
    "from random": lambda index: random.random(),
    "normal numbers, every second of which is kept aside": lambda index: (
        float(torch.randn(())) + np.random.randn() + random.gauss(0, 1)
    ),
    "one normal number in one sample": lambda index: np.random.randn() if index == 17 else 0.0,
    "in one sample": lambda index: float(torch.rand(())) if index == 17 else 0.0,
    "as many words as numpy's state has": lambda index: float(np.random.rand(312)[0]),
    "as many words as torch's state has": lambda index: int(torch.randint(2**31, (624,), dtype=torch.int32)[0]),
    "as many words as Python's state has": lambda index: random.getrandbits(32 * 624) % 1009,
    "after a constant seed": reseeded,
    "before a constant seed": drawn_and_reseeded,
    "a seed and nothing else": lambda index: [torch.manual_seed(index), float(index)][1],
    "in a fork": forked,
    "in isolation": isolated,
    "and puts the state back": put_back,
    "and puts the state back in one sample": put_back_once,
    "the seed of torch": lambda index: float(torch.initial_seed() % 1009),
    "the state of torch": lambda index: float(state_by_another_name().sum()),
    "in a function of another file": lambda index: float(helpers.Draw().number),
    "until it succeeds": drawn_until_it_succeeds,
    "more in one sample": raises_or_draws,
}


class Samples(Dataset):
    def __init__(self, draw, length=40):
        self.draw, self.length = draw, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index, self.draw(index)


class Seeded(Samples):
    """Data set that also keeps a generator: then Lumen seeds all samples."""

    kept = random.Random()


class Moving(Seeing):
    """Task that leaves the generators in many states."""

    def training_step(self, batch):
        random.gauss(0, 1)
        np.random.randn()
        torch.randn(())
        if self.global_step % 2:
            reseeded(0)
        return super().training_step(batch)


def batches(task):
    return {
        epoch: [[torch.as_tensor(field).tolist() for field in batch] for batch in task.epochs[epoch]]
        for epoch in task.epochs
    }


def fitted(tmp_path, task, loader, **options):
    bare_trainer(tmp_path, **{"max_epochs": 2} | options).fit(task, loader)
    return batches(task)


@pytest.mark.parametrize("draw", SAMPLES)
def test_samples_are_as_if_all_were_seeded(tmp_path, draw):
    expected = fitted(tmp_path, Seeing(), DataLoader(Seeded(SAMPLES[draw]), 4, shuffle=True))
    for task in (Seeing(), Moving()):
        assert fitted(tmp_path, task, DataLoader(Samples(SAMPLES[draw]), 4, shuffle=True)) == expected
    saving = Saving(13, tmp_path / "thirteen")
    fitted(tmp_path, Seeing(), DataLoader(Samples(SAMPLES[draw]), 4, shuffle=True), callbacks=[saving])
    resumed = fitted(tmp_path, Seeing(), DataLoader(Samples(SAMPLES[draw]), 4, shuffle=True), resume=saving.path)
    assert resumed == {1: expected[1][3:]}


@pytest.mark.parametrize("draw", ["from random", "in one sample", "before a constant seed", "in a fork"])
@pytest.mark.parametrize("persistent", [True, False])
def test_workers_give_samples_as_if_all_were_seeded(tmp_path, draw, persistent):
    expected = fitted(tmp_path, Seeing(), DataLoader(Seeded(SAMPLES[draw]), 4))
    loader = DataLoader(Samples(SAMPLES[draw]), 4, num_workers=2, persistent_workers=persistent)
    assert fitted(tmp_path, Seeing(), loader) == expected


class Drawn:
    """Sample of a class with a collate function of the user."""

    def __init__(self, index, draw):
        self.index = index


def draw_for_all(samples, *, collate_fn_map=None):
    return torch.tensor([sample.index for sample in samples]), torch.rand(len(samples))


def noisy(samples):
    return [*default_collate(samples), torch.tensor([np.random.rand(), random.random()])]


@pytest.mark.parametrize("kind", ["noise", "a map", "a subset", "parts", "single", "a batch sampler"])
def test_batches_are_as_if_all_were_seeded(tmp_path, monkeypatch, kind):
    monkeypatch.setitem(default_collate_fn_map, Drawn, draw_for_all)

    def loader(make):
        once = make(SAMPLES["in one sample"])
        return {
            "noise": lambda: DataLoader(once, 4, collate_fn=noisy),
            "a map": lambda: DataLoader(make(None), 4, collate_fn=None),
            "a subset": lambda: DataLoader(Subset(once, range(5, 30)), 4),
            "parts": lambda: DataLoader(
                ConcatDataset([TensorDataset(torch.arange(9), torch.zeros(9, dtype=torch.float64)), once]), 3
            ),
            "single": lambda: DataLoader(once, batch_size=None),
            "a batch sampler": lambda: DataLoader(once, batch_sampler=[[1, 2], [17, 17, 3], [17], [4]]),
        }[kind]()

    if kind == "a map":
        monkeypatch.setattr(Samples, "__getitem__", lambda data, index: Drawn(index, None))
    found = [fitted(tmp_path, Seeing(), loader(make)) for make in (Samples, Seeded)]
    assert found[0] == found[1]


def count_seedings(tmp_path, monkeypatch, data):
    """Return how often a loader of ten batches seeds the generators, for each batch."""
    keys, seed = [], np.random.seed
    monkeypatch.setattr("lumen.random._seed_numpy", lambda key: (keys.append(key), seed(key)))
    read_batches(tmp_path, DataLoader(data, 4), max_epochs=1)
    return len(keys) / 10


def test_only_data_that_draw_are_seeded_by_sample(tmp_path, monkeypatch):
    for draw, most in {"nothing": 3, "in a fork": 8, "from torch": 8}.items():
        seeds = count_seedings(tmp_path, monkeypatch, Samples(SAMPLES[draw]))
        assert seeds < most if most == 3 else seeds > 4, draw


def test_data_of_pandas_are_not_seeded_by_sample(tmp_path, monkeypatch):
    pandas = pytest.importorskip("pandas")

    class Frame(Samples):
        def __init__(self):
            super().__init__(None)
            self.frame = pandas.DataFrame({"value": np.arange(40.0)})

        def __getitem__(self, index):
            return index, self.frame["value"].iloc[index]

    assert count_seedings(tmp_path, monkeypatch, Frame()) < 3


class Counting(Samples):
    """Data set that writes the number of each requested sample to a file, also in workers."""

    def __init__(self, draw, path):
        super().__init__(draw)
        self.path = path

    def __getitem__(self, index):
        with self.path.open("a") as file:
            file.write(f"{index}\n")
        return super().__getitem__(index)


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
@pytest.mark.parametrize("draw", ["nothing", "from torch", "in one sample"])
def test_each_process_makes_one_batch_twice(tmp_path, draw, workers, persistent):
    path = tmp_path / "asked"
    data = Counting(SAMPLES[draw], path)
    read_batches(tmp_path, DataLoader(data, 4, num_workers=workers, persistent_workers=persistent), max_epochs=3)
    counts = Counter(map(int, path.read_text().split()))
    twice = {number for number, count in counts.items() if count > 3}
    expected = {"nothing": 0, "from torch": 4 * max(1, workers), "in one sample": 4}[draw]
    assert len(twice) == expected
    assert {*counts.values()} <= {3, 4}


def test_an_error_of_a_sample_is_raised_once(tmp_path):
    def fail(index):
        if index == 17:
            raise KeyError("broken")
        return 0.0

    data = Counting(fail, tmp_path / "asked")
    with pytest.raises(KeyError, match="broken") as caught:
        read_batches(tmp_path, DataLoader(data, 4), max_epochs=1)
    assert caught.value.__notes__[0] == "It was raised for sample 17 of Counting."
    assert caught.value.__context__ is None
    assert (tmp_path / "asked").read_text().split().count("17") == 1


def test_draws_that_cause_errors_are_made_again(tmp_path):
    seeded = fitted(tmp_path, Seeing(), DataLoader(Seeded(SAMPLES["from torch"]), 4))
    drawn = {index: number for batch in seeded[0] for index, number in zip(*batch, strict=True)}

    def fail_without_seeds(index):
        number = float(torch.rand(()))
        if number not in drawn.values():
            raise ValueError("drawn from another state")
        return number

    fitted(tmp_path, Seeing(), DataLoader(Samples(fail_without_seeds), 4), max_epochs=1)


@pytest.mark.parametrize("place", range(3))
def test_where_memory_cannot_be_read_samples_are_seeded(tmp_path, monkeypatch, place):
    expected = fitted(tmp_path, Seeing(), DataLoader(Seeded(SAMPLES["in one sample"]), 4))
    memories = (*MEMORIES[:place], UnreadableMemory(), *MEMORIES[place + 1 :])
    monkeypatch.setattr("lumen.random._memories", memories)
    assert fitted(tmp_path, Seeing(), DataLoader(Samples(SAMPLES["in one sample"]), 4)) == expected


DRAWS = {
    "torch": lambda count: torch.randint(2**31, (count,), dtype=torch.int32),
    "numpy": lambda count: np.random.randint(2**32, size=count, dtype=np.uint32),
    "python": lambda count: [random.getrandbits(32) for _ in range(count)],
}


@pytest.mark.parametrize("generator", DRAWS)
def test_memory_shows_every_draw(generator):
    assert not any(isinstance(each, UnreadableMemory) for each in MEMORIES)
    seed_generators(3)
    unused = seed_unless_unused(3, Domain.COLLATE, 0)
    assert unused.is_unchanged()
    for count in (1, 622, 1, 1, 623, 624, 1248, 623):
        DRAWS[generator](count)
        assert not unused.is_unchanged(), count
        assert unused.is_unchanged_except_torch() is (generator == "torch")
    again = seed_unless_unused(3, Domain.COLLATE, 1)
    assert again.is_unchanged()
    assert not unused.is_unchanged()
    seed_generators(3)
    assert not again.is_unchanged()
