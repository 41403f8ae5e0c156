"""Folder of checkpoints: find, set aside and remove them."""

import errno
import os
import shutil
import tempfile
from pathlib import Path

import pytest

import lumen
from lumen.checkpoint import Checkpoint
from lumen.checkpoint.format.folder import (
    clean_leftovers,
    find_checkpoints,
    find_unread,
    open_newest_valid,
    remove_checkpoint,
    set_aside_damaged,
)
from lumen.checkpoint.format.manifest import STATE
from lumen.checkpoint.format.storage import LocalStorage
from lumen.checkpoint.save.writer import write_checkpoint
from lumen.errors import CheckpointDamaged, CheckpointError
from tests.helpers.checkpoints import FILES, assert_small, save_small
from tests.helpers.storage_folder import verify
from tests.helpers.tasks import Regression, loader, quiet_trainer

NOBODY = 65534


def fit(tmp_path, steps, **options):
    saver = lumen.ModelCheckpoint(dirpath=tmp_path / "kept", every_n_train_steps=1, **options)
    trainer = quiet_trainer(tmp_path, max_steps=steps, callbacks=saver, resume="auto", seed=None)
    trainer.fit(Regression(), loader(50, 8))


def list_names(folder):
    return sorted(name for name in os.listdir(folder) if name != ".run")


def test_checkpoints_are_found_by_number_once_committed(tmp_path):
    assert find_checkpoints(tmp_path / "none") == []
    steps = [save_small(tmp_path / name) for name in ("step-00000009", "step-10", "step-100000000000", "step-00000011")]
    shutil.copytree(steps[0], tmp_path / "step-12.tmp-abcd")
    shutil.copytree(steps[0], tmp_path / "step-13.damaged-1")
    shutil.copytree(steps[0], tmp_path / "other")
    shutil.copytree(steps[0], tmp_path / "step-14")
    (tmp_path / "step-14" / "manifest.json").unlink()
    (tmp_path / "step-15").mkdir()
    (tmp_path / "step-16").touch()
    assert find_checkpoints(tmp_path) == [steps[0], steps[1], steps[3], steps[2]]


def test_newest_valid_checkpoint_is_used_and_damage_reported(tmp_path):
    for step in (8, 9, 10, 11):
        save_small(tmp_path / f"step-{step}", value=float(step))
    with open(tmp_path / "step-11" / FILES[3], "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    (tmp_path / "step-10" / "manifest.json").unlink()
    (tmp_path / "step-8" / "state.json").unlink()
    reports = []
    assert open_newest_valid(tmp_path, reports.append).path == tmp_path / "step-9"
    assert len(reports) == 2
    assert "step-11 is damaged" in reports[0]
    assert FILES[3] in reports[0]
    assert "Trying step-10 instead" in reports[0]
    assert "manifest.json is missing" in reports[1]
    remove_checkpoint(tmp_path / "step-9")
    assert open_newest_valid(tmp_path, reports.append) is None
    assert "There is no older checkpoint" in reports[-1]
    assert open_newest_valid(tmp_path / "none", reports.append) is None


def test_validating_checkpoint_sorts_before_the_final_one(tmp_path):
    for name in ("step-2", "step-10", "step-10-validating", "step-11-validating"):
        write_checkpoint(tmp_path / name, {}, {}, info={})
    names = [path.name for path in find_checkpoints(tmp_path)]
    assert names == ["step-2", "step-10-validating", "step-10", "step-11-validating"]


def test_only_the_sections_asked_for_must_be_intact(tmp_path):
    for step in (1, 2, 3):
        save_small(tmp_path / f"step-{step}", value=float(step))
    (tmp_path / "step-2" / FILES[2]).write_bytes(b"")
    (tmp_path / "step-3" / "state.json").write_bytes(b"")
    assert open_newest_valid(tmp_path, lambda _: None).path == tmp_path / "step-1"
    found = open_newest_valid(tmp_path, lambda _: None, sections=(STATE,))
    assert (found.path, found.state["value"]) == (tmp_path / "step-2", 2.0)


def test_unread_checkpoints_are_found_by_their_manifest(tmp_path):
    assert find_unread(tmp_path / "none") == []
    for name in ("step-9", "step-10", "step-11"):
        save_small(tmp_path / name)
    for name in ("step-10-validating", "step-9.tmp-0123abcd"):
        shutil.copytree(tmp_path / "step-9", tmp_path / name)
    (tmp_path / "step-11/manifest.json").write_bytes(b"cut o")
    (tmp_path / "step-12").mkdir()
    (tmp_path / "step-13").touch()
    assert [path.name for path in find_unread(tmp_path)] == ["step-9", "step-10-validating", "step-10", "step-11"]


@pytest.mark.slow
def test_a_save_reads_no_manifest_of_another_checkpoint(tmp_path, monkeypatch):
    reads, read = [], LocalStorage.read

    def noting(self, path, size_bytes):
        if path.name == "manifest.json":
            reads.append(path)
        return read(self, path, size_bytes)

    monkeypatch.setattr(LocalStorage, "read", noting)
    fit(tmp_path / "a", 3, keep_last=-1)
    few = len(reads)
    fit(tmp_path / "b", 9, keep_last=4)
    assert len(reads) - few == few + 6 + 5  # a save lists its own folder, a removal the folder that it removes
    assert len(list_names(tmp_path / "b/kept")) == 4


def test_unrelated_directories_are_never_removed(tmp_path):
    for step, name in ((1, "manifest.json"), (1, "notes.txt"), (2, "model.safetensors"), (3, "manifest.json")):
        (tmp_path / f"kept/step-{step}/x").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"kept/step-{step}" / name).write_text("mine")
    (tmp_path / "kept/step-3/x/notes.txt").touch()
    fit(tmp_path, 5, keep_last=1)
    assert list_names(tmp_path / "kept") == ["step-00000005", "step-1", "step-2", "step-3"]
    assert list_names(tmp_path / "kept/step-1") == ["manifest.json", "notes.txt", "x"]


