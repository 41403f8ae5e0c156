"""Checkpoints in an object store: a real server, real HTTP, real kills."""

import errno
import json
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from itertools import count
from pathlib import Path, PurePath

import fsspec
import pytest
import safetensors.torch
import torch
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

import lumen
from lumen.checkpoint import as_path_or_url, get_storage
from lumen.checkpoint.format import manifest, object_store
from lumen.checkpoint.format.folder import clean_leftovers, find_checkpoints, open_newest_valid, remove_checkpoint
from lumen.checkpoint.format.manifest import create_hashed_file
from lumen.checkpoint.format.object_store import ObjectStore
from lumen.checkpoint.format.reader import Checkpoint
from lumen.checkpoint.format.storage import path_exists
from lumen.checkpoint.save.writer import write_checkpoint
from lumen.cli import main
from lumen.errors import CheckpointDamaged, CheckpointError, CheckpointGone, ConfigError
from tests.helpers import ROOT
from tests.helpers.checkpoints import FILES, assert_small, save_small
from tests.helpers.jobs import Nursery
from tests.helpers.object_server import make_environment, serve_objects
from tests.helpers.programs import run_and_read_numbers
from tests.helpers.tasks import Regression, Saving, loader, quiet_trainer


@pytest.fixture(scope="module")
def server():
    """Return the environment of a process that uses the store."""
    with serve_objects() as url:
        yield make_environment(url)
        forget_clients()
        store.cache_clear()


@pytest.fixture
def bucket(server, monkeypatch, buckets=count()):  # noqa: B008 (one counter for all tests)
    """Create a bucket and return its URL for this process."""
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    name = f"bucket-{next(buckets)}"
    store().mkdir(name)
    return as_path_or_url(f"s3://{name}")


@pytest.fixture
def memory():
    """Return a location in the memory of this process."""
    yield as_path_or_url("memory://bucket")
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture(params=["memory", "bucket"])
def place(request):
    """Return each kind of store."""
    return request.getfixturevalue(request.param)


@cache
def store():
    """Return a client that shares no cache with Lumen's client."""
    return fsspec.filesystem("s3", use_listings_cache=False, skip_instance_cache=True)


def forget_clients():
    """Forget the clients, so that the next one reads the environment again."""
    fsspec.filesystem("s3").clear_instance_cache()


def flip(path):
    """Change the last byte of an object."""
    files, name = fsspec.core.url_to_fs(str(path))
    data = bytearray(files.cat_file(name))
    data[-1] ^= 1
    files.pipe_file(name, bytes(data))


def put(path, data=b"x"):
    files, name = fsspec.core.url_to_fs(str(path))
    files.pipe_file(name, data)


def read_data(path):
    files, name = fsspec.core.url_to_fs(str(path))
    return files.cat_file(name)


def drop(path):
    files, name = fsspec.core.url_to_fs(str(path))
    files.rm_file(name)


def copy(path, other):
    put(other, read_data(path))


def list_names(place):
    return get_storage(place).list_names(place)


# ---------------------------------------------------------------------- locations


def list_objects(checkpoint):
    """Return the objects of a checkpoint by name, without the suffix of their save."""
    found = get_storage(checkpoint).list_files(checkpoint)
    return {re.sub(r"-[0-9a-f]{8}\b", "", name): checkpoint / name for name in found}


def test_urls_behave_as_paths_except_for_file_functions():
    folder = as_path_or_url("s3://bucket/run/checkpoints/")
    path = folder / "step-1"
    assert str(path) == f"{path}" == "s3://bucket/run/checkpoints/step-1"
    assert (path.name, path.parent, path.with_name("b")) == ("step-1", folder, folder / "b")
    assert {path, as_path_or_url(str(path)), pickle.loads(pickle.dumps(path))} == {path}
    assert str(pickle.loads(pickle.dumps(path))) == str(path)
    assert str(as_path_or_url("memory://a") / "b") == "memory://a/b"
    assert not isinstance(path, Path)
    assert isinstance(path, PurePath)
    for use in (
        open,
        os.listdir,
        shutil.rmtree,
        os.path.realpath,
        os.mkdir,
        os.stat,
        Path.mkdir,
        Path.stat,
        Path.touch,
    ):
        with pytest.raises(TypeError, match="s3://bucket/run/checkpoints/step-1 is not on this machine"):
            use(path)


def test_urls_with_lost_slashes_or_wildcards_are_refused(tmp_path):
    assert as_path_or_url(f"file://{tmp_path}") == as_path_or_url(tmp_path) == tmp_path
    assert type(as_path_or_url("runs/a*b")) is type(tmp_path)
    with pytest.raises(ConfigError, match=r"s3:/bucket: pathlib removes slashes from URLs\. Pass a string"):
        lumen.ModelCheckpoint(dirpath=Path("s3://bucket"))
    with pytest.raises(ConfigError, match=r"'\*' is a wildcard"):
        lumen.ModelCheckpoint(dirpath="s3://bucket/*")


