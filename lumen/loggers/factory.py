"""Choice of a run's loggers."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from lumen.console import logger as _log
from lumen.errors import ConfigError
from lumen.internals.entry_points import LOGGERS, list_entry_points, load_entry_point
from lumen.loggers.base import Logger, RunDirectoryLogger
from lumen.loggers.csv import CSVLogger

DEFAULT_ROOT = "runs"
"""Default parent of run directories."""
_BUILT_IN = ("csv", "tensorboard", "wandb", "mlflow", "aim")
if TYPE_CHECKING:
    LoggerName: TypeAlias = str
else:  # At run time the type lists all names, so that type checks of the config find a wrong name.
    LoggerName = Literal[(*_BUILT_IN, *(name for name in list_entry_points(LOGGERS) if name not in _BUILT_IN))]


def as_loggers(value: bool | LoggerName | Logger | Sequence[LoggerName | Logger]) -> list[Logger]:
    """Return the loggers of a trainer. True means a `CSVLogger`; a name means a logger with default arguments.

    Raises:
        ConfigError: A logger cannot be created, or its `log_metrics` has a wrong signature.
    """
    if isinstance(value, bool):
        return [CSVLogger()] if value else []
    several = [value] if isinstance(value, str | Logger) else value
    loggers = [each if isinstance(each, Logger) else _make_named_logger(each) for each in several]
    for logger in loggers:
        takes_epoch(logger)
    return loggers


def choose_place(loggers: Sequence[Logger], directory: Path, name: str | None) -> tuple[Path, str | None]:
    """Return the parent of the run directory and the name of the run.

    Args:
        loggers: Loggers, whose first choice fills in what the trainer does not set.
        directory: The trainer's `default_root_dir`.
        name: The trainer's `name`, or None.
    """
    places = [each.chosen_place for each in loggers if isinstance(each, RunDirectoryLogger)]
    chosen_directory, chosen_name = next((each for each in places if any(each)), (None, None))
    chosen_name = (chosen_name or "").strip("/") or None  # Lightning's users also write "csv/".
    if directory != Path(DEFAULT_ROOT) and chosen_directory not in (None, directory):
        _log.warning("a logger's save_dir %s is not used: Trainer has default_root_dir=%s", chosen_directory, directory)
        chosen_directory = None
    if chosen_name is not None and not (name or chosen_name).startswith(chosen_name):  # The name may be NAME-2.
        _log.warning("a logger's name %r is not used: Trainer has name=%r", chosen_name, name)
    return chosen_directory or directory, chosen_name if name is None else name


def takes_epoch(logger: Logger) -> bool:
    """Return True if a logger's `log_metrics` has a parameter `epoch`.

    Raises:
        ConfigError: The method takes neither (metrics, step) nor (metrics, step, epoch).
    """
    signature = inspect.signature(logger.log_metrics)
    for values in (("epoch",), ()) if "epoch" in signature.parameters else ((), ("epoch",)):
        try:
            signature.bind("metrics", "step", *values)
        except TypeError:
            continue
        return bool(values)
    raise ConfigError(
        f"{type(logger).__name__}.log_metrics has the signature {signature}. "
        "Write log_metrics(self, metrics, step) or log_metrics(self, metrics, step, epoch)."
    )


def add_csv_logger(loggers: Sequence[Logger]) -> list[Logger]:
    """Return the user's loggers with a `CSVLogger` before them, unless they include one.

    The `CSVLogger` is first because its files are cut back on resume, and services then compare their records with
    them.

    Args:
        loggers: The user's loggers; if there are none, no logger is added.
    """
    is_complete = not loggers or any(isinstance(each, CSVLogger) for each in loggers)
    return sorted(
        [*loggers] if is_complete else [CSVLogger(), *loggers], key=lambda each: not isinstance(each, CSVLogger)
    )


def _make_named_logger(name: LoggerName) -> Logger:
    if name == "csv":
        return CSVLogger()
    label = f"the logger {name}"
    made = load_entry_point(LOGGERS, name, label)()
    if not isinstance(made, Logger):
        raise ConfigError(f"{label}: {type(made).__name__} is not a logger. Derive it from lumen.Logger.")
    return made
