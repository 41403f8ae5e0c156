"""Asynchronous saves: the same bytes and errors as synchronous ones, and nothing is lost at the end."""

import contextlib
import copy
import errno
import gc
import logging
import os
import resource
import shutil
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import lumen
from lumen.checkpoint import Checkpoint, find_checkpoints
from lumen.checkpoint.format.folder import read_info
from lumen.checkpoint.save.snapshot import Snapshot
from lumen.errors import CheckpointError, NonFiniteLoss
from tests.helpers.asynchronous_saves import (
    CallAtSteps,
    Large,
    Moving,
    SlowDisk,
    Watched,
    block_path_with_file,
    fit,
    free_parameters,
    get_checkpoint_folder,
    list_checkpoints,
    make_saver,
    read_files,
    wait_until_announced,
)
from tests.helpers.checkpoints import DTYPES, SHAPES, is_same_tensor, make_tensor
from tests.helpers.scripted_values import fit_scripted
from tests.helpers.tasks import Regression, loader, quiet_trainer

# ---------------------------------------------------------------------- saved state


def test_asynchronous_save_equals_synchronous_save_bytewise(tmp_path, monkeypatch):
    disk = SlowDisk(monkeypatch)
    under_way = []

    def save_at_once(trainer):
        trainer.save_checkpoint(
            tmp_path / "at-once", info={"best": None, "ranked": [], "monitor": None, "finished": None}
        )

    def go_on(trainer):
        assert disk.reached.wait(60)
        under_way.append(list_checkpoints(tmp_path))
        disk.goes_on.set()

    fit(tmp_path, [CallAtSteps(step4=save_at_once, step7=go_on), make_saver()], max_steps=7, logger=False)
    assert len(under_way[0]) == 1
    assert under_way[0][0].startswith("step-00000004.tmp-")
    assert list_checkpoints(tmp_path) == ["step-00000004"]
    expected, found = read_files(tmp_path / "at-once"), read_files(get_checkpoint_folder(tmp_path) / "step-00000004")
    assert {str(name) for name in found} >= {"model/00000-00000.safetensors", "optimizer/00000-00000.safetensors"}
    assert found == expected


def test_asynchronous_saves_do_not_change_the_run(tmp_path):
    """Every step is saved, so each save except the first waits for the save before."""
    for name, asynchronous in (("a", True), ("b", False)):
        saver = make_saver(every_n_train_steps=1, keep_last=-1, at_end=True, asynchronous=asynchronous)
        fit(tmp_path / name, saver, log_every_n_steps=3)
    found, expected = (find_checkpoints(get_checkpoint_folder(tmp_path / name)) for name in "ab")
    assert [path.name for path in found] == [path.name for path in expected] == list_checkpoints(tmp_path / "a")
    assert len(found) == 15
    for one, other in zip(map(Checkpoint.open, found), map(Checkpoint.open, expected), strict=True):
        for section in ("model", "optimizer", "extra"):
            assert is_same_tensor(dict(one.as_mapping(section)), dict(other.as_mapping(section)))
        for checkpoint in (one, other):
            checkpoint.state["progress"].pop("elapsed_s")
        assert one.state == other.state
        assert one.info == other.info


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_snapshot_copies_every_kind_of_tensor_exactly(dtype):
    tensors = {str(shape): make_tensor(dtype, shape) for shape in SHAPES}
    if dtype.itemsize > 1 and not str(dtype).startswith("torch.float4"):
        tensors |= {"transposed": make_tensor(dtype, (5, 7)).T, "expanded": make_tensor(dtype, (1, 3)).expand(4, 3)}
    if dtype.is_complex:
        tensors["conjugate"] = make_tensor(dtype, (4,)).conj()
    snapshot = Snapshot()
    for _ in range(2):  # the second save reuses the memory
        copies = snapshot.start_copy({"model": tensors})["model"]
        snapshot.wait()
        assert is_same_tensor(copies, tensors)
    addresses = {tensor.data_ptr() for tensor in tensors.values() if tensor.numel()}
    assert not addresses & {copy.data_ptr() for copy in copies.values()}


def test_reserved_memory_causes_no_page_faults_in_save():
    tensors = {"model": {str(number): torch.ones(1 << 20) for number in range(16)}}

    def faults(snapshot):
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        copies = snapshot.start_copy(tensors)
        count = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
        assert is_same_tensor(copies, tensors)
        return count

    reserved = Snapshot()
    thread = threading.Thread(target=reserved.reserve_memory, args=(tensors,))
    thread.start()
    thread.join()
    assert faults(reserved) < 1000
    assert faults(Snapshot()) > 16 * (4 << 20) // (2 * os.sysconf("SC_PAGESIZE"))


