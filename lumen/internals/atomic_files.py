"""Atomic writes: a file is complete, or unchanged."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lumen.errors import RunDirectoryError

_REMEDIES = {
    errno.ENOENT: "The run's directory was removed or moved. Move the directory back, or start the run again.",
    errno.ENOSPC: "Free disk space, then resume the run: saved checkpoints are intact.",
    errno.EDQUOT: "Free disk space, then resume the run: saved checkpoints are intact.",
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
        remedy = _REMEDIES.get(error.errno or 0, "Check the permissions and the disk, then resume the run.")
        raise RunDirectoryError(f"{path} cannot be written: {error.strerror or error}. {remedy}") from error


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Return a context that writes a temporary file and moves it to `path`; an error leaves `path` unchanged.

    Yields:
        The path of the temporary file, which does not exist yet: a file left by a killed process is removed.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_private(path: Path, text: str) -> None:
    """Write a file of a run that may hold a secret: atomically, and readable only by its owner.

    Raises:
        RunDirectoryError: The file cannot be written.
    """
    with explain_write_errors(path), replace_file(path) as temporary:
        temporary.touch(0o600)
        temporary.write_text(text, encoding="utf-8")
