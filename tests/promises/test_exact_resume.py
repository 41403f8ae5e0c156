"""Exact resume: a run killed at any moment and restarted is bitwise identical to an uninterrupted run."""

import csv
import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from contextlib import suppress
from itertools import count, pairwise
from pathlib import Path

import fsspec
import pytest

from tests.helpers.jobs import Nursery, is_alive, start_script, start_torchrun
from tests.helpers.object_server import make_environment, serve_objects
from tests.promises.lives import BUCKET, MODULE, Lives, final_state, surviving_samples
from tests.promises.resumable_run import EPOCHS, SAMPLES, STREAMS

BY_HAND = {"by_hand": True}
DDP_2 = {"strategy": "ddp", "devices": 2}
DDP_3 = {"strategy": "ddp", "devices": 3}
FSDP_2 = {"strategy": "fsdp", "devices": 2}
FSDP_3 = {"strategy": "fsdp", "devices": 3}
HYBRID_4 = {"strategy": "hybrid", "devices": 4}
MESH_2 = {"strategy": "mesh", "devices": 2}
MESH_4 = {"strategy": "mesh", "devices": 4}  # 2 x 2
MOVES = {"moves": True, "precision": "64-true"}
SINGLE = {"strategy": "single", "devices": 1}
LAYOUTS = (SINGLE, DDP_2, FSDP_2, MESH_2, MESH_4)
EXACT = {"moves": True, "reduction": "exact"}  # in float32
EXACT_LAYOUTS = (SINGLE, DDP_2, DDP_3, FSDP_2, FSDP_3, HYBRID_4)
BF16 = {"precision": "bf16", "max_steps": 13}  # ends inside the last epoch
LATER = {"asynchronous": True}
AVERAGES = {"averages": True}
#: Runs, and the strike of each kill.
KILLS = {
    "0 workers": ({}, [(0, "train", 7), (0, "validate", 3), (0, "operation", 60)]),
    "2 workers": ({"workers": 2}, [(0, "operation", 27), (0, "train", 20), (0, "validate", 5)]),
    "bf16": (BF16, [(0, "validate", 8), (0, "operation", 100), (0, "train", 4)]),
    "bf16, 2 workers": (BF16 | {"workers": 2}, [(0, "train", 11), (0, "operation", 12), (0, "operation", 80)]),
    "by hand": (BY_HAND | {"precision": "fp16"}, [(0, "train", 7), (0, "operation", 60), (0, "validate", 3)]),
    "by hand, ddp 2": (BY_HAND | DDP_2, [(1, "train", 5), (0, "operation", 30), (1, "train", 4)]),
    "by hand, fsdp 2": (BY_HAND | FSDP_2, [(0, "operation", 33), (1, "train", 5), (0, "train", 4)]),
    "asynchronous": (LATER, [(0, "train", 9), (0, "operation", 51), (0, "operation", 90)]),
    # the first kill is in an epoch's first step
    "workers of a stream": ({"stream": "places of workers"}, [(0, "train", 26), (0, "operation", 60), (0, "train", 5)]),
    "shuffle buffer": ({"stream": "buffer"}, [(0, "train", 17), (0, "validate", 3), (0, "operation", 60)]),
    "spikes": ({"spikes": True}, [(0, "train", 12), (0, "operation", 60), (0, "validate", 4)]),
    "spikes, ddp 2": (DDP_2 | {"spikes": True}, [(1, "train", 5), (0, "operation", 51), (0, "train", 6)]),
    # one kill in each search
    "batch size and learning rate are found": ({"finds": True}, [(0, "train", 8), (0, "train", 40), (0, "train", 75)]),
    # the first kill is during the removal of checkpoints newer than the loaded one
    "rolls back": ({"rolls_back": True}, [(0, "operation", 408), (0, "closing", 1), (0, "operation", 60)]),
    "rolls back, ddp 2": (
        DDP_2 | {"rolls_back": True, "accumulate": 1},
        [(1, "train", 11), (1, "closing", 1), (0, "operation", 51)],
    ),
    "finetuning, SWA": ({"thaws": True}, [(0, "train", 11), (0, "validate", 3), (0, "operation", 60)]),
    "finetuning, SWA, ddp 2": (DDP_2 | {"thaws": True}, [(1, "train", 7), (0, "operation", 51), (0, "train", 4)]),
    "EMA, teacher and Muon": (AVERAGES, [(0, "train", 12), (0, "validate", 2), (0, "operation", 70)]),
    "EMA, teacher and Muon, ddp 2": (DDP_2 | AVERAGES, [(1, "train", 6), (0, "operation", 51), (0, "train", 5)]),
    "EMA, teacher and Muon, fsdp 2": (FSDP_2 | AVERAGES, [(0, "operation", 33), (1, "train", 6), (1, "validate", 2)]),
    "ddp 2": (
        DDP_2 | {"workers": 2, "asynchronous": True},
        [(1, "train", 5), (0, "operation", 51), (1, "validate", 2)],
    ),
    "ddp 3": (DDP_3, [(2, "train", 4), (0, "operation", 30), (1, "validate", 3)]),
    "fsdp 2": (FSDP_2, [(0, "operation", 33), (0, "cleaning", 2), (1, "train", 5)]),
    "mesh 2": (MESH_2, [(1, "train", 5), (0, "operation", 33), (0, "validate", 2)]),
    "mesh 4": (MESH_4 | MOVES, [(3, "train", 4), (0, "operation", 33), (1, "validate", 2)]),
    "fsdp 2, 2 workers": (FSDP_2 | {"workers": 2}, [(1, "validate", 3), (1, "operation", 7), (0, "train", 4)]),
}
SLOW = (
    "workers of a stream", "by hand, fsdp 2", "bf16", "bf16, 2 workers", "spikes, ddp 2", "rolls back, ddp 2",
    "finetuning, SWA, ddp 2", "EMA, teacher and Muon, ddp 2", "EMA, teacher and Muon, fsdp 2", "ddp 3",
    "fsdp 2, 2 workers", "mesh 4",
)  # fmt: skip
TIERS = {"ddp 2": "everyday", **dict.fromkeys(SLOW, "slow")}