@pytest.mark.slow
def test_damaged_checkpoints_do_not_count_as_kept(tmp_path):
    fit(tmp_path, 6, keep_last=-1)
    for step in (4, 5, 6):
        (tmp_path / f"kept/step-{step:08d}/manifest.json").write_bytes(b"cut o")
    fit(tmp_path, 4, keep_last=2)
    assert [path.name for path in find_checkpoints(tmp_path / "kept")] == ["step-00000003", "step-00000004"]


def test_dangling_link_is_reported_as_damage(tmp_path):
    fit(tmp_path, 2, keep_last=2)
    (tmp_path / "kept/step-00000009").symlink_to(tmp_path / "not mounted")
    (tmp_path / "kept/step-00000002").rename(tmp_path / "elsewhere")
    (tmp_path / "kept/step-00000002").symlink_to(tmp_path / "elsewhere")
    reports = []
    assert open_newest_valid(tmp_path / "kept", reports.append).path.name == "step-00000002"
    (tmp_path / "elsewhere").rename(tmp_path / "gone")
    assert open_newest_valid(tmp_path / "kept", reports.append).path.name == "step-00000001"
    assert [said.partition(" is damaged")[0][-1] for said in reports] == ["9", "9", "2"]


def test_concurrent_removal_is_no_damage_and_relists(tmp_path):
    for step in (1, 2, 3):
        save_small(tmp_path / f"step-{step}")
    (tmp_path / "step-3/state.json").write_bytes(b"cut o")
    reports = []

    def report(said):
        reports.append(said[:17])
        remove_checkpoint(tmp_path / "step-2")

    assert open_newest_valid(tmp_path, report).path == tmp_path / "step-1"
    save_small(tmp_path / "step-2")
    assert (
        open_newest_valid(tmp_path, lambda said: report(said) or save_small(tmp_path / "step-4")).path
        == tmp_path / "step-4"
    )
    assert reports == ["step-3 is damaged"] * 2


def test_removal_during_verification_is_no_damage(tmp_path):
    for step in (1, 2):
        save_small(tmp_path / f"step-{step}")
    assert verify(tmp_path) == "step-3"


