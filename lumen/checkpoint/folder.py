"""A run's folder of checkpoints: which are there, which is the newest good one, and how one leaves."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from typing import Any

from lumen.checkpoint.disk import explained, fsync_directory, readable
from lumen.checkpoint.manifest import MANIFEST, is_committed, read_manifest
from lumen.checkpoint.reader import Checkpoint
from lumen.errors import CheckpointDamaged, CheckpointError

# -validating: saved before that step's validation was done; -1, -2: the samples went on while updates were skipped
_STEP_NAME = re.compile(r"step-([0-9]+)(?:-(validating|[0-9]+))?")


def read_info(path: Path) -> dict[str, Any]:
    """Return the `info` of a committed checkpoint by reading its manifest alone.

    Raises:
        CheckpointDamaged: It was never committed, or its manifest was changed.
        CheckpointError: It has another format version, or this user may not read it.
    """
    return read_manifest(path).info


def find_checkpoints(folder: Path) -> list[Path]:
    """Return the committed checkpoints of a folder (with a valid manifest; other files are not read), oldest first."""
    return [path for path in _step_directories(folder) if is_committed(path)]


def newest_valid(folder: Path, report: Callable[[str], None]) -> Checkpoint | None:
    """Open the newest checkpoint of a folder whose every byte is right, or return None if there is none.

    Args:
        folder: Where the checkpoints are.
        report: Told of every damaged one: its name, what is wrong with it, and what is used instead.

    Raises:
        CheckpointError: One cannot be judged: it has another format version, or this user may not read it.
    """
    candidates = _step_directories(folder)
    while candidates:
        path = candidates.pop()
        try:
            return Checkpoint.open(path)
        except CheckpointDamaged as error:
            instead = f"Trying {candidates[-1].name} instead." if candidates else "There is no older one."
            report(f"{path.name} is damaged and is not used: {error} {instead}")
    return None


def _step_directories(folder: Path) -> list[Path]:
    with readable(folder):
        names = os.listdir(folder) if folder.is_dir() else []
    matches = [match for name in names if (match := _STEP_NAME.fullmatch(name))]
    matches.sort(key=lambda match: (int(match[1]), -1 if match[2] == "validating" else int(match[2] or 0)))
    return [folder / match[0] for match in matches]


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint; a kill meanwhile never leaves half of one under its name.

    Raises:
        CheckpointError: It is no checkpoint, or it cannot be removed.
    """
    if not (path / MANIFEST).is_file():
        raise CheckpointError(f"{path} is no checkpoint (it has no {MANIFEST}), so it is not removed.")
    doomed = temporary_name(path)
    with explained("remove", path):
        os.rename(path, doomed)
        fsync_directory(path.parent)
        shutil.rmtree(doomed)


def remove_checkpoints(paths: Iterable[Path]) -> None:
    """Remove several, one after the other; see `remove_checkpoint`."""
    for path in paths:
        remove_checkpoint(path)


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint to `<name>.damaged-<k>`, so that its name is free and its bytes are kept.

    Raises:
        CheckpointError: It cannot be renamed.
    """
    aside = next(name for k in count(1) if not os.path.lexists(name := path.with_name(f"{path.name}.damaged-{k}")))
    with explained("rename", path):
        os.rename(path, aside)
        fsync_directory(path.parent)
    return aside


def temporary_name(path: Path) -> Path:
    """Return a free name beside a checkpoint, for what readers must not see and `clean_leftovers` removes."""
    return path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")


def clean_leftovers(folder: Path) -> None:
    """Remove what killed saves left behind. Only for the holder of the run's lock: a living save looks the same."""
    for leftover in sorted(folder.glob("*.tmp-*")):
        try:
            if leftover.is_dir() and not leftover.is_symlink():
                shutil.rmtree(leftover)
            else:
                leftover.unlink()
        except OSError as error:
            warnings.warn(f"The leftover {leftover} of a killed save cannot be removed: {error}.", stacklevel=2)
