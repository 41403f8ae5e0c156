"""Data of several ranks: together they read each sample of one loader once, in the same steps."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

import lumen
from lumen.data.adapter import Position
from lumen.data.loaders import adapt_loader
from lumen.data.windows import RankSlice
from lumen.errors import DataError
from tests.helpers.group import catch_message
from tests.helpers.pages import find_programs
from tests.helpers.simulated_ranks import Ranks, compare_key, make_plain_batch, merge_ranks, read_steps
from tests.helpers.streams import Buffered
from tests.helpers.tasks import Saving, bare_trainer, make_numbers

SEED = 3


class Augmented(Dataset):
    """Data set that draws from three libraries in each sample, and counts loaded samples."""

    def __init__(self, samples):
        self.samples, self.loaded = samples, []

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        self.loaded.append(int(index))
        return float(torch.rand(()) + np.random.rand() + random.random()), index


class Sizes(Sampler):
    """Batch sampler with batches of one, two, three, one, ... samples in random order."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        order = torch.randperm(self.samples).tolist()
        while order:
            size = 1 + random.randrange(3)
            yield order[:size]
            del order[:size]


class Stream(IterableDataset):
    """Stream that workers split, with noise."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, self.samples, step):
            yield index + float(torch.rand(()))


def sampled(samples, **options):
    return DataLoader(Augmented(samples), 2, sampler=SubsetRandomSampler(range(samples)), **options)


def make_loaders(samples):
    """Return three loaders of different kinds and lengths."""
    return {"few": sampled(samples), "many": DataLoader(Augmented(2 * samples), 2, shuffle=samples > 0),
            "stream": DataLoader(Buffered(samples + 3, 4), 3)}  # fmt: skip


def combined(mode):
    return lambda samples: lumen.CombinedLoader(make_loaders(samples), mode)


INDEXED = {
    "in order": lambda samples: DataLoader(Augmented(samples), 2),
    "shuffled": lambda samples: DataLoader(Augmented(samples), 2, shuffle=True),
    "drop_last": lambda samples: DataLoader(Augmented(samples), 2, shuffle=True, drop_last=True),
    "a sampler": sampled,
    "weighted": lambda samples: DataLoader(
        Augmented(samples), 2, sampler=WeightedRandomSampler([1.0] * (samples or 1), samples + 1)
    ),
    "a batch sampler": lambda samples: DataLoader(Augmented(samples), batch_sampler=Sizes(samples)),
    "no batching": lambda samples: DataLoader(Augmented(samples), batch_size=None, shuffle=True),
    "a distributed sampler": lambda samples: DataLoader(
        Augmented(samples), 2, sampler=DistributedSampler(range(samples), num_replicas=3, rank=1)
    ),
    "workers": lambda samples: DataLoader(Augmented(samples), 2, shuffle=True, num_workers=2),
    "a sampler and workers": lambda samples: sampled(
        samples, num_workers=2, persistent_workers=True, multiprocessing_context="fork"
    ),
    "no batching, workers": lambda samples: DataLoader(Augmented(samples), batch_size=None, num_workers=2),
}
STREAMS = {
    "a stream": lambda samples: DataLoader(Stream(samples), 2),
    "a stream and workers": lambda samples: DataLoader(Stream(samples), 2, num_workers=2),
    "a stream with a state": lambda samples: DataLoader(Buffered(samples, 4), 2),
    "a list of batches": lambda samples: list(torch.arange(samples).split(2)) if samples else [],
}
COMBINED = {mode: combined(mode) for mode in ("max_size", "min_size", "sequential")} | {
    "max_size_cycle": combined("max_size_cycle")
}
LOADERS = INDEXED | STREAMS | COMBINED


def lengths(kind):
    if "workers" in kind:
        return [11]  # starting workers takes time
    refuses_nothing = ("shuffled", "drop_last", "no batching", "max_size_cycle")
    return [1, 3, 11] if kind in refuses_nothing else [0, 1, 3, 11]


def read_by(world, kind, samples, rounds=2, needs_dummies=False, epochs=(0, 1), **options):
    """Return a list of epochs for each of several ranks."""

    def rank(ours):
        adapter = adapt_loader(LOADERS[kind](samples), SEED, rounds * world, rank_slice=ours)
        given, position = [], Position()
        for epoch in epochs:
            steps, after = read_steps(adapter, epoch, position, **options)
            given.append(steps)
            position = Position(state=after.state)
        return given, adapter.length, adapter.count_steps(options.get("limit"))

    given = Ranks(world, needs_dummies=needs_dummies).run(rank)
    for each in given:
        if isinstance(each, Exception):
            raise each
    return given


CASES = [(kind, samples) for kind in LOADERS for samples in lengths(kind)]


# ---------------------------------------------------------------------- each sample once, in the same steps


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize(("kind", "samples"), CASES)
def test_ranks_together_read_the_batches_of_one_process(kind, samples, world):
    """The samples, their augmentation and their numbers are equal over two epochs."""
    given = read_by(world, kind, samples)
    expected = read_by(1, kind, samples, rounds=2 * world)
    for epoch in range(2):
        whole = merge_ranks([rank[0][epoch] for rank in given])
        assert compare_key(whole) == compare_key(step.micros for step in expected[0][0][epoch])
    assert {rank[1:] for rank in given} == {expected[0][1:]}


@pytest.mark.parametrize("kind", ["shuffled", "a batch sampler", "no batching", "a stream", *COMBINED])
@pytest.mark.parametrize("samples", [1, 3, 11])
def test_dummy_batches_are_real_but_count_nothing(kind, samples):
    given = read_by(4, kind, samples, rounds=1, needs_dummies=True)
    idle = 0
    for epoch in range(2):
        for step in zip(*(rank[0][epoch] for rank in given), strict=True):
            real = [micro.content for each in step for micro in each.micros if not micro.is_dummy]
            needs_dummies = [micro for each in step for micro in each.micros if micro.is_dummy]
            idle += len(needs_dummies)
            if kind not in COMBINED:
                assert all(micro.content in real for micro in needs_dummies)
            assert all(micro.content is not None and micro.weight == 0 for micro in needs_dummies)
        merge_ranks([rank[0][epoch] for rank in given], needs_dummies=True)
    assert idle or (kind, samples) == ("sequential", 1)
    assert compare_key(merge_ranks([rank[0][0] for rank in given], needs_dummies=True)) == compare_key(
        merge_ranks([rank[0][0] for rank in read_by(4, kind, samples, rounds=1)])
    )


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("limit", [0, 1, 3])
def test_a_limit_counts_the_batches_of_all_ranks(kind, limit):
    given = read_by(2, kind, 11, rounds=1, limit=limit, epochs=(0,))
    expected = read_by(1, kind, 11, rounds=2, limit=limit, epochs=(0,))
    whole = merge_ranks([rank[0][0] for rank in given])
    assert compare_key(whole) == compare_key(step.micros for step in expected[0][0][0])
    assert sum(map(len, whole)) == limit


def test_each_rank_takes_batches_of_the_loaders_size():
    given = read_by(2, "shuffled", 11, rounds=1, epochs=(0,))
    sizes = [[micro.samples for step in steps for micro in step.micros if micro.weight] for (steps,), *_ in given]
    assert sizes == [[2, 2, 2], [2, 2, 1]]


def test_global_batch_is_independent_of_world_size(caplog):
    def rank(ours):
        return read_steps(adapt_loader(LOADERS["shuffled"](11), SEED, global_batch_size=5, rank_slice=ours))[0]

    expected = compare_key(step.micros for step in rank(RankSlice()))
    assert "nothing to do" not in caplog.text
    for world in (2, 3, 4):
        whole = merge_ranks(Ranks(world).run(rank))
        assert compare_key(whole) == expected
        assert [[micro.samples for micro in step] for step in whole] == [[2, 2, 1], [2, 2, 1], [1]]
        assert (f"5 samples are 3 micro-batches for {world} processes" in caplog.text) == (world != 3)


# ---------------------------------------------------------------------- loaded samples of each rank


@pytest.mark.parametrize("kind", [kind for kind in INDEXED if "workers" not in kind])
def test_a_rank_loads_its_own_samples_only(kind):
    def rank(ours):
        loader = LOADERS[kind](11)
        steps, _ = read_steps(adapt_loader(loader, SEED, 3, rank_slice=ours))
        return [micro.samples for step in steps for micro in step.micros], len(loader.dataset.loaded)

    for own, loaded in Ranks(3).run(rank):
        assert sum(own) + sum(own[:1]) == loaded  # The first batch draws random numbers, so Lumen makes it again.


@pytest.mark.parametrize("mode", COMBINED)
def test_ranks_load_only_their_combined_batches(mode):
    def loaded(ours):
        loader = LOADERS[mode](11)
        read_steps(adapt_loader(loader, SEED, 2 * ours.world_size, rank_slice=ours))
        counts = [len(loader.iterables[name].dataset.loaded) for name in ("few", "many")]
        return [count - 2 for count in counts]  # The first batch of two draws random numbers, so Lumen makes it again.

    few, many = loaded(RankSlice())
    ranks = Ranks(3).run(loaded)
    assert [sum(counts) for counts in zip(*ranks, strict=True)] == [few, many]
    assert max(counts[1] for counts in ranks) <= many / 3 + 2


# ---------------------------------------------------------------------- resume on another number of ranks


def read_with_worlds(kind, samples, worlds, limit=None):
    """Return all batches of two epochs; another number of ranks reads each step, and the last one reads the rest."""
    position, given = Position(), []
    for epoch in range(2):
        position = Position(state=position.state)
        for number, world in enumerate(worlds, 1):
            steps = None if number == len(worlds) else 1

            def rank(ours, world=world, epoch=epoch, position=position, steps=steps):
                adapter = adapt_loader(LOADERS[kind](samples), SEED, world, rank_slice=ours)
                return read_steps(adapter, epoch, position, limit, steps)

            ranks = Ranks(world).run(rank)
            whole = merge_ranks([steps for steps, _ in ranks])
            given += [(epoch, micro.index, micro.content) for step in whole for micro in step]
            positions = [after for _, after in ranks]
            assert all(each == positions[0] for each in positions)
            position = positions[0]
    return given


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("samples", "limit"), [(11, None), (23, None), (23, 9)])
@pytest.mark.parametrize("kind", [kind for kind in LOADERS if "workers" not in kind])
def test_changed_world_size_resumes_with_remaining_batches(kind, samples, limit):
    expected = read_with_worlds(kind, samples, [1], limit)
    for worlds in ([2, 4], [3, 1, 2]):
        assert read_with_worlds(kind, samples, worlds, limit) == expected


# ---------------------------------------------------------------------- ranks that differ


class Ranked(DistributedSampler):
    """Sampler of the user that gives each rank a part."""

    def __iter__(self):
        return iter(list(super().__iter__())[::-1])


def rank_seeded(rank):
    return torch.Generator().manual_seed(rank)


DIFFERENT = {
    "more samples": lambda rank: DataLoader(make_numbers(20 + rank), 4),
    "another order": lambda rank: DataLoader(make_numbers(20), 4, shuffle=True, generator=rank_seeded(rank)),
    "a sampler that shards": lambda rank: DataLoader(
        make_numbers(20), 4, sampler=Ranked(range(20), num_replicas=2, rank=rank)
    ),
    "a batch sampler that shards": lambda rank: DataLoader(
        make_numbers(20), batch_sampler=list(BatchSampler(range(20), 4, drop_last=False))[rank::2]
    ),
    "no batching": lambda rank: DataLoader(make_numbers(20), batch_size=None, sampler=range(rank, 20, 2)),
    "nothing on one rank": lambda rank: DataLoader(make_numbers(20 * rank), 4),
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_different_data_raises_equally_on_all_ranks(kind):
    results = Ranks(2).run(lambda ours: read_steps(adapt_loader(DIFFERENT[kind](ours.rank), SEED, 2, rank_slice=ours)))
    for error in results:
        assert isinstance(error, DataError)
        assert "rank 1 has a different data set or order than rank 0: {" in str(error)
        assert "a sampler that does not depend on the rank" in str(error)


@pytest.mark.parametrize(
    "make",
    [
        lambda rank: DataLoader(Part([8, 8], rank, declared=False), 2),
        lambda rank: [torch.arange(2) + rank],
        lambda rank: [torch.arange(2)] * rank,
        lambda rank: [{"text": ["a", "b"], "label": np.arange(2) + rank}],
        lambda rank: lumen.CombinedLoader([DataLoader(make_numbers(4), 2), [torch.arange(2) + rank]]),
    ],
)
def test_undeclared_stream_shards_raise_equally_on_all_ranks(make):
    results = Ranks(3).run(lambda ours: read_steps(adapt_loader(make(ours.rank), SEED, 3, rank_slice=ours)))
    for error in results:
        assert isinstance(error, DataError)
        assert "rank 1 has a different stream than rank 0" in str(error)
        assert "set shards_itself = True" in str(error)


def test_random_sampler_is_equal_on_all_ranks():
    def rank(ours):
        torch.manual_seed(ours.rank)
        return read_steps(
            adapt_loader(DataLoader(make_numbers(20), 4, sampler=RandomSampler(range(20))), SEED, 2, rank_slice=ours)
        )[0]

    samples = [each for step in merge_ranks(Ranks(2).run(rank)) for micro in step for each in micro.content[0]]
    assert sorted(samples) == list(range(20))


# ---------------------------------------------------------------------- streams that shard themselves


class Part(IterableDataset):
    """Stream with `counts[r]` samples on rank r: 100 * r, 100 * r + 1, ...; with noise."""

    def __init__(self, counts, rank, *, declared=True, noise=False):
        self.samples = counts[rank] if rank < len(counts) else 0
        self.first, self.noise, self.loaded = 100 * rank, noise, 0
        if declared:
            self.shards_itself = True

    def __iter__(self):
        for index in range(self.samples):
            self.loaded += 1
            yield self.first + index + float(torch.rand(())) * self.noise


class ResumablePart(Part):
    """Self-sharding stream that resumes from its state, and counts its passes."""

    def __init__(self, counts, rank, **options):
        super().__init__(counts, rank, **options)
        self.place, self.passes = 0, 0

    def __iter__(self):
        self.passes += self.place == 0
        while self.place < self.samples:
            self.place += 1
            self.loaded += 1
            yield self.first + self.place - 1 + 1000 * self.passes + float(torch.rand(())) * self.noise
        self.place = 0

    def state_dict(self):
        return {"place": torch.tensor(self.place), "passes": self.passes}

    def load_state_dict(self, state):
        self.place, self.passes = int(state["place"]), state["passes"]


class PlacedPart(ResumablePart):
    """Self-sharding stream whose state stays at the end until the next pass begins."""

    goes_on = False

    def __iter__(self):
        self.place *= self.goes_on
        self.goes_on = False
        while self.place < self.samples:
            self.place += 1
            yield self.first + self.place - 1 + float(torch.rand(())) * self.noise

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.goes_on = True


class Split(Part):
    """Stream like the result of Hugging Face's `split_dataset_by_node`."""

    def __init__(self, counts, rank):
        super().__init__(counts, rank, declared=False)
        self._distributed = type("DistributedConfig", (), {"rank": rank, "world_size": 2})()


