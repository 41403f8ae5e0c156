"""What is said in a run: in the terminal and in `run.log`, by Lumen, by the user's loggers and by libraries.

Handlers for the loggers of others hang on the root while the run lasts. What the root had before, hears what it heard
before, and all of it is put back.
"""

from __future__ import annotations

import logging
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, final

from lumen.console import ConsoleHandler, logger, stderr
from lumen.errors import ConfigError
from lumen.internals.whole_files import explained_writing

_OWN_FORMAT, _OTHERS_FORMAT = "%(asctime)s %(levelname)s %(message)s", "%(asctime)s %(levelname)s %(name)s: %(message)s"
_TELLS_HOW_IT_STANDS = {"tells_how_it_stands": True}
STATUS_SUFFIX = ".status"
"""Suffix of the file that keeps the lines for `lumen runs` if `log_format` is set."""


@final
class LogSettings:
    """What is heard of which logger, and how a line of a log file is written.

    Args:
        level: DEBUG, INFO, WARNING or ERROR; or a level for each logger of some names and those below them, in which
            `root` is all others, by default INFO. Without a level of its own a library is heard from WARNING.
        form: As for `logging.Formatter`; None for Lumen's.

    Raises:
        ConfigError: There is no such level or format.
    """

    def __init__(self, level: str | Mapping[str, str], form: str | None = None) -> None:
        given = {"root": level} if isinstance(level, str) else {"root": "INFO", **level}
        for name, each in given.items():
            if not isinstance(logging.getLevelName(each.upper()), int):
                where = "log_level" if isinstance(level, str) else f"log_level.{name}"
                raise ConfigError(f"{where}: expected DEBUG, INFO, WARNING or ERROR, found {each!r}.")
        self.named: dict[str, int] = {name: logging.getLevelName(each.upper()) for name, each in given.items()}
        self.root, self.form = self.named.pop("root"), form
        try:
            self.formatter = _Formatter(form)
        except ValueError as error:
            raise ConfigError(
                f"log_format: {error}. Write it as for logging.Formatter: '%(name)s %(message)s'."
            ) from None

    @property
    def own(self) -> int:
        """Lumen's level."""
        return self.named.get("lumen", self.root)

    def hear(self, record: logging.LogRecord) -> bool:
        """Whether a record of a logger that is not Lumen's is one to show."""
        name = record.name
        if name == "lumen" or name.startswith("lumen."):
            return False
        while name and name not in self.named:
            name = name.rpartition(".")[0]
        least = self.named[name] if name else max(self.root, logging.WARNING * _is_of_a_library(record.name))
        return record.levelno >= least


@final
class _Formatter(logging.Formatter):
    """Formatter of a log file; in the default format only loggers other than Lumen's are named."""

    def __init__(self, form: str | None) -> None:
        super().__init__(_OTHERS_FORMAT if form is None else form)
        self._own = logging.Formatter(_OWN_FORMAT)
        self._is_default = form is None

    def format(self, record: logging.LogRecord) -> str:
        """Format one record as text."""
        is_own = record.name == logger.name and self._is_default
        return self._own.format(record) if is_own else super().format(record)


@cache
def _is_of_a_library(name: str) -> bool:
    """Whether a logger is named after what is installed, and is not the user's."""
    module = None if name == "__main__" else sys.modules.get(name.partition(".")[0])
    places = [getattr(module, "__file__", None) or "", *getattr(module, "__path__", ())]
    own = sysconfig.get_path("stdlib")
    return any(
        Path(place).is_relative_to(own) or {"site-packages", "dist-packages"} & {*Path(place).parts}
        for place in places
        if place
    )


@final
class _Others(logging.Handler):
    """Passes on what loggers say that are not Lumen's."""

    def __init__(self, target: logging.Handler, settings: LogSettings) -> None:
        super().__init__()
        self.is_console = isinstance(target, ConsoleHandler)
        self._target, self._process = target, os.getpid()
        self.addFilter(settings.hear)

    def emit(self, record: logging.LogRecord) -> None:
        """Pass it on, to the terminal only if nobody else shows it there."""
        if not self.is_console:
            self._target.handle(record)
        elif not any(_is_on_the_terminal(handler) for each in _above(record.name) for handler in each.handlers):
            if os.getpid() == self._process:
                self._target.handle(record)
            else:  # a forked worker: the console's lock may be held for ever there
                print(self._target.format(record), file=stderr, flush=True)


def _above(name: str) -> Iterator[logging.Logger]:
    """A logger and all those that get its records."""
    found: logging.Logger | None = logging.getLogger(name)
    while found is not None:
        yield found
        found = found.parent if found.propagate else None


def _is_on_the_terminal(handler: logging.Handler) -> bool:
    """Whether it writes where this process does: that of `logging.basicConfig`, or rich's; no file, no test's."""
    stream = getattr(handler, "stream", None) or getattr(getattr(handler, "console", None), "file", None)
    return stream is not None and stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)


