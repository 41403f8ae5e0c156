"""Damaged checkpoints of one or several processes: the damage is named and the run resumes from an older checkpoint.

Nothing in a damaged checkpoint is executed, and nothing outside of the checkpoint is read.
"""

import hashlib
import io
import json
import os
import pickle
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torchmetrics import MeanMetric

import lumen
from lumen.checkpoint import Checkpoint, find_checkpoints, open_newest_valid
from lumen.errors import CheckpointDamaged, CheckpointError
from tests.helpers.checkpoints import tamper_with_manifest
from tests.helpers.group import catch_message
from tests.helpers.tasks import FEATURES, Regression, loader, quiet_trainer

STRATEGIES = ["single", "ddp", "fsdp"]
OLD, NEW = "step-00000001", "step-00000002"


class Full(Regression):
    """Task with tensors in every section: buffers, optimizer state, and a metric of each process."""

    def __init__(self, dropout=0.2, **options):
        super().__init__(dropout=dropout, **options)
        self.norm = nn.BatchNorm1d(FEATURES)
        self.mean = MeanMetric()

    def forward(self, inputs):
        return self.net(self.norm(inputs))

    def training_step(self, batch):
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.mean.update(loss.detach())
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss


def train(folder, strategy, steps):
    """Resume and train up to a step. Return the name of the checkpoint that the run resumed from."""
    trainer = quiet_trainer(
        folder, strategy=strategy, max_steps=steps, resume="auto", log_level="WARNING",
        callbacks=lumen.ModelCheckpoint(every_n_train_steps=1, keep_last=-1),
    )  # fmt: skip
    trainer.fit(Full(), loader())
    return trainer.run.checkpoint and trainer.run.checkpoint.path.name


@pytest.fixture(scope="module", params=STRATEGIES)
def written_run(request, group, tmp_path_factory):
    """Train two steps under each strategy. Return the folder and the strategy."""
    folder = tmp_path_factory.mktemp(request.param)
    run = train if request.param == "single" else partial(group(2).run, train)
    run(folder, request.param, 2)
    return folder, request.param


@pytest.fixture
def copied_run(written_run, tmp_path):
    """Return a copy of the run that a test may damage: the folder of its checkpoints."""
    return copy_run(written_run[0], tmp_path / "copy")


def copy_run(folder, target):
    shutil.copytree(folder, target)
    return target / "runs" / "run" / "checkpoints"


def list_files(checkpoint):
    return sorted(str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file())


# ---------------------------------------------------------------------- damage


def flip_byte(position):
    def damage(file):
        data = bytearray(file.read_bytes())
        header = 8 + int.from_bytes(data[:8], "little") if file.suffix == ".safetensors" else len(data) // 2
        data[{"first": 0, "header": 8, "data": header, "last": -1}[position]] ^= 1
        file.write_bytes(data)

    return damage


def move_out(file):
    shutil.move(file, out := file.parents[3] / f"elsewhere-{file.name}")
    return out


def replace_by_directory(file):
    file.unlink()
    file.mkdir()


def replace_by_link(file):
    file.symlink_to(move_out(file))


def append_byte(file):
    with file.open("ab") as opened:
        opened.write(b"\0")


