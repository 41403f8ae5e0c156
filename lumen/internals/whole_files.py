"""Files that are there whole, or as they were before."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """The context in which a file is written beside `path`, and takes its place at the end; an error leaves that alone.

    Yields:
        Where to write. Nothing is there: what a killed process has left is removed.
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
