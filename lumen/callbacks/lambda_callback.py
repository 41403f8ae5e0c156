"""Callback made of functions."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, final

from lumen.callbacks.base import Callback
from lumen.errors import ConfigError
from lumen.task.hooks import HOOKS


@final
class LambdaCallback(Callback):
    """Callback that calls the given functions as hooks of `Callback`.

        LambdaCallback(on_train_epoch_end=lambda trainer, task: print(trainer.current_epoch))

    Args:
        hooks: Functions by hook name, with the arguments of the hook: `(trainer, task, ...)`.

    Raises:
        ConfigError: A name is not a hook, or its value is not callable.
    """

    def __init__(self, **hooks: Callable[..., Any]) -> None:
        for name, function in hooks.items():
            if name not in HOOKS:
                nearest = difflib.get_close_matches(name, HOOKS, n=1)
                raise ConfigError(
                    f"LambdaCallback: there is no hook {name}.{f' Did you mean {nearest[0]}?' if nearest else ''} "
                    "help(lumen.Callback) shows all hooks. For a state in checkpoints, subclass lumen.Callback."
                )
            if not callable(function):
                raise ConfigError(f"LambdaCallback: {name} must be a function, found {function!r}.")
        vars(self).update(hooks)
