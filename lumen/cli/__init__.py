"""The command line: `lumen COMMAND`."""

from __future__ import annotations

import gc
import os
import sys
import traceback

from lumen.cli import commands
from lumen.console import stderr, stdout
from lumen.distributed import worker
from lumen.errors import HUNG, ConfigError, LumenError, ProcessStuck
from lumen.internals.garbage import only_young_collected
from lumen.version import __version__

VERBOSE = "LUMEN_DEBUG"  # what `--verbose` sets, for the processes of the run too


def main(args: list[str] | None = None) -> int:
    """Run one command, by default that of the process's own command line.

    Returns:
        The exit code: 0; 2 for a wrong command line or configuration; 70 where a process hangs; 1 for any other error
        of Lumen; 130 for Ctrl-C. An error of the user's own code is 1 too, and shown without the frames of libraries;
        it is raised where words are given, and where a debugger waits for it.
    """
    try:
        return _dispatch(sys.argv[1:], own=True) if args is None else _dispatch(args, own=False)
    except KeyboardInterrupt:
        return 130
    except LumenError as error:
        return tell(error)
    except Exception as error:
        if args is not None or sys.gettrace() is not None or sys.flags.interactive:
            raise
        from lumen.cli.users_error import show

        show(error)
        return 1
    finally:
        stdout.flush()  # here, where a closed pipe is no error, and not when Python exits


def is_verbose() -> bool:
    """Return True if all frames of errors were asked for."""
    return os.environ.get(VERBOSE) == "1"


def tell(error: LumenError) -> int:
    """Print an error, or leave that to who has started this process; returns the exit code."""
    if is_verbose():
        traceback.print_exc()
    text = "\n".join([f"error: {error}", *getattr(error, "__notes__", ())])
    if not worker.report(error, text):
        print(text, file=stderr)
    return 2 if isinstance(error, ConfigError) else HUNG if isinstance(error, ProcessStuck) else 1


def _dispatch(args: list[str], *, own: bool) -> int:
    args = _heard(without_launchers(args))
    if not args or args[0] in ("-h", "--help"):
        _show_help()
        return 0
    command, *words = args
    if command == "--version":
        print(f"lumen {__version__}", file=stdout)
        return 0
    with only_young_collected():
        run = commands.find(command)
    if own:
        gc.freeze()  # what there is now stays until the end: no need to look through it again and again

    return run(words)


def _show_help() -> None:
    registered = commands.registered_names()
    ours, others = [*commands.LOOPS, *registered[True]], registered[False]
    width = max(map(len, commands.LOOPS))
    lines = {name: f"  {name:{width}}  {commands.summary_of(name)}" for name in (*ours, *others)}
    head = "lumen COMMAND --config FILE [--KEY VALUE ...]"
    more = "lumen COMMAND --help says more; with --verbose errors show every frame."
    print(head, *map(lines.get, ours), "without a config:", *map(lines.get, others), more, sep="\n", file=stdout)


def _heard(words: list[str]) -> list[str]:
    """A command line without `--verbose`, which is for this process and for those that it starts."""
    own = words.index("--") if "--" in words else len(words)  # what follows is another command line
    if "--verbose" in words[:own]:
        os.environ[VERBOSE] = "1"
    return [word for word in words[:own] if word != "--verbose"] + words[own:]


def without_launchers(words: list[str]) -> list[str]:
    """A command line without what `torch.distributed.launch` puts before it; the environment says the same."""
    rank = os.environ.get("LOCAL_RANK")
    return [word for word in words if word not in (f"--local-rank={rank}", f"--local_rank={rank}")]
