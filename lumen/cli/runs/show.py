"""Runs with their checkpoints: a table for each run, or one line for each checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lumen.checkpoint.listing import ShownRun
from lumen.cli.runs.records import time_of, time_spent
from lumen.console import size, stdout

STYLES = {"running": "bold green", "finished": "green", "stopped": "yellow", "failed": "bold red", "unknown": "dim"}


def printable(text: str) -> str:
    """A name from the disk, without what would move the cursor."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def print_checkpoints(found: Sequence[ShownRun]) -> None:
    """One line for each checkpoint, however long it gets."""
    rows = [("RUN", "STATUS", "CHECKPOINT", "EPOCH", "SAVED", "BYTES", "STATE", "METRICS")]
    for shown in found:
        run = printable(str(shown.path)), shown.status
        for each in shown.committed:
            metrics = " ".join(f"{name}={value!r}" for name, value in shown.metrics(each).items())
            state = "damaged" if each.problem else "best" if shown.is_best(each) else "valid"
            size_bytes = "-" if each.size_bytes is None else str(each.size_bytes)
            described = each.path.name, str(each.info.get("epoch", "-")), time_of(each, "seconds") or "-", size_bytes
            rows.append((*run, *described, state, printable(each.problem or metrics)))
        if shown.error or not shown.committed:
            rows.append((*run, *"-----", printable(shown.problem or shown.error or "no checkpoints")))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(map(str.ljust, row, widths)).rstrip(), file=stdout)


def show_checkpoints(found: Sequence[ShownRun]) -> None:
    """A table for each run, as wide as the terminal."""
    console = Console(file=stdout, markup=False, emoji=False, highlight=False)
    for number, shown in enumerate(found):
        if number:
            console.print()
        console.print(_head(shown), soft_wrap=True)
        if shown.committed:
            console.print(_table(shown))
        for note, style in _notes(shown):
            console.print(printable(note), style=style, soft_wrap=True)


def _head(shown: ShownRun) -> Text:
    text = Text(printable(str(shown.path)), style="bold").append("  ")
    text.append(shown.status, STYLES[shown.status])
    if shown.holder is not None:
        pid, host, started = (printable(str(shown.holder.get(key))) for key in ("pid", "host", "started"))
        with suppress(ValueError):
            started = f"{datetime.fromisoformat(started).astimezone():%Y-%m-%d %H:%M}"
        text.append(f" as process {pid} on {host} since {started}", "not bold")
    return text


def _table(shown: ShownRun) -> Table:
    table = Table(box=None, expand=True, pad_edge=False, header_style="dim")
    table.add_column("", width=1)
    table.add_column("checkpoint", no_wrap=True)
    table.add_column("epoch", no_wrap=True, justify="right")
    table.add_column("saved", no_wrap=True)
    table.add_column("size", no_wrap=True, justify="right")
    table.add_column("metrics", ratio=1, no_wrap=True, overflow="ellipsis")
    for each in shown.committed:
        mark = Text("✗", "red") if each.problem else Text("★", "yellow") if shown.is_best(each) else ""
        monitor = each.info.get("monitor")
        metrics = Text("  ").join(
            Text(printable(f"{name} {value:.4g}"), "bold" if name == monitor else "")
            for name, value in shown.metrics(each).items()
        )
        table.add_row(
            mark,
            each.path.name,
            str(each.info.get("epoch", "")),
            time_of(each, "minutes")[:16].replace("T", " "),
            "" if each.size_bytes is None else size(each.size_bytes),
            Text("damaged", "red") if each.problem else metrics,
        )
    return table


def _notes(shown: ShownRun) -> Iterator[tuple[str, str]]:
    """What is to be said below the table, and its style."""
    if shown.problem:
        yield shown.problem, "red"
    elif not shown.committed:
        yield "  no checkpoints", "dim"
    if (spent := time_spent(shown)) is not None:
        yield f"  {spent}", "dim"
    if shown.error:
        yield f"  {shown.error}", "red"
    for each in shown.checkpoints:
        if each.problem:
            yield f"  {each.problem}", "red"
        elif each.kind == "tmp":
            done = "is being written or removed" if shown.status == "running" else "was left by a killed save"
            yield f"  {each.path.name} {done}", "dim"
