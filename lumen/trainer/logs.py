"""Logs of a run: messages of Lumen, the user's loggers and libraries, in the terminal and in `run.log`.

Handlers for loggers other than Lumen's are on the root logger during the run. Existing root handlers receive the same
records as before. The end of the run restores the root logger.
"""

from __future__ import annotations

import logging
import os
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TextIO, final

from lumen.console import ConsoleHandler, LogFile, log_to_files, logger, stderr
from lumen.errors import ConfigError
from lumen.internals.atomic_files import explain_write_errors

_LUMEN_FORMAT, _NAMED_FORMAT = (
    "%(asctime)s %(levelname)s %(message)s",
    "%(asctime)s %(levelname)s %(name)s: %(message)s",
)
_STATUS_ATTRIBUTE = {"is_run_status": True}  # marks a log record as a line for `lumen runs`
STATUS_SUFFIX = ".status"
"""Suffix of the file that keeps the lines for `lumen runs` if `log_format` is set."""


@final
class LogSettings:
    """Levels of loggers, and the line format of log files.

    Args:
        level: DEBUG, INFO, WARNING or ERROR; or a dictionary of levels by logger name, each also for the loggers below.
            The key `root` sets all other loggers, by default INFO. Libraries without a level are shown from
            WARNING.
        form: A format as for `logging.Formatter`; None for Lumen's format.

    Raises:
        ConfigError: The level or the format is invalid.
    """

    def __init__(self, level: str | Mapping[str, str], form: str | None = None) -> None:
        levels = {"root": level} if isinstance(level, str) else {"root": "INFO", **level}
        for name, each in levels.items():
            if not isinstance(logging.getLevelName(each.upper()), int):
                where = "log_level" if isinstance(level, str) else f"log_level.{name}"
                raise ConfigError(f"{where}: expected DEBUG, INFO, WARNING or ERROR, found {each!r}.")
        self.named: dict[str, int] = {name: logging.getLevelName(each.upper()) for name, each in levels.items()}
        self.root, self.form = self.named.pop("root"), form
        try:
            self.formatter = _Formatter(form)
        except ValueError as error:
            raise ConfigError(
                f"log_format: {error}. Write it as for logging.Formatter: '%(name)s %(message)s'."
            ) from None

    @property
    def level(self) -> int:
        """Level of Lumen's logger."""
        return self.named.get("lumen", self.root)

    def should_show(self, record: logging.LogRecord) -> bool:
        """Return True if a record of a logger other than Lumen's is to be shown."""
        name = record.name
        if name == "lumen" or name.startswith("lumen."):
            return False
        while name and name not in self.named:
            name = name.rpartition(".")[0]
        least = self.named[name] if name else max(self.root, logging.WARNING * _is_library_logger(record.name))
        return record.levelno >= least


@final
class _Formatter(logging.Formatter):
    """Formatter of a log file; the default format omits the name of Lumen's logger."""

    def __init__(self, form: str | None) -> None:
        super().__init__(_NAMED_FORMAT if form is None else form)
        self._lumen_formatter = logging.Formatter(_LUMEN_FORMAT)
        self._is_default = form is None

    def format(self, record: logging.LogRecord) -> str:
        """Format one record as text."""
        is_lumen = record.name == logger.name and self._is_default
        return self._lumen_formatter.format(record) if is_lumen else super().format(record)


@cache
def _is_library_logger(name: str) -> bool:
    """Return True if the logger is named after the standard library or an installed package, not the user's code."""
    module = None if name == "__main__" else sys.modules.get(name.partition(".")[0])
    places = [getattr(module, "__file__", None) or "", *getattr(module, "__path__", ())]
    stdlib = sysconfig.get_path("stdlib")
    return any(
        Path(place).is_relative_to(stdlib) or {"site-packages", "dist-packages"} & {*Path(place).parts}
        for place in places
        if place
    )


@final
class _OtherLoggersHandler(logging.Handler):
    """Handler that forwards records of loggers other than Lumen's."""

    def __init__(self, target: logging.Handler, settings: LogSettings) -> None:
        super().__init__()
        self.is_console = isinstance(target, ConsoleHandler)
        self._target, self._process = target, os.getpid()
        self.addFilter(settings.should_show)

    def emit(self, record: logging.LogRecord) -> None:
        """Forward a record; to the terminal only if no other handler shows it there."""
        if not self.is_console:
            self._target.handle(record)
        elif not any(
            _writes_to_terminal(handler) for each in _iterate_ancestors(record.name) for handler in each.handlers
        ):
            if os.getpid() == self._process:
                self._target.handle(record)
            else:  # a forked worker, in which the console's lock may be held forever
                print(self._target.format(record), file=stderr, flush=True)


def _iterate_ancestors(name: str) -> Iterator[logging.Logger]:
    """Yield a logger and all loggers that receive its records."""
    found: logging.Logger | None = logging.getLogger(name)
    while found is not None:
        yield found
        found = found.parent if found.propagate else None


def _writes_to_terminal(handler: logging.Handler) -> bool:
    """Return True if the handler writes to this process's stdout or stderr, as `logging.basicConfig` and rich do."""
    stream = getattr(handler, "stream", None) or getattr(getattr(handler, "console", None), "file", None)
    return stream is not None and stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)