def expected_samples(counts):
    return sorted(100 * rank + index for rank, count in enumerate(counts) for index in range(count))


def flatten_steps(steps):
    return [sample for step in steps for micro in step for sample in micro.content]


COUNTS = [[7, 7], [12, 1], [0, 9], [0, 0], [1, 0, 14], [3, 0, 0, 0], [2, 9, 4, 5]]


@pytest.mark.parametrize("needs_dummies", [False, True])
@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("counts", COUNTS)
def test_self_sharding_streams_are_read_to_their_ends(counts, rounds, needs_dummies):
    """Each sample is read once; steps are full until the last one; ranks that end earlier take part."""
    world = len(counts)

    def rank(ours):
        adapter = adapt_loader(DataLoader(Part(counts, ours.rank), 1), SEED, rounds * world, rank_slice=ours)
        first, _ = read_steps(adapter, 0)
        return first, read_steps(adapter, 1)[0]

    given = Ranks(world, needs_dummies=needs_dummies).run(rank)
    for epoch in range(2):
        whole = merge_ranks([each[epoch] for each in given], needs_dummies=needs_dummies)
        assert sorted(flatten_steps(whole)) == expected_samples(counts)
        assert [len(step) for step in whole[:-1]] == [rounds * world] * (len(whole) - 1)
        assert [micro.index for step in whole for micro in step] == list(range(sum(counts)))


