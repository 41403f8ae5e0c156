"""Object stores, and whatever else fsspec opens: a checkpoint is written in its place, and its manifest commits it.

There is no renaming, no syncing and no directory: a directory is what the names of objects begin with, and an object is
there, whole and durable, as soon as its upload has ended. So the last object uploaded is what commits the others.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import lru_cache
from pathlib import PurePath
from typing import Any, final

from lumen.checkpoint.format.storage import ADVICE, MANIFEST, Draft, ReadInto, Status, Storage, readable, temporary_name
from lumen.errors import CheckpointError, ConfigError

_PART_BYTES = 16 << 20  # of an upload or a download: what a store takes well, and what memory it needs beside a tensor
_AHEAD_BYTES = 1 << 20  # read at once where less is asked for: headers, small tensors
_MOST_BLOCKS = 64  # of so many bytes that are kept: tensors are read in turn from the files of so many processes

_INSTALL = "{place} cannot be opened: {error}. For s3:// and gs:// `pip install 'lumen[remote]'` brings s3fs and gcsfs."
_ADVICE_AT_START = {
    errno.ENOENT: "Create it (lumen makes no buckets), or choose another place.",
    errno.EACCES: "These credentials must be allowed to list, read, write and remove objects there.",
}


@final
class ObjectStore(Storage):
    """What fsspec opens. Every question is one request, answered as things are now: nothing is cached."""

    quick_bytes = 0  # each object takes its time
    piece_bytes = _PART_BYTES

    def look(self, path: PurePath) -> Status | None:
        """An object, or what the names of others begin with."""
        try:
            found = ask(path, "info")
        except FileNotFoundError:
            return None
        return Status("file" if found["type"] == "file" else "directory", int(found.get("size") or 0))

    def names(self, folder: PurePath) -> list[str]:
        """By one listing."""
        try:
            found = [str(name).rstrip("/") for name in ask(folder, "ls", detail=False)]
        except FileNotFoundError:
            return []
        return [name.rpartition("/")[2] for name in found if not str(folder).endswith(f"/{name.lstrip('/')}")]

    def files(self, directory: PurePath) -> list[str]:
        """By one listing of all objects whose names begin so."""
        found = [str(name).strip("/") for name in ask(directory, "find")]
        root = _store_of(directory)[1].strip("/")
        return [name.removeprefix(root).lstrip("/") for name in found if f"{name}/".startswith(f"{root}/")]

    def written_s(self, file: PurePath) -> float:
        """By the store's clock."""
        return float(ask(file, "modified").timestamp())

    def with_manifest(self, folder: PurePath, directories: Sequence[PurePath]) -> set[PurePath]:
        """Of several by one listing of the folder."""
        if len(directories) < 2:
            return super().with_manifest(folder, directories)
        with readable(folder):
            found = {*self.files(folder)}
        return {each for each in directories if f"{each.name}/{MANIFEST}" in found}

    def unseen(self, folder: PurePath, directories: Sequence[PurePath]) -> set[PurePath]:
        """What has no manifest."""
        return {*directories} - self.with_manifest(folder, directories)

    def pieces(self, directory: PurePath, sizes: Mapping[str, int]) -> ReadInto:
        """What is small is read together with what lies around it, and kept for a while."""

        @lru_cache(_MOST_BLOCKS)
        def block(name: str, number: int) -> bytes:
            start = number * _AHEAD_BYTES
            return _fetched(directory / name, start, min(start + _AHEAD_BYTES, sizes[name]))

        def read_into(name: str, start: int, view: memoryview) -> int:
            done = 0
            while done < len(view):
                at, missing = start + done, len(view) - done
                if missing < _AHEAD_BYTES:
                    number, begin = divmod(at, _AHEAD_BYTES)
                    data = block(name, number)[begin : begin + missing]
                else:
                    data = _fetched(directory / name, at, at + min(missing, _PART_BYTES))
                if not data:
                    break
                view[done : done + len(data)] = data
                done += len(data)
            return done

        return read_into

    def check_writable(self, folder: PurePath) -> None:
        """By an object that comes and goes; if it stays, it looks like what a killed save has left."""
        probe = temporary_name(folder / "probe") / "state.json"
        try:
            with self.create(probe) as write:
                write(b"?")
            self.read(probe, 1)
            self.names(folder)
            ask(probe, "rm_file")
        except OSError as error:
            advice = _ADVICE_AT_START.get(error.errno or 0, ADVICE[errno.EREMOTE])
            why = error.strerror or error
            raise CheckpointError(f"checkpoints cannot be kept in {folder}: {why}. {advice}") from error

    def begin(self, directory: PurePath) -> Draft:
        """In its place, which must be free."""
        if self.look(directory) is not None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(directory))
        return Draft(directory, directory, f"-{secrets.token_hex(4)}")

    def directory(self, path: PurePath) -> AbstractContextManager[None]:
        """There are none to be made."""
        return nullcontext()

    @contextmanager
    def create(self, path: PurePath) -> Iterator[Callable[[bytes | memoryview], int]]:
        """Upload piece by piece; when the `with` block fails there is no object. Its size is looked at afterwards."""
        file, size = ask(path, "open", mode="wb", block_size=_PART_BYTES), 0

        def write(data: bytes | memoryview) -> int:
            nonlocal size
            with _translated(path):
                file.write(data)
            size += len(data)
            return len(data)

        try:
            yield write
            with _translated(path):
                file.close()
        except BaseException:
            with suppress(AttributeError):
                file.closed = True  # to close it later, be it by the garbage collector, would commit what is there
            with suppress(Exception):
                file.discard()
            raise
        if (found := self.size_of(path)) != size:
            raise OSError(errno.EREMOTE, f"it has {found} bytes instead of {size} after the upload", str(path))

    def commit(self, draft: Draft) -> None:
        """The upload of the manifest was that."""

    def rename(self, directory: PurePath, other: PurePath) -> None:
        """Copy all objects, the manifest last as in a save, and remove those that were copied."""
        names = [] if self.unseen(directory.parent, [directory]) else self.files(directory)
        for name in sorted(names, key=MANIFEST.__eq__):
            ask(directory / name, "cp_file", path2=_store_of(other / name)[1])
        self.remove(directory)

    def remove(self, directory: PurePath) -> None:
        """The manifest first; the others in any order."""
        names = {*self.files(directory)} - {""}
        if MANIFEST in names:
            ask(directory / MANIFEST, "rm_file")
        if others := sorted(names - {MANIFEST}):
            remove_objects([directory / name for name in others])
        if left := {*self.files(directory)} - {""}:  # what one of many could not be removed for, s3fs does not tell
            raise OSError(errno.EREMOTE, "the store did not remove it", str(directory / min(left)))