@pytest.mark.slow
@pytest.mark.parametrize("keep_last", [0, 1, 2])
def test_damaged_manifest_never_costs_the_last_checkpoint(tmp_path, keep_last):
    fit(tmp_path, 4, keep_last=2)
    (tmp_path / "kept/step-00000004/manifest.json").write_bytes(b"cut o")
    fit(tmp_path, 4, keep_last=keep_last)
    assert open_newest_valid(tmp_path / "kept", pytest.fail).path.name == "step-00000004"
    assert "step-00000004.damaged-1" in list_names(tmp_path / "kept")
    (tmp_path / "kept/step-00000004/manifest.json").write_bytes(b"cut o")
    shutil.copytree(tmp_path / "kept/step-00000004", tmp_path / "kept/step-00000099")
    fit(tmp_path, 6, keep_last=keep_last)
    assert open_newest_valid(tmp_path / "kept", lambda _: None).path.name == "step-00000006"
    assert {"step-00000004.damaged-1", "step-00000004.damaged-2", "step-00000099"} <= set(list_names(tmp_path / "kept"))


def test_new_directories_are_synced_before_the_commit(tmp_path, monkeypatch):
    events, fsync, rename = [], os.fsync, os.rename

    def noting(descriptor):
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    monkeypatch.setattr(os, "rename", lambda old, new: events.append("commit") or rename(old, new))
    save_small(tmp_path / "a/b/step-1")
    before = events[: events.index("commit")]
    assert {tmp_path, tmp_path / "a"} <= set(before)
    assert tmp_path.parent not in before
    assert events[-1] == tmp_path / "a/b"


@pytest.fixture
def restricted_directory(tmp_path):
    """Make a directory and run the test as a user whom permissions bind: they do not bind root."""
    path = Path(tempfile.mkdtemp(prefix="lumen-bound-"))  # no other user may enter pytest's folder
    is_root = os.geteuid() == 0
    if is_root:
        fit_into(tmp_path, tmp_path / "kept")  # imports meanwhile may be readable for root only
        os.chown(path, NOBODY, -1)
        os.seteuid(NOBODY)
    yield path
    if is_root:
        os.seteuid(0)
    (path / "box").chmod(0o700)
    shutil.rmtree(path)


def fit_into(home, dirpath):
    saver = lumen.ModelCheckpoint(dirpath=dirpath, every_n_train_steps=1)
    quiet_trainer(home, max_steps=2, callbacks=saver, resume="auto").fit(Regression(), loader(50, 8))


def test_parent_directory_may_be_writable_but_unreadable(restricted_directory):
    (restricted_directory / "box").mkdir(0o300)
    fit_into(restricted_directory, restricted_directory / "box/runs/kept")
    assert open_newest_valid(restricted_directory / "box/runs/kept", pytest.fail).path.name == "step-00000002"


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        (0o500, r"cannot write .*/box/runs: Permission denied. Give this user the right to write there or choose"),
        (0o600, r"/box/runs/kept cannot be read: Permission denied"),
        (0o000, r"/box/runs/kept cannot be read: Permission denied"),
    ],
    ids=["not written", "not entered", "nothing"],
)
def test_unusable_parent_directory_is_one_named_error(restricted_directory, mode, message):
    (restricted_directory / "box").mkdir(mode)
    with pytest.raises(CheckpointError, match=message) as caught:
        fit_into(restricted_directory, restricted_directory / "box/runs/kept")
    assert not isinstance(caught.value, CheckpointDamaged)


def test_set_aside_renames_and_keeps_the_bytes(tmp_path):
    for k in (1, 2):
        save_small(tmp_path / "step-1", value=float(k))
        assert set_aside_damaged(tmp_path / "step-1") == tmp_path / f"step-1.damaged-{k}"
        assert_small(tmp_path / f"step-1.damaged-{k}", value=float(k))
    assert find_checkpoints(tmp_path) == []
    with pytest.raises(CheckpointError, match=r"cannot rename .*step-1: No such file"):
        set_aside_damaged(tmp_path / "step-1")


def test_a_removal_cut_short_leaves_no_half_checkpoint(tmp_path, monkeypatch):
    path = save_small(tmp_path / "step-1")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda _: (_ for _ in ()).throw(OSError(errno.EIO, "gone")))
        with pytest.raises(CheckpointError, match=r"cannot remove .*step-1"):
            remove_checkpoint(path)
    assert find_checkpoints(tmp_path) == []
    assert not path.exists()
    save_small(tmp_path / "step-4")
    clean_leftovers(tmp_path)
    assert os.listdir(tmp_path) == ["step-4"]