@pytest.mark.parametrize("batch_size", [2, 3])
def test_batches_of_a_part_count_their_own_samples(batch_size):
    counts = [7, 2]
    given = Ranks(2).run(
        lambda ours: read_steps(adapt_loader(DataLoader(Part(counts, ours.rank), batch_size), SEED, 2, rank_slice=ours))
    )
    whole = merge_ranks([steps for steps, _ in given])
    assert sorted(flatten_steps(whole)) == expected_samples(counts)
    assert {position.samples for _, position in given} == {9}


@pytest.mark.parametrize("kind", [Part, ResumablePart])
@pytest.mark.parametrize("limit", [1, 2, 5, 100])
def test_limit_counts_batches_of_all_shards(kind, limit):
    counts = [2, 9]
    sets = [kind(counts, rank) for rank in range(2)]
    given = Ranks(2).run(
        lambda ours: read_steps(adapt_loader(DataLoader(sets[ours.rank], 1), SEED, 2, rank_slice=ours), limit=limit)[0]
    )
    assert len(flatten_steps(merge_ranks(given))) == min(limit, 11) == sum(part.loaded for part in sets)


def parts_fit(kind, counts, world, *, steps=None, position=None, epoch=0, limit=None, accumulate=None, sets=None):
    """Return the batches of the ranks in one epoch, and their state after it, as rank 0 would save the state."""

    def rank(ours):
        data = kind(counts, ours.rank, noise=True) if sets is None else sets[ours.rank]
        adapter = adapt_loader(DataLoader(data, 1), SEED, accumulate or world, rank_slice=ours)
        return read_steps(adapter, epoch, position, limit, steps)

    given = Ranks(world).run(rank)
    for each in given:
        if isinstance(each, Exception):
            raise each
    return compare_key(merge_ranks([steps for steps, _ in given])), given[0][1]


