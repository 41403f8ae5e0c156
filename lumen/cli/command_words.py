"""Parsed command line: the command, the config files, the settings, and what to print instead of running."""

from __future__ import annotations

import difflib
import inspect
import shlex
import sys
from collections.abc import Iterable, Mapping
from glob import glob
from pathlib import Path
from typing import Any, NamedTuple, final

from lumen.cli.commands import LOOPS
from lumen.cli.config_layers import Tree, parse_words
from lumen.console import stdout
from lumen.errors import ConfigError
from lumen.errors.arguments import expand_path, suggest_names
from lumen.errors.lightning_names import NOT_IN_CLI
from lumen.trainer.run_directory import RunDirectory

_PRINT_CONFIG_FLAGS = {"skip_default": "default", "skip_unset": "unset", "skip_null": "unset"}
_FIXED_SETTINGS: dict[str, tuple[Any, ...]] = {
    "parser_mode": ("yaml", "omegaconf", "omegaconf+"),
    "default_env": (True,),
}


_CLASS_HOOKS = ("before_instantiate_classes", "after_instantiate_classes")


class HelpShown(SystemExit):
    """Exit of a script, with code 0, after it has printed the help or the config."""


@final
class CommandWords(NamedTuple):
    """Command line, or the settings that a script passes instead of it.

    Attributes:
        command: The first word; None if the script runs its own loops.
        words: The words after the command.
        files: The config files in the arguments, else the saved config of the run that `ckpt_path` names.
        settings: Each key with its text.
        arguments: The settings that the script passes instead of command-line arguments.
        help: The keys of `--help` and `--model.help`, with the class that each names.
        omitted_values: The values that `--print_config` omits, "default" and "unset"; None without `--print_config`.
    """

    command: str | None
    words: list[str]
    files: list[str]
    settings: list[tuple[str, str]]
    arguments: Tree
    help: list[tuple[str, str]]
    omitted_values: set[str] | None


def read_words(args: list[str] | Mapping[str, Any], program: str, commands: Mapping[str, str] | None) -> CommandWords:
    """Parse a command line.

    Args:
        args: The command-line arguments, or the settings as a mapping.
        program: The first word of the command line.
        commands: The commands with a summary of each; None if the arguments have no command.

    Raises:
        ConfigError: The command does not exist, or the arguments cannot be read.
        HelpShown: The list of commands was printed.
    """
    arguments: Tree = {}
    if isinstance(args, Mapping):
        command, words = args.get("subcommand"), list[str]()
        arguments = {key: value for key, value in args.get(str(command), args).items() if key != "subcommand"}
    else:
        command, words = (None, args) if commands is None else _split_command(args)
    if commands is not None:
        _check_command(command, program, commands)
    words = ["--help" if word == "-h" else word for word in words]
    pairs = parse_words(words)
    helped = [(key, text) for key, text in pairs if key == "help" or key.endswith(".help")]
    other_keys = {"config", "print_config", *(key for key, _ in helped)}
    return CommandWords(
        command,
        words,
        [text for key, text in pairs if key == "config"] or find_run_config(dict(pairs).get("ckpt_path")),
        [(key, text) for key, text in pairs if key not in other_keys],
        arguments,
        helped,
        _parse_print_config_flags([text for key, text in pairs if key == "print_config"]),
    )


def _split_command(words: list[str]) -> tuple[str, list[str]]:
    """Return the command and the other words; config files may precede the command."""
    files: list[str] = []
    while words and words[0].partition("=")[0] in ("-c", "--config"):
        end = 1 if "=" in words[0] else 2
        files, words = [*files, *words[:end]], words[end:]
    return words[0] if words else "--help", [*files, *words[1:]]


def _check_command(command: Any, program: str, commands: Mapping[str, str]) -> None:
    if command in ("-h", "--help"):
        width = max(map(len, commands))
        lines = [f"  {name:{width}}  {summary}" for name, summary in commands.items()]
        head, end = f"{program} COMMAND --config FILE [--KEY VALUE ...]", f"{program} COMMAND --help shows the options."
        print(head, *lines, end, sep="\n", file=stdout)
        raise HelpShown
    if command not in commands:
        hint = suggest_names(str(command), commands) or f" Did you mean {' or '.join(commands)}?"
        raise ConfigError(f"{program} has no command {command}.{hint}")


