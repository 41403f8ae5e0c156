"""Cost of checkpoints: no faster growth than their contents and their number; counted, not timed."""

import gc
import json
import os
import random
import shutil
import sys
from collections import Counter
from contextlib import contextmanager
from functools import cache, partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn

import lumen
from lumen.checkpoint import Checkpoint, as_path_or_url, find_checkpoints
from lumen.checkpoint.format import object_store
from lumen.checkpoint.format.manifest import read_manifest
from lumen.checkpoint.save.snapshot import Snapshot
from lumen.checkpoint.save.writer import write_checkpoint
from lumen.cli import main
from lumen.errors import CheckpointDamaged
from lumen.tools.runs.find import list_checkpoints
from tests.helpers.checkpoints import is_same_tensor, make_tensor, save, tamper_with_manifest
from tests.helpers.scripted_values import fit_scripted
from tests.helpers.tasks import Regression, loader, quiet_trainer


class Many(Regression):
    """Task with many small parameters."""

    def __init__(self, count):
        super().__init__()
        self.more = nn.ParameterList(nn.Parameter(torch.full((3,), float(number))) for number in range(count))

    def forward(self, inputs):
        return super().forward(inputs) + sum(each.sum() for each in self.more)


def fit(folder, count, steps, **options):
    saver = lumen.ModelCheckpoint(every_n_train_steps=1, keep_last=-1, asynchronous=False)
    trainer = quiet_trainer(folder, max_steps=steps, callbacks=saver, logger=False, **options)
    trainer.fit(Many(count), loader())
    return trainer


@cache
def get_listeners():
    """Return lists that receive every opened file and its mode; an audit hook cannot be removed."""
    told = []

    def hook(event, arguments):
        if event == "open" and told and isinstance(arguments[0], (str, Path)):
            for each in told:
                each.append((Path(arguments[0]), arguments[2] & os.O_ACCMODE == os.O_RDONLY))

    sys.addaudithook(hook)
    return told


@contextmanager
def read_files():
    """Return how often each file of a checkpoint was opened to be read, by its last two names."""
    get_listeners().append(opened := [])
    counts = Counter()
    try:
        yield counts
    finally:
        get_listeners().remove(opened)
        counts.update("/".join(path.parts[-2:]) for path, reads in opened if reads and path.suffix)


@contextmanager
def count_calls():
    """Return how many functions, of Python or C, this thread called."""
    count = [0]

    def note(frame, event, argument):
        count[0] += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        yield count
    finally:
        sys.setprofile(None)


# ---------------------------------------------------------------------- tensors


def test_resume_opens_same_files_for_more_tensors(tmp_path):
    def opened_by_a_resume(count):
        fit(tmp_path / str(count), count, 1)
        with read_files() as counts:
            fit(tmp_path / str(count), count, 2, resume="auto")
        return {name: times for name, times in counts.items() if "safetensors" in name}

    few = opened_by_a_resume(3)
    assert few == opened_by_a_resume(30)
    assert set(few) == {"model/00000-00000.safetensors", "optimizer/00000-00000.safetensors"}


@pytest.mark.slow
def test_resume_work_is_linear_in_tensors(tmp_path, monkeypatch):
    asked, names = Counter(), Checkpoint.list_tensor_names

    def counting(checkpoint, section):
        found = names(checkpoint, section)
        asked[section] += len(found)
        return found

    monkeypatch.setattr(Checkpoint, "list_tensor_names", counting)

    def work(count):
        fit(tmp_path / str(count), count, 1)
        asked.clear()
        with count_calls() as calls:
            fit(tmp_path / str(count), count, 2, resume="auto")
        return calls[0], asked.total()

    _, (few, few_names), (more, more_names), (many, many_names) = map(work, (1, 10, 110, 210))
    assert many - more < 1.1 * (more - few)
    assert many_names - more_names <= 1.1 * (more_names - few_names)


def test_unused_checkpoint_keeps_no_file_open(tmp_path):
    def descriptors():
        return {os.readlink(each.path) for each in os.scandir("/proc/self/fd") if os.path.lexists(each.path)}

    path = save(tmp_path / "step-1", model={"a": torch.ones(3), "b": torch.ones(3)})
    checkpoint = Checkpoint.open(path)
    for name in checkpoint.list_tensor_names("model"):
        assert torch.equal(checkpoint.read_tensor("model", name), torch.ones(3))
    assert str(path / "model/00000-00000.safetensors") in descriptors()
    checkpoint.release()
    assert not any(str(tmp_path) in each for each in descriptors())
    assert torch.equal(checkpoint.read_tensor("model", "a"), torch.ones(3))
    del checkpoint
    assert not any(str(tmp_path) in each for each in descriptors())


