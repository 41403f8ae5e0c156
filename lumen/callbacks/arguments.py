"""Arguments that a callback does not take, above all those that Lightning's takes under the same name."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

from lumen.errors import ConfigError


def refuse(kind: type, given: Mapping[str, Any]) -> None:
    """Refuse arguments that a callback does not take.

    Args:
        kind: The callback's class; its `INSTEAD` says what serves for which of Lightning's arguments.
        given: What was given beyond the arguments it takes, by name.

    Raises:
        ConfigError: There are some: names the first, and what to use.
    """
    for name in given:
        parameters = inspect.signature(kind).parameters.values()
        close = difflib.get_close_matches(name, [each.name for each in parameters if each.kind != each.VAR_KEYWORD])
        hint = getattr(kind, "INSTEAD", {}).get(name) or (f"Did you mean {' or '.join(close)}?" if close else "")
        raise ConfigError(f"{kind.__name__} has no argument {name}. {hint or f'See help(lumen.{kind.__name__}).'}")