def _parse_print_config_flags(texts: list[str]) -> set[str] | None:
    """Return the values that `--print_config` omits; None without `--print_config`."""
    words = [word for text in texts for word in text.split(",") if word not in ("", "true")]
    for word in words:
        if word not in _PRINT_CONFIG_FLAGS:
            raise ConfigError(f"--print_config={word}: expected one of {', '.join(_PRINT_CONFIG_FLAGS)}.")
    return {_PRINT_CONFIG_FLAGS[word] for word in words} if texts else None


def find_run_config(checkpoint: str | None) -> list[str]:
    """Return the saved config of the run to which a checkpoint's or run's path belongs; empty if no config is found."""
    if checkpoint in (None, "last", "best"):
        return []
    path = expand_path(str(checkpoint))
    places = [path, *(place for place in path.absolute().parents[:2] if RunDirectory.was_claimed(place))]
    return [str(place / "config.yaml") for place in places if (place / "config.yaml").is_file()][:1]


def find_default_files(parser_kwargs: Mapping[str, Any], command: str | None, commands: Iterable[str]) -> list[str]:
    """Return the config files that a script names in `parser_kwargs`, if they exist.

    Args:
        parser_kwargs: The `parser_kwargs` of the script.
        command: The name of the command, or None.
        commands: The names of all commands.

    Raises:
        ConfigError: The script passes another argument to its parser.
    """
    of_command = parser_kwargs.get(command, {}) if command else {}
    of_all = {name: value for name, value in parser_kwargs.items() if name not in {*commands}}
    files = [*of_all.pop("default_config_files", ()), *of_command.get("default_config_files", ())]
    for name, value in (of_all | of_command).items():
        if name != "default_config_files" and value not in _FIXED_SETTINGS.get(name, ()):
            raise ConfigError(
                f"parser_kwargs: expected default_config_files, found {name}={value!r}. Interpolation and "
                f"environment variables are always enabled. Leave {name} out."
            )
    return [file for pattern in files for file in sorted(glob(str(pattern)))]


def get_script_command(*, has_commands: bool) -> str:
    """Return the first words of a command that runs this process's script, for training.

    Args:
        has_commands: True if the script has the commands `fit`, `validate`, `test` and `predict`.
    """
    words = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]
    return shlex.join([Path(sys.executable).name, *words, *["fit"] * has_commands])


def list_summaries(commands: Iterable[str], kind: type, trainer: type) -> dict[str, str]:
    """Return the commands of a script, each with a line for the help.

    Args:
        commands: The names of the commands.
        kind: The script's class.
        trainer: The class of the trainer.

    Raises:
        ConfigError: A command is a method of neither class.
    """
    found: dict[str, str] = {}
    for name in commands:
        method = getattr(kind, name, None) or getattr(trainer, name, None)
        if method is None:
            raise ConfigError(
                f"{kind.__name__}.subcommands: {trainer.__name__} has no method {name}. Define {name}(self, model, "
                f"datamodule) in a subclass of lumen.Trainer, and pass it as trainer_class; or in {kind.__name__}."
            )
        found[name] = LOOPS.get(name) or (inspect.getdoc(method) or "").partition("\n")[0]
    return found


def refuse_lightning_cli_methods(kind: type, commands: Iterable[str]) -> None:
    """Refuse methods of a script's class that only LightningCLI would call.

    Args:
        kind: The script's class.
        commands: The names of its commands.

    Raises:
        ConfigError: The class has such methods; the message names the replacements.
    """
    defined = [name for base in kind.__mro__ if not base.__module__.startswith("lumen.") for name in vars(base)]
    known = {f"{when}_{command}" for when in ("before", "after") for command in commands}
    advice_by_name = {name: NOT_IN_CLI[name] for name in defined if name in NOT_IN_CLI}
    for name in defined:
        if name.startswith(("before_", "after_")) and name not in {*known, *_CLASS_HOOKS}:
            close = difflib.get_close_matches(name, known, n=1)
            advice_by_name[name] = f"Did you mean {close[0]}?" if close else f"Lumen calls {', '.join(sorted(known))}."
    if advice_by_name:
        lines = [
            f"{kind.__name__}.{name}: Lumen does not call this method. {instead}"
            for name, instead in advice_by_name.items()
        ]
        raise ConfigError("\n".join(lines))
