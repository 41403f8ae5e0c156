"""The path of a step's checkpoint, and which checkpoints are to be removed."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import torch

from lumen.checkpoint.format.folder import find_unread, read_info
from lumen.checkpoint.format.manifest import is_committed
from lumen.checkpoint.format.storage import as_local
from lumen.errors import CheckpointDamaged

if TYPE_CHECKING:
    from lumen.callbacks.used_trainer import UsedTrainer

Moment = tuple[int, int, int, bool]
Rule = Callable[[list[PurePath]], set[PurePath]]
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
    return _resolved(folder) == _resolved(other)


def _resolved(folder: PurePath) -> PurePath | str:
    """A path without links; a place that is not of this machine has none."""
    local = as_local(folder)
    return folder if local is None else os.path.realpath(local)


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


def unkept(rules: Iterable[Rule], newest: PurePath, found: list[PurePath]) -> list[PurePath]:
    """The checkpoints of a folder that no rule keeps, and those of a validation that was to be done.

    Args:
        rules: Each is called with all checkpoints, oldest first, and returns those that it keeps.
        newest: The checkpoint that this process has committed or verified; it is always kept.
        found: All checkpoints in the folder, oldest first.
    """
    found = found[: found.index(newest) + 1] if newest in found else []  # what lies behind it is damaged: no rule's
    complete = [path for path in found if path == newest or not path.name.endswith("-validating")]
    kept = {newest}.union(*(rule(complete) for rule in rules))
    return [path for path in found if path not in kept]


def keep(
    found: list[PurePath], *, best: Collection[str], keep_last: int, save_top_k: int, keep_every_n_steps: int | None
) -> set[PurePath]:
    """The checkpoints that the rules of a `ModelCheckpoint` keep.

    Args:
        found: Paths of all checkpoints, oldest first.
        best: Names of the `save_top_k` best.
        keep_last: Number of the newest to keep; -1: all.
        save_top_k: Number of the best to keep; -1: all.
        keep_every_n_steps: Keep those whose step is a multiple of it; None: none for that.
    """
    if -1 in (keep_last, save_top_k):
        return set(found)
    kept = set(found[max(0, len(found) - keep_last) :])
    kept |= {path for path in found if path.name in best}
    if keep_every_n_steps is not None:
        kept |= {path for path in found if int(path.name.split("-")[1]) % keep_every_n_steps == 0}
    return kept


def ranked(scores: Mapping[str, float], mode: Literal["min", "max"]) -> dict[str, float]:
    """Scores of checkpoints by name, best first, without NaN; of equal ones the earlier first."""
    sign = 1.0 if mode == "min" else -1.0
    scored = [(name, score) for name, score in scores.items() if not math.isnan(score)]
    return dict(sorted(scored, key=lambda item: (sign * item[1], item[0])))


@overload
def as_score(value: float) -> torch.Tensor: ...
@overload
def as_score(value: None) -> None: ...
def as_score(value: float | None) -> torch.Tensor | None:
    """A value of a monitor as Lightning has it, a tensor without dimensions; None stays None."""
    return None if value is None else torch.tensor(value, dtype=torch.float64)
