"""The one console: messages, progress bar and tables share it, so that none overwrites another."""

from __future__ import annotations

import logging
import sys
from typing import final

from rich.console import Console

in_notebook = Console().is_jupyter
# What a kernel writes to stdout flows into one output below the cell; printed rich's way each line would be an output
# of its own. FORCE_COLOR, which kernels and build servers set, does not make a terminal of what has no cursor to move.
console = Console(
    stderr=not in_notebook,
    soft_wrap=True,
    force_jupyter=False,
    force_terminal=None if sys.stderr.isatty() and not in_notebook else False,
)
logger = logging.getLogger("lumen")
logger.addHandler(logging.NullHandler())


@final
class ConsoleHandler(logging.Handler):
    """Prints log records on the shared console, above a live progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record; warnings and errors carry their level."""
        level = record.levelno
        text = self.format(record)
        if level >= logging.WARNING:
            style = "bold red" if level >= logging.ERROR else "yellow"
            console.print(f"{record.levelname.lower()}: {text}", style=style, markup=False, highlight=False)
        else:
            console.print(text, markup=False, highlight=False)