def test_checkpoints_are_written_found_and_read_there(place):
    folder = place / "run"
    assert find_checkpoints(folder) == []
    assert open_newest_valid(folder, print) is None
    for step in (9, 10, 100, 1):
        assert_small(save_small(folder / f"step-{step}", value=float(step)), value=float(step))
    assert [path.name for path in find_checkpoints(folder)] == ["step-1", "step-9", "step-10", "step-100"]
    assert open_newest_valid(folder, print).path == folder / "step-100"
    assert sorted(list_objects(folder / "step-1")) == sorted(FILES)
    remove_checkpoint(folder / "step-1")
    assert [path.name for path in find_checkpoints(folder)] == ["step-9", "step-10", "step-100"]
    assert sorted(list_names(folder)) == ["step-10", "step-100", "step-9"]
    assert_small(folder / "step-10", value=10.0)


def test_a_committed_checkpoint_is_never_overwritten(place):
    save_small(place / "step-1")
    with pytest.raises(CheckpointError, match=r"/step-1 holds a complete checkpoint, which Lumen never overwrites"):
        save_small(place / "step-1", value=2.0)
    assert_small(place / "step-1")


@pytest.mark.parametrize("name", FILES)
def test_damaged_file_is_named_and_previous_checkpoint_used(memory, name):
    for damage in (flip, lambda path: put(path, read_data(path)[:-1]), drop):
        save_small(memory / "step-1")
        file = list_objects(save_small(memory / "step-2"))[name]
        damage(file)
        is_gone = name == "manifest.json" and damage is drop
        with pytest.raises(CheckpointDamaged, match="/step-2 does not exist" if is_gone else file.name):
            Checkpoint.open(memory / "step-2")
        reports = []
        assert open_newest_valid(memory, reports.append).path == memory / "step-1"
        assert len(reports) == (not is_gone)
        MemoryFileSystem.store.clear()


def test_a_removal_cut_short_leaves_no_half_checkpoint(place, monkeypatch):
    path = save_small(place / "step-1")

    def fail(objects):
        raise OSError("gone")

    with monkeypatch.context() as patch:
        patch.setattr(object_store, "remove_objects", fail)
        with pytest.raises(CheckpointError, match=r"cannot remove .*step-1: gone"):
            remove_checkpoint(path)
    assert path_exists(path / "state.json")
    assert find_checkpoints(place) == []
    assert open_newest_valid(place, pytest.fail) is None
    assert_small(save_small(path, value=2.0), value=2.0)  # the remaining objects disturb nothing


@pytest.mark.parametrize("how", ["removed", "being removed"])
def test_checkpoint_removed_before_verification_restarts_the_search(place, how):
    for step in (1, 2, 3):
        save_small(place / f"step-{step}", value=float(step))
    flip(list_objects(place / "step-3")["state.json"])
    reports = []

    def report(said):
        reports.append(said)
        save_small(place / "step-4", value=4.0)
        if how == "removed":
            remove_checkpoint(place / "step-2")
        else:  # the manifest is removed first
            drop(place / "step-2/manifest.json")

    assert open_newest_valid(place, report).path == place / "step-4"
    assert [said[:17] for said in reports] == ["step-3 is damaged"]
    flip(place / "step-4/manifest.json")
    assert open_newest_valid(place, reports.append).path == place / "step-1"
    assert [said[:17] for said in reports[1:]] == ["step-4 is damaged", "step-3 is damaged"]


@pytest.mark.parametrize("how", ["removed", "being removed"])
def test_checkpoint_removed_during_verification_is_no_damage(place, how, monkeypatch):
    save_small(place / "step-1")
    last = list_objects(save_small(place / "step-2"))["optimizer/00000-00000.safetensors"]
    digest = manifest.compute_sha256

    def removing(path, size):
        patch.undo()
        if how == "removed":
            remove_checkpoint(place / "step-2")
        else:
            drop(place / "step-2/manifest.json")
            drop(last)
        return digest(path, size)

    with monkeypatch.context() as patch:  # the location needs its environment
        patch.setattr(manifest, "compute_sha256", removing)
        assert open_newest_valid(place, pytest.fail).path == place / "step-1"


def test_checkpoint_removed_after_opening_raises_gone(place):
    checkpoint = Checkpoint.open(save_small(place / "step-1"))
    remove_checkpoint(place / "step-1")
    for read in (partial(checkpoint.read_tensor, "model", "a"), partial(Checkpoint.open, checkpoint.path)):
        with pytest.raises(CheckpointGone, match=r"/step-1 does not exist, or was removed while it was read"):
            read()


