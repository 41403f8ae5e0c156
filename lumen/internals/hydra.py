"""Hydra, if it has started the program: its output directory, which may be named by the time, and its overrides."""

from __future__ import annotations

import re
import sys
from typing import Any


def _get_config() -> Any:
    """Return Hydra's own settings, or None if Hydra has not started the program."""
    module = sys.modules.get("hydra.core.hydra_config")
    if module is None or not module.HydraConfig.initialized():
        return None
    config = module.HydraConfig.get()
    return config if "output_dir" in config.runtime else None  # not with the API that composes configs


def describe_job() -> list[str]:
    """Return what must be equal on all ranks: the output directory and the overrides; nothing without Hydra."""
    config = _get_config()
    return [] if config is None else [f"hydra.run.dir={config.runtime.output_dir}", *config.overrides.task]


def get_start_directory() -> str:
    """Return the directory in which the program was started; Hydra may have entered a different one."""
    config = _get_config()
    return "." if config is None else str(config.runtime.cwd)


def has_trainer_group() -> bool:
    """Return True if Hydra composes the program's config with a group "trainer", so that overrides can change it."""
    config = _get_config()
    return config is not None and "trainer" in config.runtime.choices


def repeat_words(*overrides: str) -> list[str]:
    """Return the arguments of Python that run this program again in the directory in which it was started.

    Under Hydra, the arguments name the present output directory, so that all runs use the same directory.

    Args:
        overrides: Overrides of Hydra to add, which need a program started by Hydra.
    """
    words, config = sys.orig_argv[1:], _get_config()
    if config is None:
        return words
    kind = "sweep" if config.mode is not None and config.mode.name == "MULTIRUN" else "run"
    name, folder = f"hydra.{kind}.dir=", str(config[kind].dir)
    if not re.fullmatch(r"[\w./-]+", folder):
        folder = "'" + folder.replace("'", "\\'") + "'"
    # Hydra's parser wants all overrides next to each other.
    ends = [
        len(words) - n
        for n, word in enumerate(reversed(sys.argv[1:]))
        if word[:1] != "-" and ("=" in word or word[:1] == "~")
    ]
    end = ends[0] if ends else len(words)
    kept = [word for word in words[:end] if not word.startswith(name)]
    return [*kept, name + folder, *overrides, *words[end:]]
