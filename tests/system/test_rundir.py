"""Run directory: one live job at most, after any end of an earlier job."""

import errno
import fcntl
import json
import multiprocessing
import os
import signal
import socket
import time
import warnings
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import pytest
import torch

from lumen.checkpoint.format.folder import find_checkpoints
from lumen.checkpoint.save.writer import write_checkpoint
from lumen.errors import ConfigError, RunDirectoryError
from lumen.trainer import run_directory
from lumen.trainer.run_directory import RunDirectory

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["lumen.trainer.run_directory"])


class Job:
    """Real process that runs `target(connection, *args)`; killed at the end of its `with` block."""

    def __init__(self, target, *args):
        self.connection, other = processes.Pipe()
        self.process = processes.Process(target=target, args=(other, *args))
        self.process.start()
        other.close()

    def hear(self):
        assert self.connection.poll(100), "the job says nothing"
        return self.connection.recv()

    def kill(self):
        self.process.kill()
        self.process.join()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        self.connection.close()


def hold(connection, root, name, reuse, act=lambda run: None):
    try:
        run = RunDirectory.claim(root, name, reuse=reuse)
    except RunDirectoryError as error:
        connection.send(error)
        return
    connection.send((run.path, act(run)))
    connection.recv()
    run.release()
    connection.send("released")
    connection.recv()


def read_holder(connection, path):
    connection.send(RunDirectory.read_live_holder(path))


def test_new_run_gets_new_directory_reused_the_same(tmp_path):
    root = tmp_path / "deep" / "runs"
    (root / "gpt-3").mkdir(parents=True)
    for reuse, expected in ((False, "gpt"), (False, "gpt-2"), (False, "gpt-4"), (True, "gpt"), (True, "new")):
        with RunDirectory.claim(root, "gpt" if expected != "new" else "new", reuse=reuse) as run:
            assert run.path == root / expected
            assert run.checkpoints == root / expected / "checkpoints"
            assert run.checkpoints.is_dir()


def claim_at(connection, root, moment):
    time.sleep(max(0, moment - time.time()))
    hold(connection, root, "gpt", False)


def test_simultaneous_processes_get_separate_directories(tmp_path):
    moment = time.time() + 0.5
    jobs = [Job(claim_at, tmp_path, moment) for _ in range(6)]
    try:
        paths = {job.hear()[0] for job in jobs}
    finally:
        for job in jobs:
            job.kill()
    assert paths == {tmp_path / name for name in ("gpt", *(f"gpt-{k}" for k in range(2, 7)))}


def test_second_job_error_names_the_holder(tmp_path):
    with Job(hold, tmp_path, "gpt", True) as job:
        path, _ = job.hear()
        holder = RunDirectory.read_live_holder(path)
        assert holder == json.loads((path / ".lock").read_text())
        assert (holder["pid"], holder["host"]) == (job.process.pid, socket.gethostname())
        assert abs(time.time() - datetime.fromisoformat(holder["started"]).timestamp()) < 60
        for _ in range(2):
            with pytest.raises(RunDirectoryError, match=f"process {job.process.pid} on .* started .* another run name"):
                RunDirectory.claim(tmp_path, "gpt", reuse=True)
        with Job(hold, tmp_path, "gpt", True) as third:
            assert f"process {job.process.pid}" in str(third.hear())
        job.connection.send("release")
        assert job.hear() == "released"
        assert RunDirectory.read_live_holder(path) is None
        RunDirectory.claim(tmp_path, "gpt", reuse=True).release()


