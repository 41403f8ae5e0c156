"""Chooses the loggers of a run."""

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
    """The loggers that the user gave, with a `CSVLogger` among them: a run directory always has its own record.

    Args:
        given: The user's loggers; if it is empty, the run has no record at all.
    """
    has_own = not given or any(isinstance(each, CSVLogger) for each in given)
    return [*given] if has_own else [*given, CSVLogger()]