@pytest.mark.cuda
def test_cuda_snapshot_is_of_its_moment():
    tensor, layers = torch.zeros(1 << 24, device="cuda"), torch.randn(1024, 1024, device="cuda")
    for _ in range(50):
        layers = layers @ layers  # the copy has to wait for these writes
    tensor += 1
    snapshot = Snapshot()
    copies = snapshot.start_copy({"model": {"tensor": tensor, "transposed": tensor.view(4096, 4096).T}})["model"]
    tensor += 1
    snapshot.wait()
    assert all(copy.is_pinned() and (copy == 1).all() for copy in copies.values())


# ---------------------------------------------------------------------- time of saves


class Numerous(Regression):
    """Task with 1,200 tensors with Adam's state, of some bytes each."""

    def __init__(self):
        super().__init__()
        self.more = nn.ParameterList(nn.Parameter(torch.zeros(2)) for _ in range(300))

    def forward(self, inputs):
        return super().forward(inputs) + 0.0 * torch.stack(tuple(self.more)).sum()


@pytest.mark.parametrize(
    ("task", "asynchronous", "is_left_to_a_thread"),
    [
        (Regression, None, False), (Regression, True, True), (Large, None, True), (Large, False, False),
        (Numerous, None, True), (Numerous, False, False),
    ],
)  # fmt: skip
def test_only_large_checkpoints_are_asynchronous_by_default(
    tmp_path, monkeypatch, task, asynchronous, is_left_to_a_thread
):
    disk = SlowDisk(monkeypatch)
    disk.goes_on.set()
    fit(tmp_path, make_saver(asynchronous=asynchronous), task(), max_steps=6)
    assert list_checkpoints(tmp_path) == ["step-00000004"]
    assert disk.is_left_to_a_thread == is_left_to_a_thread


def test_saves_are_synchronous_when_memory_is_short(tmp_path, monkeypatch):
    read_text = Path.read_text
    meminfo = "MemTotal:       99999999 kB\nMemAvailable:      30000 kB\n"  # 29 MiB for 18 MiB and overhead

    def read(path, *args, **options):
        return meminfo if str(path) == "/proc/meminfo" else read_text(path, *args, **options)

    monkeypatch.setattr(Path, "read_text", read)
    disk = SlowDisk(monkeypatch)
    fit(tmp_path, make_saver(asynchronous=None), Large(), max_steps=6)
    assert list_checkpoints(tmp_path) == ["step-00000004"]
    assert not disk.is_left_to_a_thread


def test_final_checkpoint_is_saved_synchronously(tmp_path, monkeypatch):
    disk = SlowDisk(monkeypatch)
    fit(tmp_path, make_saver(every_n_train_steps=0, at_end=True), max_steps=3)
    assert list_checkpoints(tmp_path) == ["step-00000003"]
    assert not disk.is_left_to_a_thread


# ---------------------------------------------------------------------- kept checkpoints


class Improving(Moving):
    def validation_step(self, batch):
        self.log("score", -float(self.global_step))


def test_old_checkpoints_are_removed_only_after_the_commit(tmp_path, monkeypatch):
    """Every path that the callback returns exists."""
    disk = SlowDisk(monkeypatch)
    saver = make_saver(monitor="score", on_best=False, keep_last=1)
    seen = {}

    def look(trainer):
        given = [saver.best_model_path, saver.kth_best_model_path, saver.last_model_path, *saver.best_k_models]
        for path in filter(None, given):
            Checkpoint.open(Path(path))
        assert saver.best_model_score == (-float(given[0][-2:]) if given[0] else None)
        seen[trainer.global_step] = given[0][-2:], given[2][-2:]

    def hold(trainer):
        look(trainer)
        disk.goes_on.clear()
        disk.reached.clear()

    def look_at_a_held_one(trainer):
        assert disk.reached.wait(60)
        assert trainer.run.saves.path.name == "step-00000008"
        look(trainer)

    def go_on(trainer):
        disk.goes_on.set()
        wait_until_announced(trainer)
        look(trainer)

    at = CallAtSteps(
        step5=go_on, step6=look, step7=hold, step9=look_at_a_held_one, step10=go_on, step11=look, step12=look
    )
    fit(tmp_path, [at, saver], Improving(), val_check_interval=4, max_steps=12)
    # a save is accounted for one step after its end is known; the checkpoint that it replaces exists until then
    assert seen == {
        5: ("", "04"), 6: ("", "04"), 7: ("04", "04"),
        9: ("04", "04"), 10: ("04", "08"), 11: ("04", "08"), 12: ("08", "08"),
    }  # fmt: skip
    assert list_checkpoints(tmp_path) == ["step-00000012"]


