"""Traceback of an error in user code: the user's lines, and the number of library frames around them."""

from __future__ import annotations

import re
import traceback
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from lumen.cli import is_verbose
from lumen.console import stderr
from lumen.distributed import worker
from lumen.distributed.process_location import Frame

_HEAD = re.compile(r"(Original )?Traceback \(most recent call last\):")
_FRAME = re.compile(r'  File "(.*)", line (\d+), in (.*)')
_INSIDE = ("    ", "  [Previous line")
_INSTALLED = re.compile(r".*[/\\](?:site|dist)-packages[/\\](\w+)")
_IN_WORKER = re.compile(r"\w+: Caught \w+ in (DataLoader worker process \d+)\.")  # The worker's own traceback follows.


class _Section(NamedTuple):
    """One traceback of the several that an error may have.

    Attributes:
        frames: The frames, outermost first, each with the lines that Python prints for it.
        after: The lines after the frames: the exception, its notes, and the line that introduces the next traceback.
    """

    frames: list[tuple[Frame, list[str]]]
    after: list[str]


def print_user_error(error: BaseException) -> None:
    """Print an error that Lumen did not raise, or report it to the process that started this one.

    All frames of libraries become one line, unless `--verbose` is set or no frame is the user's.
    """
    text = "".join(traceback.format_exception(error))
    lines = text.rstrip("\n").split("\n") if is_verbose() else fold_traceback(text)
    if worker.report_error(error, "\n".join(lines)):
        return
    if not stderr.isatty():
        print(*lines, sep="\n", file=stderr)
        return
    from rich.console import Console

    console = Console(file=stderr, soft_wrap=True, emoji=False)
    for line in lines:
        console.print(line, style=_choose_style(line), markup=False, highlight=False)


def fold_traceback(text: str) -> list[str]:
    """Return the lines of a traceback without the frames of libraries, and with the number of frames left out.

    Args:
        text: The traceback as Python writes it; torch includes the traceback of a data worker in its message.
    """
    sections = _split_sections(text)
    user_frames = [frame for section in sections for frame, _ in section.frames if frame.is_in_user_code]
    if not user_frames and "\nSyntaxError: " not in text:
        return text.rstrip("\n").split("\n")
    in_worker = _IN_WORKER.search(text)
    lines = [f"Traceback (most recent call last){f', in {in_worker[1]}' if in_worker else ''}:"]
    libraries = list[str]()
    for number, section in enumerate(sections):
        shown_frames = [shown for frame, shown in section.frames if frame.is_in_user_code]
        libraries += [_name_library(frame) for frame, _ in section.frames if not frame.is_in_user_code]
        lines += [line for shown in shown_frames for line in shown]
        if libraries and (shown_frames or number == len(sections) - 1):
            lines.append(f"  ... {_count_libraries(libraries)}; --verbose shows all")
            libraries = []
        lines += [line for line in section.after if not (in_worker and (not line or _IN_WORKER.fullmatch(line)))]
    return lines


def _split_sections(text: str) -> list[_Section]:
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


def _name_library(frame: Frame) -> str:
    if frame.is_in_lumen:
        return "lumen"
    found = _INSTALLED.match(frame.file)
    return found[1] if found else "Python"


def _count_libraries(libraries: Iterable[str]) -> str:
    """Return the number of frames and the names of their libraries, the most frequent first."""
    counts = Counter(libraries)
    *most, last = [name for name, _ in counts.most_common()]
    total = counts.total()
    return f"{total} frame{'s' if total > 1 else ''} of {' and '.join(filter(None, [', '.join(most), last]))}"


def _choose_style(line: str) -> str | None:
    """Return the style in which a terminal shows a line."""
    if line.startswith("  ..."):
        return "dim"
    if _FRAME.fullmatch(line):
        return "cyan"
    if line.startswith("    "):
        return "red" if set(line) <= set(" ^~") else "bold"
    return "bold red" if re.match(r"[\w.]+(:|$)", line) else None
