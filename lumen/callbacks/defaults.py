"""Which callbacks a run has: the user's, and the defaults that they do not replace."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lumen.callbacks.base import Callback
from lumen.callbacks.checkpoint_names import deciding_first
from lumen.callbacks.model_checkpoint import ModelCheckpoint
from lumen.errors import ConfigError
from lumen.errors.arguments import in_words
from lumen.internals.entry_points import CALLBACKS, load, registered


def savers_of(callbacks: Iterable[Callback]) -> list[ModelCheckpoint]:
    """The callbacks that save checkpoints, first the one that says for all which checkpoint is best."""
    return deciding_first([callback for callback in callbacks if isinstance(callback, ModelCheckpoint)])


def choose_callbacks(given: Any, defaults: Mapping[type[Callback], bool], *, checkpointing: bool) -> list[Callback]:
    """The callbacks of a run, in the order in which they are called.

    Args:
        given: A callback, a list, a dictionary, or None.
        defaults: Classes of which each run has one unless the user gives one, and whether that is wanted.
        checkpointing: Whether the run is to save checkpoints.

    Returns:
        The user's callbacks, those of installed distributions, the defaults that neither replaces, and last those that
        save checkpoints.

    Raises:
        ConfigError: Something given is no callback, or saves checkpoints in a run that is to save none.
    """
    callbacks = listed("callbacks", given)
    for name in registered(CALLBACKS):
        callbacks += listed(f"entry point {name}", load(CALLBACKS, name, f"the callbacks of {name}")())
    savers = [callback for callback in callbacks if isinstance(callback, ModelCheckpoint)]
    if savers and not checkpointing:
        raise ConfigError("enable_checkpointing is False, but callbacks hold a ModelCheckpoint. Remove one of the two.")
    for kind, wanted in defaults.items():
        if wanted and not any(isinstance(callback, kind) for callback in callbacks):
            callbacks.append(kind())
    if checkpointing and not savers:
        savers = [ModelCheckpoint()]
    return [callback for callback in callbacks if not isinstance(callback, ModelCheckpoint)] + savers


def listed(where: str, given: Any) -> list[Callback]:
    """What was given as callbacks, as a list.

    Args:
        where: What gave them, for errors.
        given: A callback, a list, a dictionary, or None.

    Raises:
        ConfigError: Something given is no callback, or is there twice.
    """
    several = given.values() if isinstance(given, dict) else given if isinstance(given, (list, tuple)) else [given]
    callbacks = [callback for callback in several if callback is not None]
    for callback in callbacks:
        if not isinstance(callback, Callback):
            is_kind = inspect.isclass(callback) and issubclass(callback, Callback)
            advice = f" Make one: {callback.__name__}(...)." if is_kind else ""
            raise ConfigError(f"{where}: {in_words(callback)} is not a lumen.Callback.{advice}")
        if sum(each is callback for each in callbacks) > 1:
            raise ConfigError(
                f"{where}: one {type(callback).__name__} is there twice, so that its hooks would be called twice. "
                "Leave one out, or make two."
            )
    return callbacks


def joined(present: Sequence[Callback], given: Sequence[Callback]) -> tuple[list[Callback], list[Callback]]:
    """Callbacks with those that join them: one takes the place of all that are of its class or of a base of it.

    Returns:
        The callbacks, last those that save checkpoints; and those that have lost their place.
    """

    def is_replaced(callback: Callback) -> bool:
        return type(callback) is not Callback and any(isinstance(each, type(callback)) for each in given)

    callbacks = [*(each for each in present if not is_replaced(each)), *given]
    callbacks.sort(key=lambda callback: isinstance(callback, ModelCheckpoint))
    return callbacks, [each for each in present if is_replaced(each)]
