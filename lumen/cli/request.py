"""What was typed after `lumen COMMAND`, before any of it is looked at closely."""

from __future__ import annotations

import difflib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from lumen.cli.layers import COMMAND_LINE
from lumen.errors import ConfigError

FLAGS = ("help", "print_config")
VALUES = ("config", "output")


@final
@dataclass
class Request:
    """A command line, taken apart.

    Attributes:
        configs: The config files in their order.
        settings: `(key, text, origin)` of every other option; a key without text means True.
        output: Where results are written to.
        print_config: Print the configuration instead of running.
        help: Print the help instead of running.
    """

    configs: list[Path] = field(default_factory=list)
    settings: list[tuple[str, str | bool, str]] = field(default_factory=list)
    output: Path | None = None
    print_config: bool = False
    help: bool = False

    @staticmethod
    def parse(words: Sequence[str]) -> Request:
        """Take a command line apart.

        Raises:
            ConfigError: A word is no `--key value` or `--key=value`.
        """
        request, rest = Request(), deque(words)
        while rest:
            word = rest.popleft()
            if word == "-h":
                word = "--help"
            if not word.startswith("--") or word == "--":
                hint = f" Did you mean --config {word}?" if word.endswith((".yaml", ".yml")) else ""
                raise ConfigError(
                    f"{word!r} stands alone; settings are written --key value, a list as --key '[1, 2]'.{hint}"
                )
            key, equals, text = word[2:].partition("=")
            if key in FLAGS:
                setattr(request, key, True)
                continue
            value: str | bool = text
            if not equals:
                value = rest.popleft() if rest and not rest[0].startswith("--") else True
            request._take(key, value)
        return request

    def _take(self, key: str, value: str | bool) -> None:
        if key in VALUES:
            if not isinstance(value, str):
                raise ConfigError(f"--{key} needs a file after it.")
            if key == "config":
                self.configs.append(Path(value))
            else:
                self.output = Path(value)
        else:
            self.settings.append((key, value, COMMAND_LINE))


def close_option(key: str) -> list[str]:
    """The options that look like a key, with their dashes."""
    return [f"--{name}" for name in difflib.get_close_matches(key, (*FLAGS, *VALUES), n=1)]
