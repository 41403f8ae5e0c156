"""Folder of a run's checkpoints: list, find the newest valid one, rename and remove."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count, islice
from pathlib import PurePath
from typing import Any

from lumen.checkpoint.format.manifest import is_committed, is_uncommitted, read_head
from lumen.checkpoint.format.reader import Checkpoint
from lumen.checkpoint.format.storage import (
    MANIFEST,
    TEMPORARY,
    explain_read_errors,
    explain_storage_errors,
    get_storage,
    is_file,
)
from lumen.distributed.processes import SINGLE_PROCESS, Processes
from lumen.errors import CheckpointDamaged, CheckpointError, CheckpointGone

# -validating: saved before the step's validation ended; -1, -2: more samples at this step, whose updates were skipped
_STEP_NAME = re.compile(r"step-([0-9]+)(?:-(validating|[0-9]+))?")
SAVED_NAME = re.compile(f"(?:exception-)?{_STEP_NAME.pattern}")
_CHECKPOINT_FILE_NAME = re.compile(
    r"(?:state|manifest)\.json|[a-z_]+/[0-9]{5}-[0-9]{5}(?:-[0-9a-f]{8})?\.safetensors", re.ASCII
)


def read_info(path: PurePath) -> dict[str, Any]:
    """Return the `info` of a complete (committed) checkpoint by reading only its manifest.

    Raises:
        CheckpointDamaged: The checkpoint was never completed, or its manifest was changed.
        CheckpointError: The checkpoint has another format version, or this user may not read it.
    """
    return read_head(path).info


def find_checkpoints(folder: PurePath) -> list[PurePath]:
    """Return a folder's complete checkpoints (those with a valid manifest; other files are not read), oldest first."""
    return [path for path in _list_step_directories(folder) if is_committed(path)]


def find_checkpoints_by_step(folder: PurePath) -> dict[int, PurePath]:
    """Return the newest complete checkpoint of each step in a folder, by step."""
    return {_get_sort_key(path.name)[0]: path for path in find_checkpoints(folder)}


def find_newest_committed(folder: PurePath) -> PurePath | None:
    """Return the newest complete checkpoint of a folder, or None; no manifest of an older checkpoint is read."""
    return next(filter(is_committed, reversed(_list_step_directories(folder))), None)


def find_unread(folder: PurePath, *, known: Collection[PurePath] = (), step: int | None = None) -> list[PurePath]:
    """Return directories with the name and the manifest of a checkpoint, oldest first; no file is read.

    Reading a manifest of many shards and tensors would take about a second.

    Args:
        folder: Directory of the checkpoints.
        known: Checkpoints that had a manifest before; only their names are checked.
        step: Step of the checkpoints to return; default: all steps.
    """
    found = [path for path in _list_step_directories(folder) if step in (None, _get_sort_key(path.name)[0])]
    complete = get_storage(folder).find_with_manifest(folder, [path for path in found if path not in known])
    return [path for path in found if path in known or path in complete]


def open_newest_valid(
    folder: PurePath,
    report: Callable[[str], None],
    processes: Processes = SINGLE_PROCESS,
    *,
    sections: Sequence[str] | None = None,
    other_folders: Sequence[PurePath] = (),
    excluded: Collection[PurePath] = (),
) -> Checkpoint | None:
    """Open the newest undamaged checkpoint in a folder, or return None.

    Collective: every one of `processes` must call this. Together the processes read each byte once.

    Args:
        folder: Directory of the checkpoints.
        report: Function that receives a message for each damaged checkpoint: name, damage and replacement.
        processes: The processes that open the checkpoint together; default: only this process.
        sections: Sections to verify; only these can be read, as in `Checkpoint.open`.
        other_folders: Other folders in which the run saves. If several folders have the same step, `folder` takes
            precedence.
        excluded: Checkpoints to ignore.

    Raises:
        CheckpointError: A checkpoint cannot be judged: it has another format version, or this user may not read it.
    """
    tried: set[PurePath] = {*excluded}
    # Called before each attempt, because an active run adds newer checkpoints.
    find_two = partial(_find_newest_two, (folder, *other_folders), tried)
    while candidates := processes.run_on_rank_zero(find_two):
        tried.add(path := candidates[0])
        try:
            return Checkpoint.open(path, sections=sections, processes=processes)
        except CheckpointGone:
            continue
        except CheckpointDamaged as error:
            instead = f"Trying {candidates[1].name} instead." if candidates[1:] else "There is no older checkpoint."
            report(f"{path.name} is damaged and is not used: {error} {instead}")
    return None