class MovesAway(lumen.Callback):
    """Callback that moves a checkpoint to another disk during the run and leaves a link, like a user."""

    def __init__(self, folder, elsewhere, *, loses=False):
        self.folder, self.elsewhere, self.loses = folder, elsewhere, loses

    def on_train_batch_start(self, trainer, task, batch, batch_idx):
        if trainer.global_step == 2:
            trainer.run.saves.wait()
            os.rename(self.folder / "step-00000002", self.elsewhere / "moved")
            (self.folder / "step-00000002").symlink_to(self.elsewhere / "moved")
        if trainer.global_step == 3 and self.loses:
            shutil.rmtree(self.elsewhere / "moved")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_link_is_removed_but_its_target_stays(tmp_path, caplog, asynchronous):
    folder, elsewhere = tmp_path / "kept", tmp_path / "elsewhere"
    elsewhere.mkdir()
    saver = lumen.ModelCheckpoint(dirpath=folder, every_n_train_steps=1, keep_last=2, asynchronous=asynchronous)
    trainer = quiet_trainer(tmp_path, max_steps=6, callbacks=[MovesAway(folder, elsewhere), saver], log_level="INFO")
    trainer.fit(Regression(), loader(50, 8))
    assert list_names(folder) == ["step-00000005", "step-00000006"]
    assert Checkpoint.open(elsewhere / "moved").info["finished"] is None
    said = f"removing the link {folder / 'step-00000002'}; its target is kept: {elsewhere / 'moved'}"
    assert caplog.messages.count(said) == 1
    clean_leftovers(folder)
    assert list_names(folder) == ["step-00000005", "step-00000006"]


def test_run_resumes_through_links_and_survives_dangling_ones(tmp_path):
    folder, elsewhere = tmp_path / "kept", tmp_path / "elsewhere"
    elsewhere.mkdir()
    fit(tmp_path, 2)
    os.rename(folder / "step-00000002", elsewhere / "step")
    (folder / "step-00000002").symlink_to(elsewhere / "step")
    fit(tmp_path, 3, keep_last=1)
    assert list_names(folder) == ["step-00000003"]
    assert (elsewhere / "step/manifest.json").is_file()
    other = tmp_path / "other/kept"
    saver = lumen.ModelCheckpoint(dirpath=other, every_n_train_steps=1, keep_last=2)
    moving = MovesAway(other, elsewhere, loses=True)
    quiet_trainer(tmp_path, max_steps=6, callbacks=[moving, saver]).fit(Regression(), loader(50, 8))
    assert list_names(other) == ["step-00000002", "step-00000005", "step-00000006"]


def test_clean_leftovers_removes_only_unfinished_saves(tmp_path):
    (tmp_path / "step-2.tmp-0123beef").symlink_to("/nowhere")
    (tmp_path / "step-3.tmp-0123cafe").touch()
    (tmp_path / "results.tmp-bar").mkdir()
    for name in ("mine.tmp-0123abcd", "step-1.tmp-0123abcd"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").touch()
    (tmp_path / "step-9.tmp-0123abcd/model").mkdir(parents=True)
    (tmp_path / "step-9.tmp-0123abcd/model/00001-00000.safetensors").touch()
    before = set(os.listdir(tmp_path))
    clean_leftovers(tmp_path)
    assert before - set(os.listdir(tmp_path)) == {"step-9.tmp-0123abcd"}


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch])
def test_what_was_never_a_checkpoint_keeps_its_name(tmp_path, make):
    make(tmp_path / "outputs")
    with pytest.raises(CheckpointError, match="outputs exists and is not a checkpoint"):
        write_checkpoint(tmp_path / "outputs", {}, {}, info={})
    assert os.listdir(tmp_path) == ["outputs"]


def test_what_is_no_checkpoint_is_not_removed(tmp_path):
    (tmp_path / "precious").mkdir()
    for path in (tmp_path / "precious", tmp_path / "none"):
        with pytest.raises(CheckpointError, match="is not a checkpoint"):
            remove_checkpoint(path)
    assert (tmp_path / "precious").exists()