@pytest.fixture(scope="session")
def nursery():
    made = Nursery(MODULE)
    yield made.start
    made.close()


@pytest.fixture(scope="session")
def uninterrupted_run(nursery, tmp_path_factory):
    """Return the directory of an uninterrupted run with these options."""
    made = {}

    def run(**options):
        key = json.dumps(options, sort_keys=True)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("undisturbed")
            assert not Lives(made[key], nursery, options).live()
        return made[key]

    return run


@pytest.mark.time_limit(300)
@pytest.mark.parametrize(
    "which", [pytest.param(name, marks=getattr(pytest.mark, TIERS[name]) if name in TIERS else ()) for name in KILLS]
)
def test_three_kills_leave_no_trace(tmp_path, nursery, uninterrupted_run, which):
    options, strikes = KILLS[which]
    lives = Lives(tmp_path / "killed", nursery, options)
    for strike in strikes:
        assert lives.live(strike)
    seen = lives.end(uninterrupted_run(**options))
    if "rolls_back" in options or "stream" in options:  # some batches are skipped
        return
    for epoch in range(EPOCHS if options.get("max_steps") is None else EPOCHS - 1):
        assert seen[epoch] == Counter(range(SAMPLES))


@pytest.mark.time_limit(300)
@pytest.mark.parametrize(
    ("options", "start", "strike"),
    [
        pytest.param(DDP_2, start_script, (1, "train", 7), marks=pytest.mark.slow),
        (FSDP_2, start_torchrun, (0, "operation", 40)),
        pytest.param(DDP_2, start_torchrun, (0, "validate", 3), marks=pytest.mark.torture),
        pytest.param(FSDP_2, start_script, (1, "operation", 3), marks=pytest.mark.torture),
    ],
    ids=["ddp script", "fsdp torchrun", "ddp torchrun", "fsdp script"],
)
def test_job_with_killed_rank_ends_and_resumes(tmp_path, nursery, uninterrupted_run, options, start, strike):
    lives = Lives(tmp_path / "killed", nursery, options)
    assert lives.live(strike, start=start)
    assert lives.longest_s < 15
    lives.end(uninterrupted_run(**options))


