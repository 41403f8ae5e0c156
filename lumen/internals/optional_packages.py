"""Import of packages that the extras of Lumen install."""

from __future__ import annotations

import importlib
from typing import Any

from lumen.errors import ConfigError
from lumen.version import DISTRIBUTION


def import_optional(package: str, who: str, extra: str) -> Any:
    """Import an optional package.

    Args:
        package: The name of the package in an import, such as `pyarrow.parquet`.
        who: Description of the feature that needs the package.
        extra: Name of Lumen's extra that installs the package.

    Raises:
        ConfigError: The package is missing, or cannot be imported.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(
            f"{who} needs {package.partition('.')[0]}, which cannot be imported ({error}). Install it with: "
            f"pip install '{DISTRIBUTION}[{extra}]'"
        ) from error
