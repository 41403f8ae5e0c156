"""What lies in a folder of checkpoints, good and bad, for somebody who looks. Nothing is changed."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, final

from lumen.checkpoint.format.folder import SAVED_NAME, is_saved_name
from lumen.checkpoint.format.manifest import check_file, is_unseen, read_head
from lumen.checkpoint.format.reader import Checkpoint
from lumen.checkpoint.format.storage import MANIFEST, exists, is_dir, readable, storage_of
from lumen.errors import CheckpointError

_NAME = re.compile(SAVED_NAME.pattern + r"(?:\.(tmp|damaged)-\w+)?")


@final
@dataclass
class Listed:
    """A directory in a folder of checkpoints.

    Attributes:
        path: Directory of the checkpoint.
        info: What the manifest tells of it, such as `step`, `epoch` and `metrics`; empty if that is damaged.
        committed_s: When it was committed, in seconds since 1970, or None.
        size_bytes: Of all its files, or None.
        problem: Why it cannot be used, or None.
        kind: "tmp": a save or a removal under way, or what a killed one left; "damaged": set aside by a resume; or "".
    """

    path: PurePath
    kind: str = ""
    info: dict[str, Any] = field(default_factory=dict)
    committed_s: float | None = None
    size_bytes: int | None = None
    problem: str | None = None


@final
@dataclass
class ShownRun:
    """A run as it is found on the disk.

    Attributes:
        path: Directory of the run.
        checkpoints: What lies where its checkpoints are.
        problem: Why that cannot be read, or None.
        status: "running", "finished", "stopped", "failed" or "unknown".
        error: What it failed by, in a line, or None.
        holder: The live job that has it: its `host`, `pid` and `started`.
    """

    path: PurePath
    checkpoints: list[Listed] = field(default_factory=list)
    problem: str | None = None
    status: str = "unknown"
    error: str | None = None
    holder: dict[str, Any] | None = None

    @property
    def committed(self) -> list[Listed]:
        """Its checkpoints without what is temporary."""
        return [each for each in self.checkpoints if each.kind != "tmp"]

    @property
    def newest_info(self) -> dict[str, Any]:
        """What the manifest of the newest good checkpoint to go on from tells."""
        good = (each for each in reversed(self.checkpoints) if is_saved_name(each.path.name) and not each.problem)
        return next((each.info for each in good if each.info), {})

    def is_best(self, checkpoint: Listed) -> bool:
        """Whether the newest checkpoint calls this one the best."""
        return checkpoint.path.name == self.newest_info.get("best")

    def metrics(self, checkpoint: Listed) -> dict[str, float]:
        """The numbers that were logged last, the monitored one first."""
        found = checkpoint.info.get("metrics")
        found = found.items() if isinstance(found, dict) else ()
        numbers = {str(name): value for name, value in found if isinstance(value, (int, float))}
        monitor = checkpoint.info.get("monitor")
        return {name: numbers[name] for name in sorted(numbers, key=lambda name: name != monitor)}


def list_checkpoints(folder: PurePath, *, verify: bool = False) -> list[Listed]:
    """Look at everything in a folder that has the name of a checkpoint, by steps. What leaves meanwhile is left out.

    Args:
        folder: Where the checkpoints are. Anything else in it is passed over.
        verify: Read every byte; else manifests are read, and that all files are there with their sizes is checked.

    Raises:
        CheckpointDamaged: The folder is not there.
        CheckpointError: This user may not read it.
    """
    with readable(folder):
        names = storage_of(folder).names(folder)
    matches = [match for name in names if (match := _NAME.fullmatch(name))]
    matches.sort(key=lambda match: (int(match[1]), match[2] != "validating", match[0]))
    found = [_look(folder / match[0], match[3] or "", verify=verify) for match in matches]
    with readable(folder):
        return [each for each in found if is_dir(each.path)]


def has_checkpoints(folder: PurePath) -> bool:
    """Whether something in a folder has the name and the manifest of a checkpoint."""
    with readable(folder):
        names = storage_of(folder).names(folder)
    return any(_NAME.fullmatch(name) and _has_manifest(folder / name) for name in names)


def _has_manifest(path: PurePath) -> bool:
    try:
        return exists(path / MANIFEST)
    except OSError:
        return True  # as far as is known


def _look(path: PurePath, kind: str, *, verify: bool) -> Listed:
    listed = Listed(path, kind)
    if kind == "tmp":
        return listed
    try:
        if is_unseen(path):
            listed.kind = "tmp"
            return listed
        head = read_head(path)
        own_bytes, listed.committed_s = _status(path / MANIFEST)
        listed.info = head.info
        listed.size_bytes = own_bytes + sum(size for size, _ in head.files.values())
        if verify:
            Checkpoint.open(path)
        else:
            for name, (size, _) in head.files.items():
                check_file(path, name, size, None)
        if kind == "damaged":
            listed.problem = f"{path} was set aside when a run went on from an older one."
    except CheckpointError as error:
        listed.problem = str(error)
    return listed


def _status(file: PurePath) -> tuple[int, float]:
    """Size in bytes, and when it was written, in seconds since 1970."""
    storage = storage_of(file)
    with readable(file):
        found = storage.look(file)
        return (0 if found is None else found.size_bytes), storage.written_s(file)
