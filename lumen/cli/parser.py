"""How the commands beside the four loops read the words that are theirs."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn, final

from lumen.cli.commands import Command
from lumen.errors import ConfigError
from lumen.errors.arguments import did_you_mean


@final
class Words(argparse.ArgumentParser):
    """Reads a command line; what is wrong with it is a ConfigError.

    Args:
        name: The command's name.
        command: The command, whose summary begins the help.
        usage: Its arguments in a line.
        more: What its help says beside its options.
    """

    def __init__(self, name: str, command: Command, usage: str, more: str) -> None:
        self._options: list[str] = []
        super().__init__(
            usage=f"lumen {name} {usage}",
            description=f"{command.summary} {more}",
            allow_abbrev=False,
        )
        self._name = name

    def add_argument(self, *names: str, **settings: Any) -> argparse.Action:
        """Add an argument, as argparse does."""
        action = super().add_argument(*names, **settings)
        self._options += action.option_strings
        return action

    def read(self, words: list[str]) -> argparse.Namespace:
        """The values of all options.

        Raises:
            ConfigError: An option is unknown, missing, or has no such value.
        """
        for word in (word.partition("=")[0] for word in words if word.startswith("-")):
            if word not in self._options:
                hint = did_you_mean(word, self._options) or f" lumen {self._name} --help shows all."
                raise ConfigError(f"lumen {self._name} has no option {word}.{hint}")
        return self.parse_args(words)

    def error(self, message: str) -> NoReturn:
        """Raise instead of ending the process."""
        raise ConfigError(f"{message}. Usage: {self.usage}")
