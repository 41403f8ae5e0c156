"""Runs as they are found on the disk. Nothing is changed, and no job is disturbed."""

from __future__ import annotations

import heapq
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import suppress
from operator import itemgetter
from pathlib import Path, PurePath

from lumen.checkpoint.format.storage import MANIFEST, as_local, as_place, exists, is_dir, readable, storage_of
from lumen.console import stderr
from lumen.errors import ConfigError, LumenError, ProcessLost, RunDirectoryError
from lumen.tools.runs.listing import ShownRun, has_checkpoints, list_checkpoints
from lumen.trainer.logs import STATUS_SUFFIX
from lumen.trainer.run_directory import RunDirectory

_BEGUN, _FAILED = "the run is in ", "failed: "
_ENDS = {  # what the log of a run says last that is no longer running
    "finished: ": "finished",
    "nothing to do: ": "finished",
    "stopped at ": "stopped",
    _BEGUN: "failed",
    _FAILED: "failed",
}
_LOG_LINE = re.compile(rf"^([-0-9]+ [:,0-9]+) (?:INFO|ERROR) ({'|'.join(_ENDS)})(.*)$", re.M)
_LOG_TAIL_BYTES = 1 << 20


def runs_in(directory: str | PurePath, *, verify: bool = False) -> list[ShownRun]:
    """All runs in a directory, below it, or the one that it is.

    Args:
        directory: Where they are; a URL too.
        verify: Read every byte of their checkpoints; else manifests, and the files' sizes.

    Raises:
        ConfigError: There is no such directory, or it is a checkpoint.
    """
    root = as_place(directory)
    with readable(root):
        is_there, is_checkpoint = is_dir(root), exists(root / MANIFEST)
    if not is_there:
        raise ConfigError(f"there is no directory {root}. Say where the runs are: lumen runs DIR.")
    if is_checkpoint:
        raise ConfigError(f"{root} is a checkpoint. Give its run, or the directory of all runs.")
    if root.name == "checkpoints":
        root = root.parent
    return [look(path, verify=verify) for path in find_runs(root)]


def local_of(shown: ShownRun) -> Path | None:
    """The directory of a run, if that is on a disk; an object store has neither locks nor logs."""
    return as_local(shown.path)


def find_runs(directory: PurePath) -> Iterator[PurePath]:
    """The runs in a directory and below it, by name; no way leads through links and hidden directories."""
    try:
        if _is_run(directory):
            yield directory
            return
        names = sorted(storage_of(directory).names(directory))
        below = [directory / name for name in names if not name.startswith(".") and is_dir(directory / name)]
    except (OSError, LumenError) as error:
        print(f"warning: cannot look into {directory}: {getattr(error, 'strerror', error)}", file=stderr)
        return
    for path in below:
        local = as_local(path)
        if local is None or not local.is_symlink():
            yield from find_runs(path)
        elif _is_run(path):
            yield path


def _is_run(path: PurePath) -> bool:
    folder = path / "checkpoints"
    if not is_dir(folder):
        return has_checkpoints(path)
    local = as_local(path)
    return has_checkpoints(folder) or (local is not None and RunDirectory.was_claimed(local))


def look(path: PurePath, *, verify: bool = False) -> ShownRun:
    """How a run stands, and its checkpoints; `verify` reads every byte of these."""
    shown = ShownRun(path)
    folder = path / "checkpoints" if is_dir(path / "checkpoints") else path
    try:
        shown.checkpoints = list_checkpoints(folder, verify=verify)
    except LumenError as error:
        shown.problem = str(error)
    local = local_of(shown)
    if local is None:
        shown.status = _by_checkpoint(shown)
        return shown
    try:
        with warnings.catch_warnings(action="error"):  # of a file system without locks
            shown.holder = RunDirectory.is_locked(local)
    except (RunDirectoryError, UserWarning):
        return shown
    if shown.holder:
        shown.status = "running"
    else:
        _find_end(shown, local)
    return shown


def _find_end(shown: ShownRun, run: Path) -> None:
    """What the run's own log says last, else its newest checkpoint."""
    said = _said_in(run / "run.log")
    shown.status = _ENDS[said[-1][1]] if said else _by_checkpoint(shown)
    if shown.status == "failed":
        begun = max((when for when, what, _ in said if what == _BEGUN), default="")
        of_ranks = sorted((run / "logs").glob("*-rank*.log"))
        newest = [log for log in of_ranks if log.name.rpartition("-")[0] == of_ranks[-1].name.rpartition("-")[0]]
        logs = [run / "run.log", *newest]
        shown.error = _first_failure([each for log in logs for each in _said_in(log) if each[0] >= begun])


def _first_failure(said: list[tuple[str, str, str]]) -> str | None:
    """What the ranks failed by; the first of those that did not only lose another one."""
    failures = [line for _, what, line in sorted(said) if what == _FAILED]
    causes = [line for line in failures if not line.startswith(f"{ProcessLost.__name__}: ")]
    return next(iter(causes or failures), None)


def _said_in(log: Path) -> list[tuple[str, str, str]]:
    """Return the status lines of a log in order of time: the time, which of `_ENDS`, and the rest of the line."""
    found: list[list[tuple[str, str, str]]] = []
    for path in (log, log.with_suffix(STATUS_SUFFIX)):
        with suppress(OSError), open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_TAIL_BYTES))
            found.append(_LOG_LINE.findall(file.read().decode(errors="replace")))
    return list(heapq.merge(*found, key=itemgetter(0)))


def _by_checkpoint(shown: ShownRun) -> str:
    return "finished" if shown.newest_info.get("finished") else "unknown"
