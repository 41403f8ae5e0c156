"""`lumen report`: writes runs as one HTML file."""

from __future__ import annotations

from pathlib import Path

from lumen.cli.commands import CommandParser
from lumen.console import format_bytes, stdout
from lumen.errors import ConfigError
from lumen.errors.arguments import expand_path
from lumen.internals.optional_packages import import_optional
from lumen.tools.report import COMMAND
from lumen.tools.report.record import is_recorded
from lumen.tools.runs.find import ShownRun, find_runs, inspect_run
from lumen.tools.terminal import format_count

_DESCRIPTION = (
    "Charts show several runs together; a directory of runs means all its runs. The command changes no run and "
    "disturbs no job. The file needs no network, and a browser runs only the scripts of the report."
)


def options() -> CommandParser:
    """Return the parser of the command's options."""
    parser = CommandParser("report", COMMAND, "RUN [RUN ...] [--output FILE]", _DESCRIPTION)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="Directory of a run, or of several runs.")
    parser.add_argument(
        "--output", default="report.html", metavar="FILE", help="HTML file to write. Default: report.html."
    )
    return parser


def run(words: list[str]) -> int:
    """Write a report and return 0.

    Raises:
        ConfigError: A run does not exist, the output is not an HTML file, or bokeh is not installed.
        RunDirectoryError: The file cannot be written.
    """
    args = options().read(words)
    output = expand_path(args.output)
    if output.suffix not in (".html", ".htm"):
        raise ConfigError(f"--output {output}: expected an .html file.")
    import_optional("bokeh", "lumen report", "report")
    found = {shown.path: shown for word in args.runs for shown in _find_runs(expand_path(word))}
    from lumen.tools.report.page import write_report

    write_report(list(found.values()), output)
    print(f"{output}: {format_count(len(found), 'run')}, {format_bytes(output.stat().st_size)}", file=stdout)
    return 0


def _find_runs(path: Path) -> list[ShownRun]:
    if not path.is_dir():
        raise ConfigError(f"there is no directory {path}. Name runs on this machine: lumen report runs/NAME.")
    found = [path] if is_recorded(path) else [Path(each) for each in find_runs(path)]
    if not found:
        raise ConfigError(f"there are no runs in {path}. Name the directory of a run, such as runs/NAME.")
    return [inspect_run(each) for each in found]
