"""Object stores and other filesystems of fsspec: the upload of the manifest completes a checkpoint.

An object store has no rename, no sync and no directories: a directory is a prefix of names of objects. An object is
complete and durable as soon as its upload has ended. The last uploaded object, the manifest, therefore completes the
checkpoint.
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

from lumen.checkpoint.format.storage import (
    ADVICE,
    MANIFEST,
    Draft,
    ReadInto,
    Status,
    Storage,
    explain_read_errors,
    make_temporary_path,
)
from lumen.errors import CheckpointError, ConfigError
from lumen.version import DISTRIBUTION

#: Size of the parts of an upload or a download: efficient for stores, and the extra memory for a tensor.
_UPLOAD_PART_BYTES = 16 << 20
_READ_AHEAD_BYTES = 1 << 20  # minimum size of a read, for headers and small tensors
_MAX_CACHED_BLOCKS = 64  # cached reads: tensors are read alternately from the files of up to 64 processes

_INSTALL_HINT = (
    "{place} cannot be opened: {error}. For s3:// and gs://, "
    f"`pip install '{DISTRIBUTION}[remote]'` installs s3fs and gcsfs."
)
_STARTUP_ADVICE = {
    errno.ENOENT: "Create the bucket (Lumen does not create buckets), or choose a different URL.",
    errno.EACCES: "Allow these credentials to list, read, write and remove objects there.",
}


@final
class ObjectStore(Storage):
    """Storage that fsspec opens. Each query is one request without a cache, so that the answer is current."""

    quick_bytes = 0  # even small objects take time
    piece_bytes = _UPLOAD_PART_BYTES

    def get_status(self, path: PurePath) -> Status | None:
        """Return the status of an object or of a prefix of objects, or None if there is no such object."""
        try:
            found = call_filesystem(path, "info")
        except FileNotFoundError:
            return None
        return Status("file" if found["type"] == "file" else "directory", int(found.get("size") or 0))

    def list_names(self, folder: PurePath) -> list[str]:
        """Return the names in a directory with one request; an empty list for a missing directory."""
        try:
            found = [str(name).rstrip("/") for name in call_filesystem(folder, "ls", detail=False)]
        except FileNotFoundError:
            return []
        return [name.rpartition("/")[2] for name in found if not str(folder).endswith(f"/{name.lstrip('/')}")]

    def list_files(self, directory: PurePath) -> list[str]:
        """Return the relative names of all objects below a directory with one request."""
        found = [str(name).strip("/") for name in call_filesystem(directory, "find")]
        root = _open_filesystem(directory)[1].strip("/")
        return [name.removeprefix(root).lstrip("/") for name in found if f"{name}/".startswith(f"{root}/")]

    def get_write_time_s(self, file: PurePath) -> float:
        """Return the upload time of an object, in seconds since 1970, by the clock of the store."""
        return float(call_filesystem(file, "modified").timestamp())

    def find_with_manifest(self, folder: PurePath, directories: Sequence[PurePath]) -> set[PurePath]:
        """Return the directories that have a manifest, with one listing of the folder for several directories."""
        if len(directories) < 2:
            return super().find_with_manifest(folder, directories)
        with explain_read_errors(folder):
            found = {*self.list_files(folder)}
        return {each for each in directories if f"{each.name}/{MANIFEST}" in found}

    def find_uncommitted(self, folder: PurePath, directories: Sequence[PurePath]) -> set[PurePath]:
        """Return the directories without a manifest."""
        return {*directories} - self.find_with_manifest(folder, directories)

    def make_piece_reader(self, directory: PurePath, sizes: Mapping[str, int]) -> ReadInto:
        """Return a function that reads pieces of objects; a small piece is read and cached with its surroundings."""

        @lru_cache(_MAX_CACHED_BLOCKS)
        def fetch_block(name: str, number: int) -> bytes:
            start = number * _READ_AHEAD_BYTES
            return _fetch_bytes(directory / name, start, min(start + _READ_AHEAD_BYTES, sizes[name]))

        def read_into(name: str, start: int, view: memoryview) -> int:
            done = 0
            while done < len(view):
                position, missing = start + done, len(view) - done
                if missing < _READ_AHEAD_BYTES:
                    number, begin = divmod(position, _READ_AHEAD_BYTES)
                    data = fetch_block(name, number)[begin : begin + missing]
                else:
                    data = _fetch_bytes(directory / name, position, position + min(missing, _UPLOAD_PART_BYTES))
                if not data:
                    break
                view[done : done + len(data)] = data
                done += len(data)
            return done

        return read_into

    def check_writable(self, folder: PurePath) -> None:
        """Upload, read, list and remove a probe object; a remaining probe looks like the leftover of a killed save."""
        probe = make_temporary_path(folder / "probe") / "state.json"
        try:
            with self.create(probe) as write:
                write(b"?")
            self.read(probe, 1)
            self.list_names(folder)
            call_filesystem(probe, "rm_file")
        except OSError as error:
            advice = _STARTUP_ADVICE.get(error.errno or 0, ADVICE[errno.EREMOTE])
            reason = error.strerror or error
            raise CheckpointError(f"cannot save checkpoints in {folder}: {reason}. {advice}") from error

    def begin(self, directory: PurePath) -> Draft:
        """Create a draft at the final path, which must be free."""
        if self.get_status(directory) is not None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(directory))
        return Draft(directory, directory, f"-{secrets.token_hex(4)}")

    def make_directory(self, path: PurePath) -> AbstractContextManager[None]:
        """Do nothing: an object store has no directories."""
        return nullcontext()

    @contextmanager
    def create(self, path: PurePath) -> Iterator[Callable[[bytes | memoryview], int]]:
        """Upload an object piece by piece, and check its size; if the `with` block fails, no object is created."""
        file, size = call_filesystem(path, "open", mode="wb", block_size=_UPLOAD_PART_BYTES), 0

        def write(data: bytes | memoryview) -> int:
            nonlocal size
            with _translate_errors(path):
                file.write(data)
            size += len(data)
            return len(data)

        try:
            yield write
            with _translate_errors(path):
                file.close()
        except BaseException:
            with suppress(AttributeError):
                file.closed = True  # closing the file later, even by the garbage collector, would upload it
            with suppress(Exception):
                file.discard()
            raise
        if (found := self.get_size(path)) != size:
            raise OSError(errno.EREMOTE, f"the object has {found} bytes instead of {size} after the upload", str(path))

    def commit(self, draft: Draft) -> None:
        """Do nothing: the upload of the manifest already completed the checkpoint."""

    def rename(self, directory: PurePath, other: PurePath) -> None:
        """Copy all objects, the manifest last as in a save, and remove the originals."""
        names = [] if self.find_uncommitted(directory.parent, [directory]) else self.list_files(directory)
        for name in sorted(names, key=MANIFEST.__eq__):
            call_filesystem(directory / name, "cp_file", path2=_open_filesystem(other / name)[1])
        self.remove(directory)

    def remove(self, directory: PurePath) -> None:
        """Remove the manifest first, then the other objects in any order."""
        names = {*self.list_files(directory)} - {""}
        if MANIFEST in names:
            call_filesystem(directory / MANIFEST, "rm_file")
        if other_names := sorted(names - {MANIFEST}):
            remove_objects([directory / name for name in other_names])
        if remaining := {*self.list_files(directory)} - {""}:  # s3fs does not report failed removals
            raise OSError(errno.EREMOTE, "the store did not remove the object", str(directory / min(remaining)))


def call_filesystem(place: PurePath, method: str, **options: Any) -> Any:
    """Call a method of the filesystem of a path and return its result; any exception becomes an OSError."""
    with _translate_errors(place):
        store, name = _open_filesystem(place)
        return getattr(store, method)(name, **options)


def remove_objects(objects: Sequence[PurePath]) -> None:
    """Remove objects of one store, in any order."""
    with _translate_errors(objects[0].parent):
        store, _ = _open_filesystem(objects[0])
        store.rm([_open_filesystem(each)[1] for each in objects])


def _fetch_bytes(place: PurePath, start: int, end: int) -> bytes:
    """Read bytes of an object with one request."""
    data: bytes = call_filesystem(place, "cat_file", start=start, end=end)
    if len(data) > end - start:
        raise OSError(errno.EREMOTE, "the server cannot send a part of a file", str(place))
    return data


def _open_filesystem(place: PurePath) -> tuple[Any, str]:
    """Return the filesystem of a path, and the path's name there; called each time, as a fork breaks filesystems."""
    import fsspec  # slow, and rarely needed

    try:  # without the cache, so that changes by other processes are visible at once
        return fsspec.core.url_to_fs(str(place), use_listings_cache=False)  # type: ignore[no-any-return]
    except ValueError as error:
        raise ConfigError(f"{place}: unsupported URL scheme: {error}. Check the spelling.") from error


@contextmanager
def _translate_errors(place: PurePath) -> Iterator[None]:
    """Turn any exception of a protocol's package into an OSError with the closest error number."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(_INSTALL_HINT.format(place=place, error=error)) from error
    except ConfigError:
        raise
    except OSError as error:
        kinds = {FileNotFoundError: errno.ENOENT, PermissionError: errno.EACCES}
        number = next((number for kind, number in kinds.items() if isinstance(error, kind)), errno.EREMOTE)
        raise OSError(number, error.strerror or str(error) or type(error).__name__, str(place)) from error
    except Exception as error:
        raise OSError(errno.EREMOTE, f"{type(error).__name__}: {error}", str(place)) from error
