"""The record of a training, step by step, and how one is made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch

from lumen.data.nested import convert
from lumen.proof.digests import digest

#: What is recorded of a step, roughly in the order in which it happens.
KINDS = {
    "initial parameter": "the parameters at the start",
    "initial buffer": "the buffers at the start",
    "initial optimizer state": "the optimizer's state at the start",
    "order": "which samples the batch has",
    "batch": "what the batch holds",
    "random": "random numbers drawn",
    "input": "what a module is given",
    "output": "what a module returns",
    "operator": "what an operator returns",
    "loss": "the loss",
    "gradient of output": "the gradient that arrives at a module's output",
    "gradient of input": "the gradient that a module's backward returns",
    "backward operator": "what an operator of the backward returns",
    "gradient": "the gradient of a parameter",
    "clipped gradient": "the gradient of a parameter, clipped",
    "setting": "the optimizer's settings",
    "parameter": "a parameter after the update",
    "buffer": "a buffer after the update",
    "logged": "a logged value",
}


class Key(NamedTuple):
    """What one entry of a record is of.

    Attributes:
        micro: Number of the micro-batch in its step, from 0, on this process; -1: the step as a whole.
        kind: One of `KINDS`.
        place: Name of a module, parameter, buffer, operator, setting or value; "" where there is only one.
        turn: How often there was such an entry before it in the micro-batch.
    """

    micro: int
    kind: str
    place: str
    turn: int


@final
@dataclass
class StepTrace:
    """What one step of a training has computed.

    Attributes:
        step: Its number: updates completed when it is complete, from 1. A skipped update leaves it to the next step.
        epoch: Number of its epoch, from 0.
        events: Digests in the order in which things happened.
        kept: Values of those events that were to be kept, on the CPU.
    """

    step: int
    epoch: int
    events: dict[Key, str] = field(default_factory=dict)
    kept: dict[Key, Any] = field(default_factory=dict)
    _turns: Counter[tuple[int, str, str]] = field(default_factory=Counter, repr=False)

    def note(self, micro: int, kind: str, place: str, value: Any, keep: Callable[[Key], bool] | None = None) -> None:
        """Add a value to the record."""
        turn = self._turns[micro, kind, place]
        self._turns[micro, kind, place] += 1
        key = Key(micro, kind, place, turn)
        self.events[key] = digest(value)
        if keep is not None and keep(key):
            self.kept[key] = convert(value, _copied)


@final
@dataclass
class Trace:
    """The record of a training, or of some steps of it.

    Attributes:
        steps: A record of each step, the earliest first.
    """

    steps: list[StepTrace] = field(default_factory=list)

    def plain(self) -> list[dict[str, Any]]:
        """The record as plain data for JSON, without kept values."""
        return [
            {"step": each.step, "epoch": each.epoch, "events": [[*key, code] for key, code in each.events.items()]}
            for each in self.steps
        ]

    @staticmethod
    def of_plain(record: list[dict[str, Any]]) -> Trace:
        """The trace that `plain` was made of."""
        return Trace(
            [
                StepTrace(step["step"], step["epoch"], {Key(*key): code for *key, code in step["events"]})
                for step in record
            ]
        )


def _copied(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
