"""Hang watch: a hung process is named and its job terminated; a process that was stopped for a while is not."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

import lumen
from lumen.errors import HUNG
from tests.helpers import hanging_run
from tests.helpers.hanging_run import LATE, LONG_S, UNMATCHED
from tests.helpers.jobs import Nursery, start_script
from tests.helpers.tasks import Regression, bare_trainer, loader

MODULE = hanging_run.__name__
PLACE = r"is in user code: \S+hanging_run\.py:\d+ in"
IN_WORKER = rf"rank [01] waits for its data worker \d+, which {PLACE} this_sample_sleeps"
NAMED = {
    ("stopped", 2): r"rank 1 is stopped \(SIGSTOP; `kill -CONT \d+` resumes the process\)\. rank 0 waits",
    ("loop", 2): rf"rank 1 {PLACE} this_loop_is_endless\. rank 0 waits",
    ("lock", 2): rf"rank 1 {PLACE} keeps_the_lock\. rank 0 waits",
    ("missing", 2): rf"rank 1 {PLACE} setup\. rank 0 waits",
    ("worker", 2): rf"{IN_WORKER}\. rank [01] waits",
    ("loop", 1): rf"rank 0 {PLACE} this_loop_is_endless",
    ("worker", 1): IN_WORKER,
    ("forked worker", 1): r"rank 0 waits for its data worker \d+, which hung when it was forked: .* forks once per run",
}


@pytest.fixture(scope="module")
def nursery():
    made = Nursery(MODULE)
    yield made
    made.close()


def is_named_and_ended(nursery, folder, mode, devices):
    end = nursery.start(str(folder), MODULE, {"mode": mode, "devices": devices}).wait()
    said = rf"error: no step and no batch was done for [\d.]+ s: {NAMED[mode, devices]}\.\n"
    assert len(re.findall(said, end.output)) == 1, end.output
    assert end.output.endswith(re.findall(said, end.output)[0])
    assert "hang_watch.py" not in end.output  # only the threads that train, and data workers
    is_killed = mode in ("stopped", "lock")  # a process that does not end by itself
    assert end.code == (-signal.SIGKILL if is_killed else HUNG)
    (stacks,) = (folder / "runs/run/logs").glob("stacks-*.txt")
    text = stacks.read_text()
    assert all(f"rank {rank} (pid " in text for rank in range(devices))
    sections = re.split(r"^rank \d+ \(pid ", text, flags=re.M)[1:]
    assert is_killed or all("Thread 0x" in section for section in sections)  # of all threads, in each process
    assert f"{stacks.relative_to(folder)}" in end.output
    assert "failed: ProcessStuck: no step and no batch" in (folder / "runs/run/run.log").read_text()
    if devices > 1:
        check_recorded_collectives(folder / "runs/run/logs", ended_by_itself=[0] if is_killed else [0, 1])
    return end.took_s


def check_recorded_collectives(logs, ended_by_itself):
    """Check that torch's flight recorder is on; the waiting rank has begun more collectives than the other."""
    files = {rank: [*logs.glob(f"collectives-torch-rank{rank}-*.json")] for rank in (0, 1)}
    assert [rank for rank, found in files.items() if found] == ended_by_itself
    records = [json.loads(file.read_bytes()) for (file,) in (files[rank] for rank in ended_by_itself)]
    assert all(each["entries"][-1]["profiling_name"].startswith("gloo:") for each in records)
    begun = [len(each["entries"]) for each in records]
    assert len({*begun}) == len(begun)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "devices"), [key for key in NAMED if key not in {("loop", 2), ("loop", 1)}])
def test_hanging_process_is_named_and_job_ends(nursery, tmp_path, mode, devices):
    is_named_and_ended(nursery, tmp_path, mode, devices)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=[pytest.mark.torture] * (number % 2)) for number, mode in enumerate(UNMATCHED)]
)
def test_a_collective_that_ranks_skip_is_named(nursery, tmp_path, mode):
    """The limits are the defaults, 10 and 30 minutes."""
    end = nursery.start(str(tmp_path), MODULE, {"mode": mode, "devices": 2}).wait()
    said = (
        r"error: rank 0 waits in a collective that rank 1 does not reach: rank 0 is at \S+hanging_run\.py:\d+ in \S+; "
        r"rank 1 has continued without this collective\.\n"
    )
    assert len(re.findall(said, end.output)) == 1, end.output
    assert "A condition on batch_idx is true on one rank at a time" in end.output
    assert end.code == HUNG


@pytest.mark.slow
def test_ranks_of_different_groups_may_wait(nursery, tmp_path):
    """Two ranks wait for a third one, each in a group with that rank alone."""
    end = nursery.start(str(tmp_path), MODULE, {"mode": LATE, "devices": 3}).wait()
    assert end.code == 0, end.output
    assert "done: 8 steps" in end.output