def test_more_files_than_may_be_open_are_read(tmp_path):
    tensors = {str(number): torch.full((2,), float(number)) for number in range(150)}
    path = tmp_path / "step-1"
    write_checkpoint(path, {"model": tensors}, {}, info={}, max_file_bytes=1)
    before = len(os.listdir("/proc/self/fd"))  # earlier tests of this process leave some open
    checkpoint = Checkpoint.open(path)
    for _ in range(2):
        assert is_same_tensor(dict(checkpoint.as_mapping("model")), tensors)
    assert len(os.listdir("/proc/self/fd")) - before < 100


def test_save_has_bounded_calls_per_small_tensor(tmp_path):
    def work(count):
        tensors = {f"w{number}": torch.full((3,), float(number)) for number in range(count)}
        with count_calls() as calls:
            save(tmp_path / f"step-{count}", model=tensors)
        assert is_same_tensor(dict(Checkpoint.open(tmp_path / f"step-{count}").as_mapping("model")), tensors)
        return calls[0]

    _, few, many = map(work, (10, 100, 1100))
    assert many - few < 60 * 1000


def test_freed_small_tensors_raise_instead_of_crashing(tmp_path):
    tensors = {name: torch.ones(3) for name in "abc"}
    tensors["b"].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="setStorage"):
        save(tmp_path / "step-1", model=tensors)
    assert os.listdir(tmp_path) == []
    with pytest.raises(RuntimeError, match="setStorage"):
        Snapshot().start_copy({"model": tensors})


@pytest.mark.slow
def test_save_and_resume_run_no_full_garbage_collection(tmp_path):
    looked, seen = [], []

    def note(phase, info):
        if phase == "start" and info["generation"] == 2:
            looked.append(info)

    def looks(work):
        gc.collect()
        looked.clear()
        work()
        seen.append(len(looked))

    def save_it(trainer, task):
        looks(partial(trainer.save_checkpoint, tmp_path / "step-9"))

    gc.freeze()  # otherwise torch's many constants would hide the ones of this test
    gc.callbacks.append(note)
    try:
        saving = lumen.LambdaCallback(on_step_end=save_it)
        quiet_trainer(tmp_path, max_steps=1, callbacks=[saving], logger=False).fit(Many(1000), loader())
        looks(partial(Checkpoint.open, tmp_path / "step-9"))
    finally:
        gc.callbacks.remove(note)
    assert seen == [0, 0]


def test_directory_depth_costs_no_extra_lstat_calls(tmp_path, monkeypatch):
    looked, lstat = [], os.lstat

    def looks(folder):
        path = save(folder / "step-1", model={"w": torch.ones(2)}, extra={"x": torch.ones(2)})
        looked.clear()
        Checkpoint.open(path)
        return len(looked)

    monkeypatch.setattr(os, "lstat", lambda path, **options: looked.append(path) or lstat(path, **options))
    assert looks(tmp_path / "a") == looks(tmp_path / "/".join("abcdefghij")) < 12


# ---------------------------------------------------------------------- checkpoints


def manifests_read_by_a_resume(folder, epochs, **options):
    values = [float(epochs - epoch) for epoch in range(epochs + 1)]

    def saving():
        return [lumen.ModelCheckpoint(keep_last=-1, asynchronous=False, **options)]

    fit_scripted(folder, values, saving(), max_epochs=epochs)
    assert len(find_checkpoints(folder / "runs/run/checkpoints")) == epochs
    with read_files() as counts:
        fit_scripted(folder, values, saving(), max_epochs=epochs + 1, resume="auto")
    newest = f"step-{2 * (epochs + 1):08d}"  # the resumed run has written this itself
    return sum(times for name, times in counts.items() if "manifest.json" in name and newest not in name)


@pytest.mark.parametrize("options", [{}, {"monitor": "score"}, {"monitor": "score", "save_top_k": -1}], ids=str)
def test_manifests_read_on_resume_are_bounded(tmp_path, options):
    few, many = (manifests_read_by_a_resume(tmp_path / str(epochs), epochs, **options) for epochs in (2, 8))
    assert many <= few <= 3


