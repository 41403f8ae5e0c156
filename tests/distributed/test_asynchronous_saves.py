"""Asynchronous saves: the same bytes and errors as synchronous ones, and nothing is lost at the end."""

import errno
import os
import re
import threading
import time
from pathlib import Path

import pytest
import torch

import lumen
from lumen.checkpoint import Checkpoint, find_checkpoints
from lumen.checkpoint.save.snapshot import Snapshot
from lumen.errors import CheckpointError, NonFiniteLoss, ProcessLost
from tests.helpers.asynchronous_saves import (
    CallAtSteps,
    Large,
    SlowDisk,
    Watched,
    block_path_with_file,
    fit,
    free_parameters,
    get_checkpoint_folder,
    list_checkpoints,
    make_saver,
    read_files,
)

STRATEGIES = pytest.mark.parametrize("strategy", ["ddp", "fsdp"])


@STRATEGIES
def test_ranks_write_their_shards_from_start_of_save(group, tmp_path, strategy):
    copied = group(2).run(save_in_both_ways, tmp_path, strategy)
    assert list_checkpoints(tmp_path) == ["step-00000004"]
    expected, found = read_files(tmp_path / "at-once"), read_files(get_checkpoint_folder(tmp_path) / "step-00000004")
    assert {name.name[:5] for name in found if name.parent.name == "model"} == {"00000", "00001"}
    assert found == expected
    checkpoint = Checkpoint.open(get_checkpoint_folder(tmp_path) / "step-00000004")
    sections = ("model", "optimizer", "extra")
    specs = [
        checkpoint.get_spec(section, name) for section in sections for name in checkpoint.list_tensor_names(section)
    ]
    assert sum(copied) == sum(shape.numel() * dtype.itemsize for dtype, shape in specs)


def save_in_both_ways(tmp_path, strategy):
    """Return the number of bytes that this process has copied."""
    copied = []
    with pytest.MonkeyPatch.context() as patch:
        disk, take = SlowDisk(patch), Snapshot.start_copy

        def counted(self, sections):
            copied.extend(tensor.nbytes for tensors in sections.values() for tensor in tensors.values())
            return take(self, sections)

        def save_at_once(trainer):
            info = {"best": None, "ranked": [], "monitor": None, "finished": None}
            trainer.save_checkpoint(tmp_path / "at-once", info=info)

        def go_on(trainer):
            assert disk.reached.wait(30)
            assert list_checkpoints(tmp_path)[0].startswith("step-00000004.tmp-")
            trainer.strategy.barrier()
            disk.goes_on.set()

        patch.setattr(Snapshot, "start_copy", counted)
        callbacks = [CallAtSteps(step4=save_at_once, step7=go_on), make_saver()]
        fit(tmp_path, callbacks, strategy=strategy, max_steps=7, logger=False, accumulate_grad_batches=1)
    return sum(copied)


def test_all_ranks_save_synchronously_if_one_lacks_memory(group, tmp_path):
    for how in ("known before", "found out"):
        assert group(2).run(save_without_memory_on_one_rank, tmp_path / how, how) == [False, False]
        assert list_checkpoints(tmp_path / how) == ["step-00000004"]


def save_without_memory_on_one_rank(tmp_path, how):
    """Return True if a thread made the save."""
    read_text = Path.read_text

    def read(path, *args, **options):
        return "MemAvailable:      30000 kB\n" if str(path) == "/proc/meminfo" else read_text(path, *args, **options)

    def take(self, sections):
        raise MemoryError

    with pytest.MonkeyPatch.context() as patch:
        disk = SlowDisk(patch)
        disk.goes_on.set()
        if os.environ["RANK"] == "1":
            patch.setattr(*((Path, "read_text", read) if how == "known before" else (Snapshot, "start_copy", take)))
        if how == "known before":
            fit(tmp_path, make_saver(asynchronous=None), Large(), strategy="ddp", max_steps=6)
        else:
            patch.setattr("lumen.checkpoint.format.storage.Storage.quick_bytes", 0)
            fit(tmp_path, make_saver(asynchronous=None), strategy="ddp", max_steps=6)
    return disk.is_left_to_a_thread


@STRATEGIES
def test_thread_error_on_one_rank_ends_all(group, tmp_path, strategy):
    messages = group(2).run(train_until_a_disk_is_full, tmp_path, strategy)
    assert messages[0] == messages[1]
    assert re.search("step-00000008.*/00001-00000.safetensors: No space left on device", messages[0])
    assert list_checkpoints(tmp_path) == ["step-00000004"]
    Checkpoint.open(get_checkpoint_folder(tmp_path) / "step-00000004")


