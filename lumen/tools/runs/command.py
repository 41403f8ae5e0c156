"""The command `lumen runs`: lists the runs of a directory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

from rich.table import Table
from rich.text import Text

from lumen.cli.commands import CommandParser
from lumen.console import format_bytes, stdout
from lumen.tools.runs import COMMAND, records as data
from lumen.tools.runs.find import ShownRun, find_shown_runs
from lumen.tools.runs.records import Record, format_time
from lumen.tools.terminal import make_table_console, print_json

STYLES = {"running": "bold green", "finished": "green", "stopped": "yellow", "failed": "bold red", "unknown": "dim"}


def make_printable(text: str) -> str:
    """Return a text with `?` in place of unprintable characters, which could move the cursor."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def print_checkpoints(found: Sequence[ShownRun]) -> None:
    """Print one line for each checkpoint, of any length."""
    rows = [("RUN", "STATUS", "CHECKPOINT", "EPOCH", "SAVED", "BYTES", "STATE", "METRICS")]
    for shown in found:
        run = make_printable(str(shown.path)), shown.status
        for each in shown.committed:
            metrics = " ".join(f"{name}={value!r}" for name, value in shown.get_metrics(each).items())
            state = "damaged" if each.problem else "best" if shown.is_best(each) else "valid"
            size_bytes = "-" if each.size_bytes is None else str(each.size_bytes)
            described = (
                each.path.name,
                str(each.info.get("epoch", "-")),
                format_time(each, "seconds") or "-",
                size_bytes,
            )
            rows.append((*run, *described, state, make_printable(each.problem or metrics)))
        if shown.error or not shown.committed:
            rows.append((*run, *"-----", make_printable(shown.problem or shown.error or "no checkpoints")))
    print_columns(rows)


def show_checkpoints(found: Sequence[ShownRun]) -> None:
    """Print a table for each run, as wide as the terminal."""
    console = make_table_console()
    for number, shown in enumerate(found):
        if number:
            console.print()
        console.print(_format_head(shown), soft_wrap=True)
        if shown.committed:
            console.print(_make_table(shown))
        for note, style in _iterate_notes(shown):
            console.print(make_printable(note), style=style, soft_wrap=True)


def _format_head(shown: ShownRun) -> Text:
    text = Text(make_printable(str(shown.path)), style="bold").append("  ")
    text.append(shown.status, STYLES[shown.status])
    if shown.holder is not None:
        pid, host, started = (make_printable(str(shown.holder.get(key))) for key in ("pid", "host", "started"))
        with suppress(ValueError):
            started = f"{datetime.fromisoformat(started).astimezone():%Y-%m-%d %H:%M}"
        text.append(f" as process {pid} on {host} since {started}", "not bold")
    return text


def _make_table(shown: ShownRun) -> Table:
    table = Table(box=None, expand=True, pad_edge=False, header_style="dim")
    table.add_column("", width=1)
    for head in ("checkpoint", "epoch", "saved", "size"):
        table.add_column(head, no_wrap=True, justify="right" if head in ("epoch", "size") else "left")
    table.add_column("metrics", ratio=1, no_wrap=True, overflow="ellipsis")
    for each in shown.committed:
        mark = Text("✗", "red") if each.problem else Text("★", "yellow") if shown.is_best(each) else ""
        metrics = Text("damaged", "red") if each.problem else Text("  ").join(
            Text(make_printable(f"{name} {value:.4g}"), "bold" if name == each.info.get("monitor") else "")
            for name, value in shown.get_metrics(each).items()
        )  # fmt: skip
        size = "" if each.size_bytes is None else format_bytes(each.size_bytes)
        epoch, saved = str(each.info.get("epoch", "")), format_time(each, "minutes")[:16].replace("T", " ")
        table.add_row(mark, each.path.name, epoch, saved, size, metrics)
    return table


def _iterate_notes(shown: ShownRun) -> Iterator[tuple[str, str]]:
    """Yield the notes below the table of a run, each with its style."""
    if shown.problem:
        yield shown.problem, "red"
    elif not shown.committed:
        yield "  no checkpoints", "dim"
    if (spent := data.read_time_spent(shown)) is not None:
        yield f"  {spent}", "dim"
    if shown.error:
        yield f"  {shown.error}", "red"
    for each in shown.checkpoints:
        if each.problem:
            yield f"  {each.problem}", "red"
        elif each.kind == "tmp":
            state = "is being written or removed" if shown.status == "running" else "was left by a killed save"
            yield f"  {each.path.name} {state}", "dim"


_MAX_METRICS = 4  # if no metric is chosen or monitored


