"""What a run monitors, and whether a value of it is the best so far."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, final

from lumen.callbacks.early_stopping import EarlyStopping

if TYPE_CHECKING:
    from lumen.trainer.trainer import Trainer


class Monitored(NamedTuple):
    """A logged name that says how good a run is.

    Attributes:
        name: Under which it is logged.
        mode: "min": smaller is better; "max": larger is better.
        best: Its best value so far; None: it had none.
    """

    name: str
    mode: str
    best: float | None


def monitored(trainer: Trainer) -> Monitored | None:
    """What the `ModelCheckpoint` of a run that decides monitors, else its first `EarlyStopping`; None if nobody does.

    Args:
        trainer: One that is in `fit`, with all its callbacks.
    """
    saver = trainer.checkpoint_callback
    if saver is not None and saver.monitor is not None:
        score = saver.best_model_score
        return Monitored(saver.monitor, saver.mode, None if score is None else float(score))
    stopper = next((each for each in trainer.callbacks if isinstance(each, EarlyStopping)), None)
    if stopper is None:
        return None
    best = float(stopper.best_score)
    return Monitored(stopper.monitor, stopper.mode, best if math.isfinite(best) else None)


@final
class BestSoFar:
    """Follows the values of what a run monitors.

    Args:
        found: What that is, with the best value of the run's earlier parts; None: nothing is monitored.

    Attributes:
        name: The monitor; None: there is none.
    """

    def __init__(self, found: Monitored | None) -> None:
        self.name = None if found is None else found.name
        self._sign = -1.0 if found is not None and found.mode == "max" else 1.0
        self._best = None if found is None else found.best

    def is_here(self, values: Mapping[str, float]) -> bool:
        """Whether new values have the best one of the monitor so far."""
        value = math.nan if self.name is None else values.get(self.name, math.nan)
        if math.isnan(value) or (self._best is not None and self._sign * value >= self._sign * self._best):
            return False
        self._best = value
        return True
