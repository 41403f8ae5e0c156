"""The one console: messages, progress bar and tables share it, so that none overwrites another."""

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

_WIDE = 200  # columns of a table that goes to a file


@final
class _Stream:
    """stdout or stderr, which stays usable when its pipe or terminal is closed: that must not end a run.

    What cannot be written is dropped, and so is all that follows; else Python would try again when it exits, and fail.
    """

    def __init__(self, name: Literal["stdout", "stderr"]) -> None:
        self._name = name

    @property
    def _now(self) -> IO[str]:
        """The stream as it is now, since it may be redirected; below the proxy that a live display puts there."""
        stream = getattr(sys, self._name) or io.StringIO()  # None: the process was started with it closed
        return cast("IO[str]", getattr(stream, "rich_proxied_file", stream))

    def write(self, text: str) -> int:
        """Write, or drop."""
        try:
            return self._now.write(text)
        except OSError:
            return self._drop()

    def flush(self) -> None:
        """Flush, or drop."""
        try:
            self._now.flush()
        except OSError:
            self._drop()

    def isatty(self) -> bool:
        """Whether it is a terminal; False for a stream that has no `isatty`."""
        return bool(getattr(self._now, "isatty", bool)())

    def _drop(self) -> int:
        with suppress(OSError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), self._now.fileno())
        return 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._now, name)


stdout, stderr = cast("IO[str]", _Stream("stdout")), cast("IO[str]", _Stream("stderr"))
logger = logging.getLogger("lumen")
logger.addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    """Create `console` when it is first used: importing rich takes half as long as importing all of Lumen."""
    if name != "console":
        raise AttributeError(f"module 'lumen.console' has no attribute {name!r}")
    from rich.console import Console

    # What a kernel writes to stdout flows into one output below the cell; printed rich's way each line would be an
    # output of its own. FORCE_COLOR, which kernels and build servers set, does not make a terminal of what has no
    # cursor to move.
    globals()["console"] = made = Console(
        file=stdout if in_notebook else stderr,
        soft_wrap=True,
        emoji=False,
        force_jupyter=False,
        force_terminal=None if stderr.isatty() and not in_notebook else False,
    )
    return made


def print_values(*values: Any, sep: str = " ", end: str = "\n") -> None:
    """Print as `print` does, above a live progress bar."""
    from lumen.console import console

    console.print(sep.join(map(str, values)), end=end, markup=False, highlight=False)


def _is_notebook() -> bool:
    if not hasattr(builtins, "get_ipython"):  # what rich asks first
        return False
    from rich.console import Console

    return Console().is_jupyter


in_notebook = _is_notebook()


@final
class ConsoleHandler(logging.Handler):
    """Prints log records on the shared console, above a live progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record; warnings and errors carry their level."""
        level, text = record.levelno, self.format(record)
        style = "bold red" if level >= logging.ERROR else "yellow" if level >= logging.WARNING else None
        text = text if style is None else f"{record.levelname.lower()}: {text}"
        if "console" not in globals() and not in_notebook and not stderr.isatty():
            print(text, file=stderr, flush=True)  # as rich would, without its import
            return
        from lumen.console import console

        console.print(text, style=style, markup=False, highlight=False)


def size(count: int) -> str:
    """Bytes as people write them: `13.4 MB`."""
    value = float(count)
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def as_text(table: Table) -> str:
    """Return a table as it is written to files: 200 columns wide, without colours."""
    from rich.console import Console

    file = io.StringIO()
    Console(file=file, width=_WIDE, color_system=None, force_terminal=False, force_jupyter=False).print(table)
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())
