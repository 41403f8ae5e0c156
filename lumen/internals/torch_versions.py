"""Versions of torch with which Lumen is tested, and the error for a missing private name."""

from __future__ import annotations

from typing import Any

import torch

from lumen.errors import ConfigError

#: Versions of torch with which Lumen is tested.
TESTED_VERSIONS = ("2.11.0", "2.13.0", "2.14.1", "2.15.0")


def check_attributes(user: str, owner: Any, *names: str) -> None:
    """Check that an object has some attributes, before they are used.

    Args:
        user: The feature that needs the attributes, for errors.
        owner: The object that should have the attributes.
        *names: The names of the attributes.

    Raises:
        ConfigError: The installed torch lacks an attribute; the message names the versions to install.
    """
    if missing := [name for name in names if not hasattr(owner, name)]:
        raise ConfigError(
            f"torch {torch.__version__} has no {', '.join(missing)}, which {user} needs. Lumen is tested with torch "
            f"{', '.join(TESTED_VERSIONS)}: install one of these versions."
        )
