"""The versions of torch that Lumen was tried with, and what is said where a name is gone."""

from __future__ import annotations

from typing import Any

import torch

from lumen.errors import ConfigError

#: The versions of torch that Lumen was tried with.
TRIED = ("2.11.0", "2.13.0", "2.14.1", "2.15.0")


def need(user: str, owner: Any, *names: str) -> None:
    """Look for names before they are used.

    Raises:
        ConfigError: This torch lacks some; says which torch to install.
    """
    if missing := [name for name in names if not hasattr(owner, name)]:
        raise ConfigError(
            f"torch {torch.__version__} has no {', '.join(missing)}, which {user} needs. Lumen was tried with torch "
            f"{', '.join(TRIED)}: install one of these."
        )