@pytest.mark.parametrize(("limit", "accumulate"), [(None, None), (3, None), (None, 1), (None, 5)])
@pytest.mark.parametrize("counts", [[4, 4], [6, 1], [0, 5], [2, 5, 1]])
@pytest.mark.parametrize("kind", [Part, ResumablePart, PlacedPart])
def test_every_rank_resumes_its_shard_at_any_step(kind, counts, limit, accumulate):
    def fit(epoch, position, steps=None, sets=None):
        return parts_fit(
            kind, counts, len(counts), steps=steps, position=position, epoch=epoch, limit=limit, sets=sets,
            accumulate=accumulate,
        )  # fmt: skip

    sets = [kind(counts, rank, noise=True) for rank in range(len(counts))]
    whole, befores = [], [None]
    for epoch in range(3):
        steps, position = fit(epoch, befores[-1], sets=sets)
        whole.append(steps)
        befores.append(Position(state=position.state))
    if limit is None:
        assert [sum(map(len, steps)) for steps in whole] == [sum(counts)] * 3
    for epoch in range(3):
        for step in range(len(whole[epoch]) + 1):
            begun, position = fit(epoch, befores[epoch], steps=step)
            rest, position = fit(epoch, position)
            assert begun + rest == whole[epoch], (epoch, step)
            if epoch < 2 and step:
                assert fit(epoch + 1, Position(state=position.state))[0] == whole[epoch + 1], (epoch, step)


