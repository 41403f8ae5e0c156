"""Which loggers a run has."""

from __future__ import annotations

from collections.abc import Sequence

from lumen.loggers.base import Logger
from lumen.loggers.csv import CSVLogger


def as_loggers(given: bool | Logger | list[Logger]) -> list[Logger]:
    """The loggers of a trainer; True stands for the run directory's own record."""
    if isinstance(given, bool):
        return [CSVLogger()] if given else []
    return [given] if isinstance(given, Logger) else given


def with_own_record(given: Sequence[Logger]) -> list[Logger]:
    """The loggers that a trainer was given, and the run directory's own record: that is there whatever is beside it.

    Args:
        given: Where there is none, there is no record either.
    """
    has_own = not given or any(isinstance(each, CSVLogger) for each in given)
    return [*given] if has_own else [*given, CSVLogger()]
