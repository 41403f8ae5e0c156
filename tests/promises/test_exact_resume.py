"""Kill -9 at any moment, run it again: the result has the bits of a run that was never killed."""

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from lumen.checkpoint import Checkpoint, find_checkpoints
from tests.promises.resumable_run import EPOCHS, SAMPLES

ROOT = Path(__file__).parents[2]
#: Where each of the twelve kills strikes: the kind of event, and which of its occurrences in that process.
STRIKES = {
    (0, "fp32"): [("train", 7), ("validate", 3), ("save", 20)],
    (2, "fp32"): [("save", 9), ("train", 20), ("validate", 5)],
    (0, "bf16"): [("validate", 8), ("save", 33), ("train", 4)],
    (2, "bf16"): [("train", 11), ("save", 4), ("save", 27)],
    (0, "fp32-asynchronous"): [("train", 9), ("save", 17), ("save", 30)],
}


def run(directory, workers, kind, strike=None):
    """Run the child until it is killed at an event, or to its end. Returns whether it was killed."""
    command = [sys.executable, "-u", "-m", "tests.promises.resumable_run", str(directory), str(workers), kind]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        killed = False
        if strike is not None:
            kind, occurrence = strike
            for line in child.stdout:
                occurrence -= line.strip() == kind
                if occurrence == 0:
                    os.kill(child.pid, signal.SIGKILL)
                    killed = True
                    break
        errors = child.communicate()[1]
    assert child.returncode == (-signal.SIGKILL if killed else 0), errors
    return killed


def final_state(directory, name="run"):
    """All tensors of a run's last checkpoint, everything else it holds, and its metrics, in comparable form."""
    checkpoint = Checkpoint.open(find_checkpoints(directory / name / "checkpoints")[-1])
    tensors = {
        (section, name): checkpoint.tensor(section, name).contiguous().view(-1).tolist()
        for section in ("model", "optimizer", "extra")
        for name in checkpoint.names(section)
    }
    state = {key: value for key, value in checkpoint.state.items() if key not in ("progress", "loggers")}
    progress = {key: value for key, value in checkpoint.state["progress"].items() if key != "elapsed_s"}
    return tensors, state, progress, (directory / name / "metrics.csv").read_text()


def surviving_samples(directory):
    """Per epoch, how often each sample was trained on; what a resumed process repeats must repeat exactly."""
    history = {}
    for line in (directory / "samples.jsonl").read_text().splitlines():
        epoch, step, batch, indices = json.loads(line)
        assert history.setdefault((epoch, batch), (step, indices)) == (step, indices)
    seen = {epoch: Counter() for epoch in range(EPOCHS)}
    for (epoch, _), (_, indices) in history.items():
        seen[epoch].update(indices)
    return seen


@pytest.mark.time_limit(300)
@pytest.mark.parametrize(
    ("workers", "kind"),
    [pytest.param(*which, marks=pytest.mark.slow if which[1] == "bf16" else ()) for which in STRIKES],
)
def test_three_kills_leave_no_trace(tmp_path, workers, kind):
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    for directory in (undisturbed, killed):
        directory.mkdir()
    run(undisturbed, workers, kind)
    for strike in STRIKES[workers, kind]:
        assert run(killed, workers, kind, strike)
    run(killed, workers, kind)

    for kept, expected in zip(final_state(killed), final_state(undisturbed), strict=True):
        assert kept == expected
    seen = surviving_samples(killed)
    assert seen == surviving_samples(undisturbed)
    for epoch in range(EPOCHS - 1 if kind == "bf16" else EPOCHS):
        assert seen[epoch] == Counter(range(SAMPLES))


def kill_at_random(directory, seed, kills):
    """Undisturbed and often killed runs, drawn by a seed, end alike."""
    draw = random.Random(seed)
    workers, kind = draw.choice([0, 2]), draw.choice(["fp32", "bf16", "fp32-asynchronous"])
    undisturbed, killed = directory / "undisturbed", directory / "killed"
    for part in (undisturbed, killed):
        part.mkdir(parents=True)
    run(undisturbed, workers, kind)
    expected = final_state(undisturbed)
    for _ in range(kills):
        run(killed, workers, kind, (draw.choice(["train", "validate", "save"]), draw.randint(1, 4)))
    run(killed, workers, kind)
    assert final_state(killed) == expected


@pytest.mark.slow
@pytest.mark.time_limit(900)
@pytest.mark.parametrize("seed", range(2))
def test_kills_at_random_moments_leave_no_trace(tmp_path, seed):
    kill_at_random(tmp_path, seed, kills=10)


@pytest.mark.torture
@pytest.mark.time_limit(100_000)
def test_hundreds_of_kills_leave_no_trace(tmp_path):
    kills = int(os.environ.get("LUMEN_TORTURE_KILLS", "200"))
    for seed in range(-(-kills // 12)):
        kill_at_random(tmp_path / str(seed), seed, kills=12)
        print(f"{12 * (seed + 1)} kills, no trace", flush=True)
