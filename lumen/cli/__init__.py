"""Command line: `lumen COMMAND`."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import traceback

from lumen.cli import commands
from lumen.console import stderr, stdout
from lumen.distributed import worker
from lumen.errors import HUNG, ConfigError, LumenError, ProcessStuck
from lumen.internals.garbage import collect_young_only
from lumen.version import __version__

VERBOSE = "LUMEN_DEBUG"  # set by `--verbose`, and inherited by the processes of the run


def main(args: list[str] | None = None) -> int:
    """Run one command, by default the command of the process's command line.

    Returns:
        The exit code: 0; 2 for a wrong command line or config; 70 if a process hangs; 1 for any other error of Lumen;
        130 for Ctrl-C. An error in user code also returns 1, and is printed without the frames of libraries. The error
        is raised instead if `args` is given, under a debugger, or in an interactive Python.
    """
    try:
        return (
            _dispatch(sys.argv[1:], is_own_command_line=True)
            if args is None
            else _dispatch(args, is_own_command_line=False)
        )
    except KeyboardInterrupt:
        return 130
    except LumenError as error:
        return print_error(error)
    except Exception as error:
        if args is not None or sys.gettrace() is not None or sys.flags.interactive:
            raise
        from lumen.cli.user_errors import print_user_error

        print_user_error(error)
        return 1
    finally:
        stdout.flush()  # flush here, where a closed pipe is no error, and not when Python exits


def is_verbose() -> bool:
    """Return True if errors show all frames."""
    return os.environ.get(VERBOSE) == "1"


def print_error(error: LumenError) -> int:
    """Print an error, or report it to the process that started this one; return the exit code."""
    if is_verbose():
        traceback.print_exc()
    text = "\n".join([f"error: {error}", *getattr(error, "__notes__", ())])
    if not worker.report_error(error, text):
        print(text, file=stderr)
    return 2 if isinstance(error, ConfigError) else HUNG if isinstance(error, ProcessStuck) else 1


def _dispatch(args: list[str], *, is_own_command_line: bool) -> int:
    args = _handle_verbose(strip_launcher_words(args))
    if not args or args[0] in ("-h", "--help"):
        _show_help()
        return 0
    command, *words = args
    if command == "--version":
        print(f"lumen {__version__}", file=stdout)
        return 0
    with collect_young_only():
        run = commands.find_runner(command)
    if is_own_command_line:
        gc.freeze()  # All objects so far stay until the end, so garbage collection need not look through them.

    return run(words)


def _show_help() -> None:
    registered = commands.list_registered()
    width = min(shutil.get_terminal_size().columns, 100)
    ours, rest = (
        commands.format_summaries(names, width) for names in ([*commands.LOOPS, *registered[True]], registered[False])
    )
    head = "lumen COMMAND --config FILE [--KEY VALUE ...]"
    end = "lumen COMMAND --help shows the options and an example.\nWith --verbose, errors show every frame."
    first = "For a first project that trains, run: lumen init mine"
    print(head, *ours, "without a config:", *rest, end, first, sep="\n", file=stdout)


def _handle_verbose(words: list[str]) -> list[str]:
    """Return a command line without `--verbose`, after setting the variable for this process and its children."""
    end = words.index("--") if "--" in words else len(words)  # another command line follows
    if "--verbose" in words[:end]:
        os.environ[VERBOSE] = "1"
    return [word for word in words[:end] if word != "--verbose"] + words[end:]


def strip_launcher_words(words: list[str]) -> list[str]:
    """Return a command line without the argument that `torch.distributed.launch` adds; LOCAL_RANK has its value."""
    rank = os.environ.get("LOCAL_RANK")
    return [word for word in words if word not in (f"--local-rank={rank}", f"--local_rank={rank}")]
