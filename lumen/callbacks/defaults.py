"""Which callbacks a run has: the user's, and the defaults that they do not replace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lumen.callbacks.base import Callback
from lumen.callbacks.checkpoint_names import deciding_first
from lumen.callbacks.model_checkpoint import ModelCheckpoint
from lumen.errors import ConfigError


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
        The user's callbacks, the defaults that they do not replace, and last those that save checkpoints.

    Raises:
        ConfigError: Something given is no callback, or saves checkpoints in a run that is to save none.
    """
    listed = (
        [given] if isinstance(given, Callback) else list(given.values() if isinstance(given, dict) else given or ())
    )
    callbacks = [callback for callback in listed if callback is not None]
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise ConfigError(f"callbacks: {type(callback).__name__} is not a lumen.Callback.")
    savers = [callback for callback in callbacks if isinstance(callback, ModelCheckpoint)]
    if savers and not checkpointing:
        raise ConfigError("enable_checkpointing is False, but callbacks hold a ModelCheckpoint. Remove one of the two.")
    for kind, wanted in defaults.items():
        if wanted and not any(isinstance(callback, kind) for callback in callbacks):
            callbacks.append(kind())
    if checkpointing and not savers:
        savers = [ModelCheckpoint()]
    return [callback for callback in callbacks if not isinstance(callback, ModelCheckpoint)] + savers
