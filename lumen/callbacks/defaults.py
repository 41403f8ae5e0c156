"""Choice of a run's callbacks: the user's callbacks, and the defaults that they do not replace."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lumen.callbacks.base import Callback
from lumen.callbacks.checkpoint_names import order_checkpoint_callbacks
from lumen.callbacks.model_checkpoint import ModelCheckpoint
from lumen.callbacks.monitors import DeviceStatsMonitor, LearningRateMonitor
from lumen.callbacks.progress_bar import ProgressBar
from lumen.errors import ConfigError
from lumen.errors.arguments import describe_type
from lumen.internals.entry_points import CALLBACKS, list_entry_points, load_entry_point


def get_checkpoint_callbacks(callbacks: Iterable[Callback]) -> list[ModelCheckpoint]:
    """Return the callbacks that save checkpoints, first the one whose ranking counts for the whole run."""
    return order_checkpoint_callbacks([callback for callback in callbacks if isinstance(callback, ModelCheckpoint)])


def choose_callbacks(given: Any, defaults: Mapping[type[Callback], bool], *, checkpointing: bool) -> list[Callback]:
    """Return the callbacks of a run, in the order of their calls.

    Args:
        given: A callback, a list, a dictionary, or None.
        defaults: Classes of default callbacks, with True for a class to add if the user gives no instance.
        checkpointing: True if the run saves checkpoints.

    Returns:
        The user's callbacks, then the callbacks of installed distributions, then the defaults that neither replaces,
        and last the callbacks that save checkpoints.

    Raises:
        ConfigError: An object is not a callback, contradicts `checkpointing` or `defaults`, or is a second bar.
    """
    callbacks = as_callback_list("callbacks", given)
    for name in list_entry_points(CALLBACKS):
        callbacks += as_callback_list(
            f"entry point {name}", load_entry_point(CALLBACKS, name, f"the callbacks of {name}")()
        )
    savers = [callback for callback in callbacks if isinstance(callback, ModelCheckpoint)]
    if savers and not checkpointing:
        raise ConfigError(
            "enable_checkpointing is False, but callbacks contain a ModelCheckpoint. Remove one of the two."
        )
    bars = [type(callback).__name__ for callback in callbacks if isinstance(callback, ProgressBar)]
    if len(bars) > 1:
        raise ConfigError(f"callbacks: {' and '.join(bars)} are two progress bars. Remove one of the two.")
    if bars and not defaults.get(ProgressBar, True):
        raise ConfigError(f"enable_progress_bar is False, but callbacks contain a {bars[0]}. Remove one of the two.")
    for kind, wanted in defaults.items():
        if wanted and not any(isinstance(callback, kind) for callback in callbacks):
            callbacks.append(kind())
    if checkpointing and not savers:
        savers = [ModelCheckpoint()]
    return [callback for callback in callbacks if not isinstance(callback, ModelCheckpoint)] + savers


def check_loggers(callbacks: Iterable[Callback]) -> None:
    """Raise an error if a run without loggers has a callback whose only effect is logging.

    Raises:
        ConfigError: The values of a callback would be written nowhere.
    """
    for each in callbacks:
        if isinstance(each, DeviceStatsMonitor | LearningRateMonitor):
            raise ConfigError(
                f"{type(each).__name__} has no logger to write to. Remove logger=False from the trainer, or the "
                "callback."
            )


def as_callback_list(where: str, given: Any) -> list[Callback]:
    """Return the given callbacks as a list.

    Args:
        where: The source of the callbacks, for error messages.
        given: A callback, a list, a dictionary, or None.

    Raises:
        ConfigError: An object is not a callback, or appears twice.
    """
    several = given.values() if isinstance(given, dict) else given if isinstance(given, (list, tuple)) else [given]
    callbacks = [callback for callback in several if callback is not None]
    for callback in callbacks:
        if not isinstance(callback, Callback):
            is_kind = inspect.isclass(callback) and issubclass(callback, Callback)
            advice = f" Create an object: {callback.__name__}(...)." if is_kind else ""
            raise ConfigError(f"{where}: {describe_type(callback)} is not a lumen.Callback.{advice}")
        if sum(each is callback for each in callbacks) > 1:
            raise ConfigError(
                f"{where}: the same {type(callback).__name__} object appears twice, so its hooks would run twice. "
                "Remove one, or create two objects."
            )
    return callbacks


def merge_callbacks(present: Sequence[Callback], given: Sequence[Callback]) -> tuple[list[Callback], list[Callback]]:
    """Add callbacks to the present ones. A new callback replaces each present callback of its class or of a base class.

    Returns:
        The callbacks, with those that save checkpoints last; and the replaced callbacks.
    """

    def is_replaced(callback: Callback) -> bool:
        return type(callback) is not Callback and any(isinstance(each, type(callback)) for each in given)

    callbacks = [*(each for each in present if not is_replaced(each)), *given]
    callbacks.sort(key=lambda callback: isinstance(callback, ModelCheckpoint))
    return callbacks, [each for each in present if is_replaced(each)]