DAMAGES = {
    "first byte flipped": flip_byte("first"),
    "header byte flipped": flip_byte("header"),
    "data byte flipped": flip_byte("data"),
    "last byte flipped": flip_byte("last"),
    "a byte short": lambda file: os.truncate(file, file.stat().st_size - 1),
    "empty": lambda file: os.truncate(file, 0),
    "a byte long": append_byte,
    "missing": Path.unlink,
    "a directory": replace_by_directory,
    "a link that leaves": replace_by_link,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_file_is_named_and_previous_checkpoint_used(written_run, tmp_path, damage):
    for number, name in enumerate(files := list_files(written_run[0] / "runs/run/checkpoints" / NEW)):
        folder = copy_run(written_run[0], tmp_path / str(number))
        DAMAGES[damage](folder / NEW / name)
        complaints = []
        assert open_newest_valid(folder, complaints.append).path == folder / OLD
        (complaint,) = complaints
        assert complaint.startswith(f"{NEW} is damaged and is not used: ")
        assert name in complaint
        assert complaint.endswith(f"Trying {OLD} instead.")
    assert len(files) >= 5


def test_files_that_have_changed_places_are_noticed(written_run, copied_run):
    swapped = 0
    for section in ("model", "optimizer", "extra"):
        names = [name for name in list_files(copied_run / NEW) if name.startswith(section)]
        for name, other in zip(names, [*names[1:], "optimizer/00000-00000.safetensors"], strict=True):
            if name == other:
                continue
            exchange(copied_run / NEW / name, copied_run / NEW / other)
            complaints = []
            assert open_newest_valid(copied_run, complaints.append).path == copied_run / OLD
            assert name in complaints[0] or other in complaints[0]
            exchange(copied_run / NEW / name, copied_run / NEW / other)
            swapped += 1
    assert swapped >= 2
    assert open_newest_valid(copied_run, pytest.fail).path == copied_run / NEW


def exchange(one, other):
    os.rename(one, aside := one.with_name("aside"))
    os.rename(other, one)
    os.rename(aside, other)


def test_a_file_more_harms_nobody(copied_run):
    for name in ("notes.txt", "model/00009-00000.safetensors", "model/notes.txt", "more/x.safetensors"):
        (copied_run / NEW / name).parent.mkdir(exist_ok=True)
        (copied_run / NEW / name).write_bytes(b"anything")
    assert open_newest_valid(copied_run, pytest.fail).path == copied_run / NEW


def iterate_damaged_copies(written_run, tmp_path):
    """Yield (copy, file): a copy of the run for each file of its newest checkpoint, each damaged in a different way."""
    cases = {}
    for number, name in enumerate(list_files(written_run[0] / "runs/run/checkpoints" / NEW)):
        for shift in (0, 4):
            damage = DAMAGES[list(DAMAGES)[(number + shift) % len(DAMAGES)]]
            case = tmp_path / f"{number}-{shift}"
            damage(copy_run(written_run[0], case) / NEW / name)
            cases[case] = name
    return cases


@pytest.mark.parametrize("world", [1, 2])
def test_run_resumes_from_previous_checkpoint_on_all_ranks(written_run, group, tmp_path, world):
    cases = iterate_damaged_copies(written_run, tmp_path)
    strategy = {"single": "ddp"}.get(written_run[1], written_run[1]) if world == 2 else "single"
    answers = group(2).run(train_each, list(cases), strategy) if world == 2 else [train_each(cases, strategy)]
    for answer in answers:
        assert answer == dict.fromkeys(map(str, cases), OLD)
    for case, name in cases.items():
        said = (case / "runs/run/run.log").read_text()
        assert name in said
        assert said.count(f"{NEW} is damaged and is not used") == 1
        folder = case / "runs/run/checkpoints"
        assert [path.name for path in find_checkpoints(folder)] == [OLD, NEW, "step-00000003"]
        assert open_newest_valid(folder, pytest.fail).path.name == "step-00000003"
        assert (folder / f"{NEW}.damaged-1").is_dir()  # no checkpoint is deleted


def train_each(cases, strategy):
    return {str(case): train(case, strategy, 3) for case in cases}


@pytest.mark.parametrize("world", [1, 2])
def test_only_damaged_checkpoints_raise_and_change_nothing(copied_run, group, world):
    for checkpoint in (OLD, NEW):
        flip_byte("last")(copied_run / checkpoint / "model/00000-00000.safetensors")
    before = {path: path.stat().st_mtime_ns for path in copied_run.rglob("*")}
    run = group(2).run if world == 2 else lambda function, *args: [function(*args)]
    messages = run(catch_message, CheckpointError, train, copied_run.parents[2], "ddp" if world == 2 else "single", 3)
    assert len(set(messages)) == 1
    assert "every checkpoint in" in messages[0]
    assert {path: path.stat().st_mtime_ns for path in copied_run.rglob("*")} == before


# ---------------------------------------------------------------------- attacks


class Bomb:
    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def make_bombs(marker):
    """Return a payload that unpickling would execute, as pickle and as torch write it."""
    archive = io.BytesIO()
    torch.save(Bomb(marker), archive)
    return [pickle.dumps(Bomb(marker)), archive.getvalue()]


def fit_from(path, folder, **options):
    trainer = quiet_trainer(folder, max_steps=3, enable_checkpointing=False, logger=False, **options)
    trainer.fit(Full(), loader())
    return trainer


def evaluate(stage, path, folder):
    trainer = quiet_trainer(folder, enable_checkpointing=False, logger=False)
    getattr(trainer, stage)(Full(), loader(), ckpt_path=path)


#: Public ways to read the checkpoint at a path.
WAYS = {
    "Checkpoint.open": lambda path, folder: Checkpoint.open(path),
    "load_from_checkpoint": lambda path, folder: Full.load_from_checkpoint(path),
    "resume": lambda path, folder: fit_from(path, folder, resume=path),
    "init_from": lambda path, folder: fit_from(path, folder, init_from=path),
    "init_from a URL": lambda path, folder: fit_from(path, folder, init_from=f"file://{path}"),
    "validate": partial(evaluate, "validate"),
    "test": partial(evaluate, "test"),
    "predict": partial(evaluate, "predict"),
}


of_fsdp = pytest.mark.parametrize("written_run", ["fsdp"], indirect=True)


@of_fsdp
@pytest.mark.parametrize("way", WAYS)
def test_foreign_pickles_are_never_executed(copied_run, tmp_path, way):
    for number, bomb in enumerate(make_bombs(marker := tmp_path / "executed")):
        for name in ("model.pt", "model/x.pkl", ".metadata", "optimizer/state.bin", "extra/x.npy", "__init__.py"):
            (copied_run / NEW / f"{number}{name}" if name.startswith(".") else copied_run / NEW / name).write_bytes(
                bomb
            )
        write_metadata(copied_run / NEW, bomb.decode("latin-1"))
        WAYS[way](copied_run / NEW, tmp_path)
        assert not marker.exists()


def write_metadata(checkpoint, text):
    """Put a text into the metadata of each safetensors file, and update the manifest."""
    for name in list_files(checkpoint):
        file = checkpoint / name
        if file.suffix == ".safetensors" and file.read_bytes()[8:9] == b"{":
            data = file.read_bytes()
            size = int.from_bytes(data[:8], "little")
            header = json.loads(data[8 : 8 + size]) | {"__metadata__": {"format": "pt", "pickle": text}}
            encoded = json.dumps(header).encode()
            encoded += b" " * (-len(encoded) % 8)
            file.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data[8 + size :])
            tamper_with_manifest(checkpoint, partial(make_right, file, name))


