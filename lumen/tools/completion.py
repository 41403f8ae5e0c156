"""`lumen completion`: prints a shell completion script, which shtab builds from the parsers of all commands."""

from __future__ import annotations

import inspect
import re
from argparse import SUPPRESS, Action, ArgumentParser
from collections.abc import Iterator
from textwrap import shorten
from typing import Any, Literal, get_args, get_origin

from lumen.cli.commands import LOOPS, Command, CommandParser, get_parser, get_summary, list_commands, load_command
from lumen.console import stdout
from lumen.internals.optional_packages import import_optional

COMMAND = Command(
    "Print a script for bash, zsh or fish that completes the command lumen.",
    __name__,
    example="source <(lumen completion bash)",
)
_INSTALL = {
    "bash": "mkdir -p ~/.local/share/bash-completion/completions && lumen completion bash > "
    "~/.local/share/bash-completion/completions/lumen    # or source it in ~/.bashrc",
    "zsh": "lumen completion zsh > DIRECTORY/_lumen    # one of $fpath; or source it in ~/.zshrc, after compinit",
    "fish": "lumen completion fish > ~/.config/fish/completions/lumen.fish",
}
_DESCRIPTION = (
    "The script completes commands, options, their values, files and directories. Print the script again after an "
    "update of Lumen."
)
_EXTRA_VALUES = {
    "trainer.devices": ("auto",),
    "trainer.log_level": ("DEBUG", "INFO", "WARNING", "ERROR"),
    "trainer.resume": ("auto",),
    "print_config": ("skip_default", "skip_unset", "skip_null"),
    "help": ("all",),
}
_FILE_OPTIONS = {"config", "ckpt_path", "average", "output", "file", "trainer.init_from", "trainer.resume"}
_FILE_OPTIONS |= {"RUN", "CHECKPOINT_OR_RUN", "DIR", "A", "B", "FILE", "OUTPUT", "FILE_OR_DIR", "PATH"}


def options() -> CommandParser:
    """Return the parser of the command's options."""
    parser = CommandParser("completion", COMMAND, "bash|zsh|fish", _DESCRIPTION)
    parser.add_argument("shell", choices=(*_INSTALL,), help="The shell.")
    return parser


def run(words: list[str]) -> int:
    """Print the script and return 0.

    Raises:
        ConfigError: The shell is unknown, or shtab is not installed.
    """
    shell = options().read(words).shell
    shtab = import_optional("shtab", "lumen completion", "completion")
    first, _, rest = shtab.complete(make_full_parser(shtab.FILE), shell).partition("\n")
    print(first, f"# to install: {_INSTALL[shell]}", rest, sep="\n", file=stdout)  # zsh reads the first line
    return 0


def make_full_parser(file_marker: Any) -> ArgumentParser:
    """Return a parser of all commands, whose options list their possible values.

    Args:
        file_marker: The marker by which shtab completes an option with file names.
    """
    from lumen.cli.options import CommandOptions, OptionParser

    root = ArgumentParser("lumen", allow_abbrev=False)
    commands = root.add_subparsers()
    for name in list_commands():
        parents: list[ArgumentParser] = []
        if name in LOOPS or load_command(name).has_config:
            parents.append(parser := OptionParser(prog="lumen", exit_on_error=False))
            CommandOptions().add_to(parser, name if name in LOOPS else "fit", None)
        if name not in LOOPS:
            parents.append(get_parser(name))
        for action in (action for parent in parents for action in parent._actions):
            _add_choices(action, file_marker)
        commands.add_parser(
            name,
            help=get_summary(name),
            parents=parents,
            add_help=False,
            conflict_handler="resolve",
            allow_abbrev=False,
        )
    return root


def _add_choices(action: Action, file_marker: Any) -> None:
    """Set the possible values of an option, and shorten its help to one line."""
    hint = getattr(action, "_typehint", action.type)
    values = [*map(str, action.choices or ()), *_iterate_values(action.dest, hint)]
    if action.dest.endswith(".help"):
        action.help = SUPPRESS
    action.choices = [*dict.fromkeys(values)] or None
    if action.dest in _FILE_OPTIONS or action.metavar in _FILE_OPTIONS:
        action.complete = file_marker  # type: ignore[attr-defined]
    if action.help != SUPPRESS:
        text = re.split(r"\. (?=[A-Z])", " ".join(str(action.help or "").split()))[0]
        action.help = shorten(text, 80, placeholder=" ...").replace("%", "%%")


def _iterate_values(key: str, hint: Any) -> Iterator[str]:
    """Yield the values that an option accepts: fixed words, and built-in classes of its type."""
    from lumen.cli.classes import iterate_hints, list_bases
    from lumen.precision import PRECISIONS
    from lumen.strategies.factory import ACCELERATORS, STRATEGIES

    names = {"trainer.accelerator": ACCELERATORS, "trainer.precision": PRECISIONS, "trainer.strategy": STRATEGIES}
    yield from (*_EXTRA_VALUES.get(key, ()), *names.get(key, ()))
    for each in iterate_hints(hint):
        if get_origin(each) is Literal:
            yield from map(str, get_args(each))
        elif each is bool:
            yield from ("true", "false")
    if hint is not None and not key.endswith("help"):
        yield from _iterate_class_names(tuple(base for base in list_bases(hint) if type.__subclasses__(base)))


def _iterate_class_names(bases: tuple[type, ...]) -> Iterator[str]:
    """Yield the names of public classes of Lumen and of `torch.optim` that derive from any of the bases."""
    import torch

    import lumen

    for module in (lumen, torch.optim, torch.optim.lr_scheduler):
        for name in getattr(module, "__all__", None) or vars(module):
            kind = getattr(module, name)
            if inspect.isclass(kind) and issubclass(kind, bases) and kind not in bases and not inspect.isabstract(kind):
                yield name
