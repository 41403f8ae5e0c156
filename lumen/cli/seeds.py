"""The seed of a run, before anything is built."""

from __future__ import annotations

from pathlib import Path, PurePath
from typing import Any

from jsonargparse import Namespace

from lumen.callbacks.checkpoint_names import decides
from lumen.checkpoint import PARTS, as_place, find_checkpoint, is_weights
from lumen.checkpoint.format.manifest import STATE
from lumen.cli.config_layers import as_list
from lumen.errors import ConfigError
from lumen.errors.arguments import local_path
from lumen.random import checked_seed, draw_seed


def seed_of(config: Namespace, checkpoint: Any, name: str) -> int:
    """The seed that is set, else that of the checkpoint to go on from, else a new one.

    Args:
        config: The settings of the command.
        checkpoint: What the settings go on from.
        name: What the run is called.
    """
    if config.seed_everything is False:
        raise ConfigError("seed_everything: false: a run always has a seed. Leave it out: one is drawn and recorded.")
    if config.seed_everything is not None and config.seed_everything is not True:
        return checked_seed("seed_everything", config.seed_everything)
    own = local_path(config.trainer.default_root_dir) / name / "checkpoints"
    folder, *beside = _dirpaths(config.trainer.callbacks, own) or [own]
    goes_on = isinstance(checkpoint, (str, Path)) and "progress" in (config.trainer.resume_parts or PARTS)
    if not goes_on or is_weights(checkpoint):
        return draw_seed()
    found = find_checkpoint(str(checkpoint), folder, sections=(STATE,), beside=beside)  # the run verifies the rest
    return int(found.state["seed"]) if found else draw_seed()


def _dirpaths(callbacks: Any, own: Path) -> list[PurePath]:
    """Where each `ModelCheckpoint` saves, first the one that says which checkpoint is best."""
    savers = [node for node in as_list(callbacks) if node.class_path.endswith(".ModelCheckpoint")]
    arguments = sorted((node.init_args.as_dict() for node in savers), key=lambda given: not decides(given))
    return [own if given.get("dirpath") is None else as_place(given["dirpath"]) for given in arguments]
