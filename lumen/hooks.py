"""Hooks: which of a user's methods are called, and with what."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from operator import itemgetter
from typing import Any, final

from lumen.errors import ConfigError
from lumen.task import TaskModule

#: Every hook, in the order in which `Callback` draws them.
HOOKS = (
    "setup", "on_load_checkpoint", "on_save_checkpoint",
    "on_fit_start", "on_sanity_check_start", "on_sanity_check_end", "on_train_start", "on_train_epoch_start",
    "on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward",
    "on_before_optimizer_step", "on_train_batch_end",
    "on_validation_start", "on_validation_epoch_start", "on_validation_batch_start", "on_validation_batch_end",
    "on_validation_epoch_end", "on_validation_end",
    "on_train_epoch_end", "on_boundary", "on_boundary_end", "on_train_end", "on_fit_end",
    "on_test_start", "on_test_epoch_start", "on_test_batch_start", "on_test_batch_end", "on_test_epoch_end",
    "on_test_end",
    "on_predict_start", "on_predict_epoch_start", "on_predict_batch_start", "on_predict_batch_end",
    "on_predict_epoch_end", "on_predict_end",
    "on_exception", "teardown",
)  # fmt: skip


#: Methods of Lightning's modules that Lumen has no place for: defining one is an error instead of dead code.
NOT_CALLED = (
    "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "configure_gradient_clipping", "configure_callbacks",
    "training_epoch_end", "validation_epoch_end", "test_epoch_end", "training_step_end", "validation_step_end",
)  # fmt: skip


@final
class Hooks:
    """For each hook the calls to make, found once: what nobody overrides costs an empty loop.

    Args:
        task: Called last, without `trainer` and `task`.
        callbacks: Called first, in order.
        trainer: First argument of every callback's hook.
    """

    def __init__(self, task: TaskModule, callbacks: Iterable[Any], trainer: Any) -> None:
        self._calls: dict[str, tuple[Callable[..., Any], ...]] = {}
        for name in HOOKS:
            calls: list[Callable[..., Any]] = [
                partial(getattr(callback, name), trainer, task) for callback in callbacks if overrides(callback, name)
            ]
            if overrides(task, name):
                calls.append(getattr(task, name))
            self._calls[name] = tuple(calls)

    def __getattr__(self, name: str) -> tuple[Callable[..., Any], ...]:
        calls = self._calls[name]
        setattr(self, name, calls)  # found as an ordinary attribute from now on
        return calls


def overrides(thing: Any, method: str) -> bool:
    """Whether a user's object changed a method that its Lumen base class defines as doing nothing."""
    found = vars(thing).get(method) or getattr(type(thing), method, None)  # its own, or its class's
    return found is not None and not str(found.__module__).startswith(
        ("lumen.task", "lumen.datamodule", "lumen.callbacks.base")
    )


def step_arguments(step: Callable[..., Any]) -> Callable[[tuple[Any, int, int]], tuple[Any, ...]]:
    """What takes from (batch, batch_idx, dataloader_idx) those that a step's signature asks for.

    Raises:
        ConfigError: It asks for something else.
    """
    names = ("batch", "batch_idx", "dataloader_idx")
    parameters = list(inspect.signature(step).parameters.values())
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return itemgetter(slice(3))
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    chosen = [names.index(p.name) if p.name in names[1:] else place for place, p in enumerate(positional)]
    if not positional or max(chosen) > 2 or any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters):
        raise ConfigError(
            f"{getattr(step, '__qualname__', step)}{inspect.signature(step)}: a step takes (batch), (batch, batch_idx) "
            "or (batch, batch_idx, dataloader_idx)."
        )
    first = chosen[0]
    follow_each_other = chosen == list(range(first, first + len(chosen)))
    return itemgetter(slice(first, first + len(chosen))) if follow_each_other else itemgetter(*chosen)


def check_training(task: Any, *, optimizer_given: bool) -> None:
    """Check that a task defines what training calls, and nothing that it would not call.

    Raises:
        ConfigError: It does not.
    """
    if not isinstance(task, TaskModule):
        raise ConfigError(f"expected a TaskModule, found {type(task).__name__}. Subclass lumen.TaskModule.")
    if not overrides(task, "training_step"):
        raise ConfigError(f"{type(task).__name__} has no training_step. Define `training_step(self, batch)`.")
    if not optimizer_given and not overrides(task, "configure_optimizers"):
        task.configure_optimizers()
    if replaced := [name for name in NOT_CALLED if hasattr(task, name)]:
        raise ConfigError(
            f"{type(task).__name__} defines {', '.join(replaced)}, which Lumen does not call. "
            "Move the code to one of the hooks that help(lumen.Callback) draws."
        )
    if not task.automatic_optimization:
        raise ConfigError(
            f"{type(task).__name__} sets automatic_optimization = False; this version has no manual optimization."
        )
