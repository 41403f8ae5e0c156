"""Differences between what two variants have computed: how large, and where the first one is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, final

import torch

from lumen.tools.proof.outcome import OF_MICRO_BATCHES, OF_STEPS, Event, Outcome
from lumen.tools.proof.worker import Result

FLOAT64, FLOAT32 = 1e-10, 1e-5


@final
@dataclass(frozen=True)
class Apart:
    """How two outcomes differ.

    Attributes:
        largest: The largest difference of anything, relative to its norm where that is more than 1.
        at: What differed first, as the reference has it; None: nothing did.
        other: The same as the other one has it; None: it has no such thing.
        bits: Whether any bits differ.
    """

    largest: float = 0.0
    at: Event | None = None
    other: Event | None = None
    bits: bool = False


def compare(reference: Outcome, other: Outcome, tolerance: float, what: Sequence[str] = ()) -> Apart:
    """Compare what both have computed, in the order in which the other one did.

    Args:
        reference: The record that is taken as right.
        other: What is to be shown.
        tolerance: That counts as no difference; 0: the bits must be equal.
        what: What events must be about; default: everything but parts of gradients.
    """
    wanted = set(what or (*OF_MICRO_BATCHES, *OF_STEPS)) - ({"partial"} if not what else set())
    known = {event.key: event for event in reference.events if event.what in wanted}
    largest, bits, at, there = 0.0, False, None, None
    for event in other.events:
        if event.what not in wanted or (expected := known.get(event.key)) is None:
            continue
        if event.digest == expected.digest:
            continue
        bits, size = True, distance(expected, event)
        largest = max(largest, size)
        if at is None and (size > tolerance or tolerance == 0):
            at, there = expected, event
    if at is None:
        at = _missing(known, other, wanted)
        largest = math.inf if at else largest
    return Apart(largest, at, there, bits=bits)


def _missing(known: dict[tuple[int, int, str, str], Event], other: Outcome, wanted: set[str]) -> Event | None:
    """What the reference has of the other one's steps that the other one lacks."""
    have = {event.key for event in other.events}
    steps = {event.step for event in other.events if event.what == "loss" or event.what == "gradient"}
    micro_batches = wanted & set(OF_MICRO_BATCHES)
    for event in known.values():
        if event.what in ("gradient", *micro_batches) and event.step in steps and event.key not in have:
            return event
    return None


def distance(one: Event, other: Event) -> float:
    """The difference of two tensors, from their projections, relative to their norm where that is more than 1."""
    if len(one.numbers) != len(other.numbers):
        return math.inf
    if any(not math.isfinite(number) for number in (*one.numbers, *other.numbers)):
        return 0.0 if repr(one.numbers) == repr(other.numbers) else math.inf
    apart = max(abs(a - b) for a, b in zip(one.numbers, other.numbers, strict=True))
    return apart / max(1.0, one.numbers[0], other.numbers[0])


def merged(result: Result) -> Outcome:
    """What all ranks have computed together: rank 0's steps, everybody's micro-batches."""
    first = result.outcomes[0]
    others = [event for outcome in result.outcomes[1:] for event in outcome.of(*OF_MICRO_BATCHES)]
    by_time = sorted([*first.events, *others], key=lambda event: event.when)
    return replace(
        first,
        events=by_time,
        draws=[draw for outcome in result.outcomes for draw in outcome.draws],
        counts={micro: counts for outcome in result.outcomes for micro, counts in outcome.counts.items()},
    )


@final
class RowsApart(NamedTuple):
    """How the logged values that two outcomes have differ.

    Attributes:
        largest: The largest difference, but for that of `rounded` ones.
        first: Step and name of the first that differs by more than is allowed; None: none does.
        rounded: Names of values that differ by the rounding of float32, which is all that they hold.
    """

    largest: float = 0.0
    first: tuple[int, str] | None = None
    rounded: frozenset[str] = frozenset()


