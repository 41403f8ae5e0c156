"""Where a moment's checkpoint lies in a run's folder, and how those leave that nobody keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING

from lumen.checkpoint.folder import find_checkpoints, read_info

if TYPE_CHECKING:
    from lumen.trainer import Trainer

Moment = tuple[int, int, int, bool]
Rule = Callable[[list[Path]], set[Path]]


def moment_of(trainer: Trainer) -> Moment:
    """What tells this boundary from all others of a run: a skipped update leaves the step as it was."""
    return trainer.global_step, trainer.run.progress.micro_batches, trainer.current_epoch, trainer.validation_due


def place(trainer: Trainer, folder: Path) -> tuple[Path, bool]:
    """Where in a run's folder this moment's checkpoint lies or will lie, and whether it is saved already.

    A skipped update leaves the step as it was while samples were consumed: a second moment of a step gets `-1`.
    """
    saves, moment = trainer.run.saves, moment_of(trainer)
    if saves.path is not None and saves.path.parent == folder and saves.moment == moment:
        return saves.path, True
    committed = find_checkpoints(folder)
    later = (f"-{number}" for number in count(1))
    for suffix in ("-validating",) if trainer.validation_due else chain(("",), later):
        path = folder / f"step-{trainer.global_step:08d}{suffix}"
        if path not in committed:
            return path, False
        info = read_info(path)
        if trainer.validation_due or (info["micro_batches"], info["epoch"]) == moment[1:3]:
            break
    return path, True


def unkept(rules: Iterable[Rule], newest: Path) -> list[Path]:
    """The checkpoints beside the newest that no rule keeps."""
    found = find_checkpoints(newest.parent)
    kept = {newest}.union(*(rule(found) for rule in rules))
    return [path for path in found if path not in kept]