def ask(place: PurePath, method: str, **options: Any) -> Any:
    """What a method of the file system returns for a place; whatever it raises becomes an OSError."""
    with _translated(place):
        store, name = _store_of(place)
        return getattr(store, method)(name, **options)


def remove_objects(objects: Sequence[PurePath]) -> None:
    """Remove objects of one store, in any order."""
    with _translated(objects[0].parent):
        store, _ = _store_of(objects[0])
        store.rm([_store_of(each)[1] for each in objects])


def _fetched(place: PurePath, start: int, end: int) -> bytes:
    """Bytes of an object, by one request."""
    data: bytes = ask(place, "cat_file", start=start, end=end)
    if len(data) > end - start:
        raise OSError(errno.EREMOTE, "the server sends whole files only", str(place))
    return data


def _store_of(place: PurePath) -> tuple[Any, str]:
    """The file system of a place, and its name there. Asked for anew each time: after a fork the old one is dead."""
    import fsspec  # slow, and there is seldom such a place

    try:  # without the cache, because what other processes do is to be seen at once
        return fsspec.core.url_to_fs(str(place), use_listings_cache=False)  # type: ignore[no-any-return]
    except ValueError as error:
        raise ConfigError(f"{place}: nothing opens such a URL: {error}. It may be misspelt.") from error


@contextmanager
def _translated(place: PurePath) -> Iterator[None]:
    """Turn whatever a package for some protocol raises into an OSError whose number tells what is known of it."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(_INSTALL.format(place=place, error=error)) from error
    except ConfigError:
        raise
    except OSError as error:
        kinds = {FileNotFoundError: errno.ENOENT, PermissionError: errno.EACCES}
        number = next((number for kind, number in kinds.items() if isinstance(error, kind)), errno.EREMOTE)
        raise OSError(number, error.strerror or str(error) or type(error).__name__, str(place)) from error
    except Exception as error:
        raise OSError(errno.EREMOTE, f"{type(error).__name__}: {error}", str(place)) from error