def kill_at_operations(directory, nursery, uninterrupted_run, options, rank, step):
    """Kill a run in each attempt, some operations of a save later every time. Return the number of operations."""
    options = options | {"accumulate": 1, "max_epochs": 6}
    lives = Lives(directory, nursery, options)
    for _ in range(2):  # including the removal of old checkpoints
        assert lives.live((rank, "train", 3))
    for operation in count(1, step):
        before = len(lives.noted("saves"))
        assert lives.live((rank, "operation", operation))
        if len(lives.noted("saves")) >= before + 2:
            break
    lives.end(uninterrupted_run(**options))
    return operation


@pytest.mark.time_limit(900)
@pytest.mark.parametrize(
    ("options", "rank", "least", "step"),
    [
        pytest.param({}, 0, 40, 1, marks=pytest.mark.slow),
        pytest.param(DDP_2, 0, 40, 1, marks=pytest.mark.torture),
        pytest.param(DDP_2 | LATER, 1, 25, 1, marks=pytest.mark.torture),
        pytest.param(FSDP_2, 1, 25, 1, marks=pytest.mark.torture),
        pytest.param(FSDP_2 | LATER, 0, 40, 4, marks=pytest.mark.slow),
        pytest.param(FSDP_2 | LATER, 0, 40, 1, marks=pytest.mark.torture),
    ],
    ids=["one process", "ddp", "ddp asynchronous", "fsdp", "fsdp asynchronous, every fourth", "fsdp asynchronous"],
)
def test_kills_at_any_save_operation_leave_no_trace(tmp_path, nursery, uninterrupted_run, options, rank, least, step):
    assert kill_at_operations(tmp_path / "killed", nursery, uninterrupted_run, options, rank, step) > least


# ---------------------------------------------------------------------- other layouts


def compare_moved_run(directory, nursery, expected, lives, options=MOVES):
    """Kill a run in each life but the last, and compare its end with an uninterrupted run on one process.

    Args:
        lives: The strategy and the number of processes of each life, and its strike.
        options: Options of all lives: `MOVES` to compare up to rounding, or `EXACT`.
    """
    for layout, strike in lives:
        life = Lives(directory, nursery, options | layout)
        assert life.live(strike) == (strike is not None)
    (tensors, *_, table), (wanted, *_, other_table) = map(final_state, (directory, expected))
    largest, rtol = (0, 0) if options == EXACT else (1e-11, 1e-9)
    for (section, name), values in wanted.items():
        if section != "extra":  # states of metrics, one for each rank
            assert tensors.pop((section, name)) == pytest.approx(values, rel=0, abs=largest), name
    assert {section for section, _ in tensors} == {"extra"}
    rows, other_rows = (list(csv.DictReader(each.splitlines())) for each in (table, other_table))
    assert list(rows[0]) == list(other_rows[0])
    for name in rows[0]:
        found, right = ([float(each[name] or 0) for each in lines] for lines in (rows, other_rows))
        # The error is the sum of a metric object over the samples of each process.
        assert found == pytest.approx(right, rel=1e-6 if name == "error" else rtol, abs=0), name
    assert surviving_samples(directory, moved=True) == surviving_samples(expected)


@pytest.mark.time_limit(300)
@pytest.mark.parametrize(
    "lives",
    [
        [(MESH_4, (3, "train", 9)), (MESH_2, (1, "operation", 60)), (LAYOUTS[0], None)],
        pytest.param(
            [(MESH_2, (0, "operation", 99)), (FSDP_2, (1, "train", 9)), (MESH_4, None)], marks=pytest.mark.slow
        ),
    ],
    ids=["4 2 1", "2 fsdp 4"],
)
def test_killed_mesh_resumes_on_another(tmp_path, nursery, uninterrupted_run, lives):
    compare_moved_run(tmp_path / "killed", nursery, uninterrupted_run(**MOVES), lives)


@pytest.mark.slow
@pytest.mark.time_limit(300)
def test_killed_exact_run_resumes_elsewhere(tmp_path, nursery, uninterrupted_run):
    """The result is bitwise identical to an uninterrupted run on one process."""
    lives = [(DDP_3, (2, "train", 9)), (HYBRID_4, (0, "operation", 60)), (FSDP_2, (0, "validate", 2)), (SINGLE, None)]
    compare_moved_run(tmp_path / "killed", nursery, uninterrupted_run(**EXACT), lives, EXACT)


