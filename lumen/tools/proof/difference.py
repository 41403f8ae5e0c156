"""Compares two records of trainings: what differs first, and by how much."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple, final

import torch

from lumen.data.nested import tensors
from lumen.tools.proof.recorder import KINDS, Key, Recorder, StepTrace

#: Trains from the beginning, or from one checkpoint, with a recorder among its callbacks; the same each time.
Fit = Callable[[Recorder], None]


class Count(NamedTuple):
    """How much of one kind differs in a step.

    Attributes:
        kind: One of `KINDS`.
        differ: Entries that differ, or that only one of the records has.
        of: Entries of both.
        first: The first that differs; "" if none does.
    """

    kind: str
    differ: int
    of: int
    first: str


@final
@dataclass
class Difference:
    """The first thing in which two trainings differ.

    Attributes:
        step: Number of the step, from 1.
        key: The entry of the record that differs.
        a: What the first record has: a number or text as it is, else a digest; None: nothing.
        b: Likewise of the second.
        counts: How much of each kind differs in this step, in the order of `KINDS`.
        absolute: Largest absolute difference of an element; None: it is not known, or there are no numbers.
        relative: Largest difference of an element, relative to the larger of the two.
        element: Where the first element is that differs: of which tensor, and its index.
        values: The two values of that element.
        operator: The first operator that returned something else in there; None: it is not known.
        repeats: Both trainings did the same once more; None: that was not tried.
    """

    step: int
    key: Key
    a: str | None
    b: str | None
    counts: list[Count] = field(default_factory=list)
    absolute: float | None = None
    relative: float | None = None
    element: str | None = None
    values: tuple[float, float] | None = None
    operator: str | None = None
    repeats: bool | None = None

    def __str__(self) -> str:
        """What differs, in a sentence without a full stop."""
        where = f"step {self.step}" + (f", micro-batch {self.key.micro}" if self.key.micro > 0 else "")
        return f"{where}: {KINDS[self.key.kind].format(self.key.place)}"


def first_difference(a: Sequence[StepTrace], b: Sequence[StepTrace]) -> Difference | None:
    """The first entry in which two records differ, in the order in which things happened; None: they are equal.

    A step that only one of them has is no difference: one may have stopped earlier.
    """
    for step, twin in zip(a, b, strict=False):
        for mine, other in zip_longest(step.events.items(), twin.events.items()):
            if mine != other:
                key = other[0] if mine is None or (other is not None and mine[0] in twin.events) else mine[0]
                return Difference(step.step, key, step.events.get(key), twin.events.get(key), _counted(step, twin))
    return None


def _counted(a: StepTrace, b: StepTrace) -> list[Count]:
    counts = []
    for kind in KINDS:
        keys = [key for key in {**a.events, **b.events} if key.kind == kind]
        differ = [key for key in keys if a.events.get(key) != b.events.get(key)]
        if keys:
            counts.append(Count(kind, len(differ), len(keys), differ[0].place if differ else ""))
    return counts


def record(fit: Fit, last: int, **settings: Any) -> list[StepTrace]:
    """Train, and record some steps.

    Args:
        fit: Trains with the recorder that it is given as one of the callbacks.
        last: Number of the last step, after which the training stops.
        **settings: Other arguments of `Recorder`.
    """
    recorder = Recorder(last, **settings)
    fit(recorder)
    return recorder.trace


def compare(a: Fit, b: Fit, last: int, *, first: int = 1) -> Difference | None:
    """Train twice, or four times: where two trainings part, and by how much.

    Args:
        a: Makes one of them.
        b: Makes the other.
        last: Number of the last step to compare.
        first: Number of the first.

    Returns:
        The first difference, with values and the operator, for which both train again up to there; None: there is
        none.
    """
    found = first_difference(record(a, last, first=first), record(b, last, first=first))
    if found is not None:
        settings = {"first": found.step, "operators_at": found.step, "keep": lambda key: key == found.key}
        _measure(found, record(a, found.step, **settings), record(b, found.step, **settings))
    return found


def _measure(found: Difference, a: Sequence[StepTrace], b: Sequence[StepTrace]) -> None:
    """Add values and the operator, which the same step of both shows when it is made again."""
    if not (a and b):
        return
    steps = a[0], b[0]
    mine, other = (step.kept.get(found.key) for step in steps)
    found.repeats = [step.events.get(found.key) for step in steps] == [found.a, found.b]
    if mine is not None and other is not None:
        _compare_values(found, mine, other)
    found.operator = _operator(found.key, *steps)


def _compare_values(found: Difference, a: Any, b: Any) -> None:
    for number, (mine, other) in enumerate(zip(tensors(a), tensors(b), strict=False)):
        if mine.shape != other.shape or mine.layout is not torch.strided or torch.equal(mine, other):
            continue
        left, right = mine.double().reshape(-1), other.double().reshape(-1)
        apart = (left - right).abs()
        larger = torch.maximum(left.abs(), right.abs())
        where = int(((left != right) & ~(left.isnan() & right.isnan())).nonzero()[0])
        found.absolute = max(found.absolute or 0.0, float(apart.max()))
        found.relative = max(found.relative or 0.0, float((apart / larger).nan_to_num(0.0).max()))
        if found.element is None:
            index = [int(each) for each in torch.unravel_index(torch.tensor(where), mine.shape)]
            found.element = f"tensor {number}, {index}" if number else str(index)
            found.values = float(left[where]), float(right[where])
    if found.absolute is not None and math.isnan(found.absolute):
        found.absolute = found.relative = None


def _operator(key: Key, a: StepTrace, b: StepTrace) -> str | None:
    """The first operator in a module's call, or anywhere before, that returned something else or only one calls."""
    inside = key.place if key.kind in ("output", "random") else ""
    for (mine, code), (other, code_of_other) in zip(a.events.items(), b.events.items(), strict=False):
        if (mine, code) != (other, code_of_other):
            called = mine if "operator" in mine.kind else other
            module, _, name = called.place.rpartition(" ")
            is_there = "operator" in called.kind and f"{module}.".startswith(f"{inside}." if inside else "")
            if mine != other or is_there:
                return name if is_there else None
        if mine == key:
            break
    return None
