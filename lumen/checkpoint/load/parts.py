"""The parts of a checkpoint that a run can resume from, named by `Trainer(resume_parts=...)`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias, get_args

from lumen.checkpoint.format.reader import Checkpoint
from lumen.errors import ConfigError

Part: TypeAlias = Literal["model", "optimizer", "schedulers", "progress", "data"]
PARTS: frozenset[Part] = frozenset(get_args(Part))


def choose_parts(given: Iterable[str] | None, resume: str | None) -> frozenset[Part]:
    """The parts of a checkpoint that a run is to resume from.

    Raises:
        ConfigError: There is no such part, or the choice contradicts `resume`.
    """
    if given is None:
        return PARTS
    chosen = frozenset(part for part in PARTS if part in given)
    if not chosen or set(given) - PARTS:
        raise ConfigError(f"resume_parts: expected some of {', '.join(get_args(Part))}; found {given}.")
    if resume in (None, "auto", "last"):
        raise ConfigError(
            f'resume_parts says what a new run takes over from "best" or a path, but resume is {resume}: a run that '
            "stays in its directory goes on exactly. Set resume to the run's path, or leave resume_parts out."
        )
    if "data" in chosen and "progress" not in chosen:
        raise ConfigError(
            "resume_parts: data is a position within the epoch that progress counts. Add progress, or leave out data."
        )
    return chosen


def without(checkpoint: Checkpoint, *parts: str) -> str:
    """Advice: the setting that resumes from all parts but some."""
    rest = ", ".join(each for each in get_args(Part) if each not in parts)
    return f"start a new run from it with resume: {checkpoint.path} and resume_parts: [{rest}]"