def train_until_a_disk_is_full(tmp_path, strategy):
    """Fail in the thread of rank 1 only."""
    fsync = os.fsync

    def full(descriptor):
        in_thread = threading.current_thread() is not threading.main_thread()
        if in_thread and "step-00000008" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        if os.environ["RANK"] == "1":
            patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError) as caught:
            fit(tmp_path, make_saver(at_end=True), max_epochs=100_000, strategy=strategy, logger=False)
    return str(caught.value)


def test_slow_disks_leave_collectives_their_whole_limit(group, tmp_path):
    group(2).run(train_with_slow_disk, tmp_path)
    assert list_checkpoints(tmp_path) == ["step-00000004"]


class LateAtTheEnd(lumen.Callback):
    """Callback with a collective at the end of the fit, which rank 1 reaches a second later."""

    def on_fit_end(self, trainer, task):
        if trainer.global_rank == 1:
            time.sleep(1)
        torch.distributed.barrier()


def train_with_slow_disk(tmp_path):
    """Train with a save longer than `timeout_s`, once by far, while rank 1 delays the next collective by a second."""
    fsync, slept, rests_s = os.fsync, [], iter((15.0, 7.0))

    def slow(descriptor):
        if threading.current_thread() is not threading.main_thread() and not slept:
            slept.append(time.sleep(next(rests_s)))
        fsync(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        if os.environ["RANK"] == "1":
            patch.setattr(os, "fsync", slow)
        for part in ("before", "."):  # the threads' process group stays open for the next run
            slept.clear()
            callbacks, strategy = [make_saver(), LateAtTheEnd()], lumen.DDP(timeout_s=6.0)
            fit(tmp_path / part, callbacks, max_steps=6, strategy=strategy, logger=False)
    assert bool(slept) == (os.environ["RANK"] == "1")


def test_non_finite_shard_raises_on_all_ranks(group, tmp_path):
    messages = group(2).run(train_until_a_part_breaks, tmp_path)
    assert messages[0] == messages[1]
    assert re.search("after step 8 1 parameters are not finite.*: net.0.weight", messages[0])
    assert list_checkpoints(tmp_path) == ["step-00000004"]


def train_until_a_part_breaks(tmp_path):
    """Train until the last row of a parameter, which one process holds, is NaN."""

    def harm(trainer):
        if trainer.global_rank == 1:
            trainer.run.task.net[0].weight.detach().to_local()[-1] = torch.nan

    with pytest.raises(NonFiniteLoss) as caught:
        fit(tmp_path, [CallAtSteps(step8=harm), make_saver()], max_epochs=3, max_steps=8, strategy="fsdp", logger=False)
    return str(caught.value)


def test_failing_thread_ends_run_on_all_ranks(group, tmp_path):
    messages = group(2).run(train_until_the_save_fails, tmp_path)
    assert messages[0] == messages[1]
    assert "A file is in the way" in messages[0]
    (older,) = find_checkpoints(tmp_path / "moved")
    assert Checkpoint.open(older).info["step"] == 4


def train_until_the_save_fails(tmp_path):
    def harm(trainer):
        if trainer.is_global_zero:
            block_path_with_file(tmp_path, trainer)

    callbacks = [Watched(), CallAtSteps(step8=harm), make_saver(at_end=True)]
    with pytest.raises(CheckpointError) as caught:
        fit(tmp_path, callbacks, max_epochs=100_000, strategy="ddp", logger=False)
    return str(caught.value)


def test_ranks_agree_on_what_is_saved_and_kept(group, tmp_path):
    found = [
        group(2).run(train_on_ranks, tmp_path / name, asynchronous)
        for name, asynchronous in (("a", True), ("b", False))
    ]
    assert found[0][0] == found[0][1] == found[1][0] == found[1][1]


def train_on_ranks(tmp_path, asynchronous):
    saver = make_saver(monitor="val_loss", every_n_train_steps=2, keep_last=2, save_top_k=2, asynchronous=asynchronous)
    fit(tmp_path, saver, strategy="ddp", val_check_interval=2)
    return saver.scores, [Path(path).name for path in saver.best_k_models], list_checkpoints(tmp_path)


def test_copy_error_on_one_rank_raises_on_all(group, tmp_path):
    first, second = group(2).run(copy_freed_memory, tmp_path)
    assert second.startswith("RuntimeError: setStorage")
    assert first == f"ProcessLost: rank 1 failed: {second}"
    assert list_checkpoints(tmp_path) == []


def copy_freed_memory(tmp_path):
    def harm(trainer):
        if trainer.global_rank == 1:
            free_parameters(trainer)

    with pytest.raises((RuntimeError, ProcessLost)) as caught:
        fit(tmp_path, [CallAtSteps(step4=harm), make_saver()], strategy="ddp", logger=False)
    return f"{caught.type.__name__}: {caught.value}"
