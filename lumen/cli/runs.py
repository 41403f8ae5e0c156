"""`lumen runs`: which runs there are, how they stand, and which of their checkpoints are good."""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path, PurePath
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lumen.checkpoint.listing import Listed, ShownRun, has_checkpoints, list_checkpoints
from lumen.checkpoint.places import as_local, as_place, exists, is_dir, storage_of
from lumen.checkpoint.storage import MANIFEST, readable
from lumen.cli.parser import Words, size
from lumen.console import stderr, stdout
from lumen.errors import ConfigError, LumenError, ProcessLost, RunDirectoryError
from lumen.run.goodput import TimeSpent, goodput
from lumen.trainer.run_directory import RunDirectory

_MORE = (
    "Nothing is changed, and no job is disturbed. Running: a live process holds the run; stopped: it was asked to; "
    "failed: it ended by an error, whose traceback is in run.log, or by a kill. Exit code 1: --verify found damage."
)
_STYLES = {"running": "bold green", "finished": "green", "stopped": "yellow", "failed": "bold red", "unknown": "dim"}
_BEGUN, _FAILED = "the run is in ", "failed: "
_ENDS = {  # what the log of a run says last that is no longer running
    "finished: ": "finished",
    "nothing to do: ": "finished",
    "stopped at ": "stopped",
    _BEGUN: "failed",
    _FAILED: "failed",
}
_LOG_LINE = re.compile(rf"^([-0-9]+ [:,0-9]+) (?:INFO|ERROR) ({'|'.join(_ENDS)})(.*)$", re.M)
_LOG_TAIL_BYTES = 1 << 20


def run(words: list[str]) -> int:
    """List runs and return 0, or 1 if a checkpoint that was to be verified is damaged."""
    parser = Words("runs", "[DIR] [--verify] [--json]", _MORE)
    parser.add_argument(
        "directory",
        nargs="?",
        default="runs",
        metavar="DIR",
        help="Where the runs are, or one of them; a URL too. Default: runs.",
    )
    parser.add_argument("--verify", action="store_true", help="Read every byte. Default: manifests, and files' sizes.")
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    given = parser.read(words)
    root = as_place(given.directory)
    with readable(root):
        is_there, is_checkpoint = is_dir(root), exists(root / MANIFEST)
    if not is_there:
        raise ConfigError(f"there is no directory {root}. Say where the runs are: lumen runs DIR.")
    if is_checkpoint:
        raise ConfigError(f"{root} is a checkpoint. Give its run, or the directory of all runs.")
    if root.name == "checkpoints":
        root = root.parent
    found = [look(path, verify=given.verify) for path in find_runs(root)]
    if given.json:
        print(json.dumps([_record(each) for each in found], indent=2), file=stdout)
    elif not found:
        print(f"there are no runs in {root}", file=stdout)
    elif stdout.isatty():
        _show(found)
    else:
        _print(found)
    damaged = any(each.problem and not each.kind for shown in found for each in shown.checkpoints)
    return int(given.verify and damaged)


# ---------------------------------------------------------------------- finding


def find_runs(directory: PurePath) -> Iterator[PurePath]:
    """The runs in a directory and below it, by name; no way leads through links and hidden directories."""
    try:
        if _is_run(directory):
            yield directory
            return
        names = sorted(storage_of(directory).names(directory))
        below = [directory / name for name in names if not name.startswith(".") and is_dir(directory / name)]
    except (OSError, LumenError) as error:
        print(f"warning: cannot look into {directory}: {getattr(error, 'strerror', error)}", file=stderr)
        return
    for path in below:
        local = as_local(path)
        if local is None or not local.is_symlink():
            yield from find_runs(path)
        elif _is_run(path):
            yield path


def _is_run(path: PurePath) -> bool:
    folder = path / "checkpoints"
    if not is_dir(folder):
        return has_checkpoints(path)
    local = as_local(path)
    return has_checkpoints(folder) or (local is not None and RunDirectory.was_claimed(local))


def look(path: PurePath, *, verify: bool = False) -> ShownRun:
    """How a run stands, and its checkpoints; `verify` reads every byte of these."""
    shown = ShownRun(path)
    folder = path / "checkpoints" if is_dir(path / "checkpoints") else path
    try:
        shown.checkpoints = list_checkpoints(folder, verify=verify)
    except LumenError as error:
        shown.problem = str(error)
    local = as_local(path)
    if local is None:  # where runs have neither locks nor logs
        shown.status = _by_checkpoint(shown)
        return shown
    try:
        with warnings.catch_warnings(action="error"):  # of a file system without locks
            shown.holder = RunDirectory.is_locked(local)
    except (RunDirectoryError, UserWarning):
        return shown
    if shown.holder:
        shown.status = "running"
    else:
        _find_end(shown, local)
    return shown


def _find_end(shown: ShownRun, run: Path) -> None:
    """What the run's own log says last, else its newest checkpoint."""
    said = _said_in(run / "run.log")
    shown.status = _ENDS[said[-1][1]] if said else _by_checkpoint(shown)
    if shown.status == "failed":
        begun = max((when for when, what, _ in said if what == _BEGUN), default="")
        of_ranks = sorted((run / "logs").glob("*-rank*.log"))
        newest = [log for log in of_ranks if log.name.rpartition("-")[0] == of_ranks[-1].name.rpartition("-")[0]]
        logs = [run / "run.log", *newest]
        shown.error = _first_failure([each for log in logs for each in _said_in(log) if each[0] >= begun])