def test_only_leftovers_are_cleaned(place):
    kept = [save_small(place / "step-1"), place / "exception-step-00000002"]
    for path in list_objects(kept[0]).values():
        copy(path, kept[1] / path.relative_to(kept[0]))
    flip(save_small(place / "step-4") / "manifest.json")
    for name in (
        "step-3/model/00000-00000.safetensors",
        "step-3-validating/state.json",
        "probe.tmp-01234567/state.json",
    ):
        put(place / name)
    for name in ("notes.txt", "probe.tmp-0123abcd", "step-8", "step-5/model.safetensors", "step-6/model/x.safetensors"):
        put(place / name)  # objects of another program
    put(place / "exception-step-00000009/state.json")
    put(place / "step-100/state.json")
    clean_leftovers(place)
    of_others = ["notes.txt", "probe.tmp-0123abcd", "step-8", "step-5", "step-6"]
    assert sorted(list_names(place)) == sorted(["exception-step-00000002", "step-1", "step-4", *of_others])
    for path in kept:
        assert_small(path)


@pytest.mark.parametrize(
    ("at", "name"), [("", "notes.txt"), ("app", "manifest.json"), ("step-1", "model.safetensors"), ("step-1", "a/b")]
)
def test_what_was_never_a_checkpoint_is_left_alone(place, at, name):
    folder = place / at if at else place
    put(folder / name)
    with pytest.raises(CheckpointError, match="exists and is not a checkpoint"):
        write_checkpoint(folder, {"model": {"w": torch.ones(2)}}, {}, info={})
    assert get_storage(folder).list_files(folder) == [name]


def test_object_names_are_never_reused(place):
    before = set(list_objects(save_small(place / "step-1")).values())
    remove_checkpoint(place / "step-1")
    again = set(list_objects(save_small(place / "step-1")).values())
    assert before & again == {place / "step-1/manifest.json", place / "step-1/state.json"}


def test_what_another_process_does_is_seen_at_once(bucket):
    save_small(bucket / "step-1")
    assert [path.name for path in find_checkpoints(bucket)] == ["step-1"]
    other = store()
    other.copy(f"{bucket.name}/step-1", f"{bucket.name}/step-2", recursive=True)
    assert [path.name for path in find_checkpoints(bucket)] == ["step-1", "step-2"]
    assert_small(bucket / "step-2")
    other.rm(f"{bucket.name}/step-1", recursive=True)
    assert [path.name for path in find_checkpoints(bucket)] == ["step-2"]
    assert list_names(bucket) == ["step-2"]
    assert not path_exists(bucket / "step-1")


# ---------------------------------------------------------------------- uploads


@pytest.mark.parametrize("megabytes", [1, 40], ids=["one request", "in parts"])
def test_failed_upload_leaves_no_object_or_parts(bucket, megabytes):
    def upload(path):
        with create_hashed_file(path) as file:
            file.write(bytes(megabytes << 20))
            raise KeyError(path.name)

    with pytest.raises(KeyError):
        upload(bucket / "a")
    assert not path_exists(bucket / "a")
    assert store().list_multipart_uploads(bucket.name) == []


def test_wrong_object_size_after_upload_raises(memory, monkeypatch):
    monkeypatch.setattr(MemoryFile, "write", lambda self, data: super(MemoryFile, self).write(data[:-1]))
    with pytest.raises(CheckpointError, match="memory://bucket/a: the object has 9 bytes instead of 10"):  # noqa: SIM117
        with create_hashed_file(memory / "a") as file:
            file.write(bytes(10))


def test_a_large_object_is_read_where_one_wants(bucket):
    data = os.urandom(40 << 20)
    with create_hashed_file(bucket / "a") as file:
        file.write(data)
    storage = get_storage(bucket)
    assert storage.read(bucket / "a", len(data)) == data
    read_into = storage.make_piece_reader(bucket, {"a": len(data)})
    for start, size in ((0, 8), (17 << 20, 20 << 20), (37 << 20, 3 << 20)):
        into = memoryview(bytearray(size))
        assert read_into("a", start, into) == size
        assert into == data[start : start + size]


@pytest.fixture
def recorded_requests(memory, monkeypatch):
    """Record how often each file in memory was requested, and by which method."""
    counted = Counter()

    def counting(method):
        asked = getattr(MemoryFileSystem, method)

        def ask(self, path, *args, **options):
            counted[method, path.rpartition("/")[2]] += 1
            return asked(self, path, *args, **options)

        monkeypatch.setattr(MemoryFileSystem, method, ask)

    for method in ("info", "cat_file", "ls"):
        counting(method)
    return counted