def test_manifests_read_on_stop_are_constant(tmp_path):
    def read_by_the_end(epochs):
        def stop(trainer, task):
            if trainer.current_epoch == epochs:
                trainer.run.ending.vote.requested_signal = 15

        saver = lumen.ModelCheckpoint(keep_last=-1, asynchronous=False)
        folder = tmp_path / str(epochs)
        with read_files() as counts, pytest.raises((KeyboardInterrupt, SystemExit)):
            fit_scripted(folder, [1.0] * 20, [lumen.LambdaCallback(on_step_end=stop), saver])
        assert len(find_checkpoints(folder / "runs/run/checkpoints")) >= epochs
        return sum(times for name, times in counts.items() if "/manifest.json" in name and ".tmp-" not in name)

    assert read_by_the_end(8) == read_by_the_end(2) == 1


def test_damaged_checkpoint_is_not_the_best(tmp_path):
    def saving():
        return lumen.ModelCheckpoint(monitor="score", save_top_k=2, keep_last=-1)

    fit_scripted(tmp_path, [1, 4, 2, 3], [saving()])
    folder = tmp_path / "runs/run/checkpoints"
    data = (folder / "step-00000002/manifest.json").read_bytes()
    (folder / "step-00000002/manifest.json").write_bytes(data[:-40] + b"x" + data[-39:])
    resumed = saving()
    fit_scripted(tmp_path, [1, 4, 2, 3, 5], [resumed], resume="auto")
    assert [Path(path).name for path in resumed.best_k_models] == ["step-00000006", "step-00000008"]
    assert resumed.best_model_score == 2


def test_requests_per_save_do_not_grow(tmp_path, monkeypatch):
    requests, ask = Counter(), object_store.call_filesystem
    seen = []

    def counting(place, method, **options):
        requests[method] += 1
        return ask(place, method, **options)

    def look(trainer, task):
        seen.append(dict(requests))
        requests.clear()

    monkeypatch.setattr(object_store, "call_filesystem", counting)
    saver = lumen.ModelCheckpoint(
        dirpath="memory://bucket/run", every_n_train_steps=1, keep_every_n_steps=1, asynchronous=False
    )
    try:
        quiet_trainer(
            tmp_path, max_steps=12, callbacks=[lumen.LambdaCallback(on_step_checkpoint=look), saver], logger=False
        ).fit(Regression(), loader(100))
        assert len(find_checkpoints(as_path_or_url("memory://bucket/run"))) == 12
    finally:
        MemoryFileSystem.store.clear()
    assert seen[3] == seen[10]


def test_listing_does_not_parse_tensors(tmp_path, monkeypatch):
    parsed, loads = [], json.loads
    monkeypatch.setattr(json, "loads", lambda text, **options: parsed.append(len(text)) or loads(text, **options))

    def listed(count):
        folder = tmp_path / str(count)
        for step in (1, 2, 3):
            save(folder / f"step-{step}", model={f"w{number}": torch.ones(2) for number in range(count)})
        parsed.clear()
        assert [each.problem for each in list_checkpoints(folder)] == [None] * 3
        assert len(find_checkpoints(folder)) == 3
        return sum(parsed)

    few, many = map(listed, (4, 400))
    assert 3 * 200 < few <= many <= few + 3 * 10


def test_listing_runs_is_linear_in_checkpoints(tmp_path, capsys):
    def work(count):
        source = save(tmp_path / f"{count}/run/checkpoints/step-0", model={"w": torch.ones(2)})
        for step in range(1, count):
            shutil.copytree(source, source.with_name(f"step-{step}"))
        with count_calls() as calls:
            assert main(["runs", str(tmp_path / str(count)), "--json"]) == 0
        assert capsys.readouterr().out.count('"valid": true') == count
        return calls[0]

    _, few, more, many = map(work, (1, 5, 25, 45))
    assert many - more < 1.1 * (more - few)


@pytest.mark.parametrize("line", [0, 1, 2])
def test_changed_manifest_byte_is_detected_everywhere(tmp_path, line):
    path = save(tmp_path / "step-1", model={"w": torch.ones(2)}) / "manifest.json"
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 3
    for position in range(0, len(lines[line]), 7):
        for bit in (1, 2, 16):
            changed = bytearray(lines[line])
            changed[position] ^= bit
            path.write_bytes(b"".join([*lines[:line], changed, *lines[line + 1 :]]))
            assert find_checkpoints(tmp_path) == []
            assert "manifest.json" in list_checkpoints(tmp_path)[0].problem
            with pytest.raises(CheckpointDamaged, match=r"manifest\.json"):
                Checkpoint.open(tmp_path / "step-1")


