"""What somebody asks of a command line, taken apart: the command, where settings are, what is only to be shown."""

from __future__ import annotations

import difflib
import shlex
import sys
from collections.abc import Mapping
from glob import glob
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, final

from lumen.cli.commands import LOOPS
from lumen.cli.config_layers import Tree, parse_words
from lumen.console import stdout
from lumen.errors import ConfigError
from lumen.errors.arguments import did_you_mean, local_path
from lumen.errors.lightning_names import NOT_IN_CLI

_LEFT_OUT = {"skip_default": "default", "skip_unset": "unset", "skip_null": "unset"}
_ALWAYS_SO: dict[str, tuple[Any, ...]] = {"parser_mode": ("yaml", "omegaconf", "omegaconf+"), "default_env": (True,)}


class Shown(SystemExit):
    """All that was asked for is printed: a script ends here, with 0."""


@final
class Asked(NamedTuple):
    """A command line, or the settings that a script gives in its place.

    Attributes:
        command: The first word; None if the script runs its own loops.
        words: Those that follow it.
        files: Config files that are named, or else that of the run whose checkpoint is.
        settings: Each key with its text.
        given: What the script gives in place of words.
        help: Keys of `--help` and `--model.help`, with the class that they name.
        left_out: What `--print_config` is to leave out; None: nothing is to be printed.
    """

    command: str | None
    words: list[str]
    files: list[str]
    settings: list[tuple[str, str]]
    given: Tree
    help: list[tuple[str, str]]
    left_out: set[str] | None


def read_words(args: list[str] | Mapping[str, Any], program: str, *, run: bool) -> Asked:
    """Take a command line apart.

    Args:
        args: Words, or settings in their place.
        program: What the command line begins with.
        run: Whether it has a command.

    Raises:
        ConfigError: There is no such command, or it cannot be read.
        Shown: The commands were asked for, and printed.
    """
    given: Tree = {}
    if isinstance(args, Mapping):
        command, words = args.get("subcommand"), list[str]()
        given = {key: value for key, value in args.get(str(command), args).items() if key != "subcommand"}
    else:
        command, words = (args[0] if args else "--help", args[1:]) if run else (None, args)
    if run:
        _check_command(command, program)
    words = ["--help" if word == "-h" else word for word in words]
    pairs = parse_words(words)
    helped = [(key, text) for key, text in pairs if key == "help" or key.endswith(".help")]
    aside = {"config", "print_config", *(key for key, _ in helped)}
    return Asked(
        command,
        words,
        [text for key, text in pairs if key == "config"] or config_of_run(dict(pairs).get("ckpt_path")),
        [(key, text) for key, text in pairs if key not in aside],
        given,
        helped,
        _flags([text for key, text in pairs if key == "print_config"]),
    )


def _check_command(command: Any, program: str) -> None:
    if command in ("-h", "--help"):
        width = max(map(len, LOOPS))
        lines = [f"  {name:{width}}  {summary}" for name, summary in LOOPS.items()]
        head, more = f"{program} COMMAND --config FILE [--KEY VALUE ...]", f"{program} COMMAND --help says more."
        print(head, *lines, more, sep="\n", file=stdout)
        raise Shown
    if command not in LOOPS:
        hint = did_you_mean(str(command), LOOPS) or f" Did you mean {' or '.join(LOOPS)}?"
        raise ConfigError(f"{program} has no command {command}.{hint}")


def _flags(given: list[str]) -> set[str] | None:
    """What `--print_config` is to leave out; None if it is not there."""
    words = [word for text in given for word in text.split(",") if word not in ("", "true")]
    for word in words:
        if word not in _LEFT_OUT:
            raise ConfigError(f"--print_config={word}: expected one of {', '.join(_LEFT_OUT)}.")
    return {_LEFT_OUT[word] for word in words} if given else None


def config_of_run(checkpoint: str | None) -> list[str]:
    """The saved configuration of the run that a path of a checkpoint or run lies in."""
    path = None if checkpoint is None else local_path(checkpoint)
    places = [] if path is None else [path, *path.absolute().parents[:2]]
    return [str(place / "config.yaml") for place in places if (place / "config.yaml").is_file()][:1]


def default_files(given: Mapping[str, Any], command: str | None) -> list[str]:
    """The config files that a script names in `parser_kwargs`, if they are there.

    Raises:
        ConfigError: A script gives its parser something else.
    """
    own = given.get(command, {}) if command else {}
    given = {name: value for name, value in given.items() if name not in LOOPS} | own
    for name, value in given.items():
        if name != "default_config_files" and value not in _ALWAYS_SO.get(name, ()):
            raise ConfigError(
                f"parser_kwargs: expected default_config_files, found {name}={value!r}. Interpolation and environment "
                "variables are always there; leave it out."
            )
    return [file for pattern in given.get("default_config_files", ()) for file in sorted(glob(str(pattern)))]


def script_command(*, has_commands: bool) -> str:
    """Return the words that a command line of this process's script begins with, if the script trains.

    Args:
        has_commands: The script has the commands `fit`, `validate`, `test` and `predict`.
    """
    words = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]
    return shlex.join([Path(sys.executable).name, *words, *["fit"] * has_commands])


def no_subcommands() -> NoReturn:
    """Refuse to name the commands, as LightningCLI does.

    Raises:
        ConfigError: Always; the message says which commands there are.
    """
    raise ConfigError(f"CLI.subcommands: {NOT_IN_CLI['subcommands']}")


def check_methods(kind: type) -> None:
    """Refuse methods that LightningCLI would call.

    Raises:
        ConfigError: There are such methods; the message says what to write instead.
    """
    own = [name for base in kind.__mro__ if not base.__module__.startswith("lumen.") for name in vars(base)]
    known = {f"{when}_{command}" for when in ("before", "after") for command in LOOPS}
    wrong = {name: NOT_IN_CLI[name] for name in own if name in NOT_IN_CLI}
    for name in own:
        if name.startswith(("before_", "after_")) and name not in {*known, "before_instantiate_classes"}:
            close = difflib.get_close_matches(name, known, n=1)
            wrong[name] = f"Did you mean {close[0]}?" if close else f"There are {', '.join(sorted(known))}."
    if wrong:
        lines = [f"{kind.__name__}.{name}: nothing calls it. {instead}" for name, instead in wrong.items()]
        raise ConfigError("\n".join(lines))
