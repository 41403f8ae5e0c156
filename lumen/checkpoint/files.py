"""Single files of checkpoints: hashed when written, checked when read."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import PurePath
from typing import final

from lumen.checkpoint.codec import JSON
from lumen.checkpoint.places import storage_of
from lumen.checkpoint.storage import explained, readable
from lumen.errors import CheckpointDamaged

_PIECE_BYTES = 4 << 20  # hashed and then written while it is still in the processor's cache


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
def new_file(path: PurePath) -> Iterator[HashingWriter]:
    """Create a file, as `Storage.create` promises.

    Raises:
        CheckpointError: The file exists, or the disk or the store refuses.
    """
    with explained("write", path), storage_of(path).create(path) as write:
        yield HashingWriter(write)


def check_file(directory: PurePath, name: str, size: int, sha256: str | None) -> None:
    """Check that a file is inside a directory and has the size in bytes and, unless None, the checksum given.

    Raises:
        CheckpointDamaged: It is not, or has another one.
    """
    storage, path = storage_of(directory), directory / name
    storage.check_inside(directory, name)
    with readable(path):
        found = storage.look(path)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        if found.size_bytes != size:
            raise CheckpointDamaged(f"{path} has {found.size_bytes} bytes instead of {size}.")
        if sha256 is not None:
            with storage.open(path, whole=True) as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                    raise CheckpointDamaged(f"{path} was changed: its checksum is wrong.")


def read_json(path: PurePath) -> dict[str, JSON]:
    """Return the JSON object in a file.

    Raises:
        CheckpointDamaged: The file is missing or holds anything else.
    """
    with readable(path), storage_of(path).open(path) as file:
        data = file.read()
    return parse_json(path, data)


def parse_json(path: PurePath, data: bytes) -> dict[str, JSON]:
    """Return the JSON object in bytes that were read from `path`.

    Raises:
        CheckpointDamaged: The bytes hold anything else.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"{path} is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise CheckpointDamaged(f"{path} holds no JSON object.")
    return value