def test_edited_manifest_with_valid_digest_is_accepted(tmp_path):
    path = save(tmp_path / "step-1", model={"w": torch.ones(2)})
    tamper_with_manifest(path, lambda manifest: manifest["info"].__setitem__("step", 7))
    assert find_checkpoints(tmp_path) == [path]
    assert list_checkpoints(tmp_path)[0].info == Checkpoint.open(path).info == {"step": 7}


# ---------------------------------------------------------------------- chunks


def write_chunks(path, shape, boxes):
    """Change a manifest so that its one tensor consists of these boxes (offsets and shape), each in a separate file."""

    def edit(manifest):
        names = [f"model/{number:05d}-00000.safetensors" for number in range(len(boxes))]
        manifest["files"] |= {name: {"bytes": 8, "sha256": ""} for name in names}
        chunks = [[name, list(offsets), list(sizes)] for name, (offsets, sizes) in zip(names, boxes, strict=True)]
        manifest["sections"]["model"]["w"] |= {"shape": list(shape), "chunks": chunks}

    tamper_with_manifest(path, edit)


@pytest.mark.parametrize("cut", ["rows", "columns", "grid"])
def test_checking_chunks_is_linear(tmp_path, cut):
    def work(count):
        boxes = {
            "rows": [((number, 0), (1, 4)) for number in range(count)],
            "columns": [((0, number), (4, 1)) for number in range(count)],
            "grid": [((row, column), (1, 1)) for row, column in product(range(count // 10), range(10))],
        }[cut]
        shape = {"rows": (count, 4), "columns": (4, count), "grid": (count // 10, 10)}[cut]
        random.Random(0).shuffle(boxes)
        path = save(tmp_path / f"step-{count}", model={"w": torch.ones(1)})
        write_chunks(path, shape, boxes)
        with count_calls() as calls:
            assert len(read_manifest(path).sections["model"]["w"].chunks) == count
        return calls[0]

    _, few, more, many = map(work, (10, 20, 220, 420))
    assert many - more < 1.1 * (more - few)


def partition_box(generator, begin, shape, parts):
    """Cut a box into about the given number of boxes, along lines or as a pinwheel."""
    if parts <= 1:
        return [(begin, shape)]
    if len(shape) == 2 and min(shape) >= 3 and generator.random() < 0.3:
        (y, x), (h, w) = begin, shape
        return [
            ((y, x), (1, w - 1)),
            ((y, x + w - 1), (h - 1, 1)),
            ((y + h - 1, x + 1), (1, w - 1)),
            ((y + 1, x), (h - 1, 1)),
            *partition_box(generator, (y + 1, x + 1), (h - 2, w - 2), parts - 4),
        ]
    dim = generator.randrange(len(shape))
    if shape[dim] < 2:
        return [(begin, shape)]
    at = generator.randrange(1, shape[dim])
    first = tuple(at if each == dim else size for each, size in enumerate(shape))
    second = tuple(size - at if each == dim else size for each, size in enumerate(shape))
    moved = tuple(start + at if each == dim else start for each, start in enumerate(begin))
    return partition_box(generator, begin, first, parts // 2) + partition_box(
        generator, moved, second, parts - parts // 2
    )


def is_covered(shape, boxes):
    """Return True if boxes hold each element once, by counting all elements."""
    count = np.zeros(shape, int)
    for offsets, sizes in boxes:
        count[tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))] += 1
    return bool((count == 1).all())


@pytest.mark.slow
def test_chunks_pass_only_when_covering_each_element_once(tmp_path):
    path, verdicts = save(tmp_path / "step-1", model={"w": make_tensor(torch.float32, (1,))}), Counter()
    original = (path / "manifest.json").read_bytes()
    generator = random.Random(1)
    for _ in range(400):
        shape = tuple(generator.randrange(1, 7) for _ in range(generator.choice([1, 2, 2, 3])))
        boxes = partition_box(generator, (0,) * len(shape), shape, generator.randrange(1, 9))
        if generator.random() < 0.6:  # one is moved: the number of elements stays, but some may occur twice
            number = generator.randrange(len(boxes))
            offsets = tuple(generator.randrange(s - n + 1) for s, n in zip(shape, boxes[number][1], strict=True))
            boxes[number] = offsets, boxes[number][1]
        generator.shuffle(boxes)
        (path / "manifest.json").write_bytes(original)
        write_chunks(path, shape, boxes)
        verdicts[wanted := is_covered(shape, boxes)] += 1
        if wanted:
            read_manifest(path)
        else:
            with pytest.raises(CheckpointDamaged, match="overlap"):
                read_manifest(path)
    assert min(verdicts.values()) > 100
