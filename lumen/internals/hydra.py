"""Hydra, if it has started the program: its output directory, which may be named by the time, and its overrides."""

from __future__ import annotations

import os
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


def repeat_words() -> list[str]:
    """Return the arguments of Python that run this program again; enter the directory in which Hydra started it.

    Under Hydra, the arguments name the present output directory, so that all workers use the same directory.
    """
    words, config = sys.orig_argv[1:], _get_config()
    if config is None:
        return words
    os.chdir(config.runtime.cwd)
    kind = "sweep" if config.mode is not None and config.mode.name == "MULTIRUN" else "run"
    quoted = str(config[kind].dir).replace("'", "\\'")
    # Hydra's parser wants all overrides next to each other.
    ends = [
        len(words) - n
        for n, word in enumerate(reversed(sys.argv[1:]))
        if word[:1] != "-" and ("=" in word or word[:1] == "~")
    ]
    end = ends[0] if ends else len(words)
    return [*words[:end], f"hydra.{kind}.dir='{quoted}'", *words[end:]]
