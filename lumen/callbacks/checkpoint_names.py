"""The path of a step's checkpoint, and which checkpoints are lost."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import PurePath
from typing import Any, TypeVar

import torch

from lumen.callbacks.used_trainer import UsedTrainer
from lumen.checkpoint.format.folder import find_unread, read_info
from lumen.checkpoint.format.manifest import is_committed
from lumen.checkpoint.format.storage import as_local
from lumen.errors import CheckpointDamaged

Moment = tuple[int, int, int, bool]
Saver = TypeVar("Saver")


def decides(given: Mapping[str, Any]) -> bool:
    """Whether a `ModelCheckpoint` with these settings knows which checkpoint is best."""
    return given.get("monitor") is not None and given.get("save_top_k") != 0


def deciding_first(savers: Iterable[Saver]) -> list[Saver]:
    """Callbacks that save, in order, but first the one whose monitor says for all which is best (see `decides`)."""
    return sorted(savers, key=lambda saver: not decides(vars(saver)))


def moment_of(trainer: UsedTrainer) -> Moment:
    """What identifies the present moment of a run: not the step alone, which a skipped update leaves as it was."""
    return trainer.global_step, trainer.progress.micro_batches, trainer.current_epoch, trainer.progress.validation_due


def place(trainer: UsedTrainer, folder: PurePath) -> tuple[PurePath, bool]:
    """The path in a folder at which the present moment is or will be saved, and whether it is saved already.

    A skipped update leaves the step as it was while samples were consumed: a second moment of a step gets `-1`.
    """
    saves, moment = trainer.run.saves, moment_of(trainer)
    if saves.path is not None and is_same(saves.path.parent, folder) and saves.moment == moment:
        return saves.path, True
    saves.wait_for_removals()
    name = f"step-{trainer.global_step:08d}"
    if trainer.progress.validation_due:
        path = folder / f"{name}-validating"
        return path, is_committed(path)
    later = -1  # the numbers of this step's moments never come again, even when a checkpoint of one is removed
    for path in find_unread(folder, step=trainer.global_step):
        found = re.fullmatch(f"{name}(?:-([0-9]+))?", path.name)
        if found is None:
            continue
        with suppress(CheckpointDamaged):  # a save under its name sets it aside
            info = read_info(path)
            if (info["micro_batches"], info["epoch"]) == moment[1:3]:
                return path, True
            later = max(later, int(found[1] or 0))
    return folder / (name if later < 0 else f"{name}-{later + 1}"), False


def is_same(folder: PurePath, other: PurePath) -> bool:
    """Whether two paths, which need not exist, lead to the same place."""
    places = [(as_local(path), path) for path in (folder, other)]  # A place that is not of this machine has no links.
    return len({path if local is None else os.path.realpath(local) for local, path in places}) == 1


def lost(folder: PurePath, names: Iterable[str], best: Iterable[str], wanted: int) -> set[str]:
    """Names of checkpoints that have gone or are damaged.

    Only the best are checked for damage, since that takes reading a whole manifest.

    Args:
        folder: The directory they were saved in.
        names: Names of the checkpoints to look for.
        best: The names among these that are ranked, the best first.
        wanted: Number of the best that are to be intact; the check ends when they are found.
    """
    gone = set(names) - {path.name for path in find_unread(folder)}
    for name in best:
        if name in gone or not is_committed(folder / name):
            gone.add(name)
            continue
        wanted -= 1
        if wanted == 0:
            break
    return gone


def as_score(value: float) -> torch.Tensor:
    """Return a value of a monitor as Lightning has it, a tensor without dimensions."""
    return torch.tensor(value, dtype=torch.float64)
