"""What a check has found, by subject: a report in a terminal, or for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, Literal, final

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lumen.console import stdout

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
