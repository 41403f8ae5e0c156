"""What the samples say: ratios to the loop by hand, and whether a system computed the same."""

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
    """A system in a case.

    Attributes:
        case: Its name.
        system: Its name.
        value: The best measured: of an epoch of which every turn is the fastest of all epochs; of `lost_s`, which is a
            difference, the median.
        added: Median of what it takes more than the loop by hand of the same epoch, in the same unit.
        best: The value divided by the one by hand; not a number for a difference, as the next three.
        quartiles: Of the ratios to the loop by hand of the same epoch, lowest first; the second is their median.
        trouble: Why there are no figures: it computed something else, failed, is not installed, or the case is stale.
    """

    case: str
    system: str
    value: float = float("nan")
    added: float = float("nan")
    best: float = float("nan")
    quartiles: tuple[float, float, float] = (float("nan"),) * 3
    trouble: str | None = None


def stale(name: str, found: dict[str, Any]) -> bool:
    """Whether what was measured is not what the case is today."""
    return found.get("definition") != CASES[name].definition


def rows_of(name: str, found: dict[str, Any], measure: Measure | None = None) -> Iterator[Row]:
    """The rows of a case.

    Args:
        name: Of the case.
        found: Its part of `results.json`.
        measure: What to compare; default: the case's.
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
    """Figures of single turns as those of epochs."""
    return [figures[begin : begin + turns] for begin in range(0, len(figures), turns)]


def _best(rounds: list[list[list[float]]]) -> float:
    """The mean of an epoch of which every turn is the fastest of its kind: what a busy machine disturbs least."""
    return statistics.mean(min(turns) for turns in zip(*chain.from_iterable(rounds), strict=True))


def refusal(case: Case, system: str, samples: dict[str, Any]) -> str | None:
    """Why a system's sample does not count: it failed, or it is not of the same computation as the loop by hand.

    Args:
        case: What was done.
        system: By whom.
        samples: Those of the round. Where systems use the fused optimizer and the loop by hand does not, they are
            compared with the loop by hand that does, and only that one has a tolerance.
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
