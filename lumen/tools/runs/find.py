"""Runs and their checkpoints on the disk, valid and damaged. Reading changes no file and disturbs no job."""

from __future__ import annotations

import heapq
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path, PurePath
from typing import Any, final

from lumen.checkpoint.format.folder import SAVED_NAME, is_resumable_name
from lumen.checkpoint.format.manifest import check_file, is_uncommitted, read_head
from lumen.checkpoint.format.reader import Checkpoint
from lumen.checkpoint.format.storage import (
    MANIFEST,
    as_local_path,
    as_path_or_url,
    explain_read_errors,
    get_storage,
    is_dir,
    path_exists,
)
from lumen.console import stderr
from lumen.errors import CheckpointError, ConfigError, LumenError, ProcessLost, RunDirectoryError
from lumen.trainer.logs import STATUS_SUFFIX
from lumen.trainer.run_directory import RunDirectory

_NAME = re.compile(SAVED_NAME.pattern + r"(?:\.(tmp|damaged)-\w+)?")


@final
@dataclass
class ListedCheckpoint:
    """A directory in a folder of checkpoints.

    Attributes:
        path: Directory of the checkpoint.
        info: Contents of the manifest, such as `step`, `epoch` and `metrics`; empty if the manifest is damaged.
        committed_s: Time when the checkpoint was completed, in seconds since 1970, or None.
        size_bytes: Size of all the checkpoint's files, or None.
        problem: Reason why the checkpoint cannot be used, or None.
        kind: "tmp" for a save or removal in progress or killed, "damaged" if a resume set it aside, else "".
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
    """Status and checkpoints of a run on the disk.

    Attributes:
        path: Directory of the run.
        checkpoints: The directories in the run's folder of checkpoints.
        problem: Reason why this folder cannot be read, or None.
        status: "running", "finished", "stopped", "failed" or "unknown".
        error: The error that ended the run, in one line, or None.
        holder: The `host`, `pid` and `started` of the live job that holds the run, or None.
    """

    path: PurePath
    checkpoints: list[ListedCheckpoint] = field(default_factory=list)
    problem: str | None = None
    status: str = "unknown"
    error: str | None = None
    holder: dict[str, Any] | None = None

    @property
    def local_path(self) -> Path | None:
        """The local directory, or None for an object store, which has neither locks nor logs."""
        return as_local_path(self.path)

    @property
    def committed(self) -> list[ListedCheckpoint]:
        """The complete checkpoints of the run, valid or damaged."""
        return [each for each in self.checkpoints if each.kind != "tmp"]

    @property
    def newest_info(self) -> dict[str, Any]:
        """Info in the manifest of the newest valid checkpoint to resume from; empty if no checkpoint is valid."""
        good = (each for each in reversed(self.checkpoints) if is_resumable_name(each.path.name) and not each.problem)
        return next((each.info for each in good if each.info), {})

    def is_best(self, checkpoint: ListedCheckpoint) -> bool:
        """Return True if the newest checkpoint names this checkpoint as the best."""
        return checkpoint.path.name == self.newest_info.get("best")

    def get_metrics(self, checkpoint: ListedCheckpoint) -> dict[str, float]:
        """Return the last logged metrics of a checkpoint, with the monitored metric first."""
        found = checkpoint.info.get("metrics")
        found = found.items() if isinstance(found, dict) else ()
        numbers = {str(name): value for name, value in found if isinstance(value, (int, float))}
        monitor = checkpoint.info.get("monitor")
        return {name: numbers[name] for name in sorted(numbers, key=lambda name: name != monitor)}


def list_checkpoints(folder: PurePath, *, verify: bool = False) -> list[ListedCheckpoint]:
    """Return the directories in a folder that are named like checkpoints, by step, unless removed meanwhile.

    Args:
        folder: The folder of the checkpoints. Other files in the folder are ignored.
        verify: True to read every byte. Otherwise only the manifests are read and the sizes of all files are checked.

    Raises:
        CheckpointDamaged: The folder does not exist.
        CheckpointError: The user may not read the folder.
    """
    with explain_read_errors(folder):
        names = get_storage(folder).list_names(folder)
    matches = [match for name in names if (match := _NAME.fullmatch(name))]
    matches.sort(key=lambda match: (int(match[1]), match[2] != "validating", match[0]))
    found = [_inspect_checkpoint(folder / match[0], match[3] or "", verify=verify) for match in matches]
    with explain_read_errors(folder):
        return [each for each in found if is_dir(each.path)]


def has_checkpoints(folder: PurePath) -> bool:
    """Return True if something in a folder has the name and the manifest of a checkpoint."""
    with explain_read_errors(folder):
        names = get_storage(folder).list_names(folder)
    return any(_NAME.fullmatch(name) and _has_manifest(folder / name) for name in names)


def _has_manifest(path: PurePath) -> bool:
    with suppress(OSError):
        return path_exists(path / MANIFEST)
    return True  # An unreadable directory may have a manifest.


def _inspect_checkpoint(path: PurePath, kind: str, *, verify: bool) -> ListedCheckpoint:
    listed = ListedCheckpoint(path, kind)
    if kind == "tmp":
        return listed
    try:
        if is_uncommitted(path):
            listed.kind = "tmp"
            return listed
        head = read_head(path)
        manifest, storage = path / MANIFEST, get_storage(path)
        with explain_read_errors(manifest):
            status, listed.committed_s = storage.get_status(manifest), storage.get_write_time_s(manifest)
        listed.info = head.info
        listed.size_bytes = (status.size_bytes if status else 0) + sum(size for size, _ in head.files.values())
        if verify:
            Checkpoint.open(path)
        else:
            for name, (size, _) in head.files.items():
                check_file(path, name, size, None)
        if kind == "damaged":
            listed.problem = f"{path} was set aside when a run resumed from an older checkpoint."
    except CheckpointError as error:
        listed.problem = str(error)
    return listed


_BEGUN, _FAILED = "the run is in ", "failed: "
_STATUSES = {  # status by the beginning of the last log line, for a run that no process holds
    "finished: ": "finished",
    "nothing to do: ": "finished",
    "stopped at ": "stopped",
    _BEGUN: "failed",
    _FAILED: "failed",
}
_LOG_LINE = re.compile(rf"^([-0-9]+ [:,0-9]+) (?:INFO|ERROR) ({'|'.join(_STATUSES)})(.*)$", re.M)
_LOG_TAIL_BYTES = 1 << 20


def find_shown_runs(directory: str | PurePath, *, verify: bool = False) -> list[ShownRun]:
    """Return all runs in and below a directory, or the run that the directory is.

    Args:
        directory: Directory or URL of the runs.
        verify: True to read every byte of the checkpoints, otherwise only manifests and file sizes.

    Raises:
        ConfigError: The directory does not exist, or is a checkpoint.
    """
    root = as_path_or_url(directory)
    with explain_read_errors(root):
        is_directory, is_checkpoint = is_dir(root), path_exists(root / MANIFEST)
    if not is_directory:
        raise ConfigError(f"there is no directory {root}. Name the directory of the runs: lumen runs DIR.")
    if is_checkpoint:
        raise ConfigError(f"{root} is a checkpoint. Name the directory of its run, or of all runs.")
    return [inspect_run(path, verify=verify) for path in find_runs(root.parent if root.name == "checkpoints" else root)]


def find_runs(directory: PurePath) -> Iterator[PurePath]:
    """Yield the runs in and below a directory, by name. Links are followed only to runs, hidden directories never."""
    try:
        if _is_run(directory):
            yield directory
            return
        names = sorted(get_storage(directory).list_names(directory))
        below = [directory / name for name in names if not name.startswith(".") and is_dir(directory / name)]
    except (OSError, LumenError) as error:
        print(f"warning: cannot read {directory}: {getattr(error, 'strerror', error)}", file=stderr)
        return
    for path in below:
        local = as_local_path(path)
        if local is None or not local.is_symlink() or _is_run(path):
            yield from find_runs(path)


def _is_run(path: PurePath) -> bool:
    folder = path / "checkpoints"
    if not is_dir(folder):
        return has_checkpoints(path)
    local = as_local_path(path)
    return has_checkpoints(folder) or (local is not None and RunDirectory.was_claimed(local))


def inspect_run(path: PurePath, *, verify: bool = False) -> ShownRun:
    """Return the status of a run and its checkpoints; `verify` reads every byte of the checkpoints."""
    shown = ShownRun(path)
    folder = path / "checkpoints" if is_dir(path / "checkpoints") else path
    try:
        shown.checkpoints = list_checkpoints(folder, verify=verify)
    except LumenError as error:
        shown.problem = str(error)
    local = shown.local_path
    if local is None:
        shown.status = _get_recorded_status(shown)
        return shown
    try:
        with warnings.catch_warnings(action="error"):  # warned on a file system without locks
            shown.holder = RunDirectory.read_live_holder(local)
    except (RunDirectoryError, UserWarning):
        return shown
    lines = _read_status_lines(local / "run.log")
    shown.status = "running" if shown.holder else _STATUSES[lines[-1][1]] if lines else _get_recorded_status(shown)
    if shown.status == "failed":
        begun = max((when for when, status, _ in lines if status == _BEGUN), default="")
        of_ranks = sorted((local / "logs").glob("*-rank*.log"))
        newest = [log for log in of_ranks if log.name.rpartition("-")[0] == of_ranks[-1].name.rpartition("-")[0]]
        lines = sorted(
            each for log in (local / "run.log", *newest) for each in _read_status_lines(log) if each[0] >= begun
        )
        failures = [line for _, status, line in lines if status == _FAILED]
        causes = [line for line in failures if not line.startswith(f"{ProcessLost.__name__}: ")]
        shown.error = next(iter(causes or failures), None)  # the first error that is not the loss of another rank
    return shown


def _read_status_lines(log: Path) -> list[tuple[str, str, str]]:
    """Return the status lines of a log in order of time: the time, the key in `_STATUSES`, and the rest of the line."""
    found: list[list[tuple[str, str, str]]] = []
    for path in (log, log.with_suffix(STATUS_SUFFIX)):
        with suppress(OSError), open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_TAIL_BYTES))
            lines = _LOG_LINE.findall(file.read().decode(errors="replace"))
            if not lines:  # The steps of a long run that was killed have moved the line of its start out of the tail.
                file.seek(0)
                lines = _LOG_LINE.findall(file.read().decode(errors="replace"))
            found.append(lines)
    return list(heapq.merge(*found, key=itemgetter(0)))


def _get_recorded_status(shown: ShownRun) -> str:
    return "finished" if shown.newest_info.get("finished") else "unknown"