def find_newer(path: PurePath, folders: Iterable[PurePath]) -> list[PurePath]:
    """Return the complete checkpoints of some folders that are newer than a given checkpoint."""
    newer = [
        each
        for folder in folders
        for each in _list_step_directories(folder)
        if _get_sort_key(each.name) > _get_sort_key(path.name)
    ]
    return [each for each in newer if is_committed(each)]


def _find_newest_two(folders: Sequence[PurePath], tried: Collection[PurePath]) -> list[PurePath]:
    """Return the two newest untried checkpoints that are not leftovers; for equal steps the first folder's."""
    found = [path for folder in reversed(folders) for path in _list_step_directories(folder)]
    found.sort(key=lambda path: _get_sort_key(path.name))
    return [*islice((path for path in reversed(found) if path not in tried and not is_uncommitted(path)), 2)]


def _list_step_directories(folder: PurePath) -> list[PurePath]:
    return [folder / name for name in sorted(filter(is_resumable_name, _list_names(folder)), key=_get_sort_key)]


def is_resumable_name(name: str) -> bool:
    """Return True if runs can resume from a checkpoint of this name."""
    return _STEP_NAME.fullmatch(name) is not None


def _get_sort_key(name: str) -> tuple[int, int]:
    """Return the step of a checkpoint, and its order among the checkpoints of this step."""
    match = _STEP_NAME.fullmatch(name)
    assert match is not None
    return int(match[1]), -1 if match[2] == "validating" else int(match[2] or 0)


def _list_names(folder: PurePath) -> list[str]:
    with explain_read_errors(folder), suppress(FileNotFoundError, NotADirectoryError):
        return get_storage(folder).list_names(folder)
    return []


def is_checkpoint_directory(path: PurePath) -> bool:
    """Return True if a directory holds only files of checkpoints, so that it may be moved or removed."""
    return all(_CHECKPOINT_FILE_NAME.fullmatch(name) for name in get_storage(path).list_files(path))


def remove_checkpoint(path: PurePath) -> None:
    """Remove a checkpoint; even after a kill, readers never see a partial checkpoint.

    If the user has moved the checkpoint and left a link, only the link is removed.

    Raises:
        CheckpointError: The path is not a checkpoint, or the checkpoint cannot be removed.
    """
    with explain_storage_errors("remove", path):
        if not is_file(path / MANIFEST):
            raise CheckpointError(
                f"{path} is not a checkpoint (no {MANIFEST}), so Lumen does not remove the directory."
            )
        get_storage(path).remove(path)


def remove_checkpoints(paths: Iterable[PurePath]) -> None:
    """Remove several checkpoints with `remove_checkpoint`; damaged and incomplete ones are kept."""
    for path in filter(is_committed, paths):
        remove_checkpoint(path)


def refuse_foreign_path(path: PurePath) -> None:
    """Refuse to overwrite a directory that has the path of a checkpoint but was never a checkpoint.

    Raises:
        CheckpointError: The directory holds other files.
    """
    with explain_read_errors(path):
        was_checkpoint = SAVED_NAME.fullmatch(path.name) and (not is_uncommitted(path) or is_checkpoint_directory(path))
    if not was_checkpoint:
        raise CheckpointError(
            f"{path} exists and is not a checkpoint, so Lumen does not replace the directory. Choose a different name."
        )


def set_aside_damaged(path: PurePath) -> PurePath:
    """Rename a damaged checkpoint to `<name>.damaged-<k>`, so that its name is free and its files are kept.

    In an object store, the leftover of a killed save under that name is removed.

    Raises:
        CheckpointError: The path holds other files, or cannot be renamed.
    """
    refuse_foreign_path(path)
    taken = _list_names(path.parent)
    free_path = next(path.with_name(name) for k in count(1) if (name := f"{path.name}.damaged-{k}") not in taken)
    with explain_storage_errors("rename", path):
        get_storage(path).rename(path, free_path)
    return free_path


def clean_leftovers(folder: PurePath) -> None:
    """Remove leftovers of killed saves; call this only with the run's lock, because an active save looks the same."""
    storage, names = get_storage(folder), sorted(_list_names(folder))
    drafts = storage.find_uncommitted(folder, [folder / name for name in names if SAVED_NAME.fullmatch(name)])
    for leftover in (folder / name for name in names):
        try:
            if (TEMPORARY.fullmatch(leftover.name) or leftover in drafts) and is_checkpoint_directory(leftover):
                storage.remove(leftover)
        except OSError as error:
            warnings.warn(f"cannot remove {leftover}, the leftover of a killed save: {error}.", stacklevel=2)