def test_shard_without_state_rereads_its_batches(caplog):
    sets = [Part([6, 1], rank, noise=True) for rank in range(2)]
    _, position = parts_fit(Part, [6, 1], 2, steps=2)
    parts_fit(Part, [6, 1], 2, position=position, sets=sets)
    assert [part.loaded for part in sets] == [6, 0]
    assert "3 batches of this epoch again" in caplog.text


def test_sharded_stream_cannot_resume_with_other_world_size():
    """Between epochs, a resume is possible."""
    _, inside = parts_fit(Part, [4, 4], 2, steps=2)
    for world in (1, 3):
        with pytest.raises(DataError, match="which 2 processes read in parts, but now there are"):
            parts_fit(Part, [4, 4, 4], world, position=inside)
    _, ended = parts_fit(Part, [4, 4], 2)
    steps, _ = parts_fit(Part, [4, 4, 4], 3, position=Position(state=ended.state), epoch=1)
    assert sum(map(len, steps)) == 12
    _, cut = parts_fit(ResumablePart, [4, 4], 2, limit=4)
    with pytest.raises(DataError, match="Resume with 2 processes, or from a checkpoint at the end of an epoch"):
        parts_fit(ResumablePart, [4, 4, 4], 3, position=Position(state=cut.state), epoch=1)


