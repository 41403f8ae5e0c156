"""Environment variables that stand in for arguments which a script leaves out."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from lumen.console import logger
from lumen.errors import ConfigError
from lumen.trainer.script_record import plain

P = ParamSpec("P")
S = TypeVar("S")
_OURS, _LIGHTNINGS = "LUMEN_TRAINER__", "PL_TRAINER_"


def defaults_from_environment(constructor: Callable[Concatenate[S, P], None]) -> Callable[Concatenate[S, P], None]:
    """Let `LUMEN_TRAINER__MAX_STEPS=9` stand for an argument that a trainer is not given; each that does is said.

    Values are read as YAML.

    Raises:
        ConfigError: By the constructor: a variable names no argument, or is one that Lightning's trainer would read.
    """
    names = list(inspect.signature(constructor).parameters)[1:]

    @wraps(constructor)
    def constructing(self: S, /, *args: P.args, **kwargs: P.kwargs) -> None:
        for variable, text in sorted(os.environ.items()):
            if variable.startswith(_LIGHTNINGS):
                ours = f"{_OURS}{variable.removeprefix(_LIGHTNINGS)}"
                raise ConfigError(f"the environment variable {variable} is not read. Write {ours}, or unset it.")
            name = variable.removeprefix(_OURS).lower()
            if not variable.startswith(_OURS) or name in kwargs:
                continue
            if name not in names:
                raise ConfigError(f"the environment variable {variable}: Trainer has no argument {name}. Unset it.")
            kwargs[name] = _value(variable, text)
            logger.info("Trainer: %s=%s is that of the environment variable %s", name, text, variable)
        vars(self)["_given"] = plain(kwargs)
        constructor(self, *args, **kwargs)

    return constructing


def _value(variable: str, text: str) -> Any:
    import yaml  # which a script without such variables does not wait for

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"the environment variable {variable}: {text!r} is no YAML value.") from error
