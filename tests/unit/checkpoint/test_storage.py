"""Contract of storage: each backend keeps every promise, in a directory and in an object store."""

import os
from contextlib import suppress
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from lumen.checkpoint import as_path_or_url, get_storage
from lumen.checkpoint.format.folder import clean_leftovers
from lumen.checkpoint.format.storage import Status, Storage, as_local_path, is_dir, is_file, path_exists
from tests.helpers.checkpoints import save_small

OURS = ["manifest.json", "model/00000-00000.safetensors", "state.json"]


@pytest.fixture(params=["directory", "object store"])
def place(request, tmp_path):
    """Return the location of a missing checkpoint."""
    yield as_path_or_url(tmp_path / "kept" if request.param == "directory" else "memory://bucket/kept")
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture
def storage(place) -> Storage:
    return get_storage(place)


def write(storage, path, data=b"x"):
    with storage.create(path) as append:
        assert append(data) == len(data)


def begin_draft(storage, directory, *, manifest=True):
    """Begin a draft with all its files."""
    draft = storage.begin(directory)
    with storage.make_directory(draft.root / "model"):
        write(storage, draft.root / OURS[1], b"0123456789")
    write(storage, draft.root / OURS[2])
    if manifest:
        write(storage, draft.root / OURS[0], b"{}")
    return draft


def commit_draft(storage, directory):
    storage.commit(begin_draft(storage, directory))
    return directory


def test_a_draft_becomes_a_checkpoint_by_its_commit(storage, place):
    draft = begin_draft(storage, place / "a/step-1", manifest=False)
    assert draft.directory == place / "a/step-1"
    assert not is_file(draft.directory / "manifest.json")
    assert (draft.root == draft.directory) == bool(storage.find_uncommitted(place / "a", [draft.root]))
    write(storage, draft.root / "manifest.json")
    storage.commit(draft)
    assert storage.find_uncommitted(place / "a", [draft.directory]) == set()
    assert sorted(storage.list_files(draft.directory)) == OURS
    assert storage.list_names(place / "a") == ["step-1"]


def test_draft_in_final_place_needs_free_name(storage, place):
    first = begin_draft(storage, commit_draft(storage, place / "step-1").with_name("step-2"), manifest=False)
    if first.root == first.directory:
        with pytest.raises(FileExistsError, match="step-2"):
            storage.begin(first.directory)
    else:
        assert storage.begin(first.directory).root != first.root
    assert (first.root == first.directory) == bool(first.mark)


def test_a_name_is_looked_at(storage, place):
    write(storage, commit_draft(storage, place / "step-1") / "model/b", b"12345")
    assert storage.get_status(place / "step-1/model/b") == Status("file", 5)
    assert storage.get_status(place / "step-1/model").kind == "directory"
    assert storage.get_status(place / "step-2") is None
    assert storage.get_status(place / "step-1/model/b/c") is None
    found = [
        (path_exists(each), is_file(each), is_dir(each)) for each in (place / "step-1/state.json", place / "step-1")
    ]
    assert found == [(True, True, False), (True, False, True)]
    assert not path_exists(place / "nothing")
    assert (
        storage.get_write_time_s(place / "step-1/model/b")
        >= storage.get_write_time_s(place / "step-1/state.json")
        > 1e9
    )


def test_files_are_listed_recursively_and_include_file_itself(storage, place):
    path = commit_draft(storage, place / "step-1")
    assert sorted(storage.list_names(path)) == ["manifest.json", "model", "state.json"]
    assert sorted(storage.list_files(path)) == OURS
    assert storage.list_files(path / "model") == ["00000-00000.safetensors"]
    assert storage.list_files(path / "state.json") == [""]


def test_a_file_is_read_whole_and_in_pieces(storage, place):
    path = commit_draft(storage, place / "step-1") / OURS[1]
    assert storage.get_size(path) == 10
    assert storage.read(path, 10) == b"0123456789"
    assert storage.read(path, 2) == b"01"
    read_into = storage.make_piece_reader(place / "step-1", {OURS[1]: 10})
    for start in (5, 0, 6):
        view = memoryview(bytearray(4))
        assert read_into(OURS[1], start, view) == 4
        assert bytes(view) == b"0123456789"[start : start + 4]
    for read in (lambda: storage.get_size(place / "nothing"), lambda: read_into("no", 0, view)):
        with pytest.raises((FileNotFoundError, KeyError)):
            read()