@contextmanager
def _forward_other_loggers(target: logging.Handler, settings: LogSettings) -> Iterator[None]:
    """Set the levels of other loggers and forward their records to `target` within the context."""
    root, level = logging.root, logging.root.level

    def was_shown(record: logging.LogRecord) -> bool:
        return record.levelno >= level or any(
            each.level for each in _iterate_ancestors(record.name) if each is not root
        )

    root_handlers = (
        [handler for handler in root.handlers if not isinstance(handler, _OtherLoggersHandler)]
        if settings.root < level
        else []
    )
    with ExitStack() as closing:
        for name, least in settings.named.items():
            each = logging.getLogger(name)
            closing.callback(each.setLevel, each.level)
            each.setLevel(least)
        closing.enter_context(filter_handlers(root_handlers, was_shown))
        closing.callback(root.setLevel, level)
        root.setLevel(min(level, settings.root))
        closing.enter_context(_add_handler(root, _OtherLoggersHandler(target, settings)))
        yield


@contextmanager
def log_to_console(settings: LogSettings, *, shown: bool = True) -> Iterator[None]:
    """Show messages in the terminal within the context, unless the user's program already shows them.

    Args:
        settings: The level of each logger.
        shown: False in a process that leaves the terminal to another process.
    """
    above = logging.root.handlers if logger.propagate else []
    has_handler = any(not isinstance(handler, logging.NullHandler) for handler in logger.handlers)
    has_shown = has_handler or any(_writes_to_terminal(handler) for handler in above)
    shows_others = any(
        isinstance(handler, _OtherLoggersHandler) and handler.is_console for handler in logging.root.handlers
    )
    with ExitStack() as closing:
        console_handler = ConsoleHandler() if shown and not has_shown else logging.NullHandler()
        closing.enter_context(_configure_handler(console_handler, settings))
        if shown and not shows_others:
            console = ConsoleHandler()
            console.setFormatter(logging.Formatter("%(name)s: %(message)s"))
            closing.enter_context(_forward_other_loggers(console, settings))
        yield


def log_status(message: str, *args: Any, error: BaseException | None = None) -> None:
    """Log the status of a run. The log files have it at every `log_level`, because `lumen runs` reads them.

    Args:
        message: The status, as for a logger.
        args: Values for the placeholders of the message.
        error: The error that ended the run, logged with its traceback. It goes to the files only, because the caller
            shows it.
    """
    level = logging.INFO if error is None else logging.ERROR
    if error is None and logger.isEnabledFor(level):
        logger.log(level, message, *args, extra=_STATUS_ATTRIBUTE)
        return
    trace = None if error is None else (type(error), error, error.__traceback__)
    record = logger.makeRecord(logger.name, level, __file__, 0, message, args, trace, extra=_STATUS_ATTRIBUTE)
    log_to_files(record)


@contextmanager
def log_to_file(path: Path, settings: LogSettings) -> Iterator[None]:
    """Append messages to a file within the context.

    If the user set `log_format`, a second file has the lines for `lumen runs`.

    Raises:
        RunDirectoryError: The file cannot be written.
    """
    with explain_write_errors(path):
        handler = LogFile(path, encoding="utf-8")
    handler.setFormatter(settings.formatter)
    with ExitStack() as closing:
        if settings.form is not None:
            status = LogFile(path.with_suffix(STATUS_SUFFIX), encoding="utf-8")
            status.setFormatter(logging.Formatter(_LUMEN_FORMAT))
            status.addFilter(lambda record: hasattr(record, "is_run_status"))
            closing.enter_context(_configure_handler(status, settings))
        closing.enter_context(_configure_handler(handler, settings))
        closing.enter_context(_forward_other_loggers(handler, settings))
        closing.enter_context(_record_warnings(handler, settings))
        yield


@contextmanager
def _record_warnings(handler: logging.Handler, settings: LogSettings) -> Iterator[None]:
    """Write the warnings of Python's `warnings` to a log file too within the context, by the name `py.warnings`.

    `logging.captureWarnings`, if a user calls it, makes them messages of the logger with this name.
    """
    show_before = warnings.showwarning

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int,
        file: TextIO | None = None, line: str | None = None,
    ) -> None:  # fmt: skip
        text = warnings.formatwarning(message, category, filename, lineno).rstrip()
        record = logging.LogRecord("py.warnings", logging.WARNING, filename, lineno, text, None, None)
        if settings.should_show(record) and handler in logger.handlers:
            handler.handle(record)
        show_before(message, category, filename, lineno, file, line)

    if show_before.__module__ != logging.__name__:
        warnings.showwarning = show
    try:
        yield
    finally:
        if warnings.showwarning is show:
            warnings.showwarning = show_before


@contextmanager
def separate_nested_runs(*, has_files: bool) -> Iterator[None]:
    """Keep the status of this run out of the log files of an outer run, whose hook opened this run.

    Args:
        has_files: True if this run has separate log files; then all its messages stay out of the outer files.
    """
    files: list[logging.Handler] = [handler for handler in logger.handlers if isinstance(handler, LogFile)]
    files += [
        handler
        for handler in logging.root.handlers
        if isinstance(handler, _OtherLoggersHandler) and not handler.is_console
    ]
    with filter_handlers(files, lambda record: not (has_files or hasattr(record, "is_run_status"))):
        yield


@contextmanager
def filter_handlers(
    handlers: list[logging.Handler], should_pass: Callable[[logging.LogRecord], bool]
) -> Iterator[None]:
    """Add a filter to handlers within the context."""
    for handler in handlers:
        handler.addFilter(should_pass)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(should_pass)


@contextmanager
def _configure_handler(handler: logging.Handler, settings: LogSettings) -> Iterator[None]:
    before = logger.level
    logger.setLevel(settings.level)
    with _add_handler(logger, handler):
        try:
            yield
        finally:
            logger.setLevel(before)


@contextmanager
def _add_handler(where: logging.Logger, handler: logging.Handler) -> Iterator[None]:
    where.addHandler(handler)
    try:
        yield
    finally:
        where.removeHandler(handler)
        handler.close()