def save_mixed(path):
    """Write a checkpoint of one file of 10 MiB: many small tensors of several dtypes, and a few large ones."""
    tensors = {}
    for k in range(100):
        tensors[f"{k}.weight"] = torch.randn(100 if k % 25 else 500_000 + k)
        tensors[f"{k}.half"] = torch.randn(9001).bfloat16()
        tensors[f"{k}.count"] = torch.tensor(k)
        tensors[f"{k}.empty"] = torch.empty(0, 3)
    write_checkpoint(path, {"model": tensors}, {}, info={})
    return tensors


def test_to_read_many_tensors_takes_few_requests(memory, recorded_requests):
    tensors = save_mixed(memory / "step-1")
    recorded_requests.clear()
    checkpoint = Checkpoint.open(memory / "step-1")
    assert recorded_requests.total() < 20
    recorded_requests.clear()
    assert all(torch.equal(checkpoint.read_tensor("model", name), tensor) for name, tensor in tensors.items())
    mebibytes = sum(tensor.nbytes for tensor in tensors.values()) / 2**20
    large = sum(tensor.nbytes > 2**20 for tensor in tensors.values())
    assert large == 4
    assert recorded_requests.total() <= mebibytes + 1 + 2 * large
    assert {method for method, _ in recorded_requests} == {"cat_file"}


def test_few_tensors_are_read_without_the_others(memory, recorded_requests):
    tensors = save_mixed(memory / "step-1")
    checkpoint = Checkpoint.open(memory / "step-1")
    recorded_requests.clear()
    for name in ("3.count", "99.half"):
        assert torch.equal(checkpoint.read_tensor("model", name), tensors[name])
    assert recorded_requests.total() == 2


def test_several_threads_read_one_checkpoint(place):
    tensors = save_mixed(place / "step-1")
    checkpoint = Checkpoint.open(place / "step-1")
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(partial(checkpoint.read_tensor, "model"), tensors))
    assert all(map(torch.equal, found, tensors.values()))


def test_block_of_large_tensor_is_read_exactly(memory):
    tensor = torch.randn(3000, 1000)
    write_checkpoint(memory / "step-1", {"model": {"w": tensor}}, {}, info={})
    checkpoint = Checkpoint.open(memory / "step-1")
    for rows, columns in ((7, 2500), (0, 1000)), ((1, 3000), (3, 998)), ((2998, 3000), (999, 1000)), ((5, 5), (0, 9)):
        box = checkpoint.read_block("model", "w", (rows[0], columns[0]), (rows[1] - rows[0], columns[1] - columns[0]))
        assert torch.equal(box, tensor[slice(*rows), slice(*columns)])


@pytest.mark.parametrize("left", [0, 1000, 3 << 20])
def test_object_shortened_after_opening_is_named(place, left):
    write_checkpoint(place / "step-1", {"model": {"w": torch.ones(1 << 20), "b": torch.ones(9)}}, {}, info={})
    checkpoint = Checkpoint.open(place / "step-1")
    file = list_objects(place / "step-1")["model/00000-00000.safetensors"]
    put(file, read_data(file)[:left])
    for name in ("w", "b"):
        with pytest.raises(CheckpointError, match=f"{file.name} (became shorter|cannot be read)"):
            checkpoint.read_tensor("model", name)


MEMORY = """
import resource, sys, torch
from lumen.checkpoint import Checkpoint, as_path_or_url
from lumen.checkpoint.save.writer import write_checkpoint
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
tensors = {f"t{i}": torch.ones(1024, 1024).T for i in range(50)}
write_checkpoint(as_path_or_url(sys.argv[1]) / "step-1", {"model": {"w": torch.ones(2, 3).T}}, {}, info={})
Checkpoint.open(as_path_or_url(sys.argv[1]) / "step-1")
start = peak()
write_checkpoint(as_path_or_url(sys.argv[1]) / "step-2", {"model": tensors}, {}, info={})
written = peak()
checkpoint = Checkpoint.open(as_path_or_url(sys.argv[1]) / "step-2")
for name, tensor in tensors.items():
    checkpoint.copy_into("model", name, tensor)
print(written - start, peak() - start)
"""


@pytest.mark.slow
def test_a_checkpoint_is_streamed_both_ways(bucket):
    written, both = run_and_read_numbers("-c", MEMORY, bucket)  # MiB; the tensors have 200, a part of an upload has 16
    print(written, both)
    assert written < 100
    assert both < 100