@pytest.mark.torture
@pytest.mark.parametrize(("mode", "devices"), [*NAMED])
@pytest.mark.parametrize("time", range(5))
def test_hangs_are_named_and_ended_reliably(nursery, tmp_path, mode, devices, time):
    took_s = is_named_and_ended(nursery, tmp_path, mode, devices)
    print(f"{mode} on {devices}: the last process ended {took_s:.1f} s after the first")


@pytest.mark.slow
def test_job_ends_without_its_temporary_files(tmp_path):
    """A cleaner has removed the temporary files of a long run."""
    end = start_script(tmp_path, MODULE, {"mode": "no folder", "devices": 2, "launched": True}).wait()
    assert end.code == HUNG, end.output
    assert "error: no step and no batch was done for" in end.output


@pytest.mark.slow
def test_hung_job_is_restarted_and_finishes(tmp_path):
    options = {"mode": "loop", "devices": 2, "launched": True, "max_restarts": 1}
    end = start_script(tmp_path, MODULE, options).wait()
    assert end.code == 0, end.output
    assert re.search(r"restart 1 of 1: rank \d .*resuming from step 2", end.output)
    assert "done: 8 steps" in end.output


@pytest.mark.slow
def test_a_rank_that_never_comes_is_named(tmp_path):
    is_missed(tmp_path)


@pytest.mark.torture
@pytest.mark.parametrize("time", range(5))
def test_missing_rank_is_named_reliably(tmp_path, time):
    is_missed(tmp_path)


def is_missed(folder):
    end = start_script(folder, MODULE, {"mode": "absent", "devices": 2, "launched": True}).wait()
    assert end.code == HUNG, end.output
    assert "the 2 processes did not all connect" in end.output
    assert "timed out waiting for ranks 1" in end.output


@pytest.mark.slow
def test_suspended_job_continues(nursery, tmp_path):
    """The job is stopped as by Ctrl-Z and continued as by `fg`, for longer than the limit."""
    job = nursery.start(str(tmp_path), MODULE, {"mode": "suspended", "devices": 2})
    while len([*tmp_path.glob("waits-*")]) < 2:
        time.sleep(0.02)
    time.sleep(1.0)  # the watch has seen no progress
    for number, rest_s in ((signal.SIGSTOP, 1.5 * LONG_S), (signal.SIGCONT, 3.0)):
        for pid in job.pids.values():
            os.kill(pid, number)
        time.sleep(rest_s)
    (tmp_path / "goes-on").touch()
    end = job.wait()
    assert end.code == 0, end.output
    assert "done: 8 steps" in end.output
    (row,) = csv.DictReader((tmp_path / "runs/run/system.csv").read_text().splitlines())
    assert float(row["steps_per_s"]) > 8 / (1.5 * LONG_S)  # The time in which the job was stopped does not count.


def test_code_without_a_hash_is_watched(tmp_path, monkeypatch):
    """Code of `torch.compile` may have constants without a hash."""
    raised = []
    monkeypatch.setattr(threading, "excepthook", raised.append)

    def wait():
        time.sleep(0.8)

    wait.__code__ = wait.__code__.replace(co_consts=(*wait.__code__.co_consts, {}))
    task = Regression()
    monkeypatch.setattr(task, "on_before_zero_grad", lambda optimizer: wait())
    strategy = lumen.SingleDevice(timeout_s=8)  # polls each 0.2 s
    bare_trainer(tmp_path, max_steps=1, strategy=strategy).fit(task, loader())
    assert raised == []


def test_stack_requests_do_not_crash_a_process():
    """A signal finds the main thread asleep and another thread at work, in a process like that of a run."""
    code = """
import os, sys, threading, time
from pathlib import Path
from lumen.distributed.stack_dump import SINGLE_SIGNAL, open_stack_file
open_stack_file()
def work():
    for _ in range(3000):
        os.kill(os.getpid(), SINGLE_SIGNAL)
        Path("/proc/self/status").read_text()
thread = threading.Thread(target=work)
thread.start()
while thread.is_alive():
    time.sleep(0.01)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_reading_frames_does_not_block_other_threads():
    """Python 3.11.7 can wait for ever if a garbage collection begins while it lists the frames of all threads."""
    code = """
import sys, threading, time
from types import SimpleNamespace
from lumen.trainer.hang_watch import _HangWatch

class Cycle:
    def __init__(self):
        self.itself = self
    def __del__(self):
        time.sleep(0)  # lets another thread run, as closing a file does

def read():
    while not over.is_set():
        for frame in _HangWatch._iterate_frames(watch):
            pass

over, watch = threading.Event(), SimpleNamespace(_thread=threading.get_ident())
reader = threading.Thread(target=read)
reader.start()
for _ in range(20_000):
    Cycle()
    thread = threading.Thread(target=Cycle)
    thread.start()
    thread.join()
over.set()
reader.join()
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=200).returncode == 0