def test_the_same_process_cannot_hold_a_directory_twice(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    with RunDirectory.claim(tmp_path, "gpt", reuse=False) as run:
        for root in (tmp_path, tmp_path / "link"):
            with pytest.raises(RunDirectoryError, match=f"process {os.getpid()} on"):
                RunDirectory.claim(root, "gpt", reuse=True)
            assert RunDirectory.read_live_holder(root / "gpt")["pid"] == os.getpid()
        with Job(read_holder, run.path) as job:  # refused claims and reads did not release the lock
            assert job.hear()["pid"] == os.getpid()
    run.release()
    assert RunDirectory.read_live_holder(run.path) is None
    with RunDirectory.claim(tmp_path, "gpt", reuse=True) as again:
        run.release()  # from the first holder: the second one keeps its lock
        with Job(hold, tmp_path, "gpt", True) as job:
            assert f"process {os.getpid()}" in str(job.hear())
        assert RunDirectory.read_live_holder(again.path)


def lose_and_check(connection, root):
    run = RunDirectory.claim(root, "gpt", reuse=True)
    for _ in range(2):
        (run.path / ".lock").read_text()  # as a copy of the directory does
        connection.send("lost")
        connection.recv()
        try:
            run.check_claim()
        except RunDirectoryError as error:
            connection.send(str(error))
        else:
            connection.send("checked")
        connection.recv()


def test_a_lost_lock_is_taken_again(tmp_path):
    with Job(lose_and_check, tmp_path) as job:
        assert job.hear() == "lost"
        assert RunDirectory.read_live_holder(tmp_path / "gpt") is None
        job.connection.send("check")
        assert job.hear() == "checked"
        assert RunDirectory.read_live_holder(tmp_path / "gpt")["pid"] == job.process.pid
        job.connection.send("again")
        assert job.hear() == "lost"
        with RunDirectory.claim(tmp_path, "gpt", reuse=True):
            job.connection.send("check")
            assert f"is also in use by process {os.getpid()} on" in job.hear()


def fork_a_child(run):
    child = os.fork()
    if child == 0:  # a data worker: it has every descriptor of the job
        signal.pause()
    return child


def test_kill_frees_directory_despite_forked_child(tmp_path, monkeypatch):
    monkeypatch.setattr(run_directory, "_PATIENCE_S", 10)
    with Job(hold, tmp_path, "gpt", True, fork_a_child) as job:
        path, child = job.hear()
        try:
            assert RunDirectory.read_live_holder(path)["pid"] == job.process.pid
            os.kill(job.process.pid, signal.SIGKILL)
            with RunDirectory.claim(tmp_path, "gpt", reuse=True) as run:
                assert run.path == path
                open_there = [os.readlink(link) for link in Path(f"/proc/{child}/fd").iterdir()]
                assert str(path / ".lock") in open_there
        finally:
            os.kill(child, signal.SIGKILL)


def fork_an_heir(run):
    job, child = os.getpid(), os.fork()
    if child == 0:
        while os.getppid() == job:
            time.sleep(0.01)
        RunDirectory.claim(run.path.parent, run.path.name, reuse=True)
        signal.pause()
    return child


def test_child_that_outlives_its_job_can_claim(tmp_path):
    with Job(hold, tmp_path, "gpt", True, fork_an_heir) as job:
        path, child = job.hear()
        try:
            job.kill()
            deadline = time.monotonic() + 100
            while (RunDirectory.read_live_holder(path) or {}).get("pid") != child:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        finally:
            os.kill(child, signal.SIGKILL)


def fork_a_child_that_meddles(run):
    child = os.fork()
    if child == 0:
        held = RunDirectory.read_live_holder(run.path)
        run.release()
        os._exit(0 if held["pid"] == os.getppid() else 1)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def test_forked_child_sees_but_cannot_release_the_lock(tmp_path):
    with Job(hold, tmp_path, "gpt", True, fork_a_child_that_meddles) as job:
        path, child_exit = job.hear()
        assert child_exit == 0
        assert RunDirectory.read_live_holder(path)["pid"] == job.process.pid


def lock_and_let_go(connection, path):
    with open(path, "r+b") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        connection.send("locked")
        time.sleep(0.3)
        fcntl.lockf(file, fcntl.LOCK_UN)
        connection.recv()


def test_claim_waits_for_a_lock_being_released(tmp_path, monkeypatch):
    monkeypatch.setattr(run_directory, "_PATIENCE_S", 10)
    RunDirectory.claim(tmp_path, "gpt", reuse=True).release()
    with Job(lock_and_let_go, tmp_path / "gpt" / ".lock") as job:
        assert job.hear() == "locked"
        RunDirectory.claim(tmp_path, "gpt", reuse=True).release()


def test_claim_removes_only_leftovers_of_killed_saves(tmp_path):
    folder = tmp_path / "gpt" / "checkpoints"
    write_checkpoint(folder / "step-1", {"model": {"w": torch.ones(2)}}, {}, info={})
    (folder / "step-2.tmp-01234567" / "model").mkdir(parents=True)
    (folder / "step-2.tmp-01234567" / "model" / "00000-00000.safetensors").touch()
    (folder / "step-3.damaged-1").mkdir()
    with Job(hold, tmp_path, "gpt", True) as job:
        job.hear()
        (folder / "step-4.tmp-456789ab").mkdir()  # the save of the live job
        with pytest.raises(RunDirectoryError):
            RunDirectory.claim(tmp_path, "gpt", reuse=True)
        assert sorted(os.listdir(folder)) == ["step-1", "step-3.damaged-1", "step-4.tmp-456789ab"]
    RunDirectory.claim(tmp_path, "gpt", reuse=True).release()
    assert sorted(os.listdir(folder)) == ["step-1", "step-3.damaged-1"]
    assert find_checkpoints(folder) == [folder / "step-1"]


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "/etc", "../up", "a\\b", "a\0", "a\nb"])
@pytest.mark.parametrize("reuse", [True, False])
def test_invalid_run_names_are_refused(tmp_path, name, reuse):
    with pytest.raises(ConfigError, match="cannot name a run"):
        RunDirectory.claim(tmp_path / "runs", name, reuse=reuse)
    assert os.listdir(tmp_path) == []


