"""Warns of numbers logged outside of steps that differ between processes and have no weight or reduction."""

from __future__ import annotations

import logging
import math
from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple, final

_log = logging.getLogger("lumen")
_ROUNDING = 1e-6  # relative


class HookValue(NamedTuple):
    """The values that all processes have logged under one name outside of steps, without a weight or `reduce_fx`."""

    hook: str
    ranks: Sequence[float]
    is_tensor: bool


@final
class Doubts:
    """Warns once for each name whose value is probably that of a part of the samples only.

    Outside of steps a number stands for no samples, so its mean over the processes is right only if all of them log the
    same number by nature, as one that torchmetrics computed over all. If the numbers differ, the mean is doubtful. If
    they are equal, mean, minimum and maximum are right, but a count or a sum is not; so a Python int (the length of a
    list, say) is doubtful even then.
    """

    def __init__(self) -> None:
        self._told: set[str] = set()

    def look(self, values: Mapping[str, HookValue], known: Container[float]) -> None:
        """Warn of the doubtful ones among the values of an epoch.

        Args:
            values: The values of all processes by name.
            known: Numbers that are the same on all processes by nature, such as computed metrics.
        """
        for name, value in values.items():
            if name not in self._told and _is_doubtful(value, known):
                self._told.add(name)
                _log.warning(
                    "%s logs %r as a number of each process (%s): the value is their mean, whatever samples they stand "
                    'for. Say what it is, by self.log(..., reduce_fx="sum"), "min" or "max"; "mean" if it is the same '
                    "everywhere or the mean is right. For a value over all samples log it in the step, give its "
                    "weight, log a torchmetrics object, or bring the parts together by self.all_gather.",
                    value.hook, name, ", ".join(f"{each:g}" for each in value.ranks[:8]),
                )  # fmt: skip


def _is_doubtful(value: HookValue, known: Container[float]) -> bool:
    first, *others = value.ranks
    if not others:  # nobody else logs it
        return False
    if not all(_are_equal(first, other) for other in others):
        return True
    return not value.is_tensor and first != 0 and first.is_integer() and first not in known


def _are_equal(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_ROUNDING) or (math.isnan(one) and math.isnan(other))
