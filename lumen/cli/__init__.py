"""The command line: `lumen COMMAND`."""

from __future__ import annotations

import difflib
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

from lumen import __version__
from lumen.errors import ConfigError, LumenError

#: Each command, the module whose `run(command, words)` does it, and what it is for.
COMMANDS = {
    "fit": ("lumen.cli.loops", "Train."),
    "validate": ("lumen.cli.loops", "Evaluate on the validation data."),
    "test": ("lumen.cli.loops", "Evaluate on the test data."),
    "predict": ("lumen.cli.loops", "Predict; text is printed."),
}


def main(words: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        words: The command line without the program's name; None: the process's own.

    Returns:
        The exit code: 0; 2 for a wrong command line or configuration; 1 for any other error of Lumen; 130 for Ctrl-C.
        Errors of the user's own code are raised.
    """
    try:
        return _dispatch(list(sys.argv[1:] if words is None else words))
    except KeyboardInterrupt:
        return 130
    except LumenError as error:
        if os.environ.get("LUMEN_DEBUG"):
            traceback.print_exc()
        else:
            _print_error(str(error))
        return 2 if isinstance(error, ConfigError) else 1


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        return 0
    if words[0] == "--version":
        print(f"lumen {__version__}")
        return 0
    command, *rest = words
    if command not in COMMANDS:
        close = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"Did you mean {close[0]}?" if close else f"There are: {', '.join(COMMANDS)}."
        raise ConfigError(f"lumen has no command {command}. {hint}")
    module, _ = COMMANDS[command]
    return int(import_module(module).run(command, rest))


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {command:{width}}  {summary}" for command, (_, summary) in COMMANDS.items()]
    return "\n".join(
        ["lumen COMMAND [--config FILE] [--KEY VALUE ...]", "", *lines, "", "lumen COMMAND --help says more."]
    )


def _print_error(message: str) -> None:
    from lumen.console import console

    console.print("error:", style="bold red", end=" ")
    console.print(message, markup=False, highlight=False)
