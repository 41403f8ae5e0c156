"""Commands of `lumen`: the four loops of a trainer, and the entry points of the group `lumen.commands`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from textwrap import wrap
from types import ModuleType
from typing import NoReturn, final

from lumen.errors import ConfigError, LumenError
from lumen.errors.arguments import suggest_names
from lumen.internals import entry_points

LOOPS = {
    "fit": "Train.",
    "validate": "Evaluate on the validation data.",
    "test": "Evaluate on the test data.",
    "predict": "Predict; text is printed.",
}
"""The commands of every command line, of a script's too; nothing can be registered in their place."""
LOOP_EXAMPLES = {
    "fit": "--config mine.yaml --trainer.max_epochs 2",
    **dict.fromkeys(("validate", "test", "predict"), "--config runs/mine/config.yaml --ckpt_path last"),
}
"""The arguments of each of these commands in the example of its help."""


@final
@dataclass(frozen=True)
class Command:
    """Command that an entry point of the group `lumen.commands` names.

    The help of `lumen` imports the module of this object, so that module should import little.

    Args:
        summary: A sentence for the help.
        module: The full name of the module that defines `run(words: list[str]) -> int`, which returns the exit code,
            and `options() -> argparse.ArgumentParser`. Lumen imports the module to run the command, or for a shell's
            completion.
        has_config: True if the command takes the options of `lumen fit` too.
        example: A complete command of at most 69 characters for the help, such as `lumen report runs/mine`.
    """

    summary: str
    module: str
    has_config: bool = False
    example: str | None = None


@final
class CommandParser(argparse.ArgumentParser):
    """Parser of a command line, whose errors are ConfigErrors.

    Args:
        name: The command's name.
        command: The command, whose summary begins the help.
        usage: The command's arguments, in one line.
        details: The text of the help in addition to the options.
    """

    def __init__(self, name: str, command: Command, usage: str, details: str) -> None:
        super().__init__(
            usage=f"lumen {name} {usage}",
            description=f"{command.summary} {details}",
            epilog=command.example and f"Example: {command.example}",
            allow_abbrev=False,
        )
        self._name = name

    def read(self, words: list[str]) -> argparse.Namespace:
        """Return the values of all options.

        Raises:
            ConfigError: An option is unknown, missing, or has a wrong value.
        """
        options = [option for action in self._actions for option in action.option_strings]
        for word in (word.partition("=")[0] for word in words if word.startswith("-")):
            if word not in options:
                hint = suggest_names(word, options) or f" lumen {self._name} --help shows all options."
                raise ConfigError(f"lumen {self._name} has no option {word}.{hint}")
        return self.parse_args(words)

    def error(self, message: str) -> NoReturn:
        """Raise a ConfigError instead of ending the process."""
        message = re.sub("^argument (.+): invalid int value: ", r"\1: expected a whole number, found ", message)
        raise ConfigError(f"{message}. Usage: {self.usage}")


def list_commands() -> list[str]:
    """Return the names of all commands: the loops, the commands with a config, then the others."""
    names = list_registered()
    return [*LOOPS, *names[True], *names[False]]


def list_registered() -> dict[bool, list[str]]:
    """Return the names of commands in two groups: with a config; without one, or broken."""
    names: dict[bool, list[str]] = {True: [], False: []}
    for name in sorted(entry_points.list_entry_points(entry_points.COMMANDS).keys() - LOOPS.keys()):
        try:
            names[load_command(name).has_config].append(name)
        except ConfigError:
            names[False].append(name)
    return names


def load_command(name: str) -> Command:
    """Import a registered command.

    Raises:
        ConfigError: No distribution or two distributions register the command, the import fails, or the object is not a
            `Command`.
    """
    description = f"the command {name}"
    command = entry_points.load_entry_point(entry_points.COMMANDS, name, description)
    if not isinstance(command, Command):
        raise ConfigError(
            f"{description}: expected a lumen.cli.commands.Command, found {command!r}. Register a Command."
        )
    return command


def get_summary(name: str) -> str:
    """Return the line of a command in the help: the summary, or the reason why the command cannot be used."""
    try:
        return LOOPS.get(name) or load_command(name).summary
    except ConfigError as error:
        return str(error)


def format_summaries(names: Iterable[str], width: int) -> list[str]:
    """Return the lines of a help that list commands, wrapped to the width of a terminal."""
    head = max(map(len, list_commands())) + 4
    return [
        line
        for name in names
        for line in wrap(get_summary(name), width, initial_indent=f"  {name}".ljust(head), subsequent_indent=" " * head)
    ]


def find_runner(name: str) -> Callable[[list[str]], int]:
    """Import and return the function that runs a command; the import takes seconds, because it imports torch.

    Raises:
        ConfigError: The command does not exist, or its import fails.
    """
    if name in LOOPS:
        from lumen.cli import command_line

        return partial(command_line.run, name)
    registered = entry_points.list_entry_points(entry_points.COMMANDS)
    if name not in registered:
        if not any(each.module.startswith("lumen.") for several in registered.values() for each in several):
            raise ConfigError(f"lumen has no command {name}. {entry_points.format_install_hint()}")
        raise ConfigError(
            f"lumen has no command {name}.{suggest_names(name, list_commands()) or ' lumen --help lists all commands.'}"
        )
    run: Callable[[list[str]], int] = _import_module(name).run
    return run


def get_parser(name: str) -> argparse.ArgumentParser:
    """Return the options of a registered command.

    Raises:
        ConfigError: The command cannot be imported.
    """
    parser: argparse.ArgumentParser = _import_module(name).options()
    return parser


def _import_module(name: str) -> ModuleType:
    command = load_command(name)
    try:
        return import_module(command.module)
    except LumenError:
        raise
    except Exception as error:
        (entry,) = entry_points.list_entry_points(entry_points.COMMANDS)[name]
        raise entry_points.make_broken_error(
            f"the command {name}", entry_points.get_distribution_name(entry), error
        ) from error
