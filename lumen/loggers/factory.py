"""Chooses the loggers of a run."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

from lumen.errors import ConfigError
from lumen.internals.entry_points import LOGGERS, load, registered
from lumen.loggers.base import Logger
from lumen.loggers.csv import CSVLogger

_OURS = ("csv", "tensorboard", "wandb", "mlflow", "aim")
if TYPE_CHECKING:
    LoggerName: TypeAlias = str
else:  # the names that are there, so that a wrong one is found where types are checked
    LoggerName = Literal[(*_OURS, *(name for name in registered(LOGGERS) if name not in _OURS))]


def as_loggers(given: bool | LoggerName | Logger | Sequence[LoggerName | Logger]) -> list[Logger]:
    """The loggers of a trainer; True stands for the run directory's own record, a name for a logger made without more.

    Raises:
        ConfigError: A logger cannot be made, or its `log_metrics` does not take what it is given.
    """
    if isinstance(given, bool):
        return [CSVLogger()] if given else []
    several = [given] if isinstance(given, str | Logger) else given
    loggers = [each if isinstance(each, Logger) else _named(each) for each in several]
    for logger in loggers:
        takes_epoch(logger)
    return loggers


def takes_epoch(logger: Logger) -> bool:
    """Whether a logger's `log_metrics` is given the epoch.

    Raises:
        ConfigError: It takes neither metrics and step nor these and the epoch.
    """
    signature = inspect.signature(logger.log_metrics)
    for values in (("epoch",), ()) if "epoch" in signature.parameters else ((), ("epoch",)):
        try:
            signature.bind("metrics", "step", *values)
        except TypeError:
            continue
        return bool(values)
    raise ConfigError(
        f"{type(logger).__name__}.log_metrics{signature}: it is given the values and the step, and the epoch if it has "
        "a parameter of that name. Write log_metrics(self, metrics, step) or log_metrics(self, metrics, step, epoch)."
    )


def with_own_record(given: Sequence[Logger]) -> list[Logger]:
    """The loggers that the user gave, after a `CSVLogger`: a run directory always has its own record.

    It comes first, since services are compared with the CSV files, which are cut back before.

    Args:
        given: The user's loggers; if it is empty, the run has no record at all.
    """
    has_own = not given or any(isinstance(each, CSVLogger) for each in given)
    return sorted([*given] if has_own else [CSVLogger(), *given], key=lambda each: not isinstance(each, CSVLogger))


def _named(name: LoggerName) -> Logger:
    if name == "csv":
        return CSVLogger()
    what = f"the logger {name}"
    made = load(LOGGERS, name, what)()
    if not isinstance(made, Logger):
        raise ConfigError(f"{what}: {type(made).__name__} is not derived from lumen.Logger. Derive it.")
    return made