@pytest.mark.torture
@pytest.mark.time_limit(1_000_000)
@pytest.mark.parametrize(
    ("options", "all_layouts"), [(MOVES, LAYOUTS), (EXACT, EXACT_LAYOUTS)], ids=["rounded", "exact"]
)
def test_dozens_of_moves_leave_no_trace(tmp_path, nursery, uninterrupted_run, options, all_layouts):
    """Each run is killed five times, and resumes on a drawn layout."""
    draw, expected = random.Random(int(os.environ.get("LUMEN_TORTURE_SEED", "0"))), uninterrupted_run(**options)
    moves = Counter()
    while moves.total() < int(os.environ.get("LUMEN_TORTURE_KILLS", "200")) // 4:
        layouts = [draw.choice(all_layouts) for _ in range(6)]
        lives = []
        for layout in layouts[:-1]:
            event, last = draw.choice([("train", 5), ("operation", 60)])
            lives.append((layout, (draw.randrange(layout["devices"]), event, draw.randint(1, last))))
        directory = tmp_path / str(moves.total())
        compare_moved_run(directory, nursery, expected, [*lives, (layouts[-1], None)], options)
        shutil.rmtree(directory)
        names = [f"{each['strategy']} {each['devices']}" for each in layouts]
        moves += Counter(f"{one} to {other}" for one, other in pairwise(names))
    print(f"{moves.total()} kills, no trace\n({listed(moves)})")


# ---------------------------------------------------------------------- random kills


class Hunter:
    """Kills of the processes of one run, drawn by a seed.

    Attributes:
        lives: Attempts of the run.
        victims: Number of kills of each kind.
    """

    def __init__(self, directory, nursery, seed, bucket_url):
        self.draw = random.Random(seed)
        self.options = self.draw_options() | {"s3": self.draw.choice([None, bucket_url])}
        self.lives = Lives(directory, nursery, self.options)
        self.victims = Counter()

    def draw_options(self):
        options = self.draw.choice([{"strategy": "single", "devices": 1}, DDP_2, DDP_3, FSDP_2, MESH_2])
        by_hand = BY_HAND if options["devices"] < 3 else {}  # with three ranks, one would have a batch of one sample
        thaws = {"thaws": options["strategy"] != "fsdp", "max_epochs": 5}  # within the 30 steps of the schedule
        stream = self.draw.choice([None, *STREAMS])
        workers = self.draw.choice([0, 2]) if stream is None else 2 * (stream == "places of workers")
        options = options | self.draw.choice([{}, AVERAGES, by_hand, thaws]) | {"stream": stream, "workers": workers}
        options |= {"asynchronous": self.draw.choice([False, True])}
        if self.draw.random() < 0.25:  # ends inside an epoch
            options |= {"precision": "bf16", "max_steps": {1: 38, 2: 23, 3: 15}[options["devices"]]}
        return {"max_epochs": 8} | options

    def kill(self, kills):
        """Kill the given number of times, or until the run ends."""
        as_user = self.draw.randrange(kills)
        for number in range(kills):
            draw = self.shoot_as_user if number == as_user else self.draw.choice([self.strike, self.strike, self.shoot])
            kind, killed = draw()
            if not killed:
                return
            self.victims[kind] += 1

    def strike(self):
        """Kill a rank at one of its events."""
        occurrences = {"train": 9, "validate": 5, "operation": 150}
        if self.options["s3"] or list(self.lives.checkpoints.glob("*.tmp-*")):
            occurrences["cleaning"] = 30 if self.options["s3"] else 3
        rank, event = self.draw.randrange(self.options["devices"]), self.draw.choice(list(occurrences))
        rank = 0 if event == "cleaning" else rank
        return f"at one {event}", self.lives.live((rank, event, self.draw.randint(1, occurrences[event])))

    def shoot(self):
        """Kill a rank at a random time of its training."""
        ranks = range(self.options["devices"])
        kind = self.draw.choice(["a rank", "all ranks", "a data worker"][: 3 if self.options["workers"] else 2])
        ranks = ranks if kind == "all ranks" else [self.draw.choice(ranks)]
        delay_s = self.draw.uniform(0, 1)

        def kill(job):
            self.wait(job, delay_s)
            pids = [job.pids[rank] for rank in ranks]
            shoot(list_children(pids[0])[:1] if kind == "a data worker" else pids)

        return f"{kind}, sometime", self.lives.live(kill=kill, fails=kind == "a data worker")

    def shoot_as_user(self):
        """Kill a job started like a user's at a random time, perhaps during its start."""
        start = self.draw.choice([start_script, start_torchrun] if self.options["devices"] > 1 else [start_script])
        # torchrun's ranks outlive it
        rank = self.draw.choice([*range(self.options["devices"]), *([None] if start is start_script else [])])
        in_start, delay_s = self.draw.random() < 0.3, self.draw.uniform(0, 2)

        def kill(job):
            if in_start:
                while rank not in job.pids and is_alive(job.pids[None]):
                    time.sleep(0.005)
                time.sleep(delay_s)
            else:
                self.wait(job, delay_s)
            shoot([job.pids[rank]] if rank in job.pids else [])

        kind = f"{'the launcher' if rank is None else 'a rank'} of a {start.__name__}"
        return kind, self.lives.live(start=start, kill=kill)

    def wait(self, job, delay_s):
        """Wait until training has begun on all ranks, unless it is over, and some time more."""
        while len(list(self.lives.directory.glob("begun-*"))) < self.options["devices"]:
            if not any(map(is_alive, job.pids.values())):
                return
            time.sleep(0.005)
        time.sleep(delay_s)


