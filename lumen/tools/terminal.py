"""Printing for the tools: counts in words, plain data as JSON, and a console for tables."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lumen.console import stdout
from lumen.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console


def format_count(count: float, unit: str) -> str:
    """Return a count in words: `1 step`, `2 steps`."""
    return f"{count:,} {unit}{'' if count == 1 else 's'}"


def get_first_line(error: BaseException) -> str:
    """Return the class of an error and the first line of its message."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def check_output_free(output: Path, subject: str) -> None:
    """Raise if an output exists or its directory does not.

    Args:
        output: The file or directory to write.
        subject: The beginning of the error message.

    Raises:
        ConfigError: The output cannot be created.
    """
    if not output.parent.is_dir():
        raise ConfigError(f"{subject}: there is no directory {output.parent}. Create the directory.")
    if os.path.lexists(output):
        raise ConfigError(f"{subject}: the output exists, and Lumen overwrites nothing. Choose another name.")


def make_table_console() -> Console:
    """Return a console on stdout that prints names and values as they are, without markup."""
    from rich.console import Console

    return Console(file=stdout, markup=False, emoji=False, highlight=False)


def as_json_data(value: Any) -> Any:
    """Return a value as JSON-compatible data. Non-finite numbers and objects of other types become strings."""
    value = value._asdict() if hasattr(value, "_asdict") else value  # for a named tuple
    if isinstance(value, Mapping):
        return {str(key): as_json_data(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [as_json_data(each) for each in value]
    is_json = isinstance(value, (str, int)) or value is None or (isinstance(value, float) and math.isfinite(value))
    return value if is_json else str(value)


def print_json(value: Any) -> None:
    """Print data as JSON, indented."""
    print(json.dumps(as_json_data(value), indent=2), file=stdout)
