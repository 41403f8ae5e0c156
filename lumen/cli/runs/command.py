"""The command `lumen runs`."""

from __future__ import annotations

import json
from argparse import Namespace

from lumen.cli.parser import Words
from lumen.cli.runs.choose import choose
from lumen.cli.runs.find import runs_in
from lumen.cli.runs.records import record
from lumen.cli.runs.show import print_checkpoints, show_checkpoints
from lumen.cli.runs.table import differences, find_two, show_differences, show_table
from lumen.console import stdout
from lumen.errors import ConfigError

_MORE = (
    "Nothing is changed, and no job is disturbed. Running: a live process holds the run; stopped: it was asked to; "
    "failed: it ended by an error, whose traceback is in run.log, or by a kill. Exit code 1: --verify found damage."
)


def run(words: list[str]) -> int:
    """List runs and return 0, or 1 if a checkpoint that was to be verified is damaged."""
    given = options().read(words)
    if given.compare and (given.where or given.sort or given.table):
        raise ConfigError("--compare takes two runs by their names. Leave out --where, --sort and --table.")
    found = runs_in(given.directory, verify=given.verify)
    records = [record(each) for each in found] if given.json or given.compare or _is_table(given) else []
    if given.compare:
        one, other = find_two(given.compare, records)
        if given.json:
            print(json.dumps(differences(one, other), indent=2), file=stdout)
        else:
            show_differences(one, other)
        return 0
    chosen = choose(records, given.where, given.sort)
    if given.json:
        print(json.dumps(chosen, indent=2), file=stdout)
    elif not found:
        print(f"there are no runs in {given.directory}", file=stdout)
    elif _is_table(given):
        show_table(chosen, records, given.where, given.sort)
    else:
        (show_checkpoints if stdout.isatty() else print_checkpoints)(found)
    damaged = any(each.problem and not each.kind for shown in found for each in shown.checkpoints)
    return int(given.verify and damaged)


def _is_table(given: Namespace) -> bool:
    return bool(given.table or given.where or given.sort)


def options() -> Words:
    """The options of the command."""
    parser = Words("runs", "[DIR] [--where CONDITION] [--sort NAME] [--compare RUN RUN] [--json]", _MORE)
    parser.add_argument(
        "directory",
        nargs="?",
        default="runs",
        metavar="DIR",
        help="Where the runs are, or one of them; a URL too. Default: runs.",
    )
    parser.add_argument("--table", action="store_true", help="A row for each run, with the settings that differ.")
    parser.add_argument(
        "--where", action="append", default=[], metavar="CONDITION",
        help="A table of the runs that meet it: 'lr < 1e-3', 'status = finished'. Several: all must be met.",
    )  # fmt: skip
    parser.add_argument(
        "--sort", metavar="NAME", help="A table by a setting or metric, smallest first; --sort=-NAME: largest first."
    )
    parser.add_argument("--compare", nargs=2, metavar="RUN", help="In which settings two runs differ, and in metrics.")
    parser.add_argument("--verify", action="store_true", help="Read every byte. Default: manifests, and files' sizes.")
    parser.add_argument("--json", action="store_true", help="Print JSON; of --where and --sort too.")
    return parser
