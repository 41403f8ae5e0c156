"""What somebody sees of an error in their own code: their lines, and how many of libraries lie around them."""

from __future__ import annotations

import re
import traceback
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from lumen.cli import is_verbose
from lumen.console import stderr
from lumen.distributed import worker
from lumen.distributed.culprit import Frame

_HEAD = re.compile(r"(Original )?Traceback \(most recent call last\):")
_FRAME = re.compile(r'  File "(.*)", line (\d+), in (.*)')
_INSIDE = ("    ", "  [Previous line")
_INSTALLED = re.compile(r".*[/\\](?:site|dist)-packages[/\\](\w+)")
_IN_WORKER = re.compile(r"\w+: Caught \w+ in (DataLoader worker process \d+)\.")  # and then comes the worker's own


class _Section(NamedTuple):
    """A traceback of the several that an error may have.

    Attributes:
        frames: Each with the lines that Python shows of it, the outermost first.
        after: The lines that follow: what was raised, its notes, and what leads to the next one.
    """

    frames: list[tuple[Frame, list[str]]]
    after: list[str]


def show(error: BaseException) -> None:
    """Print an error that is none of Lumen's, or leave that to who has started this process.

    The frames of libraries are one line, unless all were asked for or the user has none.
    """
    text = "".join(traceback.format_exception(error))
    lines = text.rstrip("\n").split("\n") if is_verbose() else folded(text)
    if worker.report(error, "\n".join(lines)):
        return
    if not stderr.isatty():
        print(*lines, sep="\n", file=stderr)
        return
    from rich.console import Console

    console = Console(file=stderr, soft_wrap=True, emoji=False)
    for line in lines:
        console.print(line, style=_style(line), markup=False, highlight=False)


def folded(text: str) -> list[str]:
    """The lines of a traceback without the frames of libraries, of which it says how many there were.

    Args:
        text: As Python writes it; a data worker's own is part of the message of what torch raises for it.
    """
    sections = _sections(text)
    own = [frame for section in sections for frame, _ in section.frames if frame.is_users]
    if not own and "\nSyntaxError: " not in text:
        return text.rstrip("\n").split("\n")
    worker_of = _IN_WORKER.search(text)
    lines = [f"Traceback (most recent call last){f', in {worker_of[1]}' if worker_of else ''}:"]
    others = list[str]()
    for number, section in enumerate(sections):
        users = [shown for frame, shown in section.frames if frame.is_users]
        others += [_library(frame) for frame, _ in section.frames if not frame.is_users]
        lines += [line for shown in users for line in shown]
        if others and (users or number == len(sections) - 1):
            lines.append(f"  ... {_counted(others)}; --verbose shows all")
            others = []
        lines += [line for line in section.after if not (worker_of and (not line or _IN_WORKER.fullmatch(line)))]
    return lines


def _sections(text: str) -> list[_Section]:
    sections = [_Section([], [])]
    in_frames = False
    for line in text.rstrip("\n").split("\n"):
        frames, after = sections[-1]
        if _HEAD.fullmatch(line):
            sections.append(_Section([], []))
            in_frames = True
        elif in_frames and (found := _FRAME.fullmatch(line)):
            frames.append((Frame(found[1], int(found[2]), found[3]), [line]))
        elif in_frames and frames and line.startswith(_INSIDE):
            frames[-1][1].append(line)
        else:
            in_frames = False
            after.append(line)
    return sections


def _library(frame: Frame) -> str:
    if frame.is_lumens:
        return "lumen"
    found = _INSTALLED.match(frame.file)
    return found[1] if found else "Python"


def _counted(libraries: Iterable[str]) -> str:
    """How many frames of which libraries, those that there are most of first."""
    counts = Counter(libraries)
    *most, last = [name for name, _ in counts.most_common()]
    total = counts.total()
    return f"{total} frame{'s' if total > 1 else ''} of {' and '.join(filter(None, [', '.join(most), last]))}"


def _style(line: str) -> str | None:
    """How a terminal shows a line."""
    if line.startswith("  ..."):
        return "dim"
    if _FRAME.fullmatch(line):
        return "cyan"
    if line.startswith("    "):
        return "red" if set(line) <= set(" ^~") else "bold"
    return "bold red" if re.match(r"[\w.]+(:|$)", line) else None
