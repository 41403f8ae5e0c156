"""Folder of a run's checkpoints, path of a step's checkpoint, and the search for lost checkpoints."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import chain, count
from pathlib import Path, PurePath
from typing import Any, TypeVar

import torch

from lumen.callbacks.callback_trainer import CallbackTrainer
from lumen.checkpoint.format.folder import find_newest_committed, find_unread, read_info
from lumen.checkpoint.format.manifest import is_committed
from lumen.checkpoint.format.storage import as_local_path, as_path_or_url, get_storage, make_directory
from lumen.errors import CheckpointDamaged
from lumen.internals.atomic_files import explain_write_errors, replace_file, write_private

Moment = tuple[int, int, int, bool]
Saver = TypeVar("Saver")
_FOLDERS = "dirpath.json"  # in the run directory, if the run could not use `dirpath`
_OWNER = ".run"  # in `dirpath`: the path of the run directory


def can_rank_checkpoints(settings: Mapping[str, Any]) -> bool:
    """Return True if a `ModelCheckpoint` with these settings ranks its checkpoints."""
    return settings.get("monitor") is not None and settings.get("save_top_k") != 0


def order_checkpoint_callbacks(savers: Iterable[Saver]) -> list[Saver]:
    """Return the savers in order, but first the one that ranks for the whole run (see `can_rank_checkpoints`)."""
    return sorted(savers, key=lambda saver: not can_rank_checkpoints(vars(saver)))


def get_moment(trainer: CallbackTrainer) -> Moment:
    """Return the counters that identify the present moment of a run; a skipped update leaves the step unchanged."""
    return trainer.global_step, trainer.progress.micro_batches, trainer.current_epoch, trainer.progress.validation_due


def locate_checkpoint(trainer: CallbackTrainer, folder: PurePath) -> tuple[PurePath, bool]:
    """Return the path in a folder for a checkpoint of the present moment, and True if it is saved already.

    A skipped update consumes samples but leaves the step number unchanged. A later moment of the same step gets the
    suffix `-1`, `-2` and so on.
    """
    saves, moment = trainer.run.saves, get_moment(trainer)
    if saves.path is not None and is_same_path(saves.path.parent, folder) and saves.moment == moment:
        return saves.path, True
    saves.wait_for_removals()
    name = f"step-{trainer.global_step:08d}"
    if trainer.progress.validation_due:
        path = folder / f"{name}-validating"
        return path, is_committed(path)
    later = -1  # A number is never used twice for moments of one step, even after its checkpoint is removed.
    for path in find_unread(folder, step=trainer.global_step):
        found = re.fullmatch(f"{name}(?:-([0-9]+))?", path.name)
        if found is None:
            continue
        with suppress(CheckpointDamaged):  # A new save under the same name moves a damaged checkpoint away.
            info = read_info(path)
            if (info["micro_batches"], info["epoch"]) == moment[1:3]:
                return path, True
            later = max(later, int(found[1] or 0))
    return folder / (name if later < 0 else f"{name}-{later + 1}"), False


def locate_folder(home: Path, given: PurePath | None) -> PurePath:
    """Return the folder of a run's checkpoints for the `dirpath` of a `ModelCheckpoint`.

    Args:
        home: The run directory, which may not exist.
        given: The argument `dirpath`, or None.
    """
    return home / "checkpoints" if given is None else as_path_or_url(_read_folders(home).get(str(given), given))


def choose_folder(home: Path, given: PurePath, is_running: Callable[[Path], bool]) -> None:
    """Let a new run save in `GIVEN-2` or `GIVEN-3`, ..., if `given` belongs to a different run.

    Args:
        home: The run directory.
        given: The argument `dirpath`.
        is_running: Function that returns True if a live process holds a run directory.
    """
    names = chain([given.name], (f"{given.name}-{number}" for number in count(2)))
    chosen = next(each for name in names if _claim_folder(each := given.with_name(name), home.resolve(), is_running))
    if chosen != given:
        get_storage(chosen).check_writable(chosen)
        write_private(home / _FOLDERS, json.dumps(_read_folders(home) | {str(given): str(chosen)}))


def _claim_folder(folder: PurePath, home: Path, is_running: Callable[[Path], bool]) -> bool:
    """Note that a run saves in a folder. Return False if the folder contains checkpoints or another run saves there.

    In an object store nothing is noted: two runs that begin before either has saved choose the same folder.
    """
    if find_newest_committed(folder) is not None:
        return False
    if (local := as_local_path(folder)) is None:
        return True
    owner, text = local / _OWNER, str(home)
    with explain_write_errors(owner):
        with suppress(FileExistsError):
            make_directory(local)
        try:
            with owner.open("x", encoding="utf-8") as file:  # fails if another run was faster
                file.write(text)
        except FileExistsError:
            noted = owner.read_text(encoding="utf-8")
            if noted != text and (not noted or is_running(Path(noted))):
                return False
            with replace_file(owner) as temporary:
                temporary.write_text(text, encoding="utf-8")
    return True


def _read_folders(home: Path) -> dict[str, str]:
    with suppress(FileNotFoundError):
        return dict(json.loads((home / _FOLDERS).read_text(encoding="utf-8")))
    return {}


def is_same_path(folder: PurePath, other: PurePath) -> bool:
    """Return True if two paths, which need not exist, lead to the same place."""
    places = [(as_local_path(path), path) for path in (folder, other)]  # Only local paths can contain symbolic links.
    return len({path if local is None else os.path.realpath(local) for local, path in places}) == 1


def find_lost_checkpoints(folder: PurePath, names: Iterable[str], best: Iterable[str], wanted: int) -> set[str]:
    """Return the names of checkpoints that are removed or damaged.

    Only the best are checked for damage, because the check reads a whole manifest.

    Args:
        folder: The directory of the checkpoints.
        names: Names of the checkpoints to look for.
        best: The ranked names, best first.
        wanted: Number of best checkpoints that must be intact; the check ends once they are found.
    """
    lost = set(names) - {path.name for path in find_unread(folder)}
    for name in best:
        if name in lost or not is_committed(folder / name):
            lost.add(name)
            continue
        wanted -= 1
        if wanted == 0:
            break
    return lost


def as_score(value: float) -> torch.Tensor:
    """Return a value of a monitor as a tensor without dimensions, as in Lightning."""
    return torch.tensor(value, dtype=torch.float64)
