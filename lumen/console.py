"""Shared console: messages, progress bar and tables use it, so that none overwrites the others."""

from __future__ import annotations

import builtins
import io
import logging
import os
import sys
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any, Literal, cast, final

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    console: Console

_WIDE = 200  # Width of a table that is written to a file.


@final
class _Stream:
    """Proxy of stdout or stderr that stays usable after its pipe or terminal is closed, so that the run continues.

    After a failed write, the stream drops all output. Otherwise Python would retry at exit, and fail.
    """

    def __init__(self, name: Literal["stdout", "stderr"]) -> None:
        self._name = name

    @property
    def _current_stream(self) -> IO[str]:
        """Present target of the stream, which may be redirected; not the proxy of a live display."""
        stream = getattr(sys, self._name) or io.StringIO()  # None if the stream was closed when the process started.
        return cast("IO[str]", getattr(stream, "rich_proxied_file", stream))

    def write(self, text: str) -> int:
        """Write the text, or drop it."""
        try:
            return self._current_stream.write(text)
        except OSError:
            return self._drop_output()

    def flush(self) -> None:
        """Flush the stream, or drop its output."""
        try:
            self._current_stream.flush()
        except OSError:
            self._drop_output()

    def isatty(self) -> bool:
        """Return True if the stream is a terminal; False for a stream without `isatty`."""
        return bool(getattr(self._current_stream, "isatty", bool)())

    def _drop_output(self) -> int:
        with suppress(OSError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), self._current_stream.fileno())
        return 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._current_stream, name)


stdout, stderr = cast("IO[str]", _Stream("stdout")), cast("IO[str]", _Stream("stderr"))
logger = logging.getLogger("lumen")
logger.addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    """Create `console` on first use, because importing rich takes half as long as importing all of Lumen."""
    if name != "console":
        raise AttributeError(f"module 'lumen.console' has no attribute {name!r}")
    from rich.console import Console

    # In a notebook, print to stdout: the kernel joins this text into one output below the cell, while rich would create
    # one output per line. Kernels and build servers set FORCE_COLOR although they cannot move a cursor, so
    # `force_terminal` ignores the variable.
    globals()["console"] = made = Console(
        file=stdout if in_notebook else stderr,
        soft_wrap=True,
        emoji=False,
        force_jupyter=False,
        force_terminal=None if stderr.isatty() and not in_notebook else False,
    )
    return made


def print_values(*values: Any, sep: str = " ", end: str = "\n") -> None:
    """Print like `print`, above a live progress bar."""
    from lumen.console import console

    console.print(sep.join(map(str, values)), end=end, markup=False, highlight=False)


def _is_notebook() -> bool:
    if not hasattr(builtins, "get_ipython"):  # The first check of rich, done here without importing rich.
        return False
    from rich.console import Console

    return Console().is_jupyter


in_notebook = _is_notebook()


@final
class ConsoleHandler(logging.Handler):
    """Logging handler that prints records on the shared console, above a live progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record; warnings and errors begin with their level."""
        level, text = record.levelno, self.format(record)
        style = "bold red" if level >= logging.ERROR else "yellow" if level >= logging.WARNING else None
        text = text if style is None else f"{record.levelname.lower()}: {text}"
        if "console" not in globals() and not in_notebook and not stderr.isatty():
            print(text, file=stderr, flush=True)  # the same output as rich, without importing rich
            return
        from lumen.console import console

        console.print(text, style=style, markup=False, highlight=False)


@final
class LogFile(logging.FileHandler):
    """Log file of a run. If it cannot be written, as on a full disk, Lumen prints one warning and continues."""

    _is_broken = False

    def handleError(self, record: logging.LogRecord) -> None:
        """Print one warning."""
        if not self._is_broken:
            self._is_broken = True
            print(f"warning: cannot write {self.baseFilename}: {sys.exc_info()[1]}", file=stderr)

    def close(self) -> None:
        """Close the file, and ignore errors."""
        with suppress(OSError):
            super().close()


def log_to_files(record: logging.LogRecord) -> None:
    """Write a record of Lumen's logger to the log files of the run, but not to the terminal."""
    for handler in logger.handlers:
        if isinstance(handler, LogFile):
            handler.handle(record)


def format_bytes(count: int) -> str:
    """Format a number of bytes: `13.4 MB`."""
    value = float(count)
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def render_table(table: Table) -> str:
    """Return a table as text for files: 200 columns wide, without colours."""
    from rich.console import Console

    file = io.StringIO()
    Console(file=file, width=_WIDE, color_system=None, force_terminal=False, force_jupyter=False).print(table)
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())
