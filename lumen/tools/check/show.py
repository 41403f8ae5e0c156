"""The findings of a check by subject, batches among them, in words: a report in a terminal, or for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import IO, Any, Literal, final

import torch
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lumen.console import size, stdout

_MOST_PARTS = 16
_PLAIN = (str, bytes, int, float, type(None))


@final
@dataclass(frozen=True)
class Part:
    """A leaf of a nested batch.

    Attributes:
        path: Where it is: `[0]`, `image`, `[0].image`.
        kind: The dtype of a tensor, else the class.
        shape: The tensor's shape; None: it is no tensor.
        size_bytes: The memory that the tensor takes, in bytes.
        least: The smallest finite element; None without one, and for tensors of other things than numbers.
        most: The largest one.
        mean: Of the elements that are finite; None but for floating-point numbers.
        std: Their standard deviation; None likewise.
        nan: How many elements are NaN.
        infinite: How many are infinite.
    """

    path: str
    kind: str
    shape: tuple[int, ...] | None = None
    size_bytes: int = 0
    least: float | None = None
    most: float | None = None
    mean: float | None = None
    std: float | None = None
    nan: int = 0
    infinite: int = 0

    @property
    def cells(self) -> list[str]:
        """Return the cells of a row of the table."""
        shape = "" if self.shape is None else "x".join(map(str, self.shape)) or "scalar"
        holds = "" if self.least is None or self.most is None else f"{_short(self.least)} .. {_short(self.most)}"
        spread = "" if self.mean is None or self.std is None else f"mean {_short(self.mean)} std {_short(self.std)}"
        odd = [f"{count} {what}" for count, what in ((self.nan, "NaN"), (self.infinite, "infinite")) if count]
        memory = size(self.size_bytes) if self.size_bytes else ""
        return [self.path, self.kind, shape, holds, ", ".join([*filter(None, [spread]), *odd]), memory]


def parts_of(batch: Any) -> list[Part]:
    """The leaves of a nested batch, depth first."""
    return [_part(path, leaf) for path, leaf in leaves(batch)]


def rows_of(parts: list[Part]) -> list[list[str]]:
    """Parts as rows of a table, not too many."""
    more = len(parts) - _MOST_PARTS
    return [each.cells for each in parts[:_MOST_PARTS]] + ([[f"and {more} more"]] if more > 0 else [])


def leaves(batch: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a nested batch, depth first, each with where it is; a list of words or numbers is one."""
    inside: Iterator[tuple[str, Any]] | None = None
    if isinstance(batch, Mapping):
        inside = ((_within(path, key), value) for key, value in batch.items())
    elif isinstance(batch, tuple) and hasattr(batch, "_fields"):
        inside = ((f"{path}.{name}", value) for name, value in zip(batch._fields, batch, strict=True))
    elif isinstance(batch, (list, tuple)) and not all(isinstance(each, _PLAIN) for each in batch):
        inside = ((f"{path}[{number}]", value) for number, value in enumerate(batch))
    elif is_dataclass(batch) and not isinstance(batch, type):
        inside = ((f"{path}.{each.name}", getattr(batch, each.name)) for each in fields(batch))
    if inside is None:
        yield path or "batch", batch
        return
    for where, value in inside:
        yield from leaves(value, where)


def _within(path: str, key: Any) -> str:
    return f"{path}.{key}".lstrip(".") if isinstance(key, str) else f"{path}[{key!r}]"


def largest(batch: Any) -> tuple[str, torch.Tensor] | None:
    """Return the first of the largest tensors with two or more dimensions; None without such a tensor."""
    found = [(path, leaf) for path, leaf in leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim() > 1]
    return max(found, key=lambda each: each[1].numel(), default=None)


def _part(path: str, leaf: Any) -> Part:
    if isinstance(leaf, (list, tuple)):
        kinds = {type(each).__name__: None for each in leaf}
        return Part(path, f"{len(leaf)} {', '.join(kinds)}".rstrip())
    if not isinstance(leaf, torch.Tensor):
        return Part(path, type(leaf).__name__)
    kind, shape = str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape)
    size_bytes = leaf.numel() * leaf.element_size()
    if leaf.is_sparse or leaf.is_nested or leaf.is_complex() or leaf.is_quantized or not leaf.numel():
        return Part(path, kind, shape, size_bytes)
    if not leaf.is_floating_point():
        numbers = leaf.detach().long()
        return Part(path, kind, shape, size_bytes, float(numbers.min()), float(numbers.max()))
    numbers = leaf.detach().float()
    nan, infinite = int(numbers.isnan().sum()), int(numbers.isinf().sum())
    finite = numbers[numbers.isfinite()]
    if not finite.numel():
        return Part(path, kind, shape, size_bytes, nan=nan, infinite=infinite)
    least, most, mean, std = map(float, (finite.min(), finite.max(), finite.mean(), finite.std(correction=0)))
    return Part(path, kind, shape, size_bytes, least, most, mean, std, nan, infinite)


