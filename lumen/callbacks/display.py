"""Displays of progress (terminal, notebook, plain lines) and formatting of their numbers."""

from __future__ import annotations

import atexit
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, final

from lumen import console as terminal

if TYPE_CHECKING:  # rich is imported on first use
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.live import Live as RichLive

_SEPARATOR = " · "
_MAX_BAR_WIDTH = 60
_MIN_BAR_WIDTH = 8
_WIDE_TERMINAL = 120
_MAX_DETAIL_LINES = 3
_MAX_DRAWING_SHARE = 0.01
_NOTEBOOK_INTERVAL_S = 0.5  # The server keeps every picture for a disconnected browser.


@final
@dataclass
class ProgressLine:
    """Progress line of training or of one evaluation.

    Attributes:
        head: The position, such as "epoch 2/30  step 120/900".
        fraction: Filled part of the bar, 0 to 1; None: no bar.
        tail: Time passed and time left.
        values: Values by name: numbers, or formatted strings.
        costs: Speed and memory, formatted.
        best: Name of a value that is the best so far; shown only in lines that stay on the screen.
        stays: True if the line is the last picture, which stays on the screen.
    """

    head: str
    fraction: float | None = None
    tail: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    costs: list[str] = field(default_factory=list)
    best: str | None = None
    stays: bool = False

    def __str__(self) -> str:
        return _SEPARATOR.join(self._list_pieces())

    def wrap(self, width: int) -> str:
        """Return the line in rows of at most `width` characters, which break between values only."""
        return "\n  ".join(_wrap_pieces(self._list_pieces(), width - 2))

    def _list_pieces(self) -> list[str]:
        return [*filter(None, [self.head, *self._format_values(self.best), *self.costs, self.tail])]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.progress_bar import ProgressBar as Bar
        from rich.text import Text

        width, tail = options.max_width, self._format_tail()
        room = min(width - Text(self.head + tail).cell_len - 1, _MAX_BAR_WIDTH)
        if self.fraction is None or room < _MIN_BAR_WIDTH:
            yield Text(self.head + tail, no_wrap=True, overflow="ellipsis")
        else:
            yield Text(self.head + " ", end="")
            yield Bar(total=1.0, completed=min(self.fraction, 1.0), width=room)
            yield Text(tail)
        wide = width >= _WIDE_TERMINAL  # The layout depends on the width only, so lines do not jump as numbers change.
        values = self._format_values(self.best if self.stays else None)
        for pieces in ([*values, *self.costs],) if wide else (values, self.costs):
            lines = _wrap_pieces(pieces, width)
            if len(lines) > _MAX_DETAIL_LINES and not self.stays:
                lines[_MAX_DETAIL_LINES - 1 :] = [lines[_MAX_DETAIL_LINES - 1] + " …"]
            for text in lines:
                yield Text(text, no_wrap=True, overflow="ellipsis")

    def to_html(self) -> str:
        """Return the line as HTML: the bar, and below it values and costs, without line breaks inside a value."""
        from html import escape

        bar = "" if self.fraction is None else f' <progress max="1" value="{self.fraction:.3f}"></progress>'
        pieces = [escape(piece).replace(" ", "&nbsp;") for piece in (*self._format_values(), *self.costs)]
        return f"{escape(self.head)}{bar}{escape(self._format_tail())}\n{_SEPARATOR.join(pieces)}".rstrip()

    def _format_tail(self) -> str:
        percent = "" if self.fraction is None else f" {min(int(100 * self.fraction), 100)} %"
        return percent + (_SEPARATOR + self.tail if self.tail else "")

    def _format_values(self, best: str | None = None) -> list[str]:
        marks = {best: " (best so far)"}
        return [f"{name} {_format_value(value)}{marks.get(name, '')}" for name, value in self.values.items()]


#: Lines of training and of an evaluation within it, with the keys "training" and "evaluation".
Board = dict[str, ProgressLine]


class Display(ABC):
    """Base class of places that show a board.

    Attributes:
        interval_s: Seconds between two updates.
    """

    interval_s: float = math.inf

    @abstractmethod
    def draw(self, board: Board) -> None:
        """Update a live picture; a display of plain lines prints nothing."""

    def show(self, board: Board) -> None:
        """Update a live picture or print a line, at an interval or after an event."""
        self.draw(board)

    def keep(self, board: Board) -> None:
        """Show the board after a validation; a terminal keeps a line of its values above the picture."""
        self.show(board)

    def close(self) -> None:
        """End the display and leave its last picture on the screen."""


@final
class NoDisplay(Display):
    """Display that shows nothing, for all processes but the first."""

    def draw(self, board: Board) -> None:
        """Do nothing."""


@final
class PlainDisplay(Display):
    """Display that prints one line at a time, for files and pipes.

    Args:
        interval_s: Seconds between two lines, >= 0.
    """

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s

    def draw(self, board: Board) -> None:
        """Do nothing: a plain display has no picture."""

    def show(self, board: Board) -> None:
        """Print the line of the evaluation, or otherwise of training."""
        terminal.print_values([*board.values()][-1])


