"""Single files and directories, here or far away: durable when written, checked when read; errors say what to do."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
import stat
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from io import BufferedReader
from pathlib import Path
from typing import final

from lumen.checkpoint.codec import JSON
from lumen.checkpoint.object_store import RemotePath, opened_remotely, uploaded
from lumen.errors import CheckpointDamaged, CheckpointError

_PIECE_BYTES = 4 << 20  # hashed and then written while it is still in the processor's cache
_MOST_OPEN = 64  # files at once: tensors are read in turn from the files of so many processes

PROBE = "probe"

_ADVICE = {
    errno.ENOSPC: "Free space on that disk or choose another directory.",
    errno.EDQUOT: "The disk quota is used up: free space or choose another directory.",
    errno.EFBIG: "No file may grow that large there: raise the limit (`ulimit -f`) or choose another directory.",
    errno.EACCES: "Give this user the right to write there or choose another directory.",
    errno.EPERM: "Give this user the right to write there or choose another directory.",
    errno.EROFS: "The file system is read-only: choose another directory.",
    errno.ENOENT: "A directory was removed while it was in use: leave the run's directory alone while it runs.",
    errno.ENOTDIR: "A file is in the way: move it or choose another directory.",
    errno.EEXIST: "A file is in the way: move it or choose another directory.",
    errno.EREMOTE: "Check the network, the address and the credentials, which are those of the environment.",
}

_ADVICE_AT_START = {
    errno.ENOENT: "Create it (lumen makes no buckets), or choose another place.",
    errno.EACCES: "These credentials must be allowed to list, read, write and remove objects there.",
}


@contextmanager
def explained(verb: str, path: Path) -> Iterator[None]:
    """Turn what the operating system refuses into a CheckpointError: "cannot `verb` `path`", why, and what to do."""
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "Check the disk.")
        raise CheckpointError(f"cannot {verb} {error.filename or path}: {error.strerror or error}. {advice}") from error


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn what is missing or unreadable into CheckpointDamaged, and any other refusal into CheckpointError."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EIO):
            raise CheckpointDamaged(f"{path} is missing or unreadable: {error.strerror}.") from error
        # the file is intact, as far as is known
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error


@final
class HashingWriter:
    """Writes to a file and hashes what it writes."""

    def __init__(self, write: Callable[[memoryview], int]) -> None:
        self._write = write
        self._sha256 = hashlib.sha256()
        self._bytes = 0

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        view = memoryview(data)
        for start in range(0, len(view), _PIECE_BYTES):
            piece = view[start : start + _PIECE_BYTES]
            self._sha256.update(piece)
            self._bytes += self._write(piece)

    def record(self) -> dict[str, int | str]:
        """Return what was written so far: its size in `bytes` and its `sha256`."""
        return {"bytes": self._bytes, "sha256": self._sha256.hexdigest()}


@contextmanager
def new_file(path: Path) -> Iterator[HashingWriter]:
    """Create a file, which must not exist; at the end of the `with` block it is on the disk.

    Far away nobody can see to it that it does not exist, so names there must never come again.

    Raises:
        CheckpointError: The file exists, or the disk refuses.
    """
    with explained("write", path):
        if isinstance(path, RemotePath):
            with uploaded(path) as write:
                yield HashingWriter(write)
            return
        with open(path, "xb") as file:
            yield HashingWriter(file.write)
            file.flush()
            os.fsync(file.fileno())


def opened(path: Path, *, whole: bool = False) -> BufferedReader:
    """Open a file to read it, where one wants or, `whole`, from its beginning to its end.

    Raises:
        OSError: It cannot be read; `readable` explains that.
    """
    return opened_remotely(path, whole=whole) if isinstance(path, RemotePath) else open(path, "rb")


@final
class _Descriptor:
    """A file that is open for reading until nobody has this any more."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.number)


@final
class Files:
    """Reads pieces of the files in a directory of this machine; each is opened once. For several threads.

    Args:
        directory: What they are in.
    """

    def __init__(self, directory: Path) -> None:
        self._opened = lru_cache(_MOST_OPEN)(lambda name: _Descriptor(directory / name))
        self.free = self._opened.cache_clear

    def read_into(self, name: str, start: int, view: memoryview) -> int:
        """Fill memory with the bytes of a file from `start` on.

        Returns:
            How many bytes there were.

        Raises:
            OSError: It cannot be read; `readable` explains that.
        """
        file, done = self._opened(name), 0
        while done < len(view) and (count := os.preadv(file.number, [view[done:]], start + done)):
            done += count
        return done