def test_failed_save_at_any_object_leaves_nothing(memory, monkeypatch):
    save_small(memory / "step-1")
    upload = ObjectStore.create
    for failing in range(1, len(FILES) + 1):
        uploads = count(1)

        def create(self, path, failing=failing, uploads=uploads):
            if next(uploads) == failing:
                raise OSError(errno.EACCES, "the quota is used up", str(path))
            return upload(self, path)

        with monkeypatch.context() as patch:
            patch.setattr(ObjectStore, "create", create)
            with pytest.raises(CheckpointError, match=r"cannot write memory://bucket/step-2/.*: the quota is used up"):
                save_small(memory / "step-2")
        assert list_names(memory) == ["step-1"]
        assert_small(memory / "step-1")


processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["lumen.checkpoint.save.writer", "s3fs"])


def save_until(place, last, environment):
    """Save a second checkpoint, and die by kill -9 in the middle of its `last`-th object."""
    os.environ.update(environment)  # the servers' store may be older than the objects' store
    uploads, upload = count(1), ObjectStore.create

    @contextmanager
    def create(self, path):
        with upload(self, path) as write:
            yield write
            if next(uploads) == last:
                os.kill(os.getpid(), signal.SIGKILL)

    ObjectStore.create = create
    save_small(place / "step-2", value=2.0)


@pytest.mark.slow
def test_killed_save_is_complete_or_invisible(bucket, server):
    save_small(bucket / "step-1")
    for last in count(1):
        process = processes.Process(target=save_until, args=(bucket, last, server))
        process.start()
        process.join()
        found = find_checkpoints(bucket)
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        for path in found:
            assert_small(path, value=float(path.name[-1]))
        clean_leftovers(bucket)
        assert sorted(list_names(bucket)) == [path.name for path in found]
        if len(found) == 2:
            remove_checkpoint(bucket / "step-2")
    assert last == len(FILES) + 1


# ---------------------------------------------------------------------- runs


def make_saver(place, **options):
    return lumen.ModelCheckpoint(**{"dirpath": str(place), "every_n_train_steps": 2} | options)


def fit(tmp_path, place, steps, *, task=None, workers=0, saver=None, **options):
    task = Regression(dropout=0.2) if task is None else task
    trainer = quiet_trainer(tmp_path, max_steps=steps, callbacks=saver or make_saver(place), **options)
    trainer.fit(task, loader(50, 8, num_workers=workers), val_dataloaders=loader(20))
    return trainer


def read_state(trainer):
    """Return the learned state of a run, bitwise."""
    task, (optimizer,) = trainer.run.task, trainer.optimizers
    parts = [*task.state_dict().values(), *(v for s in optimizer.state_dict()["state"].values() for v in s.values())]
    return [torch.as_tensor(getattr(part, "full_tensor", lambda part=part: part)()).tolist() for part in parts]


@pytest.mark.parametrize(
    ("asynchronous", "workers"),
    [pytest.param(False, 0, id="at once"), pytest.param(True, 2, id="later, with workers", marks=pytest.mark.slow)],
)
def test_run_resumes_exactly_without_its_machine(tmp_path, bucket, asynchronous, workers):
    straight = fit(tmp_path / "straight", bucket / "a", 10)
    saver = make_saver(bucket / "b", asynchronous=asynchronous)
    fit(tmp_path, bucket / "b", 5, saver=saver, workers=workers, log_every_n_steps=1)
    assert [path.name for path in find_checkpoints(bucket / "b")] == ["step-00000004", "step-00000005"]
    assert saver.last_model_path == f"{bucket}/b/step-00000005"
    assert {"metrics.csv", "run.log", "environment.json"} < set(os.listdir(tmp_path / "runs/run"))
    assert os.listdir(tmp_path / "runs/run/checkpoints") == []
    shutil.rmtree(tmp_path / "runs")
    trainer = fit(tmp_path, bucket / "b", 10, workers=workers, resume="auto", seed=None, log_every_n_steps=1)
    assert (tmp_path / "runs/run/metrics.csv").read_text().splitlines()[1].startswith("6,")
    assert read_state(trainer) == read_state(straight)
    assert sorted(list_names(bucket / "b")) == ["step-00000008", "step-00000010"]


