"""Tables of results: for the terminal, and for README.md between its two markers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import isnan
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.cases import CASES, SYSTEMS, Case, Measure
from benchmarks.models import GPT_SHAPES
from benchmarks.ratios import Row, rows_of, stale

BEGIN, END = "<!-- figures: written by `python -m benchmarks` -->", "<!-- end of figures -->"
_UNITS = {  # unit and factor of each measure
    "cpu_s": ("µs CPU / batch", 1e6), "wall_s": ("µs / batch", 1e6), "first_s": ("s CPU", 1), "peak_mb": ("MB", 1),
    "blocked_s": ("s", 1), "calls": ("calls / batch", 1), "gap_s": ("µs / batch", 1e6), "lost_s": ("s", 1),
}  # fmt: skip


def unit_of(case: Case, measure: Measure) -> tuple[str, float]:
    """Return the unit of printed figures, and its factor."""
    return ("ms CPU", 1e3) if case.kind in ("import", "help") else _UNITS[measure]


def all_rows(results: dict[str, Any]) -> Iterator[tuple[Case, Measure, list[Row]]]:
    """Yield every measured case, in order, with its rows."""
    for name, case in CASES.items():
        if name in results["cases"]:
            for measure in (case.measure, *case.also):
                yield case, measure, list(rows_of(name, results["cases"][name], measure))


def cells(case: Case, measure: Measure, row: Row) -> list[str]:
    """Return the cells of a row after its name: value, added, best, median, quartiles."""
    if row.trouble:
        return [row.trouble, "", "", "", ""]
    _, factor = unit_of(case, measure)
    low, median, high = row.quartiles
    digits = 1 if factor > 1 or measure in ("peak_mb", "calls") else 2
    measured = [f"{row.value * factor:,.{digits}f}", f"{row.added * factor:+,.{digits}f}"]
    if isnan(row.best):
        return [*measured, "", "", ""]
    return [*measured, f"{row.best:.3f}", f"{median:.3f}", f"{low:.3f} - {high:.3f}"]


def speed(case: Case, measure: Measure, row: Row) -> str:
    """Return the tokens per second of a GPT's wall time, in parentheses, or an empty string."""
    if row.trouble or measure != "wall_s" or case.model not in GPT_SHAPES:
        return ""
    *_, positions, _ = GPT_SHAPES[case.model]
    return f" ({case.batch_size * positions / row.value:,.0f} tokens/s)"


def print_case(name: str, results: dict[str, Any], console: Console) -> None:
    """Print the tables of one case."""
    for case, measure, rows in all_rows({"cases": {name: results["cases"][name]}}):
        goal = f" (goal {case.goal})" if case.goal else ""
        table = Table(title=title(case, measure) + goal, title_justify="left", title_style="bold")
        for heading in ("system", unit_of(case, measure)[0], "added", "best ratio", "median ratio", "quartiles"):
            table.add_column(heading, justify="left" if heading == "system" else "right", no_wrap=True)
        for row in rows:
            value, *rest = ["-"] if row.trouble else cells(case, measure, row)
            table.add_row(SYSTEMS[row.system], value + speed(case, measure, row), *rest)
        console.print(table)
        for row in rows:
            if row.trouble:
                console.print(f"  {SYSTEMS[row.system]}: {row.trouble}", markup=False, highlight=False)


def title(case: Case, measure: Measure) -> str:
    """Return the name of a case, its measure if unusual, and its description."""
    return f"{case.name}{'' if measure == case.measure else f' ({measure})'}: {case.about}"


def markdown(results: dict[str, Any]) -> str:
    """Return all cases as one table in Markdown."""
    lines = [
        *[f"{line}." for line in machine_lines(results)],
        "",
        "| case | system | measured | added | best ratio | median ratio | quartiles |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for case, measure, rows in all_rows(results):
        name = f"**{case.name}**" + ("" if measure == case.measure else f" {measure}")
        name += f", goal {case.goal}" if case.goal else ""
        for number, row in enumerate(rows):
            value, *rest = cells(case, measure, row)
            unit = "" if row.trouble else f" {unit_of(case, measure)[0]}{speed(case, measure, row)}"
            lines.append(
                " | ".join([f"| {name}" if number == 0 else "| ", SYSTEMS[row.system], value + unit, *rest]) + " |"
            )
    return "\n".join(lines)


def machine_lines(results: dict[str, Any]) -> list[str]:
    """Return date, machine and versions of the cases that are not stale; a line for each machine."""
    shown = {name: found for name, found in results["cases"].items() if name in CASES and not stale(name, found)}
    machines: dict[str, list[str]] = {}
    for name, found in shown.items():
        machines.setdefault(json.dumps(found["machine"], sort_keys=True), []).append(name)
    lines, most = [], max(machines.values(), key=len, default=[])
    for names in machines.values():
        here = [shown[name] for name in names]
        machine, dates = here[0]["machine"], sorted({found["date"] for found in here})
        peers = sorted({f"{name} {version}" for found in here for name, version in found["peers"].items()})
        parts = [
            " to ".join(dates[:1] + dates[1:][-1:]), machine["accelerator"], machine["cpu"],
            f"{machine['cores']} cores", f"Python {machine['python']}", f"torch {machine['torch']}", *peers,
        ]  # fmt: skip
        which = "" if len(machines) == 1 else ": all others" if names is most else f": {', '.join(names)}"
        lines.append(", ".join(filter(None, parts)) + which)
    return lines


def write_readme(results: dict[str, Any], path: Path) -> None:
    """Write the figures between the markers of a README."""
    text = path.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    path.write_text(f"{before}{BEGIN}\n\n{markdown(results)}\n\n{END}{after}")