def test_every_evaluation_restarts_the_shards():
    def rank(ours):
        data = ResumablePart([5, 2], ours.rank)
        adapter = adapt_loader(DataLoader(data, 1), SEED, 2, rank_slice=ours, rewinds=True)
        return [read_steps(adapter, 0, limit=limit)[0] for limit in (3, None, None)]

    given = Ranks(2).run(rank)
    passes = [flatten_steps(merge_ranks([each[number] for each in given])) for number in range(3)]
    assert sorted(passes[1]) == sorted(passes[2]) == [1000, 1001, 1002, 1003, 1004, 1100, 1101]
    assert passes[0] == passes[1][:3]


def test_ranks_draw_differently_but_shard_equally():
    class Laid(IterableDataset):
        shards_itself = True

        def __init__(self, rank):
            self.rank = rank

        def __iter__(self):
            files = list(range(8))
            random.shuffle(files)
            for file in files[self.rank :: 2]:
                yield torch.tensor([file, float(torch.rand(()))])

    given = Ranks(2).run(
        lambda ours: read_steps(adapt_loader(DataLoader(Laid(ours.rank), 1), SEED, 2, rank_slice=ours))[0]
    )
    drawn = [sample for step in merge_ranks(given) for micro in step for sample in micro.content]
    assert sorted(file for file, _ in drawn) == list(range(8))
    assert len({noise for _, noise in drawn[2:]}) == 6


def test_workers_of_different_parts_draw_differently():
    class Noise(IterableDataset):
        shards_itself = True

        def __iter__(self):
            yield float(torch.rand(()))

    given = Ranks(2).run(
        lambda ours: read_steps(adapt_loader(DataLoader(Noise(), 1, num_workers=1), SEED, 2, rank_slice=ours))[0]
    )
    assert len(set(flatten_steps(merge_ranks(given)))) == 2


def test_streams_split_by_node_are_read_as_shards():
    given = Ranks(2).run(
        lambda ours: read_steps(adapt_loader(DataLoader(Split([5, 3], ours.rank), 1), SEED, 2, rank_slice=ours))
    )
    assert sorted(flatten_steps(merge_ranks([steps for steps, _ in given]))) == expected_samples([5, 3])


def test_custom_loader_may_shard_itself_and_have_length():
    class Loader:
        shards_itself = True

        def __init__(self, rank):
            self.batches = [torch.tensor([100 * rank + number]) for number in range(3 + rank)]

        def __iter__(self):
            return iter(self.batches)

        def __len__(self):
            return len(self.batches)

    def rank(ours):
        adapter = adapt_loader(Loader(ours.rank), SEED, 2, rank_slice=ours)
        return read_steps(adapter)[0], adapter.length, adapter.count_steps(None), adapter.count_steps(5)

    given = Ranks(2).run(rank)
    assert sorted(flatten_steps(merge_ranks([each[0] for each in given]))) == [0, 1, 2, 100, 101, 102, 103]
    assert {each[1:] for each in given} == {(7, 4, 3)}


def test_documented_stream_shards_are_read_once():
    files = [range(10 * number, 10 * number + number) for number in range(5)]

    def rank(ours):
        given = {"torch": torch}
        exec(find_programs()[2], given)
        return read_steps(
            adapt_loader(DataLoader(given["Shards"](files, ours.rank, ours.world_size), 2), SEED, 3, rank_slice=ours)
        )[0]

    assert sorted(flatten_steps(merge_ranks(Ranks(3).run(rank)))) == [number for file in files for number in file]


def test_identical_shards_warn_once_per_rank(caplog):
    Ranks(2).run(
        lambda ours: [
            read_steps(adapter)
            for adapter in [adapt_loader(DataLoader(Part([4, 4], 0), 1), SEED, 2, rank_slice=ours)] * 2
        ]
    )
    assert caplog.text.count("every rank reads the same first batch") == 2  # one sample per rank
    caplog.clear()
    Ranks(2).run(
        lambda ours: read_steps(adapt_loader(DataLoader(Part([4, 4], ours.rank), 1), SEED, 2, rank_slice=ours))
    )
    assert "same first batch" not in caplog.text


def test_parts_among_several_training_loaders_are_an_error():
    def rank(ours):
        return adapt_loader(
            [DataLoader(make_numbers(8), 2), DataLoader(Part([4, 4], ours.rank), 2)], SEED, 2, rank_slice=ours
        )

    for error in Ranks(2).run(rank):
        assert isinstance(error, DataError)
        assert "Part, one of several training loaders, gives every process different batches" in str(error)