@pytest.mark.slow
def test_remote_checkpoint_can_be_named_in_every_way(tmp_path, bucket):
    saver = make_saver(bucket / "run/checkpoints", monitor="val_loss", every_n_epochs=1, keep_last=-1)
    trained = fit(tmp_path, None, 14, saver=saver, max_epochs=2)
    (first, *_, last), wanted = find_checkpoints(bucket / "run/checkpoints"), trained.run.task.state_dict()
    learned = read_state(trained)
    for url in (last, bucket / "run/checkpoints", bucket / "run"):
        found = Regression.load_from_checkpoint(str(url)).state_dict()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    value = trained.validate(trained.run.task, loader(20))[0]["val_loss"]
    for url in (str(last), f"{bucket}/run", "last"):
        assert trained.validate(Regression(dropout=0.5), loader(20), ckpt_path=url)[0]["val_loss"] == pytest.approx(
            value
        )
    assert trained.validate(Regression(), loader(20), ckpt_path="best")[0]["val_loss"] == saver.best_model_score
    options = {"max_epochs": 0, "num_sanity_val_steps": 0}
    for url in (str(last), f"{bucket}/run", lumen.Weights(f"{bucket}/run/checkpoints")):
        begun = fit(tmp_path / "begun", bucket / "begun", 1, init_from=url, **options).run.task.state_dict()
        assert all(torch.equal(begun[name], wanted[name]) for name in wanted)
    again = fit(tmp_path / "again", bucket / "again", 14, resume=str(first), seed=None)
    assert read_state(again) == learned
    with pytest.raises(CheckpointError, match=r"no valid checkpoint found in s3://bucket-\d+/nothing"):
        Regression.load_from_checkpoint(f"{bucket}/nothing")


def test_damaged_checkpoint_is_skipped_and_leftovers_cleaned(tmp_path, place, caplog):
    wanted = read_state(fit(tmp_path / "straight", place / "straight", 8))
    fit(tmp_path, place / "run", 6)
    flip(list_objects(place / "run/step-00000006")["model/00000-00000.safetensors"])
    put(place / "run/step-00000008/model/00000-00000.safetensors", b"of a killed save")
    trainer = fit(tmp_path, place / "run", 8, resume="auto", seed=None, log_level="WARNING")
    assert "step-00000006 is damaged and is not used" in caplog.text
    assert "step-00000008" not in caplog.text
    assert read_state(trainer) == wanted
    assert sorted(list_names(place / "run")) == ["step-00000006", "step-00000006.damaged-1", "step-00000008"]


def test_checkpoints_of_another_run_are_kept(tmp_path, memory):
    fit(tmp_path, memory, 4)
    put(memory / "step-00000099/state.json")
    before = sorted(MemoryFileSystem.store)
    fit(tmp_path, memory, 4)
    new = sorted({*MemoryFileSystem.store} - {*before})
    assert {each.split("/")[1] for each in new} == {"bucket-2"}
    assert {*before} < {*MemoryFileSystem.store}


class Unwilling(Regression):
    """Task that must not begin."""

    def prepare_data(self):
        pytest.fail("the place should have been looked at before")


def catch_error(tmp_path, dirpath, error=CheckpointError):
    with pytest.raises(error) as caught:
        fit(tmp_path, dirpath, 2, task=Unwilling())
    assert not (tmp_path / "runs").exists()
    return str(caught.value)


def test_unusable_place_raises_before_the_run(tmp_path, bucket, monkeypatch):
    assert "bucket does not exist. Create the bucket" in catch_error(tmp_path, "s3://no-such-bucket/run")
    assert "unsupported URL scheme: Protocol not known: s33" in catch_error(tmp_path, "s33://bucket", ConfigError)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "s3fs", None)
        patch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
        assert "pip install 'lumen-train[remote]'" in catch_error(tmp_path, str(bucket), ConfigError)
    for name, value, message in (
        ("AWS_ACCESS_KEY_ID", None, "Unable to locate credentials.* Check the network"),
        ("AWS_ENDPOINT_URL", "http://127.0.0.1:9", "in s3://bucket-.*Could not connect.*127.0.0.1:9.* Check the"),
    ):
        forget_clients()
        with monkeypatch.context() as patch:
            patch.setenv(name, value) if value else patch.delenv(name)
            assert re.search(message, catch_error(tmp_path, str(bucket)))
    forget_clients()


def test_place_of_exception_checkpoint_is_checked_too(tmp_path, bucket):
    callbacks = [lumen.OnExceptionCheckpoint("s3://no-such-bucket/run"), make_saver(bucket)]
    with pytest.raises(CheckpointError, match="bucket does not exist"):
        fit(tmp_path, None, 2, task=Unwilling(), saver=callbacks)
    assert not (tmp_path / "runs").exists()
    assert list_names(bucket) == []


@pytest.mark.parametrize(
    "error", [PermissionError("Forbidden"), TimeoutError(), RuntimeError("503"), OSError(5, "I/O")]
)
@pytest.mark.parametrize("method", ["info", "cat_file", "ls"])
def test_unavailable_store_is_no_damage_or_new_run(tmp_path, memory, monkeypatch, error, method):
    fit(tmp_path, memory / "run", 4)

    def fail(self, *args, **kwargs):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, method, fail)
        for look in (partial(open_newest_valid, report=pytest.fail), find_checkpoints):
            with pytest.raises(CheckpointError, match="cannot be read: ") as caught:
                look(memory / "run")
            assert not isinstance(caught.value, CheckpointDamaged)
        with pytest.raises(CheckpointError, match=r"cannot save checkpoints in memory://bucket/run: "):
            fit(tmp_path, memory / "run", 8, resume="auto", seed=None)
    assert len(find_checkpoints(memory / "run")) == 2


