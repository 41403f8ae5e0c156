"""The versions of torch that Lumen is tested with, and the error where a private name is missing."""

from __future__ import annotations

from typing import Any

import torch

from lumen.errors import ConfigError

#: The versions of torch that Lumen is tested with.
TRIED = ("2.11.0", "2.13.0", "2.14.1", "2.15.0")


def need(user: str, owner: Any, *names: str) -> None:
    """Check that an object has some attributes, before they are used.

    Raises:
        ConfigError: This version of torch lacks one of them; the message says which version to install.
    """
    if missing := [name for name in names if not hasattr(owner, name)]:
        raise ConfigError(
            f"torch {torch.__version__} has no {', '.join(missing)}, which {user} needs. Lumen was tried with torch "
            f"{', '.join(TRIED)}: install one of these."
        )