def shoot(pids):
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def list_children(pid):
    with suppress(FileNotFoundError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


@pytest.fixture
def bucket_url(monkeypatch):
    """Return the URL of a server with an empty bucket, which this process uses."""
    with serve_objects() as url:
        for name, value in make_environment(url).items():
            monkeypatch.setenv(name, value)
        store = fsspec.filesystem("s3", skip_instance_cache=True)
        store.mkdir(BUCKET)
        yield url
        type(store).clear_instance_cache()


def compare_hunted_run(directory, nursery, seed, bucket_url, kills):
    """Compare an uninterrupted and an often killed run, drawn by a seed. Return who killed the run."""
    directory.mkdir()
    hunter = Hunter(directory / "killed", nursery, seed, bucket_url)
    assert not Lives(directory / "undisturbed", nursery, hunter.options).live()
    hunter.kill(kills)
    for number in (1, 2):  # on_train_end, on_fit_end
        assert hunter.lives.live((0, "ending", number))
        hunter.victims["in an end hook"] += 1
    hunter.lives.end(directory / "undisturbed")
    return hunter


@pytest.mark.slow
@pytest.mark.time_limit(900)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.torture)])
def test_kills_at_random_moments_leave_no_trace(tmp_path, nursery, seed, bucket_url):
    assert compare_hunted_run(tmp_path / "run", nursery, seed, bucket_url, kills=6).victims


@pytest.mark.torture
@pytest.mark.time_limit(1_000_000)
def test_hundreds_of_kills_leave_no_trace(tmp_path, nursery, bucket_url):
    wanted = int(os.environ.get("LUMEN_TORTURE_KILLS", "200"))
    first = int(os.environ.get("LUMEN_TORTURE_SEED", "0"))
    victims, kinds, longest_s = Counter(), Counter(), 0.0
    for seed in count(first):
        hunter = compare_hunted_run(tmp_path / str(seed), nursery, seed, bucket_url, kills=16)
        shutil.rmtree(tmp_path / str(seed))
        victims += hunter.victims
        kinds[f"{hunter.options['strategy']} {hunter.options['devices']}"] += hunter.victims.total()
        longest_s = max(longest_s, hunter.lives.longest_s)
        print(f"{victims.total()} kills, no trace; seed {seed}: {hunter.options}", flush=True)
        if victims.total() >= wanted:
            break
    print(
        f"{victims.total()} kills in {seed + 1 - first} runs, 0 differences, never without a valid checkpoint, "
        f"no process left {longest_s:.1f} s after a kill\n({listed(kinds)}; {listed(victims)})"
    )


def listed(counts):
    return ", ".join(f"{name}: {count}" for name, count in sorted(counts.items()))
