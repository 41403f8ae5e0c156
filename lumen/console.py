"""The one console: messages, progress bar and tables share it, so that none overwrites another."""

from __future__ import annotations

import logging
from typing import final

from rich.console import Console

console = Console(stderr=True, soft_wrap=True)
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
