"""Ratios to the loop by hand, and checks that all systems computed the same."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, final

from benchmarks.cases import CASES, SYSTEMS, Case, Measure


@final
@dataclass(frozen=True)
class Row:
    """Result of a system in a case.

    Attributes:
        case: Name of the case.
        system: Name of the system.
        value: Best measured value: an epoch of the fastest turns; for `lost_s`, which is a difference, the median.
        added: Median difference from the loop by hand of the same epoch, in the same unit.
        best: The value divided by the value of the loop by hand; NaN for a difference, as the quartiles.
        quartiles: Quartiles of the ratios to the loop by hand of the same epoch, lowest first.
        trouble: Reason for missing figures: different results, an error, not installed, or stale; None with figures.
    """

    case: str
    system: str
    value: float = float("nan")
    added: float = float("nan")
    best: float = float("nan")
    quartiles: tuple[float, float, float] = (float("nan"),) * 3
    trouble: str | None = None


def stale(name: str, found: dict[str, Any]) -> bool:
    """Return True if the case has changed since it was measured."""
    return found.get("definition") != CASES[name].definition


def rows_of(name: str, found: dict[str, Any], measure: Measure | None = None) -> Iterator[Row]:
    """Yield the rows of a case.

    Args:
        name: Name of the case.
        found: The case's part of `results.json`.
        measure: Value to compare. Default: the case's.
    """
    case = CASES[name]
    measure = measure or case.measure
    for system in sorted(found["systems"], key=list(SYSTEMS).index):
        if stale(name, found):
            yield Row(name, system, trouble="stale")
            continue
        pairs = [(samples[system], samples["hand"]) for samples in found["rounds"] if system in samples]
        reasons = (refusal(case, system, samples) for samples in found["rounds"] if system in samples)
        trouble = found["skipped"].get(system) or next(filter(None, reasons), None)
        if trouble or not pairs:
            yield Row(name, system, trouble=trouble or "not measured")
            continue
        turns = found["turns"] if measure in ("cpu_s", "wall_s") else 1
        own, by_hand = ([_epochs(sample[measure], turns) for sample in samples] for samples in zip(*pairs, strict=True))
        means = [
            (statistics.mean(a), statistics.mean(b))
            for epochs in zip(own, by_hand, strict=True)
            for a, b in zip(*epochs, strict=True)
        ]
        added = statistics.median(a - b for a, b in means)
        if measure == "lost_s":
            yield Row(name, system, statistics.median(mean for mean, _ in means), added)
            continue
        best, best_by_hand = _best(own), _best(by_hand)
        ratios = [a / b for a, b in means]
        low, median, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        yield Row(name, system, best, added, best / best_by_hand, (low, median, high))


def _epochs(figures: list[float], turns: int) -> list[list[float]]:
    """Group the figures of turns by epoch."""
    return [figures[begin : begin + turns] for begin in range(0, len(figures), turns)]


def _best(rounds: list[list[list[float]]]) -> float:
    """Return the mean of the fastest turns, which a busy machine disturbs least."""
    return statistics.mean(min(turns) for turns in zip(*chain.from_iterable(rounds), strict=True))


def refusal(case: Case, system: str, samples: dict[str, Any]) -> str | None:
    """Return the reason why a sample does not count: an error, or results different from the loop by hand.

    Args:
        case: The case.
        system: Name of the system.
        samples: The samples of the round. Systems with the fused optimizer are compared with the fused loop by hand;
            only that loop has a tolerance.
    """
    sample, by_hand, tolerance = samples[system], samples["hand"], 0.0
    if isinstance(sample, str) or isinstance(by_hand, str):
        return f"failed: {sample if isinstance(sample, str) else by_hand}"
    if "loss" not in sample:
        return None
    if case.fused == "not by hand" and system not in ("hand", "again"):
        fused = samples.get("hand-fused")
        by_hand, tolerance = (by_hand, case.tolerance) if system == "hand-fused" or not fused else (fused, 0.0)
    elif case.tolerance:
        tolerance = case.tolerance
    loss, expected = (float.fromhex(each["loss"]) for each in (sample, by_hand))
    if not abs(loss - expected) <= tolerance * abs(expected):
        return f"refused: its final loss is {loss!r}, by hand {expected!r}"
    if not tolerance and sample["digest"] != by_hand["digest"]:
        return f"refused: its parameters are {sample['digest']}, by hand {by_hand['digest']} (the last loss is equal)"
    result, expected_result = sample["result"], by_hand["result"]
    if expected_result is not None and (result is None or not abs(result - expected_result) <= 1e-6):
        return f"refused: its result is {result}, by hand {expected_result}"
    return None