def make_right(file, name, manifest):
    data = file.read_bytes()
    manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


@of_fsdp
@pytest.mark.parametrize("way", WAYS)
def test_pickle_in_place_of_file_is_refused_unexecuted(copied_run, tmp_path, way):
    for bomb in make_bombs(marker := tmp_path / "executed"):
        for name in list_files(copied_run / NEW):
            data = (copied_run / NEW / name).read_bytes()
            (copied_run / NEW / name).write_bytes(bomb)
            if name.startswith("model/") or name == "manifest.json":
                with pytest.raises(CheckpointError, match=name):
                    WAYS[way](copied_run / NEW, tmp_path)
            elif "init_from" not in way:  # a reader of only this file
                with pytest.raises(CheckpointDamaged, match=name):
                    WAYS[way](copied_run / NEW, tmp_path)
            assert not marker.exists()
            (copied_run / NEW / name).write_bytes(data)


def test_bombs_explode_where_they_are_unpickled(tmp_path):
    plain, archive = make_bombs(tmp_path / "executed")
    pickle.loads(plain)
    (tmp_path / "executed").rmdir()
    torch.load(io.BytesIO(archive), weights_only=False)
    assert (tmp_path / "executed").is_dir()


@of_fsdp
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_several_processes_execute_none_either(group, copied_run, tmp_path, strategy):
    bomb, _ = make_bombs(marker := tmp_path / "executed")
    for name in ("model.pt", "extra/x.npy", ".metadata"):
        (copied_run / OLD / name).write_bytes(bomb)
    for name in list_files(copied_run / NEW):
        (copied_run / NEW / name).write_bytes(bomb)
    assert group(2).run(train, copied_run.parents[2], strategy, 3) == [OLD, OLD]
    assert not marker.exists()