def show_table(chosen: Sequence[Record], records: Sequence[Record], where: Sequence[str], sort: str | None) -> None:
    """Print a row for each chosen run. Settings and metrics in `where` and `sort` get a column.

    Args:
        chosen: The runs to print.
        records: All runs, in which the names in `where` and `sort` are looked up.
        where: The conditions that the chosen runs meet.
        sort: The setting or metric by which the runs are sorted, or None.
    """
    chosen_names = [data.read_condition(text, records).name for text in where]
    chosen_names += [data.find_full_name(sort.removeprefix("-"), records)] if sort else []
    metrics = {name for record in chosen for name in record["metrics"]}
    no_settings = {*metrics, "name", "status", "step", "epoch"}
    asked = [name for name in dict.fromkeys(chosen_names) if name not in no_settings]
    settings = [*dict.fromkeys([*asked, *data.list_differing(chosen)])]
    monitored = [record["monitor"] for record in chosen if record["monitor"] is not None]
    numbers = [*dict.fromkeys([*(name for name in chosen_names if name in metrics), *monitored])]
    numbers = numbers or sorted(metrics)[:_MAX_METRICS]
    heads = dict(zip(settings, data.shorten_names(settings), strict=True))
    columns = {
        name: [heads.get(name, name), *_format_cells([data.get_value(record, name) for record in chosen])]
        for name in ("name", "status", *settings, "step", *numbers)
    }
    columns["name"][0] = "run"
    if not stdout.isatty():
        in_pipe = ([head.upper(), *(cell or "-" for cell in cells)] for head, *cells in columns.values())
        print_columns([*zip(*in_pipe, strict=True)])
        return
    console = make_table_console()
    left_out = _find_columns_too_many(columns, [name for name in settings if name not in asked], console.width)
    table = Table(box=None, pad_edge=False, header_style="dim")
    shown = [column for name, column in columns.items() if name not in left_out]
    for number, (head, *_) in enumerate(shown):
        table.add_column(head, overflow="fold", justify="right" if number > 1 else "left")
    for name, *cells in zip(*(column[1:] for column in shown), strict=True):
        table.add_row(Text(name, "bold"), *(Text(cell, STYLES.get(cell, "")) for cell in cells))
    console.print(table)
    if left_out:
        names = ", ".join(heads[name] for name in left_out)
        console.print(f"These settings differ too, and need a wider terminal or a pipe: {names}", style="dim")


def _find_columns_too_many(columns: Mapping[str, Sequence[str]], optional: Sequence[str], width: int) -> list[str]:
    """Return the optional columns for which a table of a given width has no room. The first optional ones stay."""
    widths = {name: max(map(len, column)) + 2 for name, column in columns.items()}  # two spaces between columns
    room = width + 2 - sum(widths[name] for name in columns if name not in optional)
    left_out = []
    for name in optional:
        if widths[name] <= room:
            room -= widths[name]
        else:
            left_out.append(name)
    return left_out


def print_columns(rows: Sequence[Sequence[str]]) -> None:
    """Print each row on one line of any length, in aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(map(str.ljust, row, widths)).rstrip(), file=stdout)


def _format_cells(values: Sequence[Any]) -> list[str]:
    """Return the texts of a column. Classes have the shortest names that differ in the column."""
    paths = [*dict.fromkeys(value for value in values if data.is_class_path(value))]
    short = dict(zip(paths, data.shorten_names(paths), strict=True))
    return [short[value] if value in paths else _format_cell(value) for value in values]


def _format_cell(value: Any) -> str:
    if value is data.ABSENT:
        return ""
    if isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        return make_printable(",".join(value))
    return format(value, ".6g") if isinstance(value, float) else make_printable("null" if value is None else str(value))


_DESCRIPTION = (
    "The command changes nothing and disturbs no job. Status of a run: running if a live process holds the run; "
    "stopped after a stop signal or request; failed after an error, whose traceback is in run.log, or after a kill. "
    "Exit code 1: --verify found damage."
)


def run(words: list[str]) -> int:
    """List runs and return 0, or 1 if `--verify` found a damaged checkpoint."""
    args = options().read(words)
    as_table = bool(args.table or args.where or args.sort)
    found = find_shown_runs(args.directory, verify=args.verify)
    records = [data.make_record(each) for each in found] if args.json or as_table else []
    chosen = data.select_records(records, args.where, args.sort)
    if args.json:
        print_json(chosen)
    elif not found:
        print(f"there are no runs in {args.directory}", file=stdout)
    elif as_table:
        show_table(chosen, records, args.where, args.sort)
    else:
        (show_checkpoints if stdout.isatty() else print_checkpoints)(found)
    damaged = any(each.problem and not each.kind for shown in found for each in shown.checkpoints)
    return int(args.verify and damaged)


def options() -> CommandParser:
    """Return the parser of the command's options."""
    parser = CommandParser("runs", COMMAND, "[DIR] [--where CONDITION] [--sort NAME] [--json]", _DESCRIPTION)
    parser.add_argument("directory", nargs="?", default="runs", metavar="DIR", help="Directory or URL of the runs, or "
                        "of one run. Default: runs.")  # fmt: skip
    parser.add_argument("--table", action="store_true", help="Print a row for each run, with the settings that differ.")
    parser.add_argument(
        "--where", action="append", default=[], metavar="CONDITION",
        help="Print a table of the runs that meet all conditions, such as 'lr < 1e-3' or 'status = finished'.",
    )  # fmt: skip
    parser.add_argument(
        "--sort",
        metavar="NAME",
        help="Sort the table by a setting or metric, smallest first; --sort=-NAME: largest first.",
    )
    parser.add_argument(
        "--verify", action="store_true", help="Read every byte. Default: read manifests and file sizes."
    )
    parser.add_argument("--json", action="store_true", help="Print JSON, also with --where and --sort.")
    return parser