def test_shared_save_of_two_callbacks_is_written_once(tmp_path, monkeypatch):
    disk = SlowDisk(monkeypatch)

    def go_on(trainer):
        assert disk.reached.wait(60)
        assert list_checkpoints(tmp_path)[0].startswith("step-00000004.tmp-")
        disk.goes_on.set()

    savers = [make_saver(keep_last=1), make_saver(monitor="val_loss", keep_last=0)]
    fit(tmp_path, [CallAtSteps(step5=go_on), *savers], val_check_interval=4, max_steps=5)
    assert list_checkpoints(tmp_path) == ["step-00000004"]
    assert (
        savers[1].best_model_path == savers[0].last_model_path == str(get_checkpoint_folder(tmp_path) / "step-00000004")
    )


def test_several_callbacks_keep_what_each_of_them_says(tmp_path):
    savers = [
        make_saver(monitor="score", every_n_train_steps=0, keep_last=0),
        make_saver(monitor="score", mode="max", every_n_train_steps=0, keep_last=0),
        make_saver(every_n_train_steps=5, keep_last=1),
    ]
    fit_scripted(tmp_path, [9, 5, 1, 2, 8, 7], savers)
    assert list_checkpoints(tmp_path) == ["step-00000002", "step-00000006", "step-00000010"]


# ---------------------------------------------------------------------- errors


def limit_the_size_of_files(tmp_path, trainer):
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (block_path_with_file, r"checkpoints.*A file is in the way"),
        (limit_the_size_of_files, r"step-00000008.*: File too large. The file exceeds a size limit"),
    ],
)
def test_thread_error_ends_run_at_next_boundary(tmp_path, harm, message):
    watched = Watched()
    callbacks = [watched, CallAtSteps(step8=lambda trainer: harm(tmp_path, trainer)), make_saver()]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(CheckpointError, match=message):
            fit(tmp_path, callbacks, logger=False)
    finally:  # not in a fixture: pytest writes its dot before the teardown, perhaps into a long file
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert watched.last_step == 9
    (older,) = find_checkpoints(
        tmp_path / "moved" if (tmp_path / "moved").exists() else get_checkpoint_folder(tmp_path)
    )
    assert Checkpoint.open(older).info["step"] == 4
    assert not list(tmp_path.rglob("*.tmp-*"))


@pytest.mark.parametrize("ends", [False, True], ids=["goes on", "ends there"])
def test_directory_removed_during_save_raises(tmp_path, monkeypatch, ends):
    callbacks = [CallAtSteps(step5=remover(tmp_path, SlowDisk(monkeypatch))), make_saver()]
    with pytest.raises(CheckpointError, match=r"step-00000004.*removed while in use"):
        fit(tmp_path, callbacks, max_steps=5 if ends else 9)


def test_save_error_in_failing_run_is_logged(tmp_path, monkeypatch, caplog):
    disk = SlowDisk(monkeypatch)

    def fail(trainer):
        remover(tmp_path, disk)(trainer)
        raise RuntimeError("on purpose")

    with caplog.at_level(logging.ERROR, "lumen"), pytest.raises(RuntimeError, match="on purpose"):
        fit(tmp_path, [CallAtSteps(step5=fail), make_saver()], log_level="ERROR")
    assert "the save in progress failed: cannot write" in caplog.text
    assert "step-00000004" in caplog.text


def remover(tmp_path, disk):
    def remove(trainer):
        assert disk.reached.wait(60)
        shutil.rmtree(get_checkpoint_folder(tmp_path))
        disk.goes_on.set()

    return remove


def test_parameters_that_are_not_finite_are_never_committed(tmp_path):
    class Breaks(Moving):
        def __init__(self):
            super().__init__()
            self.spare = nn.Parameter(torch.zeros(3))  # no loss depends on it

        def on_train_batch_end(self, outputs, batch, batch_idx):
            if self.global_step == 8:
                self.spare.data[1] = torch.nan

    with pytest.raises(NonFiniteLoss, match=r"after step 8 1 parameters are not finite.*: spare"):
        fit(tmp_path, make_saver(), Breaks())
    assert list_checkpoints(tmp_path) == ["step-00000004"]


# ---------------------------------------------------------------------- exit


class Leaves(Moving):
    """Task that fails in the step after a save has begun."""

    error = RuntimeError

    def training_step(self, batch):
        if self.global_step == 4 and self.error is not None:
            raise self.error
        return super().training_step(batch)


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt, SystemExit])
def test_leaving_run_waits_for_pending_save(tmp_path, monkeypatch, error):
    disk = SlowDisk(monkeypatch)
    timer = threading.Timer(0.5, disk.goes_on.set)
    timer.start()
    with contextlib.nullcontext() if error is None else pytest.raises(error):
        task = Leaves()
        task.error = error
        fit(tmp_path, make_saver(), task, max_steps=5)
    timer.join()
    assert list_checkpoints(tmp_path) == ["step-00000004"]
    Checkpoint.open(get_checkpoint_folder(tmp_path) / "step-00000004")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lumen-save")]


