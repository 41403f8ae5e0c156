"""Records the settings of a script in the run directory, as `config.yaml` does for config files.

Environment variables also set arguments of the trainer that a script omits.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import wraps
from numbers import Integral, Real
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch

from lumen.console import logger
from lumen.errors import ConfigError
from lumen.internals.atomic_files import write_private
from lumen.internals.masking import mask_secrets
from lumen.run.run import Run
from lumen.task.hyperparameters import HyperparametersMixin, get_logged_hparams

if TYPE_CHECKING:
    from lumen.trainer.trainer import Trainer


SCRIPT_FILE = "script.yaml"
_HEAD = "# Settings of a script, with classes in place of objects. To repeat the run, run the script.\n"
_MOST_ITEMS = 1000
_LEFT_OUT = ("self", "seed", "resume", "resume_parts")


def as_yaml_data(value: Any) -> Any:
    """Convert a value to YAML types: objects become class names, with their hyperparameters if they have any."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, str | PurePath | timedelta | torch.dtype | torch.device):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): as_yaml_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [as_yaml_data(item) for item in value] if len(value) <= _MOST_ITEMS else f"{len(value)} items"
    if isinstance(value, type) or inspect.isroutine(value):
        return _get_class_name(value)
    arguments = get_logged_hparams(value) if isinstance(value, HyperparametersMixin) else {}
    return {"class_path": _get_class_name(type(value))} | ({"init_args": as_yaml_data(arguments)} if arguments else {})


def record_script(trainer: Trainer, run: Run) -> None:
    """Write the settings of a script into the run directory, on rank 0; skipped for runs of the command line.

    Args:
        trainer: The trainer that the script has made.
        run: The trainer's run, which has just begun.
    """
    if trainer._arguments is None or trainer.run_directory is None or not trainer.is_global_zero:
        return
    defaults = {name: as_yaml_data(each.default) for name, each in inspect.signature(type(trainer)).parameters.items()}
    settings = {**defaults, **trainer._arguments, "name": trainer.run_directory.name}
    found: dict[str, Any] = {"seed_everything": run.seed, "model": as_yaml_data(run.task)}
    if run.loaders.datamodule is not None:
        found["data"] = as_yaml_data(run.loaders.datamodule)
    found["trainer"] = {name: value for name, value in settings.items() if name not in _LEFT_OUT}
    import yaml  # imported only here, to keep the import of Lumen fast

    text = yaml.safe_dump(mask_secrets(found), sort_keys=False, allow_unicode=True)
    write_private(trainer.run_directory / SCRIPT_FILE, _HEAD + text)


def _get_class_name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


P = ParamSpec("P")
S = TypeVar("S")
_OURS, _LIGHTNINGS = "LUMEN_TRAINER__", "PL_TRAINER_"


def read_environment_defaults(constructor: Callable[Concatenate[S, P], None]) -> Callable[Concatenate[S, P], None]:
    """Let variables such as `LUMEN_TRAINER__MAX_STEPS=9` set omitted arguments of a trainer, and log each.

    Values are read as YAML.

    Raises:
        ConfigError: A variable names no argument, or has the prefix of Lightning's variables; raised by the
            constructor.
    """
    names = list(inspect.signature(constructor).parameters)[1:]

    @wraps(constructor)
    def wrapped(self: S, /, *args: P.args, **kwargs: P.kwargs) -> None:
        for variable, text in sorted(os.environ.items()):
            if variable.startswith(_LIGHTNINGS):
                ours = f"{_OURS}{variable.removeprefix(_LIGHTNINGS)}"
                raise ConfigError(f"the environment variable {variable} is not read. Write {ours}, or unset it.")
            name = variable.removeprefix(_OURS).lower()
            if not variable.startswith(_OURS) or name in kwargs:
                continue
            if name not in names:
                raise ConfigError(f"the environment variable {variable}: Trainer has no argument {name}. Unset it.")
            import yaml  # imported only here, because most scripts set no such variable

            try:
                kwargs[name] = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise ConfigError(f"the environment variable {variable}: {text!r} is not a YAML value.") from error
            logger.info("Trainer: %s=%s comes from the environment variable %s", name, text, variable)
        vars(self)["_arguments"] = as_yaml_data(kwargs)
        constructor(self, *args, **kwargs)

    return wrapped