def _first_failure(said: list[tuple[str, str, str]]) -> str | None:
    """What the ranks failed by; the first of those that did not only lose another one."""
    failures = [line for _, what, line in sorted(said) if what == _FAILED]
    causes = [line for line in failures if not line.startswith(f"{ProcessLost.__name__}: ")]
    return next(iter(causes or failures), None)


def _said_in(log: Path) -> list[tuple[str, str, str]]:
    """What a log says of how the run stands: when, which of `_ENDS`, and the rest of the line."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_TAIL_BYTES))
            return _LOG_LINE.findall(file.read().decode(errors="replace"))
    except OSError:
        return []


def _by_checkpoint(shown: ShownRun) -> str:
    return "finished" if shown.newest_info.get("finished") else "unknown"


# ---------------------------------------------------------------------- showing


def _record(shown: ShownRun) -> dict[str, Any]:
    holder = shown.holder or {}
    checkpoints = [
        {
            "name": each.path.name,
            "path": str(each.path),
            "step": each.info.get("step"),
            "epoch": each.info.get("epoch"),
            "saved": _time(each, "seconds"),
            "bytes": each.size_bytes,
            "metrics": {name: _plain(value) for name, value in shown.metrics(each).items()},
            "monitor": each.info.get("monitor"),
            "best": shown.is_best(each),
            "valid": each.problem is None,
            "problem": each.problem,
        }
        for each in shown.committed
    ]
    return {
        "path": str(shown.path),
        "status": shown.status,
        **{key: holder.get(key) for key in ("host", "pid", "started")},
        "error": shown.error,
        "goodput": _goodput(shown),
        "problem": shown.problem,
        "checkpoints": checkpoints,
        "temporary": [each.path.name for each in shown.checkpoints if each.kind == "tmp"],
    }


def _time_spent(shown: ShownRun) -> TimeSpent | None:
    """Where its time went; None: it is not told."""
    local = as_local(shown.path)
    try:
        return None if local is None else goodput(local)
    except OSError:
        return None


def _goodput(shown: ShownRun) -> dict[str, Any] | None:
    spent = _time_spent(shown)
    if spent is None:
        return None
    return {"share": spent.goodput, "wall_s": spent.wall_s, "lives": spent.lives, "spent_s": spent.spent_s}


def _plain(value: float) -> float | str:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else str(value)


def _time(checkpoint: Listed, precision: str) -> str:
    """When a checkpoint was committed, by the local clock."""
    if checkpoint.committed_s is None:
        return ""
    return datetime.fromtimestamp(checkpoint.committed_s).astimezone().isoformat(timespec=precision)


def _printable(text: str) -> str:
    """A name from the disk, without what would move the cursor."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _print(found: Sequence[ShownRun]) -> None:
    """One line for each checkpoint, however long it gets."""
    rows = [("RUN", "STATUS", "CHECKPOINT", "EPOCH", "SAVED", "BYTES", "STATE", "METRICS")]
    for shown in found:
        run = _printable(str(shown.path)), shown.status
        for each in shown.committed:
            metrics = " ".join(f"{name}={value!r}" for name, value in shown.metrics(each).items())
            state = "damaged" if each.problem else "best" if shown.is_best(each) else "valid"
            size_bytes = "-" if each.size_bytes is None else str(each.size_bytes)
            described = each.path.name, str(each.info.get("epoch", "-")), _time(each, "seconds") or "-", size_bytes
            rows.append((*run, *described, state, _printable(each.problem or metrics)))
        if shown.error or not shown.committed:
            rows.append((*run, *"-----", _printable(shown.problem or shown.error or "no checkpoints")))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(map(str.ljust, row, widths)).rstrip(), file=stdout)


def _show(found: Sequence[ShownRun]) -> None:
    """A table for each run, as wide as the terminal."""
    console = Console(file=stdout, markup=False, emoji=False, highlight=False)
    for number, shown in enumerate(found):
        if number:
            console.print()
        console.print(_head(shown), soft_wrap=True)
        if shown.committed:
            console.print(_table(shown))
        for note, style in _notes(shown):
            console.print(_printable(note), style=style, soft_wrap=True)


def _head(shown: ShownRun) -> Text:
    text = Text(_printable(str(shown.path)), style="bold").append("  ")
    text.append(shown.status, _STYLES[shown.status])
    if shown.holder is not None:
        pid, host, started = (_printable(str(shown.holder.get(key))) for key in ("pid", "host", "started"))
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
            Text(_printable(f"{name} {value:.4g}"), "bold" if name == monitor else "")
            for name, value in shown.metrics(each).items()
        )
        table.add_row(
            mark,
            each.path.name,
            str(each.info.get("epoch", "")),
            _time(each, "minutes")[:16].replace("T", " "),
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
    if (spent := _time_spent(shown)) is not None:
        yield f"  {spent}", "dim"
    if shown.error:
        yield f"  {shown.error}", "red"
    for each in shown.checkpoints:
        if each.problem:
            yield f"  {each.problem}", "red"
        elif each.kind == "tmp":
            done = "is being written or removed" if shown.status == "running" else "was left by a killed save"
            yield f"  {each.path.name} {done}", "dim"