def rename_file_in_manifest(old, new, manifest):
    """Rename a file in a manifest, like an attacker who claims another location for the file."""
    manifest["files"][new] = manifest["files"].pop(old)
    for tensors in manifest["sections"].values():
        for tensor in tensors.values():
            for chunk in tensor["chunks"]:
                chunk[0] = new if chunk[0] == old else chunk[0]


OUTSIDE = {
    "parent": "../outside/{}",
    "absolute": "{root}/outside/{}",
    "down and up": "model/../../outside/{}",
    "a file as directory": "state.json/../../outside/{}",
    "itself by detour": "../step-00000002/{}",
}


@of_fsdp
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", OUTSIDE)
def test_manifest_with_outside_paths_is_refused(copied_run, tmp_path, place, way):
    shutil.copytree(copied_run / NEW, copied_run / "outside")  # all files exist and are intact
    for name in ("model/00000-00000.safetensors", "state.json"):
        shutil.copy(copied_run / "outside/manifest.json", copied_run / NEW / "manifest.json")
        tamper_with_manifest(
            copied_run / NEW, partial(rename_file_in_manifest, name, OUTSIDE[place].format(name, root=copied_run))
        )
        with pytest.raises(CheckpointDamaged, match=r"manifest\.json is malformed: .*is not allowed"):
            WAYS[way](copied_run / NEW, tmp_path)


@of_fsdp
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("linked", ["model", "model/00000-00000.safetensors", "manifest.json"])
def test_links_to_outside_are_refused(copied_run, tmp_path, linked, way):
    shutil.move(copied_run / NEW / linked, copied_run / "outside")
    (copied_run / NEW / linked).symlink_to(copied_run / "outside")
    with pytest.raises(CheckpointDamaged, match="is a link that leaves the checkpoint"):
        WAYS[way](copied_run / NEW, tmp_path)


@of_fsdp
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_outside_path_is_refused_equally_on_all_ranks(group, copied_run, tmp_path, strategy):
    shutil.copytree(copied_run / NEW, copied_run / "outside")
    name = "model/00000-00000.safetensors"
    tamper_with_manifest(copied_run / NEW, partial(rename_file_in_manifest, name, f"../outside/{name}"))
    assert group(2).run(train, copied_run.parents[2], strategy, 3) == [OLD, OLD]
    assert "could be outside the checkpoint" in (copied_run.parent / "run.log").read_text()


@pytest.mark.parametrize("way", ["init_from", "init_from a URL", "validate", "test", "predict"])
@pytest.mark.parametrize(
    "file", ["../outside.safetensors", "/{root}/outside.safetensors", "a/../../outside.safetensors"]
)
def test_hub_index_with_outside_paths_is_refused(tmp_path, file, way):
    hub = tmp_path / "hub"
    (hub / "a").mkdir(parents=True)
    save_file(Full().state_dict(), tmp_path / "outside.safetensors")
    names = dict.fromkeys(
        load_file(tmp_path / "outside.safetensors"), file.format("outside.safetensors", root=tmp_path)
    )
    (hub / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(CheckpointDamaged, match="not a file name in its directory"):
        WAYS[way](hub, tmp_path)
