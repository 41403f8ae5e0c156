"""Progress: how far a run is."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, final

from lumen.data.adapter import Position
from lumen.data.windows import AccumulationWindow

_KINDS: dict[str, type] = {"int": Integral, "bool": bool, "float": Real, "Any": object, "list[list[int]]": list}


@final
@dataclass
class Progress:
    """How far a run is; part of every checkpoint. A step is a completed optimizer update, everywhere.

    Attributes:
        step: Optimizer updates completed.
        epoch: Epochs completed so far.
        samples: Samples consumed of the epoch in progress: the position in its order.
        batches: Micro-batches consumed of the epoch in progress.
        micro_batches: Micro-batches consumed in the whole run; keys dropout.
        in_epoch: The epoch in progress has begun.
        validation_due: This step's validation has not been completed.
        should_stop: A callback or the user asked the run to end; honoured after the minimum of steps and epochs.
        elapsed_s: Seconds of training, over all resumed parts.
        weight_guess: See `LossWeighting`.
        units: Weight of all updates: the tokens, boxes or samples learned from.
        loader: Where the training loader stands, as its adapter says after the last step.
        fits: Samples of the largest part of a micro-batch that fits into memory, on every process; 0: all have fitted.
        left_out: Steps whose first micro-batch lies in one of these ranges (from, to) of the run's are not trained on.
    """

    step: int = 0
    epoch: int = 0
    samples: int = 0
    batches: int = 0
    micro_batches: int = 0
    in_epoch: bool = False
    validation_due: bool = False
    should_stop: bool = False
    elapsed_s: float = 0.0
    weight_guess: float = 0.0
    units: float = 0.0
    loader: Any = None
    fits: int = 0
    left_out: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Check the values, which a checkpoint may give."""
        wrong = [each.name for each in fields(self) if not isinstance(getattr(self, each.name), _KINDS[str(each.type)])]
        if wrong or min(self.step, self.epoch, self.samples, self.batches, self.micro_batches, self.fits) < 0:
            raise ValueError(f"progress has values of another kind, or below 0: {', '.join(wrong)}")

    def become(self, other: Progress) -> None:
        """Stand where another one stands; who holds this one sees it."""
        for item in fields(self):
            setattr(self, item.name, getattr(other, item.name))

    def advance(self, window: AccumulationWindow, *, updated: bool) -> None:
        """Count one window; a step only if the update was not skipped."""
        self.step += updated
        self.samples += window.samples
        self.batches += window.batches
        self.loader = window.state

    def leave_epoch(self) -> None:
        """Stand before the epoch in progress."""
        self.samples = self.batches = 0
        self.loader, self.in_epoch, self.validation_due = None, False, False

    def next_epoch(self) -> None:
        """The epoch in progress is complete."""
        self.epoch += 1
        self.samples = self.batches = 0
        self.in_epoch = False

    @property
    def epochs_begun(self) -> int:
        """The epoch in progress counted from 1; between two of them the one that is complete. What people are told."""
        return self.epoch + self.in_epoch

    @property
    def position(self) -> Position:
        """Where the epoch in progress stands."""
        return Position(self.samples, self.batches, self.loader)
