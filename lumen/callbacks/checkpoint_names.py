"""Where a moment's checkpoint lies in a run's folder, and how those leave that nobody keeps."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lumen.checkpoint.folder import find_unread, read_info
from lumen.checkpoint.manifest import is_committed
from lumen.checkpoint.object_store import RemotePath
from lumen.errors import CheckpointDamaged

if TYPE_CHECKING:
    from lumen.trainer.trainer import Trainer

Moment = tuple[int, int, int, bool]
Rule = Callable[[list[Path]], set[Path]]
Saver = TypeVar("Saver")


def decides(given: Mapping[str, Any]) -> bool:
    """Whether a `ModelCheckpoint` with these settings knows which checkpoint is best."""
    return given.get("monitor") is not None and given.get("save_top_k") != 0


def deciding_first(savers: Iterable[Saver]) -> list[Saver]:
    """Callbacks that save, first the one that says for all which checkpoint is best: the first that `decides`."""
    return sorted(savers, key=lambda saver: not decides(vars(saver)))


def moment_of(trainer: Trainer) -> Moment:
    """What tells this boundary from all others of a run: a skipped update leaves the step as it was."""
    return trainer.global_step, trainer.run.progress.micro_batches, trainer.current_epoch, trainer.validation_due


def place(trainer: Trainer, folder: Path) -> tuple[Path, bool]:
    """Where in a run's folder this moment's checkpoint lies or will lie, and whether it is saved already.

    A skipped update leaves the step as it was while samples were consumed: a second moment of a step gets `-1`.
    """
    saves, moment = trainer.run.saves, moment_of(trainer)
    if saves.path is not None and is_same(saves.path.parent, folder) and saves.moment == moment:
        return saves.path, True
    saves.wait_for_removals()
    name = f"step-{trainer.global_step:08d}"
    if trainer.validation_due:
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


def is_same(folder: Path, other: Path) -> bool:
    """Whether two paths, which need not exist, lead to the same place."""
    if isinstance(folder, RemotePath) or isinstance(other, RemotePath):
        return folder == other
    return os.path.realpath(folder) == os.path.realpath(other)


def lost(folder: Path, names: Iterable[str], best: Iterable[str], wanted: int) -> set[str]:
    """Which of some checkpoints are no more.

    Whether one is intact takes reading all of its manifest: that is found out of the best alone.

    Args:
        folder: Where they lay.
        names: Theirs.
        best: Of these, the best first.
        wanted: How many of the best are to be intact.
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


def unkept(rules: Iterable[Rule], newest: Path, found: list[Path]) -> list[Path]:
    """What no rule keeps of checkpoints that lie together.

    Args:
        rules: Each is told of all, oldest first, and returns what it keeps.
        newest: It was committed or verified by this process, so it is kept whatever the others are worth.
        found: All, oldest first.
    """
    found = found[: found.index(newest) + 1] if newest in found else []  # what lies behind it is damaged: no rule's
    kept = {newest}.union(*(rule(found) for rule in rules))
    return [path for path in found if path not in kept]