def test_failing_run_reuses_pending_boundary_save(tmp_path, monkeypatch):
    disk = SlowDisk(monkeypatch)
    timer = threading.Timer(0.5, disk.goes_on.set)
    timer.start()
    with pytest.raises(RuntimeError):
        fit(tmp_path, [lumen.OnExceptionCheckpoint(), make_saver()], Leaves())
    timer.join()
    assert list_checkpoints(tmp_path) == ["step-00000004"]


# ---------------------------------------------------------------------- regressions


def test_saves_within_one_step_stay_in_order(tmp_path):
    class Skipping(Regression):
        def training_step(self, batch):
            return None if self.global_step >= 3 else super().training_step(batch)

    newest = []
    watching = lumen.LambdaCallback(on_step_end=lambda trainer, task: newest.append(_newest(tmp_path)))
    saver = make_saver(every_n_train_steps=0, train_time_interval={"microseconds": 1}, keep_last=1)
    trainer = quiet_trainer(tmp_path, max_epochs=1, callbacks=[watching, saver])
    trainer.fit(Skipping(), loader(320))
    assert len(newest) == 40
    micro_batches = [info["micro_batches"] for info in newest if info is not None]
    assert micro_batches == sorted(micro_batches)
    assert _newest(tmp_path)["micro_batches"] == 40


def _newest(tmp_path):
    found = find_checkpoints(get_checkpoint_folder(tmp_path)) if get_checkpoint_folder(tmp_path).is_dir() else []
    return read_info(found[-1]) if found else None


@pytest.mark.parametrize("asynchronous", [False, True])
def test_savers_share_a_folder_however_it_is_spelled(tmp_path, monkeypatch, asynchronous):
    monkeypatch.chdir(tmp_path)
    savers = [
        make_saver(dirpath=path, asynchronous=asynchronous) for path in ("ck", tmp_path / "ck", tmp_path / "ck/../ck")
    ]
    fit(tmp_path, savers, max_steps=9)
    assert sorted(path.name for path in (tmp_path / "ck").glob("*step*")) == ["step-00000004", "step-00000008"]


def test_callback_does_not_keep_its_run_alive(tmp_path):
    saver, task = make_saver(), Moving()
    fit(tmp_path, saver, task)
    gone = weakref.ref(task)
    del task
    gc.collect()
    assert gone() is None
    assert copy.deepcopy(saver).last_model_path == saver.last_model_path != ""


@pytest.mark.parametrize("asynchronous", [False, True])
def test_failed_state_collection_records_no_score(tmp_path, asynchronous):
    class Refusing(Moving):
        def on_save_checkpoint(self, checkpoint):
            if self.global_step == 8:
                raise ValueError("not now")

    saver = make_saver(monitor="val_loss", asynchronous=asynchronous, every_n_train_steps=4)
    with pytest.raises(ValueError, match="not now"):
        fit(tmp_path, saver, Refusing(), val_check_interval=4)
    assert Path(saver.best_model_path).is_dir()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_single_element_of_any_stride_is_saved(tmp_path, asynchronous):
    class Strided(Moving):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["x"] = torch.full((1, 5), 3.0)[:, 0]

    fit(tmp_path, make_saver(asynchronous=asynchronous), Strided(), max_steps=4)
    assert list_checkpoints(tmp_path) == ["step-00000004"]


def test_failed_save_keeps_the_previous_checkpoint(tmp_path, monkeypatch):
    real = os.fsync

    def fsync(descriptor):
        if "b/step-00000008" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    savers = [make_saver(dirpath=tmp_path / name, keep_last=0) for name in ("a", "b", "c")]
    with pytest.raises(CheckpointError, match="step-00000008"):
        fit(tmp_path, [*savers, lumen.OnExceptionCheckpoint()])
    assert "step-00000004" in [path.name for path in find_checkpoints(tmp_path / "b")]


@pytest.mark.parametrize("asynchronous", [None, True])
def test_copy_error_is_not_reported_as_low_memory(tmp_path, asynchronous):
    callbacks = [CallAtSteps(step4=free_parameters), make_saver(asynchronous=asynchronous)]
    with pytest.raises(RuntimeError, match="out of bounds for storage of size 0") as caught:
        fit(tmp_path, callbacks, Large())
    assert "_copy_tensors" in [entry.name for entry in caught.traceback]
    assert list_checkpoints(tmp_path) == []
    assert "memory" not in (tmp_path / "runs/run/run.log").read_text()
