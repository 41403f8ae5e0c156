"""A callback made of functions."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, final

from lumen.callbacks.base import Callback
from lumen.errors import ConfigError
from lumen.task.hooks import HOOKS


@final
class LambdaCallback(Callback):
    """Calls functions at the places that `Callback` draws.

        LambdaCallback(on_train_epoch_end=lambda trainer, task: print(trainer.current_epoch))

    Args:
        hooks: Functions by the name of their hook, with its arguments: `(trainer, task, ...)`.

    Raises:
        ConfigError: There is no such hook, or what is given for it cannot be called.
    """

    def __init__(self, **hooks: Callable[..., Any]) -> None:
        for name, function in hooks.items():
            if name not in HOOKS:
                nearest = difflib.get_close_matches(name, HOOKS, n=1)
                raise ConfigError(
                    f"LambdaCallback: there is no hook {name}.{f' Did you mean {nearest[0]}?' if nearest else ''} "
                    "help(lumen.Callback) draws them all; a state in checkpoints needs a subclass of it."
                )
            if not callable(function):
                raise ConfigError(f"LambdaCallback: {name} must be a function, found {function!r}.")
        vars(self).update(hooks)
