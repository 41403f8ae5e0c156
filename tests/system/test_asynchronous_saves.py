"""Asynchronous saves in programs that are interrupted, killed or short of memory."""

import os
import signal
import subprocess
import sys
import time

import pytest

from lumen.checkpoint import Checkpoint, find_checkpoints
from tests.helpers import ROOT
from tests.helpers.asynchronous_saves import get_checkpoint_folder, list_checkpoints
from tests.helpers.jobs import find_free_port, wait_until_received
from tests.helpers.programs import run_python

IMPATIENT = """
import os, sys, threading, time
from tests.helpers.asynchronous_saves import Moving, fit, make_saver
from pathlib import Path

fsync = os.fsync
def slow(descriptor):
    if threading.current_thread() is not threading.main_thread():
        print("saving", flush=True)
        while not Path(sys.argv[1], "goes-on").exists():
            time.sleep(0.01)
    fsync(descriptor)
os.fsync = slow

class Slow(Moving):
    def training_step(self, batch):
        time.sleep(0.05)
        return super().training_step(batch)

fit(Path(sys.argv[1]), make_saver(every_n_train_steps=2), Slow(), max_epochs=1000, log_level="WARNING")
"""


def test_python_exit_waits_for_save_despite_interrupts(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", IMPATIENT, tmp_path], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        while child.stdout.readline().strip() != "saving":
            assert child.poll() is None
        for _ in range(3):  # finish this step; leave at once; do not wait; end of Python
            child.send_signal(signal.SIGINT)
            wait_until_received(child.pid, signal.SIGINT)
            time.sleep(0.3)
        (tmp_path / "goes-on").touch()
        errors = child.communicate(timeout=60)[1]
    assert child.returncode in (130, -signal.SIGINT), errors
    assert list_checkpoints(tmp_path) == ["step-00000002"], errors
    assert errors.count("SIGINT: stopping once the checkpoint in progress is written") == 1, errors
    Checkpoint.open(get_checkpoint_folder(tmp_path) / "step-00000002")


KILLED = """
import os, sys, threading, time
from pathlib import Path
import torch
from tests.helpers.asynchronous_saves import Moving, fit, make_saver

torch.set_num_threads(1)
directory, strategy, held, step_s = Path(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4])
fsync = os.fsync
def slow(descriptor):
    if threading.current_thread() is not threading.main_thread() and os.environ["RANK"] == held:
        print("saving", flush=True)
        time.sleep(600)
    fsync(descriptor)
os.fsync = slow

class Slow(Moving):
    def training_step(self, batch):
        time.sleep(step_s)
        return super().training_step(batch)

options = {"max_epochs": 100_000} if held != "none" else {"max_steps": 9}
fit(directory, make_saver(), Slow(), strategy=strategy, resume="auto", log_every_n_steps=10_000, **options)
"""


@pytest.mark.parametrize(("strategy", "victim"), [pytest.param("ddp", 1, marks=pytest.mark.slow), ("fsdp", 0)])
def test_killed_rank_ends_ranks_that_wait_for_it(tmp_path, strategy, victim):
    job = start_ranks(tmp_path, strategy, str(victim))
    assert job[victim].stdout.readline().strip() == "saving"
    time.sleep(0.5)  # the other one now waits for this one
    assert list_checkpoints(tmp_path)[0].startswith("step-00000004.tmp-")
    job[victim].kill()
    _, errors = job[1 - victim].communicate(timeout=60)
    assert job[1 - victim].returncode == 1, errors
    assert "ProcessLost" in errors
    job[victim].communicate()
    assert find_checkpoints(get_checkpoint_folder(tmp_path)) == []
    for process in start_ranks(tmp_path, strategy, "none"):
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    assert list_checkpoints(tmp_path) == ["step-00000004", "step-00000008"]


def test_failed_save_after_lost_rank_is_reported_once(tmp_path):
    job = start_ranks(tmp_path, "ddp", "1", step_s="0.4")
    assert job[1].stdout.readline().strip() == "saving"
    time.sleep(0.5)  # rank 0 trains, and does not wait for its thread
    job[1].kill()
    errors = job[0].communicate(timeout=60)[1]
    job[1].communicate()
    (said,) = [line for line in errors.splitlines() if "the save in progress failed" in line]
    assert said.endswith(": rank 0 lost another process of the run: look for the error of that process."), errors


def start_ranks(tmp_path, strategy, held, step_s="0.02"):
    port = str(find_free_port())
    return [
        subprocess.Popen(
            [sys.executable, "-c", KILLED, tmp_path, strategy, held, step_s], cwd=ROOT, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
            env=os.environ | {
                "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1",
            },
        )
        for rank in (0, 1)
    ]  # fmt: skip


CRAMPED = """
import re, resource, sys
from pathlib import Path
import torch
from tests.helpers.asynchronous_saves import CallAtSteps, Moving, fit, make_saver

class Growing(Moving):
    grown = None

    def on_save_checkpoint(self, checkpoint):
        checkpoint["grown"] = self.grown

def cramp(trainer):
    task.grown = torch.ones(24 << 20)
    taken = int(re.search(r"VmSize:\\s+([0-9]+) kB", Path("/proc/self/status").read_text())[1]) << 10
    resource.setrlimit(resource.RLIMIT_AS, (taken + (64 << 20), -1))

task = Growing()
saver = make_saver(asynchronous=True if sys.argv[2] == "True" else None)
fit(Path(sys.argv[1]), [CallAtSteps(step4=cramp), saver], task, max_steps=5, log_level="WARNING")
"""


@pytest.mark.parametrize("asynchronous", [None, True])
def test_save_without_memory_for_copy_is_synchronous(tmp_path, asynchronous):
    """The save raises an error if asynchronous=True was set."""
    _, said = run_python("-c", CRAMPED, tmp_path, asynchronous, code=1 if asynchronous else 0)
    if asynchronous:
        assert "CheckpointError: step-00000004: not enough memory for the copy" in said
        assert "can't allocate memory" in said
        assert "Set asynchronous=False in ModelCheckpoint." in said
        assert list_checkpoints(tmp_path) == []
    else:
        assert "step-00000004: not enough memory for a copy, so training waits" in said
        checkpoint = Checkpoint.open(get_checkpoint_folder(tmp_path) / "step-00000004")
        assert (checkpoint.read_tensor("extra", "task.grown") == 1).all()
