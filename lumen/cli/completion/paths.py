"""Files and directories that may stand where a word is completed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, final

_OF_RUNS = ("config.yaml", "script.yaml", "run.log", "metrics.csv", "manifest.json")  # the last: of a checkpoint
_DEEPEST, _MOST = 2, 200


@final
class _Entry(NamedTuple):
    """What a directory has.

    Attributes:
        path: Folder and name, as the system opens it.
        is_directory: Also where a link leads to one.
    """

    path: str
    is_directory: bool


def _complete(prefix: str, is_wanted: Callable[[_Entry], bool]) -> Iterator[str]:
    """What goes on from a prefix; a directory that may only lead to what is wanted ends in a slash."""
    folder, slash, begin = prefix.rpartition("/")
    for entry in _entries(os.path.expanduser(folder + slash) or "."):
        name = os.path.basename(entry.path)
        if name.startswith(begin) and (begin or not name.startswith(".")):
            if is_wanted(entry):
                yield f"{folder}{slash}{name}"
            elif entry.is_directory and _leads_to(entry.path, is_wanted, _DEEPEST):
                yield f"{folder}{slash}{name}/"


def _entries(folder: str) -> list[_Entry]:
    try:
        with os.scandir(folder) as found:
            return sorted(_Entry(each.path, each.is_dir()) for each, _ in zip(found, range(10 * _MOST), strict=False))
    except OSError:
        return []


def _leads_to(folder: str, is_wanted: Callable[[_Entry], bool], depth: int) -> bool:
    """Whether there is something wanted in a directory, or not far below; one with very many entries may have it."""
    entries = [each for each in _entries(folder) if not os.path.basename(each.path).startswith(".")]
    if len(entries) > _MOST or any(map(is_wanted, entries)):
        return True
    return depth > 1 and any(each.is_directory and _leads_to(each.path, is_wanted, depth - 1) for each in entries)


def _is_config(entry: _Entry) -> bool:
    return not entry.is_directory and entry.path.endswith((".yaml", ".yml"))


def _is_run(entry: _Entry) -> bool:
    return entry.is_directory and any(os.path.isfile(os.path.join(entry.path, name)) for name in _OF_RUNS)


def configs(prefix: str) -> Iterator[str]:
    """YAML files."""
    return _complete(prefix, _is_config)


def runs(prefix: str) -> Iterator[str]:
    """Directories of runs and of checkpoints."""
    return _complete(prefix, _is_run)


def runs_and_configs(prefix: str) -> Iterator[str]:
    """What `lumen diff` compares."""
    return _complete(prefix, lambda entry: _is_run(entry) or _is_config(entry))


def files(prefix: str) -> Iterator[str]:
    """Any file."""
    for found in _complete(prefix, lambda entry: True):
        yield f"{found}/" if os.path.isdir(os.path.expanduser(found)) else found


def directories(prefix: str) -> Iterator[str]:
    """Any directory."""
    return (found for found in files(prefix) if found.endswith("/"))


PATHS: Mapping[str, Callable[[str], Iterator[str]]] = {
    "config": configs,
    "run": runs,
    "run or config": runs_and_configs,
    "file": files,
    "directory": directories,
}
