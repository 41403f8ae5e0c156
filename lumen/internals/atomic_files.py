"""Atomic writes: a file is complete, or unchanged."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lumen.errors import RunDirectoryError

_REMEDIES = {
    errno.ENOENT: "It was removed or moved while its run was writing to it. Put it back, or start the run again.",
    errno.ENOSPC: "Make room; what was saved is whole, and the run can be resumed.",
    errno.EDQUOT: "Make room; what was saved is whole, and the run can be resumed.",
}


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Turn an OSError within the context into an error that names the file of a run and a remedy.

    Raises:
        RunDirectoryError: The file cannot be written.
    """
    try:
        yield
    except OSError as error:
        cure = _REMEDIES.get(error.errno or 0, "See that it can be written, and resume the run.")
        raise RunDirectoryError(f"{path} cannot be written: {error.strerror or error}. {cure}") from error


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Return a context that writes a temporary file and moves it to `path`; an error leaves `path` unchanged.

    Yields:
        The path of the temporary file, which does not exist yet: a file left by a killed process is removed.
    """
    beside = path.with_name(f".{path.name}.tmp")
    beside.unlink(missing_ok=True)
    try:
        yield beside
        os.replace(beside, path)
    except BaseException:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def write_private(path: Path, text: str) -> None:
    """Write a file of a run that may hold a secret: atomically, and readable only by its owner.

    Raises:
        RunDirectoryError: The file cannot be written.
    """
    with explain_write_errors(path), replace_file(path) as beside:
        beside.touch(0o600)
        beside.write_text(text, encoding="utf-8")