def rows_apart(reference: Outcome, other: Outcome, tolerance: float) -> RowsApart:
    """Compare the logged values that both have; see `is_rounding_of_float32`."""
    known = {(step, name): value for step, values in reference.rows for name, value in values.items()}
    largest, first, rounded = 0.0, None, set[str]()
    for step, values in other.rows:
        for name, value in values.items():
            if (step, name) not in known:
                continue
            size = values_apart(known[step, name], value)
            if size > tolerance > 0 and is_rounding_of_float32(known[step, name], value):
                rounded.add(name)
                continue
            largest = max(largest, size)
            first = first or ((step, name) if size > tolerance else None)
    return RowsApart(largest, first, frozenset(rounded))


def is_rounding_of_float32(one: float, other: float) -> bool:
    """Whether two numbers were computed in float32, whatever their task's precision, and differ by its rounding alone.

    torchmetrics objects sum in it by default. A number that was computed in float64 has more digits than it holds.
    """
    are_counts = float(one).is_integer() and float(other).is_integer()
    in_float32 = all(torch.tensor(each, dtype=torch.float32).item() == each for each in (one, other))
    return in_float32 and not are_counts and values_apart(one, other) <= FLOAT32


def values_apart(one: float, other: float) -> float:
    """The difference of two numbers, relative to them where they are more than 1."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    apart = abs(one - other) / max(1.0, abs(one), abs(other))
    return apart if math.isfinite(apart) else math.inf


_FITS = 1e-6


def cause_of_parts(ours: Outcome, theirs: Outcome) -> str | None:
    """By what weights two gradients add up to that of both batches together, and what in the batches these count.

    The numbers of a gradient are linear in it but for the norm, so that they add up as gradients do.

    Args:
        ours: A step of micro-batches, with what the gradients were after each of them.
        theirs: The same samples in half as many.

    Returns:
        A sentence; None: it is no weighted mean of them.
    """
    micro = sorted({event.micro for event in ours.of("partial") if event.step == 0})[:2]
    joint = sorted({event.micro for event in theirs.of("partial") if event.step == 0})[:1]
    if len(micro) < 2 or not joint:
        return None
    sums = [_vector(ours, number) for number in micro]
    both = _vector(theirs, joint[0])
    names = [name for name in sums[0] if name in sums[1] and name in both]
    first = [number for name in names for number in sums[0][name]]
    second = [b - a for name in names for a, b in zip(sums[0][name], sums[1][name], strict=True)]
    total = [number for name in names for number in both[name]]
    share = _share(first, second, total)
    if share is None:
        return None
    counts = [ours.counts.get(number, {}) for number in micro]
    named = [
        what for what, one in counts[0].items()
        if one and (other := counts[1].get(what)) and what != "samples" and abs(one / (one + other) - share) < _FITS
    ]  # fmt: skip
    one, other = (each.get(named[0] if named else "samples", 0) for each in counts)
    found = f"where {named[0]}: {one} in the first micro-batch, {other} in the second" if named else "of some kind"
    return (
        f"two micro-batches count {share:.4f} and {1 - share:.4f} in the gradient of both together, not one half each: "
        f"the loss is a mean over units {found}. Return (loss, weight) with that count as the weight."
    )


def _vector(outcome: Outcome, micro: int) -> dict[str, tuple[float, ...]]:
    first = (event for event in outcome.of("partial") if (event.step, event.micro) == (0, micro))
    return {event.name: event.numbers[1:] for event in first}


def _share(first: list[float], second: list[float], total: list[float]) -> float | None:
    """The weight w for which 2 w first + 2 (1 - w) second is total: each of the two was counted as one half."""
    apart = [2 * (a - b) for a, b in zip(first, second, strict=True)]
    rest = [t - 2 * b for t, b in zip(total, second, strict=True)]
    square = sum(a * a for a in apart)
    if not square:
        return None
    share = sum(a * r for a, r in zip(apart, rest, strict=True)) / square
    missed = max(abs(r - share * a) for a, r in zip(apart, rest, strict=True))
    fits = missed <= _FITS * max(abs(number) for number in total) and 0 < share < 1
    return share if fits else None