def test_exception_and_user_checkpoints_are_saved_remotely(tmp_path, memory):
    class Failing(Regression):
        def validation_step(self, batch):
            raise KeyError("mine")

    callbacks = [
        Saving(1, f"{memory}/mine/x"),
        make_saver(memory / "run"),
        lumen.OnExceptionCheckpoint(f"{memory}/failed"),
    ]
    with pytest.raises(KeyError, match="mine"):
        fit(tmp_path, None, 9, task=Failing(), saver=callbacks, val_check_interval=3, num_sanity_val_steps=0)
    assert Checkpoint.open(memory / "mine/x").info["step"] == 1
    assert [path.name for path in find_checkpoints(memory / "run")] == ["step-00000002"]
    assert Checkpoint.open(memory / "failed/exception-step-00000003").info["step"] == 3


class Removing(lumen.Callback):
    """Callback that removes the bucket at a step, like another user."""

    def on_step_end(self, trainer, task):
        if trainer.global_step == 3:
            trainer.run.saves.finish_save()
            store().rm(trainer.checkpoint_callback.dirpath.name, recursive=True)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["at once", "later"])
def test_removed_bucket_ends_run_with_one_error(tmp_path, bucket, asynchronous):
    callbacks = [Removing(), make_saver(bucket, asynchronous=asynchronous)]
    with pytest.raises(CheckpointError, match=r"cannot write s3://bucket-\d+/step-00000004.*bucket does not exist"):
        fit(tmp_path, bucket, 20, saver=callbacks)
    assert not store().exists(bucket.name)


SCRIPT = """
import sys, time
from lumen.checkpoint.format.object_store import ObjectStore
from pathlib import Path
from tests.system.test_remote import Regression, fit
from lumen.checkpoint import as_path_or_url
upload = ObjectStore.create
def create(self, path):
    if str(path).endswith("step-00000004/state.json"):
        print("uploading", flush=True)
        time.sleep(100)
    return upload(self, path)
ObjectStore.create = create
fit(Path(sys.argv[1]), as_path_or_url(sys.argv[2]), 8)
"""


@pytest.mark.slow
def test_run_killed_during_upload_resumes_from_previous_checkpoint(tmp_path, bucket):
    wanted = read_state(fit(tmp_path / "straight", bucket / "straight", 8))
    place = bucket / "run"
    with subprocess.Popen([sys.executable, "-c", SCRIPT, tmp_path, str(place)], stdout=-1, text=True) as process:
        assert process.stdout.readline() == "uploading\n"
        process.kill()
    assert sorted(list_names(place)) == ["step-00000002", "step-00000004"]
    assert [path.name for path in find_checkpoints(place)] == ["step-00000002"]
    seen = []

    class Looking(lumen.Callback):
        def on_train_batch_start(self, trainer, task, batch, batch_idx):
            seen.append(sorted(list_names(place)))

    trainer = fit(tmp_path, place, 8, saver=[make_saver(place), Looking()], resume="auto", seed=None)
    assert seen[0] == ["step-00000002"]
    assert read_state(trainer) == wanted


@pytest.mark.slow
@pytest.mark.time_limit(300)
def test_a_kill_before_pruning_leaves_nothing_there(tmp_path, bucket):
    module = "tests.helpers.ending_run"
    nursery = Nursery(module)

    def ended(name, *strikes):
        (tmp_path / name).mkdir()
        for strike in (*strikes, None):
            job = nursery.start(tmp_path / name, module, {"dirpath": f"{bucket}/{name}", "strike": strike})
            end = job.wait()
            assert (end.code == 0) == (strike is None), end.output
        (path,) = find_checkpoints(bucket / name)
        assert get_storage(bucket).list_names(bucket / name) == [path.name]
        return json.loads((tmp_path / name / "end.json").read_text()), sorted(list_objects(path))

    assert ended("struck", "validation", "pruning", None, "on_fit_end") == ended("whole")
    nursery.close()


