"""Entry points of installed distributions: the commands, loggers and callbacks that they add to Lumen."""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from lumen.errors import ConfigError, LumenError
from lumen.version import DISTRIBUTION

COMMANDS = "lumen.commands"
LOGGERS = "lumen.loggers"
CALLBACKS = "lumen.callbacks"


@cache
def list_entry_points(group: str) -> dict[str, list[EntryPoint]]:
    """Return the entry points of a group by name; a name has several if several distributions register it."""
    found: dict[str, list[EntryPoint]] = {}
    for each in _list_installed().select(group=group):
        several = found.setdefault(each.name, [])
        if all(each.value != other.value for other in several):  # a renamed distribution can be registered twice
            several.append(each)
    return found


@cache
def _list_installed() -> Any:
    return entry_points()  # a few ms, once for all groups


def load_entry_point(group: str, name: str, title: str) -> Any:
    """Import the object that is registered under a name.

    Args:
        group: The group of entry points.
        name: A name of the group, or a name that Lumen itself registers.
        title: A description for errors, such as "the command diff".

    Raises:
        ConfigError: No distribution or two distributions register the name, or the import fails.
    """
    found = list_entry_points(group).get(name, [])
    if not found:
        raise ConfigError(f"{title} is not registered. {format_install_hint()}")
    if len(found) > 1:
        owners = " and ".join(sorted(map(get_distribution_name, found)))
        raise ConfigError(f"{title} is registered by {owners}. Uninstall one of these packages.")
    try:
        return found[0].load()
    except LumenError:
        raise
    except Exception as error:
        raise make_broken_error(title, get_distribution_name(found[0]), error) from error


def make_broken_error(title: str, owner: str, error: Exception) -> ConfigError:
    """Return the error of a registered module that cannot be imported."""
    found = f"{type(error).__name__}: {error}"
    return ConfigError(f"{title}, registered by {owner}, cannot be imported ({found}). Repair or uninstall {owner}.")


def get_distribution_name(entry: EntryPoint) -> str:
    """Return the name of the distribution that registers an entry point."""
    return entry.dist.name if entry.dist is not None else entry.module


def format_install_hint() -> str:
    """Return the sentence that says how to install Lumen's own entry points."""
    root = Path(__file__).parents[2]
    source = f"--editable {root}" if (root / "pyproject.toml").is_file() else f"--force-reinstall {DISTRIBUTION}"
    return f"The installed metadata of Lumen is missing or old: run pip install {source}"