def names_in(folder: Path) -> list[str]:
    """Names of what is directly in a directory; far away there are none where nothing is.

    Raises:
        OSError: It is not there, or cannot be read; `readable` explains that.
    """
    return folder.names() if isinstance(folder, RemotePath) else os.listdir(folder)


def make_directory(path: Path, *, inside: bool = False) -> None:
    """Make a directory; far away there are none to be made. Those made above it survive a power loss.

    Args:
        path: The directory.
        inside: It may be there already, but the one that it is in must be; else it is new, and so may be those above.

    Raises:
        OSError: It cannot be made; `explained` explains that.
    """
    if not isinstance(path, RemotePath):
        above = [] if inside else [each for each in path.parents if not each.exists()]
        path.mkdir(parents=not inside, exist_ok=inside)
        for each in above:
            with suppress(PermissionError):  # what may not be read cannot be synced
                fsync_directory(each.parent)
    elif not inside and path.exists():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))


def remove_tree(path: Path, *, first: str | None = None) -> None:
    """Remove a directory and everything in it.

    Args:
        path: The directory.
        first: A file in it that goes before all others, where files go one by one.

    Raises:
        OSError: It cannot be removed, or is not there; `explained` explains that.
    """
    if not isinstance(path, RemotePath):
        shutil.rmtree(path)
        return
    found = path.below()
    if first is not None and path / first in found:
        (path / first).unlink()
    path.remove_all([each for each in found if each.name != first or each.parent != path])
    if left := path.below():  # what one of many could not be removed for, s3fs does not tell
        raise OSError(errno.EREMOTE, "the store did not remove it", str(left[0]))


def check_writable(folder: Path) -> None:
    """Find out before any work whether checkpoints can be kept in a place far away, by an object that comes and goes.

    Raises:
        CheckpointError: They cannot; says why.
        ConfigError: A package is missing.
    """
    if not isinstance(folder, RemotePath):
        return
    probe = folder / f"{PROBE}.tmp-{secrets.token_hex(4)}"
    try:
        with uploaded(probe) as write:
            write(b"?")
        with opened(probe) as file:
            file.read()
        folder.names()
        probe.unlink()
    except OSError as error:
        advice = _ADVICE_AT_START.get(error.errno or 0, _ADVICE[errno.EREMOTE])
        raise CheckpointError(f"checkpoints cannot be kept in {folder}: {error.strerror or error}. {advice}") from error


def fsync_directory(path: Path) -> None:
    """Make renames and new names in a directory survive a power loss; far away what is written is safe."""
    if isinstance(path, RemotePath):
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot sync a directory
            raise
    finally:
        os.close(descriptor)


def check_inside(directory: Path, name: str) -> None:
    """Check that a name in a directory is a regular file there, and no link to one elsewhere.

    Raises:
        CheckpointDamaged: It is not.
    """
    if isinstance(directory, RemotePath):  # where there are no links
        return
    path, above = directory / name, Path(name).parents[-2::-1]
    with readable(path):
        modes = [os.lstat(each).st_mode for each in (*(directory / each for each in above), path)]
        if any(map(stat.S_ISLNK, modes)):
            root, real = os.path.realpath(directory), os.path.realpath(path)
            if os.path.commonpath([root, real]) != root:
                raise CheckpointDamaged(f"{path} is a link that leaves the checkpoint.")
            modes.append(os.stat(real).st_mode)
        if not stat.S_ISREG(modes[-1]):  # opening a pipe would wait for ever
            raise CheckpointDamaged(f"{path} is not a regular file.")


def check_file(directory: Path, name: str, size: int, sha256: str | None) -> None:
    """Check that a file is inside a directory and has the size in bytes and, unless None, the checksum given.

    Raises:
        CheckpointDamaged: It is not, or has another one.
    """
    path = directory / name
    check_inside(directory, name)
    with readable(path):
        found = path.size() if isinstance(path, RemotePath) else os.stat(path).st_size
        if found != size:
            raise CheckpointDamaged(f"{path} has {found} bytes instead of {size}.")
        if sha256 is not None:
            with opened(path, whole=True) as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                    raise CheckpointDamaged(f"{path} was changed: its checksum is wrong.")


def read_json(path: Path) -> dict[str, JSON]:
    """Return the JSON object in a file.

    Raises:
        CheckpointDamaged: The file is missing or holds anything else.
    """
    with readable(path), opened(path) as file:
        data = file.read()
    return parse_json(path, data)


def parse_json(path: Path, data: bytes) -> dict[str, JSON]:
    """Return the JSON object in bytes that were read from `path`.

    Raises:
        CheckpointDamaged: They hold anything else.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"{path} is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise CheckpointDamaged(f"{path} holds no JSON object.")
    return value