@final
class LiveDisplay(Display):
    """Display at the bottom of a terminal, below all printed text.

    The training loop draws the picture. A separate thread would take time from the loop at any moment, and forked
    loader workers would inherit its locks. The picture disappears when a debugger (`breakpoint()`, pdb, ipdb) asks for
    a command, and returns at the next drawing.

    Args:
        interval_s: Least seconds between two pictures; more where drawing is slow.
    """

    def __init__(self, interval_s: float) -> None:
        self._shortest_interval_s = self.interval_s = interval_s
        self._live: RichLive | None = None
        self._stop_watching_debuggers: Callable[[], None]  # set by the first picture

    def draw(self, board: Board) -> None:
        """Draw; the first call starts the live display."""
        from rich.console import Group
        from rich.live import Live as RichLive

        start = perf_counter()
        if self._live is None:
            self._live = RichLive(
                get_renderable=lambda: Group(*board.values()),
                console=terminal.console,
                auto_refresh=False,
                redirect_stdout=terminal.stdout.isatty(),  # Output to a file or a pipe must not be redirected.
                redirect_stderr=terminal.stderr.isatty(),
            )
            atexit.register(self._live.stop)  # restores the cursor, however the process ends
            self._live.start()
            self._pause_for_debugger()
        self._live.refresh()
        self.interval_s = max(self._shortest_interval_s, (perf_counter() - start) / _MAX_DRAWING_SHARE)

    def keep(self, board: Board) -> None:
        """Print the line of training without its costs above the picture."""
        self.draw(board)
        terminal.print_values(replace(board["training"], costs=[], tail="").wrap(terminal.console.width))

    def _pause_for_debugger(self) -> None:
        """Remove the picture before a debugger of this process asks for its first command."""
        from pdb import Pdb

        interact = Pdb.interaction

        def interaction(debugger: Pdb, *args: Any) -> Any:
            if self._live is not None:
                self._live.transient = True
            self.close()
            debugger.stdout = getattr(debugger.stdout, "rich_proxied_file", debugger.stdout)  # not the proxy of rich
            return interact(debugger, *args)

        Pdb.interaction = interaction  # type: ignore[method-assign, assignment]
        self._stop_watching_debuggers = partial(setattr, Pdb, "interaction", interact)

    def close(self) -> None:
        """Leave the last picture on the screen and release the terminal."""
        if self._live is not None:
            self._stop_watching_debuggers()
            self._live.stop()
            atexit.unregister(self._live.stop)
            self._live = None


@final
class NotebookDisplay(Display):
    """Display in one output below a notebook's cell; each picture replaces the previous one.

    Args:
        interval_s: Seconds between two pictures, at least 0.5.
    """

    def __init__(self, interval_s: float) -> None:
        self.interval_s = max(interval_s, _NOTEBOOK_INTERVAL_S)
        self._output: Any = None

    def draw(self, board: Board) -> None:
        """Draw; the first call creates the output."""
        from IPython.display import display

        text, marked_up = ("\n".join(map(write, board.values())) for write in (str, ProgressLine.to_html))
        picture = {"text/plain": text, "text/html": f'<pre style="white-space: pre-wrap">{marked_up}</pre>'}
        if self._output is None:
            self._output = display(picture, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._output.update(picture, raw=True)


def choose_display(interval_s: float, plain_interval_s: float) -> Display:
    """Return the best display that this process supports: terminal, notebook, or plain lines.

    Args:
        interval_s: Seconds between two pictures of a live display.
        plain_interval_s: Seconds between two plain lines, if no live display is possible.
    """
    if terminal.in_notebook:
        return NotebookDisplay(interval_s)
    can_move_cursor = terminal.console.is_terminal and not terminal.console.is_dumb_terminal
    return LiveDisplay(interval_s) if can_move_cursor else PlainDisplay(plain_interval_s)


def _wrap_pieces(pieces: list[str], width: int) -> list[str]:
    """Join pieces to lines of at most `width` characters, breaking between pieces only."""
    from rich.cells import cell_len

    lines: list[str] = []
    for piece in pieces:
        if lines and cell_len(joined := lines[-1] + _SEPARATOR + piece) <= width:
            lines[-1] = joined
        else:
            lines.append(piece)
    return lines


def _format_value(value: Any) -> str:
    try:
        return value if isinstance(value, str) else format_number(float(value), 4)
    except (TypeError, ValueError, RuntimeError):  # an object of a subclass of the bar, or a tensor of several numbers
        return str(value)


def format_number(value: float, digits: int) -> str:
    """Format a number with `digits` significant digits: 2.731, 0.02731, 12,346, 2.731e-05."""
    if 10**digits <= abs(value) < 1e9:
        return f"{value:,.0f}"
    return f"{value:#.{digits}g}".rstrip(".")


def format_speed(per_s: float, unit: str) -> str:
    """Format a speed > 0: 43.1 steps/s, or 2.50 s/step."""
    return f"{format_number(per_s, 3)} {unit}s/s" if per_s >= 1 else f"{format_number(1 / per_s, 3)} s/{unit}"


def format_megabytes(mb: float) -> str:
    """Format megabytes: 612 MB, 1.9 GB."""
    return f"{mb:.0f} MB" if mb < 1000 else f"{mb / 1000:.1f} GB"


def format_duration(seconds: float) -> str:
    """Format seconds: 0:01:23."""
    return str(timedelta(seconds=round(seconds)))
