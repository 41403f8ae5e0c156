"""Storage faults: kills and full disks in the middle of a save leave a complete checkpoint or none."""

import errno
import io
import multiprocessing
import os
import random
import resource
import shutil
import signal
import time
from itertools import count

import pytest
import torch

from lumen.checkpoint.format.folder import clean_leftovers, find_checkpoints, remove_checkpoint
from lumen.checkpoint.save import writer
from lumen.checkpoint.save.writer import write_checkpoint
from lumen.errors import CheckpointError
from tests.helpers.checkpoints import FILES, assert_small, save, save_small
from tests.helpers.programs import run_and_read_numbers


@pytest.mark.parametrize("pattern", ["step-2.tmp-*", "step-2.tmp-*/model/00000-00000.safetensors", "."])
def test_directory_removed_during_save_raises_without_checkpoint(tmp_path, pattern, monkeypatch):
    folder = tmp_path / "checkpoints"
    save_small(folder / "step-1")
    written, write = [], writer.write_safetensors

    def removing(path, tensors):
        written.append(path)
        if len(written) == 4:  # in the middle of the save
            for each in [folder] if pattern == "." else folder.glob(pattern):
                shutil.rmtree(each) if each.is_dir() else each.unlink()
        return write(path, tensors)

    monkeypatch.setattr(writer, "write_safetensors", removing)
    tensors = {f"t{i}": torch.ones(9) for i in range(8)}
    with pytest.raises(CheckpointError, match=r"step-2|checkpoints"):
        write_checkpoint(folder / "step-2", {"model": tensors}, {}, info={}, max_file_bytes=1)
    assert len(written) >= 4
    assert find_checkpoints(folder) == ([] if pattern == "." else [folder / "step-1"])
    assert not list(folder.glob("*.tmp-*"))


class Faults:
    """Faults that make the k-th operation of a save on the disk fail, alone or with all later ones."""

    def __init__(self, patch, k, forever):
        self.done = 0
        self.k = k
        self.forever = forever
        real_open = open
        for name in ("open", "fsync", "mkdir", "rename", "unlink", "rmdir"):
            patch.setattr(os, name, self.failing(getattr(os, name)))

        faults = self

        class Writer(io.FileIO):
            def write(self, data):
                faults.step()
                return super().write(data)

        def opening(path, mode="r", *args, **kwargs):
            self.step()
            return Writer(path, mode) if "x" in mode else real_open(path, mode, *args, **kwargs)

        patch.setattr("builtins.open", opening)

    def step(self):
        self.done += 1
        if self.done == self.k or (self.forever and self.done > self.k):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def failing(self, function):
        def wrapper(*args, **kwargs):
            self.step()
            return function(*args, **kwargs)

        return wrapper


@pytest.mark.parametrize("forever", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("occupied", [False, True], ids=["free", "damaged there"])
def test_fault_at_any_operation_leaves_all_or_nothing(tmp_path, forever, occupied):
    old = save_small(tmp_path / "step-1")
    for k in count(1):
        folder = tmp_path / str(k)
        shutil.copytree(old, folder / "step-1")
        if occupied:
            shutil.copytree(old, folder / "step-2")
            os.truncate(folder / "step-2" / "manifest.json", 100)
        error = None
        with pytest.MonkeyPatch.context() as patch:
            faults = Faults(patch, k, forever)
            try:
                save_small(folder / "step-2", value=2.0)
            except CheckpointError as caught:
                error = caught
        assert_small(folder / "step-1")
        names = sorted(os.listdir(folder))
        if (folder / "step-2") in find_checkpoints(folder):
            assert_small(folder / "step-2", value=2.0)
            assert names == ["step-1", "step-2"] + ["step-2.damaged-1"] * occupied
        else:
            assert error is not None
            assert forever or not [name for name in names if "tmp" in name]
            assert occupied == bool({"step-2", "step-2.damaged-1"} & set(names))
        if k > faults.done:
            break
        assert error is None or "No space left on device" in str(error)
    assert k > 30
    assert error is None


def test_files_are_synced_before_commit_and_commit_after(tmp_path, monkeypatch):
    events = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(descriptor):
        events.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real_fsync(descriptor)

    def rename(source, target):
        events.append("renamed")
        real_rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    path = save_small(tmp_path / "step-1")
    commit = events.index("renamed")
    synced = [os.path.relpath(event, tmp_path).partition("/")[2] for event in events[:commit]]
    assert sorted(synced) == sorted(["", "model", "optimizer", *FILES])
    assert synced[-1] == ""
    assert events[commit + 1 :] == [str(path.parent)]


def test_file_system_without_directory_sync_is_tolerated(tmp_path, monkeypatch):
    real = os.fsync

    def fsync(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    assert_small(save_small(tmp_path / "step-1"))


processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["lumen.checkpoint.save.writer"])


def save_onto_a_full_disk(folder, results):
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        save(folder / "step-2", model={"w": torch.ones(10_000), "big": torch.ones(1_000_000)})
    except CheckpointError as error:
        results.send(str(error))


def test_a_full_disk_is_one_clear_error(tmp_path):
    save_small(tmp_path / "step-1")
    receiver, sender = processes.Pipe(duplex=False)
    process = processes.Process(target=save_onto_a_full_disk, args=(tmp_path, sender))
    process.start()
    sender.close()
    message = receiver.recv()
    process.join()
    assert process.exitcode == 0
    assert "model/00000-00000.safetensors: File too large" in message
    assert "raise the limit" in message
    assert os.listdir(tmp_path) == ["step-1"]
    assert_small(tmp_path / "step-1")


def save_for_ever(folder, first):
    for step in count(first):
        save_small(folder / f"step-{step}", value=float(step))
        if (step - first) % 3 == 2:
            remove_checkpoint(folder / f"step-{step}")


def test_killed_saves_never_leave_partial_checkpoints(tmp_path):
    rng = random.Random(0)
    leftovers = 0
    for life in range(15):
        process = processes.Process(target=save_for_ever, args=(tmp_path, 1000 * life + 1))
        process.start()
        while not (tmp_path / f"step-{1000 * life + 1}").exists():
            assert process.is_alive()
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.06))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        leftovers += len(list(tmp_path.glob("*.tmp-*")))
        clean_leftovers(tmp_path)
        names = [path.name for path in find_checkpoints(tmp_path)]
        assert sorted(names) == sorted(os.listdir(tmp_path))  # nothing uncommitted has a checkpoint's name
    for path in find_checkpoints(tmp_path):
        assert_small(path, value=float(path.name[5:]))
    assert len(names) >= 15
    assert leftovers > 0  # the kills did hit saves


MEMORY = """
import resource, sys, torch
from pathlib import Path
from lumen.checkpoint.format.reader import Checkpoint
from lumen.checkpoint.save.writer import write_checkpoint
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
tensors = {f"t{i}": torch.ones(1024, 2048).T for i in range(24)}
write_checkpoint(Path(sys.argv[1]) / "step-1", {"model": {"w": torch.ones(2, 3).T}}, {}, info={})
start = peak()
write_checkpoint(Path(sys.argv[1]) / "step-2", {"model": tensors}, {}, info={})
written = peak()
checkpoint = Checkpoint.open(Path(sys.argv[1]) / "step-2")
for name, tensor in tensors.items():
    checkpoint.copy_into("model", name, tensor)
print(written - start, peak() - start)
"""


def test_saving_and_loading_need_memory_of_one_tensor(tmp_path):
    written, read = run_and_read_numbers("-c", MEMORY, tmp_path)  # in MiB; each tensor has 8, together 192
    assert written < 14
    assert read < 14
