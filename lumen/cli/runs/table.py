"""Runs side by side: a row for each, with the settings in which they differ and the last metrics; or two of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lumen.cli.runs.choose import ABSENT, Record, differing, full_name, names_of, read_condition, short_names, value_of
from lumen.cli.runs.show import STYLES, printable
from lumen.console import stdout
from lumen.errors import ConfigError

_MOST_METRICS = 4  # where nobody says which


def show_table(chosen: Sequence[Record], records: Sequence[Record], where: Sequence[str], sort: str | None) -> None:
    """Print a row for each run that was chosen; what is asked for by name is a column too.

    Args:
        chosen: The runs to print.
        records: All runs, in which the names of `where` and `sort` were found.
        where: Conditions that were asked for.
        sort: The setting or metric that they are sorted by.
    """
    asked = [read_condition(text, records).name for text in where]
    asked += [full_name(sort.removeprefix("-"), records)] if sort else []
    metrics = {name for record in chosen for name in record["metrics"]}
    settings = dict.fromkeys([*differing(chosen), *(name for name in asked if name not in {*metrics, "name"})])
    settings = {name: None for name in settings if name not in ("status", "step", "epoch")}
    numbers = dict.fromkeys([*(name for name in asked if name in metrics), *_monitored(chosen)])
    columns = ["name", "status", *settings, "step", *(numbers or sorted(metrics)[:_MOST_METRICS])]
    heads = ["run", "status", *short_names(list(settings)), "step", *columns[len(settings) + 3 :]]
    rows = [[_cell(value_of(record, name)) for name in columns] for record in chosen]
    if stdout.isatty():
        _show(heads, rows, statuses=[record["status"] for record in chosen])
    else:
        print_columns([[head.upper() for head in heads], *([cell or "-" for cell in row] for row in rows)])


def _monitored(records: Sequence[Record]) -> list[str]:
    found = (record["monitor"] for record in records)
    return [name for name in found if name is not None]


def _show(heads: Sequence[str], rows: Sequence[Sequence[str]], statuses: Sequence[str]) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in heads:
        table.add_column(head, overflow="fold", justify="left" if head in ("run", "status") else "right")
    for row, status in zip(rows, statuses, strict=True):
        name, _, *cells = row
        table.add_row(Text(name, "bold"), Text(status, STYLES[status]), *cells)
    Console(file=stdout, markup=False, emoji=False, highlight=False).print(table)


def print_columns(rows: Sequence[Sequence[str]]) -> None:
    """Print rows, each in a line, however long it gets."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(map(str.ljust, row, widths)).rstrip(), file=stdout)


def _cell(value: Any) -> str:
    if value is ABSENT:
        return ""
    return format(value, ".6g") if isinstance(value, float) else printable("null" if value is None else str(value))


# ---------------------------------------------------------------------- two runs


def find_two(names: Sequence[str], records: Sequence[Record]) -> tuple[Record, Record]:
    """The runs of two names or paths.

    Raises:
        ConfigError: There is no such run, or there are several.
    """
    one, other = (_find(name.rstrip("/"), records) for name in names)
    return one, other


def _find(name: str, records: Sequence[Record]) -> Record:
    found = [each for each in records if each["path"] == name] or [each for each in records if each["name"] == name]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"several runs are called {name}: {', '.join(each['path'] for each in found)}. Give a path.")
    raise ConfigError(f"there is no run {name}. There are {', '.join(each['name'] for each in records) or 'none'}.")


def differences(one: Record, other: Record) -> dict[str, dict[str, tuple[Any, Any]]]:
    """The settings in which two runs differ, None where one has no such, and all last metrics, by name."""
    changed = [name for name in dict.fromkeys([*one["settings"], *other["settings"]]) if _differs(one, other, name)]
    metrics = dict.fromkeys([*one["metrics"], *other["metrics"]])
    return {
        "settings": {name: (one["settings"].get(name), other["settings"].get(name)) for name in changed},
        "metrics": {name: (one["metrics"].get(name), other["metrics"].get(name)) for name in metrics},
    }


def _differs(one: Record, other: Record, name: str) -> bool:
    both = name in names_of(one) and name in names_of(other)
    return bool(differing([one, other]).count(name)) if both else True


def show_differences(one: Record, other: Record) -> None:
    """Print in which settings two runs differ, and what each has come to."""
    found = differences(one, other)
    facts = {name: (one[name], other[name]) for name in ("status", "step", "epoch")}
    rows = [["", one["path"], other["path"]]]
    for pairs, own in ((found["settings"], "settings"), (facts, None), (found["metrics"], "metrics")):
        rows += [[name, *_both(one, other, name, own, pair)] for name, pair in pairs.items()]
    if stdout.isatty():
        table = Table(*rows[0], box=None, pad_edge=False)
        for row in rows[1:]:
            table.add_row(*(Text(cell) for cell in row))
        Console(file=stdout, markup=False, emoji=False, highlight=False).print(table)
    else:
        print_columns([["NAME", *rows[0][1:]], *rows[1:]])
    if not found["settings"]:
        known = one["settings"] and other["settings"]
        print("their settings are the same" if known else "one of them has recorded no settings", file=stdout)


def _both(one: Record, other: Record, name: str, own: str | None, pair: tuple[Any, Any]) -> list[str]:
    if own is None:
        return [_cell(value) for value in pair]
    owners: list[Mapping[str, Any]] = [one[own], other[own]]
    return [_cell(owner[name]) if name in owner else "-" for owner in owners]
