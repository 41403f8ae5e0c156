"""Disk failures on one of several processes: all processes end with one error, and older checkpoints stay complete."""

import ctypes
import os
import resource
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import lumen
from lumen.checkpoint import Checkpoint, find_checkpoints, open_newest_valid
from lumen.errors import CheckpointError
from tests.helpers.checkpoints import is_same_tensor
from tests.helpers.tasks import Regression, loader, quiet_trainer

STEPS, FAULTY_STEP = 5, 3
NOBODY = 65534


class Large(Regression):
    """Task of which each process writes more than 100,000 bytes, the file size limit of some tests."""

    def __init__(self):
        super().__init__()
        self.tables = torch.nn.ParameterList(torch.randn(200, 200) for _ in range(3))

    def training_step(self, batch):
        return super().training_step(batch) + sum(table.square().mean() for table in self.tables)


class Fault(lumen.Callback):
    """Callback that starts a fault on one rank right before the save of a step."""

    def __init__(self, rank, begin):
        self.rank, self.begin = rank, begin

    def on_step_end(self, trainer, task):
        if trainer.global_step == FAULTY_STEP:
            trainer.run.saves.finish_save()  # the checkpoint before must stay complete
            if trainer.global_rank == self.rank:
                self.begin(trainer.run_directory)


@contextmanager
def limit_file_size():
    """Limit files to 100,000 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda directory: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def remove_permission():
    """Remove the permission to write in the directory."""
    yield lambda directory: os.seteuid(NOBODY)
    os.seteuid(0)


@contextmanager
def remove_files(pattern):
    """Remove the files that match a pattern in the middle of a save."""
    real = os.fsync

    def begin(directory):
        def fsync(descriptor):
            if ".tmp-" in os.readlink(f"/proc/self/fd/{descriptor}"):
                os.fsync = real
                for path in list(directory.glob(pattern)) if pattern else [directory]:
                    gone = path.with_name("gone")
                    path.rename(gone)  # restored at once: other tests write there meanwhile, by name
                    shutil.rmtree(gone)
            real(descriptor)

        os.fsync = fsync

    yield begin
    os.fsync = real


FAULTS = {
    "small files": (limit_file_size, "File too large. The file exceeds a size limit: raise the limit"),
    "no permission": (remove_permission, "Permission denied. Give this user the right"),
    "save removed": (lambda: remove_files("checkpoints/*.tmp-*"), "do not change the run's directory"),
    "run removed": (lambda: remove_files(""), "do not change the run's directory"),
}


def make_trainer(folder, strategy, asynchronous, *callbacks):
    saving = lumen.ModelCheckpoint(every_n_train_steps=1, keep_last=-1, asynchronous=asynchronous)
    return quiet_trainer(
        folder, strategy=strategy, max_steps=STEPS, resume="auto", callbacks=[*callbacks, saving],
    )  # fmt: skip


def fit(folder, strategy, asynchronous):
    make_trainer(folder, strategy, asynchronous).fit(Large(), loader())


def fail(folder, strategy, asynchronous, name, rank):
    """Return the error of a run with a fault, and the step of its end."""
    with FAULTS[name][0]() as begin:
        trainer = make_trainer(folder, strategy, asynchronous, Fault(rank, begin), lumen.OnExceptionCheckpoint())
        with pytest.raises(CheckpointError) as caught:
            trainer.fit(Large(), loader())
    return str(caught.value), trainer.global_step


@pytest.fixture
def folder():
    """Make a directory that other users may enter."""
    path = Path(tempfile.mkdtemp(prefix="lumen-faults-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def uninterrupted_states(group, tmp_path_factory):
    """Return the final state of a run without faults, by strategy."""
    made = {}

    def get(strategy):
        if strategy not in made:
            folder = tmp_path_factory.mktemp("undisturbed")
            group(2).run(fit, folder, strategy, False)
            made[strategy] = read_last_checkpoint(folder)
        return made[strategy]

    return get


def read_last_checkpoint(folder):
    """Return all tensors of the last checkpoint, by section and name."""
    checkpoint = Checkpoint.open(find_checkpoints(folder / "runs/run/checkpoints")[-1])
    assert checkpoint.info["step"] == STEPS
    return {section: dict(checkpoint.as_mapping(section)) for section in ("model", "optimizer", "extra")}


@pytest.mark.parametrize("asynchronous", [False, True], ids=["at once", "asynchronous"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", FAULTS)
def test_storage_fault_ends_all_ranks_and_run_resumes(
    group, folder, uninterrupted_states, name, strategy, rank, asynchronous
):
    if name == "no permission" and os.geteuid() != 0:
        pytest.skip("not proven here: only root can lose its rights and get them back")
    (message, step), (other, _) = group(2).run(fail, folder, strategy, asynchronous, name, rank, limit_s=40)
    assert message == other
    assert FAULTS[name][1] in message
    assert step in (FAULTY_STEP, FAULTY_STEP + asynchronous)
    checkpoints = folder / "runs/run/checkpoints"
    if name != "run removed":
        assert [path.name for path in find_checkpoints(checkpoints)] == ["step-00000001", "step-00000002"]
        assert open_newest_valid(checkpoints, pytest.fail).info["step"] == FAULTY_STEP - 1
        assert not list(checkpoints.glob("*.tmp-*")) or (name, rank) == ("no permission", 0)
    group(2).run(fit, folder, strategy, asynchronous)
    assert is_same_tensor(read_last_checkpoint(folder), uninterrupted_states(strategy))
    assert not list(checkpoints.glob("*.tmp-*"))


@pytest.fixture
def small_disk(tmp_path):
    """Mount a file system of 8 MB."""
    path, libc = tmp_path / "disk", ctypes.CDLL(None, use_errno=True)
    path.mkdir()
    if libc.mount(b"none", os.fsencode(path), b"tmpfs", 0, b"size=8m"):
        pytest.skip("not proven here: a disk of its own needs the right to mount one")
    yield path
    assert libc.umount(os.fsencode(path)) == 0


@pytest.mark.parametrize("asynchronous", [False, True], ids=["at once", "asynchronous"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_full_disk_raises_one_error_on_all_ranks(group, small_disk, uninterrupted_states, strategy, asynchronous):
    (message, _), (other, _) = group(2).run(fill_up, small_disk, strategy, asynchronous, limit_s=40)
    assert message == other
    assert "No space left on device. Free space on that disk" in message
    checkpoints = small_disk / "runs/run/checkpoints"
    assert open_newest_valid(checkpoints, pytest.fail).info["step"] == FAULTY_STEP - 1
    assert sorted(os.listdir(checkpoints)) == ["step-00000001", "step-00000002"]
    (small_disk / "filling").unlink()
    shutil.rmtree(checkpoints / "step-00000001")
    group(2).run(fit, small_disk, strategy, asynchronous)
    assert is_same_tensor(read_last_checkpoint(small_disk), uninterrupted_states(strategy))


def fill(directory):
    disk = os.statvfs(directory)
    with open(directory.parents[1] / "filling", "wb") as file:
        file.write(bytes(disk.f_bavail * disk.f_frsize - 300_000))


def fill_up(folder, strategy, asynchronous):
    trainer = make_trainer(folder, strategy, asynchronous, Fault(0, fill))
    with pytest.raises(CheckpointError) as caught:
        trainer.fit(Large(), loader())
    return str(caught.value), trainer.global_step
