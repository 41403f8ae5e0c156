"""What a check has found, by subject."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, final

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
