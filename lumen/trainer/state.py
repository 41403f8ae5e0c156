"""TrainerState: which of its four runs a trainer makes, and how far that is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

Status = Literal["initializing", "running", "finished", "interrupted"]
#: Lightning's names of what a run does at a moment, by Lumen's.
_STAGES = {"fit": "train", "sanity": "sanity_check"}


@final
@dataclass(frozen=True)
class TrainerState:
    """What a trainer does, in plain words, which compare equal to Lightning's enumerations.

    Attributes:
        status: "initializing" before the first run, "running", "finished"; "interrupted" by an error or a stop request.
        fn: The call that is running or was the last one: "fit", "validate", "test" or "predict"; None before it.
        stage: What it does now: "train", "sanity_check", "validate", "test" or "predict"; None when it is over.
    """

    status: Status
    fn: str | None
    stage: str | None

    @property
    def finished(self) -> bool:
        """The last run has ended as it should."""
        return self.status == "finished"

    @property
    def stopped(self) -> bool:
        """No run is in progress, but there was one."""
        return self.status in ("finished", "interrupted")


def stage_name(stage: str) -> str | None:
    """Lightning's name of a stage of a run; None for "", which is that of a run that is over."""
    return _STAGES.get(stage, stage) or None