def on_ranks(tmp_path, place, server, strategy, asynchronous):
    """Train, resume with new clients, and train without interruption; on every rank."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.items():
            patch.setenv(name, value)
        make = {"ddp": lambda: "ddp", "fsdp": lambda: lumen.FSDP(wrap="Linear")}[strategy]
        straight = read_state(fit(tmp_path / "straight", place / "straight", 6, strategy=make()))
        fit(tmp_path, place / "run", 4, strategy=make(), saver=make_saver(place / "run", asynchronous=asynchronous))
        went_on = read_state(fit(tmp_path, place / "run", 6, strategy=make(), resume="auto", seed=None))
    forget_clients()
    assert went_on == straight
    return went_on


@pytest.mark.parametrize("asynchronous", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["at once", "later"])
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_every_rank_writes_its_share_there(group, tmp_path, bucket, server, strategy, asynchronous):
    first, second = group(2).run(on_ranks, tmp_path, bucket, server, strategy, asynchronous)
    assert first == second
    assert [path.name for path in find_checkpoints(bucket / "run")] == ["step-00000004", "step-00000006"]
    written = {name for name in list_objects(bucket / "run/step-00000006") if name.startswith("model/")}
    assert written == {"model/00000-00000.safetensors", "model/00001-00000.safetensors"}
    alone = fit(tmp_path / "alone", bucket / "alone", 6, resume=f"{bucket}/run/step-00000006", seed=None)
    assert alone.global_step == 6


def failing_on_one(tmp_path, place, server):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.items():
            patch.setenv(name, value)
        if os.environ["RANK"] == "1":
            patch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        forget_clients()
        message = catch_error(tmp_path, place)
    forget_clients()
    return message


def test_unreachable_place_on_one_rank_raises_on_all(group, tmp_path, bucket, server):
    for message in group(2).run(failing_on_one, tmp_path, str(bucket), server):
        assert "Could not connect" in message


# ---------------------------------------------------------------------- the command line


DOCUMENT = (ROOT / "docs/guides/object-stores.md").read_text()


def test_the_documentation_works_as_shown(tmp_path, bucket, monkeypatch, capsys):
    (config,) = re.findall(r"```yaml\n(.*?)```", DOCUMENT, re.S)
    (commands,) = re.findall(r"```sh\n(.*?)```", DOCUMENT, re.S)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT)
    model = "model: tests.helpers.cli_tasks.Line\ndata: tests.helpers.cli_tasks.Points\noptimizer: torch.optim.AdamW\n"
    Path("gpt.yaml").write_text(model)
    Path("store.yaml").write_text(config.replace("s3://my-bucket", str(bucket)))
    fit, *others = [
        line.split("  #")[0].replace("models/gpt.yaml", "gpt.yaml").replace("s3://my-bucket", str(bucket)).split()[1:]
        for line in commands.splitlines()
    ]
    quiet = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
    for steps in (4, 8):
        assert main([*fit, *quiet, f"--trainer.max_steps={steps}"]) == 0
        shutil.rmtree("runs")
    found = find_checkpoints(bucket / "gpt")
    assert [path.name for path in found] == ["step-00000004", "step-00000008"]
    for words in others:
        assert main(words) == 0
    wanted = Checkpoint.open(found[-1]).as_mapping("model")
    exported = safetensors.torch.load_file("gpt.safetensors")
    assert exported.keys() == set(wanted)
    assert all(torch.equal(exported[name], wanted[name]) for name in wanted)


def test_seed_is_taken_from_external_checkpoints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT)
    words = ["fit", "--model=tests.helpers.cli_tasks.Line", "--data=tests.helpers.cli_tasks.Points"]
    words += ["--trainer.resume=auto"]
    words += ["--trainer.callbacks.saver=ModelCheckpoint", "--trainer.callbacks.saver.dirpath=elsewhere"]
    for steps in (2, 4):
        assert main([*words, f"--trainer.max_steps={steps}", "--trainer.enable_progress_bar=false"]) == 0
    assert find_checkpoints(tmp_path / "elsewhere")[-1].name == "step-00000004"


def test_checkpoint_is_verified_once_despite_reading_the_seed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT)
    words = ["fit", "--model=tests.helpers.cli_tasks.Line", "--data=tests.helpers.cli_tasks.Points", "--optimizer=SGD"]
    words += ["--trainer.name=line", "--trainer.enable_progress_bar=false", "--trainer.max_steps"]
    assert main([*words, "2"]) == 0
    read, digest = Counter(), manifest.compute_sha256

    def counting(path, size):
        read[path.parent.name] += 1
        return digest(path, size)

    for where in ("auto", "runs/line", "runs/line/checkpoints/step-00000002"):
        read.clear()
        with monkeypatch.context() as patch:
            patch.setattr(manifest, "compute_sha256", counting)
            assert main([*words, "3", f"--trainer.resume={where}"]) == 0
        assert read["model"] == 1
        shutil.rmtree("runs/line/checkpoints/step-00000003", ignore_errors=True)