@contextmanager
def _of_others(target: logging.Handler, settings: LogSettings) -> Iterator[None]:
    """Let loggers say what is to be heard, and pass on what is not Lumen's."""
    root, level = logging.root, logging.root.level

    def was_heard(record: logging.LogRecord) -> bool:
        return record.levelno >= level or any(each.level for each in _above(record.name) if each is not root)

    theirs = [handler for handler in root.handlers if not isinstance(handler, _Others)] if settings.root < level else []
    with ExitStack() as closing:
        for name, least in settings.named.items():
            each = logging.getLogger(name)
            closing.callback(each.setLevel, each.level)
            each.setLevel(least)
        closing.enter_context(filtered(theirs, was_heard))
        closing.callback(root.setLevel, level)
        root.setLevel(min(level, settings.root))
        closing.enter_context(_added(root, _Others(target, settings)))
        yield


@contextmanager
def console_log(settings: LogSettings, *, shown: bool = True) -> Iterator[None]:
    """Show what is said in the terminal; in the manner of the user's program where it shows that already.

    Args:
        settings: From which level each logger is heard.
        shown: False in a process that leaves the terminal to another one.
    """
    above = logging.root.handlers if logger.propagate else []
    listened = any(not isinstance(handler, logging.NullHandler) for handler in logger.handlers)
    has_shown = listened or any(_is_on_the_terminal(handler) for handler in above)
    others_shown = any(isinstance(handler, _Others) and handler.is_console for handler in logging.root.handlers)
    with ExitStack() as closing:
        own = ConsoleHandler() if shown and not has_shown else logging.NullHandler()
        closing.enter_context(_handler(own, settings))
        if shown and not others_shown:
            console = ConsoleHandler()
            console.setFormatter(logging.Formatter("%(name)s: %(message)s"))
            closing.enter_context(_of_others(console, settings))
        yield


@final
class _LogFile(logging.FileHandler):
    """A log of a run. Where it cannot be written, on a full disk for example, that is said once, and nothing ends."""

    _is_broken = False

    def handleError(self, record: logging.LogRecord) -> None:
        """Say it, in one line."""
        if not self._is_broken:
            self._is_broken = True
            print(f"warning: {self.baseFilename} cannot be written: {sys.exc_info()[1]}", file=stderr)

    def close(self) -> None:
        """Close the file; what it cannot take any more is lost."""
        with suppress(OSError):
            super().close()


def record(message: str, *args: Any, error: BaseException | None = None) -> None:
    """Say how a run stands. Its log files have it whatever `log_level` is: `lumen runs` reads them.

    Args:
        message: How, as for a logger.
        args: Values for the placeholders of the message.
        error: What has failed, with its traceback: only for the files, since whoever gets the error shows it.
    """
    level = logging.INFO if error is None else logging.ERROR
    if error is None and logger.isEnabledFor(level):
        logger.log(level, message, *args, extra=_TELLS_HOW_IT_STANDS)
        return
    trace = None if error is None else (type(error), error, error.__traceback__)
    said = logger.makeRecord(logger.name, level, __file__, 0, message, args, trace, extra=_TELLS_HOW_IT_STANDS)
    for handler in logger.handlers:
        if isinstance(handler, _LogFile):
            handler.handle(said)


@contextmanager
def log_file(path: Path, settings: LogSettings) -> Iterator[None]:
    """Append messages to a file, and with a format of the user the lines that `lumen runs` reads to a second file.

    Raises:
        RunDirectoryError: The file cannot be written.
    """
    with explained_writing(path):
        handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(settings.formatter)
    with ExitStack() as closing:
        if settings.form is not None:
            status = _LogFile(path.with_suffix(STATUS_SUFFIX), encoding="utf-8")
            status.setFormatter(logging.Formatter(_OWN_FORMAT))
            status.addFilter(lambda record: hasattr(record, "tells_how_it_stands"))
            closing.enter_context(_handler(status, settings))
        closing.enter_context(_handler(handler, settings))
        closing.enter_context(_of_others(handler, settings))
        yield


@contextmanager
def apart_from_others(*, has_files: bool) -> Iterator[None]:
    """The context of a run: how it stands is not in the files of the run in whose hook it is.

    Args:
        has_files: It has log files of its own: then nothing of it is in those of the other.
    """
    files: list[logging.Handler] = [handler for handler in logger.handlers if isinstance(handler, _LogFile)]
    files += [handler for handler in logging.root.handlers if isinstance(handler, _Others) and not handler.is_console]
    with filtered(files, lambda record: not (has_files or hasattr(record, "tells_how_it_stands"))):
        yield


@contextmanager
def filtered(handlers: list[logging.Handler], is_heard: Callable[[logging.LogRecord], bool]) -> Iterator[None]:
    """The context in which handlers get only the records that a filter lets through."""
    for handler in handlers:
        handler.addFilter(is_heard)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(is_heard)


@contextmanager
def _handler(handler: logging.Handler, settings: LogSettings) -> Iterator[None]:
    before = logger.level
    logger.setLevel(settings.own)
    with _added(logger, handler):
        try:
            yield
        finally:
            logger.setLevel(before)


@contextmanager
def _added(where: logging.Logger, handler: logging.Handler) -> Iterator[None]:
    where.addHandler(handler)
    try:
        yield
    finally:
        where.removeHandler(handler)
        handler.close()
