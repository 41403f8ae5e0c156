"""Numbers that are logged outside of steps on several processes: are they of all samples, or of one process's?"""

from __future__ import annotations

import logging
import math
from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple, final

_log = logging.getLogger("lumen")
_ROUNDING = 1e-6  # relative


class HookValue(NamedTuple):
    """What was logged under one name in a hook around steps, where nothing said how it becomes one value."""

    hook: str
    ranks: Sequence[float]
    is_tensor: bool


@final
class Doubts:
    """Warns once of each name whose value is probably that of a part of the samples.

    Outside of steps a number has no samples that it stands for, so that its mean over the processes is right only if
    they all have the same by nature. Where they differ they do not. Where they are equal it is the mean, the minimum
    and the maximum of all, and wrong as a count or a sum alone: of one that changes with the data they are equal once
    in a while only; of the length of a list they can be equal always, so a whole number of Python's is doubted too.
    """

    def __init__(self) -> None:
        self._told: set[str] = set()

    def look(self, values: Mapping[str, HookValue], known: Container[float]) -> None:
        """Look at the values of an epoch.

        Args:
            values: By name.
            known: Numbers that are the same on all processes.
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