def test_a_file_that_fails_is_not_committed(storage, place):
    draft = storage.begin(place / "step-1")
    with suppress(ZeroDivisionError), storage.create(draft.root / "state.json") as append:
        append(b"x" * 10)
        raise ZeroDivisionError
    storage.remove(draft.root)
    assert not path_exists(draft.root)
    assert not path_exists(place / "step-1")


def test_with_manifest_finds_paths_that_have_a_manifest(storage, place):
    paths = [commit_draft(storage, place / f"step-{step}") for step in (1, 2, 3)]
    write(storage, place / "step-1/model/manifest.json")  # of another user
    others = [place / "step-9", place / "step-1/model"]
    assert storage.find_with_manifest(place, []) == set()
    assert storage.find_with_manifest(place, paths[:1]) == {paths[0]}
    assert storage.find_with_manifest(place, [*paths, others[0]]) == set(paths)


def test_rename_keeps_files_and_frees_the_name(storage, place):
    path = commit_draft(storage, place / "step-1")
    storage.rename(path, place / "step-1.damaged-1")
    assert sorted(storage.list_files(place / "step-1.damaged-1")) == OURS
    assert not path_exists(path)
    assert storage.read(place / "step-1.damaged-1" / OURS[1], 10) == b"0123456789"


def test_interrupted_rename_leaves_no_visible_checkpoint(monkeypatch):
    """A killed rename may have copied any of its objects: the manifest is the last one, as in a save."""
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    place, copy = as_path_or_url("memory://bucket/renamed"), MemoryFileSystem.cp_file
    storage = get_storage(place)
    path, other, copied = commit_draft(storage, place / "step-1"), place / "step-2", []

    def copy_some(files, name, path2, **options):
        if len(copied) == allowed:
            raise OSError("killed")
        copied.append(path2)
        copy(files, name, path2, **options)

    monkeypatch.setattr(MemoryFileSystem, "cp_file", copy_some)
    for allowed in range(len(OURS)):
        copied.clear()
        with pytest.raises(OSError, match="killed"):
            storage.rename(path, other)
        assert len(copied) == allowed
        assert storage.find_uncommitted(place, [path, other]) == {other}
    allowed = len(OURS)
    copied.clear()
    storage.rename(path, other)
    assert storage.find_uncommitted(place, [path, other]) == {path}


def test_what_is_removed_is_gone_and_nothing_else(storage, place):
    one, other = (commit_draft(storage, place / name) for name in ("step-1", "step-10"))
    storage.remove(one)
    assert not path_exists(one)
    assert storage.list_names(place) == ["step-10"]
    assert sorted(storage.list_files(other)) == OURS


def test_leftover_drafts_are_cleaned_and_checkpoints_kept(storage, place):
    save_small(place / "step-1")
    begin_draft(storage, place / "step-2", manifest=False)
    storage.begin(place / "step-3")
    clean_leftovers(place)
    assert storage.list_names(place) == ["step-1"]


def test_check_writable_leaves_no_trace(storage, place):
    storage.check_writable(place)
    assert not path_exists(place)


def test_only_local_paths_have_a_local_path(tmp_path):
    assert as_local_path(as_path_or_url(tmp_path)) == tmp_path
    assert isinstance(as_local_path(as_path_or_url(f"file://{tmp_path}")), Path)
    assert as_local_path(as_path_or_url("memory://bucket")) is None


def test_links_and_pipes_are_told_from_files(tmp_path):
    storage = get_storage(tmp_path)
    (tmp_path / "nowhere").symlink_to("nothing")
    (tmp_path / "round").symlink_to("round")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    kinds = {name: storage.get_status(tmp_path / name).kind for name in os.listdir(tmp_path)}
    others = dict.fromkeys(("nowhere", "round", "pipe"), "other")
    assert kinds == others | {"folder": "directory", "link": "directory"}
    assert storage.get_status(tmp_path / "a\0b") is None
    assert storage.list_files(tmp_path / "link") == [""]
    assert sorted(storage.list_files(tmp_path)) == ["link", "nowhere", "pipe", "round"]
    storage.remove(tmp_path / "link")
    assert (tmp_path / "folder").is_dir()