def duration(seconds: float) -> str:
    """A time as people say it: `40 ms`, `12 s`, `3 min`, `5.2 h`, `2.1 days`."""
    for most, unit, name in ((1, 0.001, "ms"), (100, 1, "s"), (5400, 60, "min"), (172800, 3600, "h")):
        if seconds < most:
            return f"{seconds / unit:.2g} {name}" if seconds < 100 * unit else f"{seconds / unit:.0f} {name}"
    return f"{seconds / 86400:.3g} days"


def _short(value: float) -> str:
    return f"{value:.3g}"


def every(count: int, what: str) -> str:
    """`every step`, `every 2 steps`."""
    return f"every {what}" if count == 1 else f"every {count:,} {what}s"


def counted(count: float, what: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


Mark = Literal["ok", "note", "suspicious", "wrong"]


@final
@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        mark: "ok"; "note": worth knowing, or it could not be looked at; "suspicious": hardly meant; "wrong": a run
            would fail.
        name: What it is about, for programs: `labels.range`.
        text: A sentence on what was found.
        advice: A sentence on what to do.
        rows: A table below it, of cells, or lines of one cell each.
    """

    mark: Mark
    name: str
    text: str
    advice: str = ""
    rows: Sequence[Sequence[str]] = ()


@final
@dataclass
class Report:
    """All findings of a check.

    Attributes:
        title: Names what was checked.
        sections: Findings by subject, in their order.
        facts: Numbers and names by what they are called, plain data for programs.
    """

    title: str = ""
    sections: dict[str, list[Finding]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def add(
        self, section: str, mark: Mark, name: str, text: str, advice: str = "", rows: Sequence[Sequence[str]] = ()
    ) -> None:
        """Add a finding; see `Finding`."""
        self.sections.setdefault(section, []).append(Finding(mark, name, text, advice, rows))

    def all_of(self, mark: Mark) -> list[Finding]:
        """The findings of a mark."""
        return [each for section in self.sections.values() for each in section if each.mark == mark]

    def exit_code(self, *, strict: bool) -> int:
        """2: something is wrong; 1: something is suspicious, and this is strict; 0."""
        return 2 if self.all_of("wrong") else int(strict and bool(self.all_of("suspicious")))


_MARKS = {"ok": ("✓", "green"), "note": ("·", "dim"), "suspicious": ("!", "yellow"), "wrong": ("✗", "bold red")}
_WIDEST = 120


def show(report: Report, file: IO[str] = stdout) -> None:
    """Print a report, as wide as the terminal is; 80 columns where there is none."""
    console = Console(file=file, markup=False, emoji=False, highlight=False)
    console.width = min(console.width, _WIDEST) if console.is_terminal else 80
    with console.capture() as shown:
        _show_all(console, report)
    print(*map(str.rstrip, shown.get().splitlines()), sep="\n", file=file)


def _show_all(console: Console, report: Report) -> None:
    console.print(Text(report.title, "bold"))
    for name, findings in report.sections.items():
        console.print()
        console.print(Text(name, "bold"))
        for finding in findings:
            _show(console, finding)
    console.print()
    console.print(verdict(report))


def _show(console: Console, finding: Finding) -> None:
    sign, style = _MARKS[finding.mark]
    line = Table.grid(padding=(0, 1))
    line.add_column(width=1)
    line.add_column(overflow="fold")
    line.add_row(Text(sign, style), Text(finding.text, style if finding.mark in ("suspicious", "wrong") else ""))
    if finding.advice:
        line.add_row("", Text(finding.advice))
    console.print(line)
    if finding.rows:
        console.print(Padding(_table(finding.rows), (0, 0, 0, 4)))


def _table(rows: Sequence[Sequence[str]]) -> Table:
    table, columns = Table.grid(padding=(0, 2)), max(map(len, rows))
    for _ in range(columns):
        table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, "dim") for cell in row), *[""] * (columns - len(row)))
    return table


def verdict(report: Report) -> Text:
    """All of it in a line."""
    wrong, suspicious = (len(report.all_of(mark)) for mark in ("wrong", "suspicious"))
    if wrong:
        return Text(f"{wrong} wrong, {suspicious} suspicious", "bold red")
    if suspicious:
        return Text(f"{suspicious} suspicious", "bold yellow")
    return Text("nothing suspicious was found", "bold green")


def as_json(report: Report, exit_code: int) -> str:
    """A report as JSON; numbers that JSON does not have are strings."""
    sections = {name: [_record(each) for each in findings] for name, findings in report.sections.items()}
    whole = {"title": report.title, "exit_code": exit_code, "sections": sections, "facts": report.facts}
    return json.dumps(_plain(whole), indent=2, ensure_ascii=False)


def _record(finding: Finding) -> dict[str, Any]:
    said = {"mark": finding.mark, "name": finding.name, "text": finding.text, "advice": finding.advice}
    return said | {"rows": [list(row) for row in finding.rows]}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, (str, int, float, bool)) or value is None else str(value)
