"""What a script has set, kept beside its run: what `config.yaml` is of a run that a config file began."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from datetime import timedelta
from numbers import Integral, Real
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import torch

from lumen.internals.masking import masked
from lumen.internals.whole_files import write_private
from lumen.run.run import Run
from lumen.task.hyperparameters import HasHyperparameters

if TYPE_CHECKING:
    from lumen.trainer.trainer import Trainer

SCRIPT_FILE = "script.yaml"
_HEAD = "# A record of what a script has set, with classes in place of objects. To repeat the run, run the script.\n"
_MOST_ITEMS = 1000
_LEFT_OUT = ("self", "seed", "resume", "resume_parts")


def plain(value: Any) -> Any:
    """A value as YAML holds it: objects become the names of their classes, with hyperparameters if they have some."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, str | PurePath | timedelta | torch.dtype | torch.device):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value] if len(value) <= _MOST_ITEMS else f"{len(value)} items"
    if isinstance(value, type) or inspect.isroutine(value):
        return _name(value)
    arguments = value.logged_hparams if isinstance(value, HasHyperparameters) else {}
    return {"class_path": _name(type(value))} | ({"init_args": plain(arguments)} if arguments else {})


def record_script(trainer: Trainer, run: Run) -> None:
    """Write it into the directory of a run, on rank 0 alone; not where the command line keeps a config.

    Args:
        trainer: The trainer that the script has made.
        run: Its run, which has just begun.
    """
    if trainer._given is None or trainer.run_directory is None or not trainer.is_global_zero:
        return
    defaults = {name: plain(each.default) for name, each in inspect.signature(type(trainer)).parameters.items()}
    settings = {**defaults, **trainer._given, "name": trainer.run_directory.name}
    data = run.loaders.datamodule
    found = {
        "seed_everything": run.seed,
        "model": plain(run.task),
        **({} if data is None else {"data": plain(data)}),
        "trainer": {name: value for name, value in settings.items() if name not in _LEFT_OUT},
    }
    import yaml  # not before a run: a script imports little beside torch

    text = yaml.safe_dump(masked(found), sort_keys=False, allow_unicode=True)
    write_private(trainer.run_directory / SCRIPT_FILE, _HEAD + text)


def _name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