def test_file_in_the_way_is_named(tmp_path):
    (tmp_path / "file").touch()
    for root, name in ((tmp_path / "file", "gpt"), (tmp_path, "file"), (tmp_path / "file" / "deep", "gpt")):
        with pytest.raises(
            RunDirectoryError, match=r"/file.*(File exists|Not a directory).* Remove a file of this name"
        ):
            RunDirectory.claim(root, name, reuse=True)
    with RunDirectory.claim(tmp_path, "file", reuse=False) as run:
        assert run.path == tmp_path / "file-2"
    (tmp_path / "gpt").mkdir()
    (tmp_path / "gpt" / "checkpoints").touch()
    for _ in range(2):  # the failed claim holds no lock
        with pytest.raises(RunDirectoryError, match="gpt/checkpoints: File exists"):
            RunDirectory.claim(tmp_path, "gpt", reuse=True)
        assert RunDirectory.read_live_holder(tmp_path / "gpt") is None
    assert RunDirectory.read_live_holder(tmp_path / "file") is None
    assert RunDirectory.read_live_holder(tmp_path / "none") is None


def test_linked_lock_file_is_refused_and_target_kept(tmp_path):
    (tmp_path / "gpt").mkdir()
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "gpt" / ".lock").symlink_to(tmp_path / "precious")
    with pytest.raises(RunDirectoryError, match=r"gpt/\.lock"):
        RunDirectory.claim(tmp_path, "gpt", reuse=True)
    assert (tmp_path / "precious").read_text() == "precious"


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC])
@pytest.mark.parametrize("operation", ["mkdir", "open", "pwrite", "fsync"])
def test_unwritable_directory_raises_and_stays_free(tmp_path, monkeypatch, operation, code):
    def refuse(*args, **kwargs):
        raise OSError(code, os.strerror(code), str(tmp_path / "gpt"))

    (tmp_path / "gpt").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(os, operation, refuse)
        if operation == "mkdir":
            with pytest.raises(RunDirectoryError, match=os.strerror(code)):
                RunDirectory.claim(tmp_path, "new", reuse=True)
        else:
            with pytest.raises(RunDirectoryError, match=rf"gpt: {os.strerror(code)}"):
                RunDirectory.claim(tmp_path, "gpt", reuse=True)
    assert [path for path in open_paths() if path.is_relative_to(tmp_path)] == []
    RunDirectory.claim(tmp_path, "gpt", reuse=True).release()


def open_paths():
    """Return paths of the open files of this process; garbage of other tests may close some of them meanwhile."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.append(link.readlink())
    return found


def test_new_files_survive_power_loss(tmp_path, monkeypatch):
    synced, fsync = set(), os.fsync

    def noting(descriptor):
        synced.add(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    with RunDirectory.claim(tmp_path / "new/runs", "gpt", reuse=False) as run:
        assert {tmp_path, tmp_path / "new", tmp_path / "new/runs", run.path} <= synced


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_file_system_without_locks_warns_and_works(tmp_path, monkeypatch, code):
    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with pytest.warns(UserWarning, match="gpt has no locks"):
        run = RunDirectory.claim(tmp_path, "gpt", reuse=True)
    with run, pytest.raises(RunDirectoryError, match=f"process {os.getpid()}"):
        RunDirectory.claim(tmp_path, "gpt", reuse=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning):  # an intended error releases the directory
            RunDirectory.claim(tmp_path, "gpt", reuse=True)
    monkeypatch.undo()
    RunDirectory.claim(tmp_path, "gpt", reuse=True).release()


def test_restarted_job_takes_directory_by_name_and_number(tmp_path):
    claims = [("gpt-2", False), ("gpt", False), ("gpt", False)]

    def attempt():
        found = []
        for name, reuse in claims:
            with RunDirectory.claim(tmp_path, name, reuse=reuse, launchers={"one launch"}) as run:
                found.append((run.path.name, run.restarted))
        return found

    assert attempt() == [("gpt-2", False), ("gpt", False), ("gpt-3", False)]
    run_directory._claims.clear()  # as in a new process
    assert attempt() == [("gpt-2", True), ("gpt", True), ("gpt-3", True)]
    run_directory._claims.clear()
    with RunDirectory.claim(tmp_path, "gpt", reuse=False, launchers={"another one"}) as run:
        assert (run.path.name, run.restarted) == ("gpt-4", False)
