"""Comparison of two recorded trainings: the first difference, and its size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple, final

import torch

from lumen.data.nested import iterate_tensors
from lumen.tools.proof.recorder import KINDS, Key, Recorder, StepTrace

#: Function that trains with a recorder as a callback, always from the same start or checkpoint.
Fit = Callable[[Recorder], None]


class DifferenceCount(NamedTuple):
    """Number of differences of one kind in a step.

    Attributes:
        kind: A kind in `KINDS`.
        differ: Number of entries that differ or that only one of the records has.
        of: Number of entries in either record.
        first: Place of the first entry that differs, or "".
    """

    kind: str
    differ: int
    of: int
    first: str


@final
@dataclass
class Difference:
    """First difference between two trainings.

    Attributes:
        step: Number of the step, from 1.
        key: The entry of the record that differs.
        a: The entry in the first record: a number or text as text, else a digest; None if missing.
        b: The entry in the second record, in the same form.
        counts: Number of differences of each kind in this step, in the order of `KINDS`.
        absolute: Largest absolute difference of an element, or None if unknown or not numeric.
        relative: Largest difference of an element, relative to the larger of the two values.
        element: Tensor and index of the first element that differs.
        values: The two values of the first element that differs.
        operator: The first operator with a different result in this place, or None if unknown.
        repeats: True if both trainings gave the same results when repeated, or None if not tried.
    """

    step: int
    key: Key
    a: str | None
    b: str | None
    counts: list[DifferenceCount] = field(default_factory=list)
    absolute: float | None = None
    relative: float | None = None
    element: str | None = None
    values: tuple[float, float] | None = None
    operator: str | None = None
    repeats: bool | None = None

    def __str__(self) -> str:
        """Return a description of the difference, without a full stop."""
        where = f"step {self.step}" + (f", micro-batch {self.key.micro}" if self.key.micro > 0 else "")
        return f"{where}: {KINDS[self.key.kind].format(self.key.place)}"


def find_first_difference(a: Sequence[StepTrace], b: Sequence[StepTrace]) -> Difference | None:
    """Return the first difference between two records, in order of computation, or None if they are equal.

    Steps that only one record has do not count as different, because one training may have stopped earlier.
    """
    for step, other_step in zip(a, b, strict=False):
        sizes = [sum(key.kind == "batch" for key in each.events) for each in (step, other_step)]
        if sizes[0] != sizes[1]:
            key = Key(-1, "micro-batches", "", 0)
            return Difference(step.step, key, str(sizes[0]), str(sizes[1]), _count_differences(step, other_step))
        for mine, other in zip_longest(step.events.items(), other_step.events.items()):
            if mine != other:
                key = other[0] if mine is None or (other is not None and mine[0] in other_step.events) else mine[0]
                return Difference(
                    step.step,
                    key,
                    step.events.get(key),
                    other_step.events.get(key),
                    _count_differences(step, other_step),
                )
    return None


def _count_differences(a: StepTrace, b: StepTrace) -> list[DifferenceCount]:
    counts = []
    for kind in KINDS:
        keys = [key for key in {**a.events, **b.events} if key.kind == kind]
        differ = [key for key in keys if a.events.get(key) != b.events.get(key)]
        if keys:
            counts.append(DifferenceCount(kind, len(differ), len(keys), differ[0].place if differ else ""))
    return counts


def record_steps(fit: Fit, last: int, **settings: Any) -> list[StepTrace]:
    """Train, and return the record of steps up to `last`.

    Args:
        fit: Function that trains with the given recorder as one of the callbacks.
        last: Number of the last step, after which the training stops.
        **settings: Other arguments of `Recorder`.
    """
    recorder = Recorder(last, **settings)
    fit(recorder)
    return recorder.trace


def compare_trainings(a: Fit, b: Fit, last: int, *, first: int = 1) -> Difference | None:
    """Run two trainings, compare them, and run both again to measure the first difference.

    Args:
        a: Function that runs the first training.
        b: Function that runs the second training.
        last: Number of the last step to compare.
        first: Number of the first step to compare.

    Returns:
        The first difference, with values and the operator, or None if the trainings are equal.
    """
    found = find_first_difference(record_steps(a, last, first=first), record_steps(b, last, first=first))
    if found is not None and found.key.kind != "micro-batches":
        settings = {"first": found.step, "operators_at": found.step, "keep": lambda key: key == found.key}
        _measure_difference(found, record_steps(a, found.step, **settings), record_steps(b, found.step, **settings))
    return found


def _measure_difference(found: Difference, a: Sequence[StepTrace], b: Sequence[StepTrace]) -> None:
    """Repeat the step in both trainings; record in the difference the operator that differs, and its values."""
    if not (a and b):
        return
    steps = a[0], b[0]
    mine, other = (step.kept.get(found.key) for step in steps)
    found.repeats = [step.events.get(found.key) for step in steps] == [found.a, found.b]
    if mine is not None and other is not None:
        _compare_values(found, mine, other)
    found.operator = _find_operator(found.key, *steps)


def _compare_values(found: Difference, a: Any, b: Any) -> None:
    for number, (mine, other) in enumerate(zip(iterate_tensors(a), iterate_tensors(b), strict=False)):
        if mine.shape != other.shape or mine.layout is not torch.strided or torch.equal(mine, other):
            continue
        left, right = mine.double().reshape(-1), other.double().reshape(-1)
        difference = (left - right).abs()
        larger = torch.maximum(left.abs(), right.abs())
        where = int(((left != right) & ~(left.isnan() & right.isnan())).nonzero()[0])
        found.absolute = max(found.absolute or 0.0, float(difference.max()))
        found.relative = max(found.relative or 0.0, float((difference / larger).nan_to_num(0.0).max()))
        if found.element is None:
            index = [int(each) for each in torch.unravel_index(torch.tensor(where), mine.shape)]
            found.element = f"tensor {number}, {index}" if number else str(index)
            found.values = float(left[where]), float(right[where])
    if found.absolute is not None and math.isnan(found.absolute):
        found.absolute = found.relative = None


def _find_operator(key: Key, a: StepTrace, b: StepTrace) -> str | None:
    """Return the first operator before the entry that differs, only within the entry's module if it has one."""
    module_of_key = key.place if key.kind in ("output", "random") else ""
    for (mine, code), (other, code_of_other) in zip(a.events.items(), b.events.items(), strict=False):
        if (mine, code) != (other, code_of_other):
            called = mine if "operator" in mine.kind else other
            module, _, name = called.place.rpartition(" ")
            is_inside = "operator" in called.kind and f"{module}.".startswith(
                f"{module_of_key}." if module_of_key else ""
            )
            if mine != other or is_inside:
                return name if is_inside else None
        if mine == key:
            break
    return None