# ---------------------------------------------------------------------- real processes


class Kept(lumen.TaskModule):
    """Task that keeps its batches by their batch_idx."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.trained, self.validated = [], []

    def on_train_batch_start(self, batch, batch_idx):
        self.trained.append((self.current_epoch, batch_idx, make_plain_batch(batch)))

    def training_step(self, batch):
        return (self.weight - 1).square()

    def validation_step(self, batch, batch_idx):
        self.validated.append((self.current_epoch, batch_idx, make_plain_batch(batch)))
        self.log("mean", batch.double().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def part(rank, world):
    return DataLoader(ResumablePart([5, 2, 7][:world], rank, noise=True), 1)


def fit(folder, kind, options=None, samples=11):
    """Train; return the batches of this process and the results."""
    task, trainer = Kept(), bare_trainer(folder, **{"max_epochs": 2, "num_sanity_val_steps": 0} | (options or {}))
    rank, world = trainer.global_rank, trainer.world_size
    if kind == "parts":
        trainer.fit(task, part(rank, world), val_dataloaders=part(rank, world))
    else:
        trainer.fit(task, LOADERS[kind](samples))
    return task.trained, task.validated, trainer.global_step, trainer.callback_metrics.get("mean", 0.0) + 0.0


def begin(folder, kind, steps, samples=11):
    """Train a few steps and save."""
    return fit(folder, kind, {"max_steps": steps, "callbacks": [Saving(steps, folder / "step")]}, samples)


def resume_training(folder, kind, samples=11):
    """Resume and train the rest."""
    return fit(folder, kind, {"resume": folder / "step"}, samples)


def join_ranks(results, place=0):
    return sorted((each for result in results for each in result[place]), key=lambda each: each[:2])


@pytest.mark.parametrize(
    "kind", ["shuffled", "a sampler and workers", "a stream with a state", "no batching", "max_size"]
)
def test_real_processes_train_on_each_batch_once(group, tmp_path, kind):
    results = group(2).run(fit, tmp_path, kind)
    alone = fit(tmp_path, kind, {"accumulate_grad_batches": 2})
    assert join_ranks(results) == alone[0]
    assert {result[2] for result in results} == {alone[2]}


@pytest.mark.parametrize("kind", ["shuffled", "a batch sampler", "a stream with a state", "max_size_cycle"])
def test_real_ranks_resume_mid_epoch_with_another_count(group, tmp_path, kind):
    begun = group(2).run(begin, tmp_path, kind, 2)
    assert {index for _, index, _ in join_ranks(begun)} == {0, 1, 2, 3}
    rest = group(3).run(resume_training, tmp_path, kind)
    assert join_ranks([*begun, *rest]) == fit(tmp_path, kind)[0]


def test_real_ranks_train_validate_and_resume_on_shards(group, tmp_path):
    whole = group(2).run(fit, tmp_path, "parts")
    trained, validated = join_ranks(whole), join_ranks(whole, 1)
    for given in (trained, validated):
        for epoch in range(2):
            indices, samples = zip(*((index, sample) for of, index, [sample] in given if of == epoch), strict=True)
            assert indices == tuple(range(7))
            assert sorted(int(sample) % 1000 for sample in samples) == [0, 1, 2, 3, 4, 100, 101]
    mean = sum(sample for _, _, [sample] in validated[7:]) / 7
    assert [result[3] for result in whole] == pytest.approx([mean, mean])
    begun = group(2).run(begin, tmp_path, "parts", 6)
    rest = group(2).run(resume_training, tmp_path, "parts")
    assert join_ranks([*begun, *rest]) == trained
    for said in group(3).run(catch_message, DataError, resume_training, tmp_path, "parts"):
        assert "which 2 processes read in parts, but now there are 3" in said


def fit_different(folder, kind):
    trainer = bare_trainer(folder, max_epochs=1)
    with pytest.raises(DataError, match=r"rank 1 (and rank 0 hold different|has a different) data") as caught:
        trainer.fit(Kept(), DIFFERENT[kind](trainer.global_rank))
    return str(caught.value)


@pytest.mark.parametrize("kind", ["more samples", "a batch sampler that shards"])
def test_real_ranks_with_different_data_raise_together(group, tmp_path, kind):
    first, second = group(2).run(fit_different, tmp_path, kind)
    assert first == second
