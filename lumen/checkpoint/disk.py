"""Single files and directories: synced when written, checked when read, and every error says what to do."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, final

from lumen.checkpoint.codec import JSON
from lumen.errors import CheckpointDamaged, CheckpointError

_PIECE_BYTES = 4 << 20  # hashed and then written while it is still in the processor's cache

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

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._sha256 = hashlib.sha256()
        self._bytes = 0

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        view = memoryview(data)
        for start in range(0, len(view), _PIECE_BYTES):
            piece = view[start : start + _PIECE_BYTES]
            self._sha256.update(piece)
            self._bytes += self._file.write(piece)

    def record(self) -> dict[str, int | str]:
        """Return what was written so far: its size in `bytes` and its `sha256`."""
        return {"bytes": self._bytes, "sha256": self._sha256.hexdigest()}


@contextmanager
def new_file(path: Path) -> Iterator[HashingWriter]:
    """Create a file, which must not exist; at the end of the `with` block it is on the disk.

    Raises:
        CheckpointError: The file exists, or the disk refuses.
    """
    with explained("write", path), open(path, "xb") as file:
        yield HashingWriter(file)
        file.flush()
        os.fsync(file.fileno())


def fsync_directory(path: Path) -> None:
    """Make renames and new names in a directory survive a power loss."""
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
    path, root, real = directory / name, os.path.realpath(directory), os.path.realpath(directory / name)
    if os.path.commonpath([root, real]) != root:
        raise CheckpointDamaged(f"{path} is a link that leaves the checkpoint.")
    with readable(path):
        if not stat.S_ISREG(os.stat(real).st_mode):  # opening a pipe would wait for ever
            raise CheckpointDamaged(f"{path} is not a regular file.")


def check_file(directory: Path, name: str, size: int, sha256: str | None) -> None:
    """Check that a file is inside a directory and has the size in bytes and, unless None, the checksum given.

    Raises:
        CheckpointDamaged: It is not, or has another one.
    """
    path = directory / name
    check_inside(directory, name)
    with readable(path), open(path, "rb") as file:
        found = os.fstat(file.fileno()).st_size
        if found != size:
            raise CheckpointDamaged(f"{path} has {found} bytes instead of {size}.")
        if sha256 is not None and hashlib.file_digest(file, "sha256").hexdigest() != sha256:
            raise CheckpointDamaged(f"{path} was changed: its checksum is wrong.")


def read_json(path: Path) -> dict[str, JSON]:
    """Return the JSON object in a file.

    Raises:
        CheckpointDamaged: The file is missing or holds anything else.
    """
    with readable(path):
        data = path.read_bytes()
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
