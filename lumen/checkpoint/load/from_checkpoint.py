"""Builds a task or a data module from a checkpoint: the work of their `load_from_checkpoint`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, TypeVar

import torch
from torch import nn

from lumen.checkpoint.format.codec import decode
from lumen.checkpoint.format.places import as_place
from lumen.checkpoint.format.reader import Checkpoint
from lumen.checkpoint.load.averaging import averaged
from lumen.checkpoint.load.load_weights import load_model
from lumen.checkpoint.load.reshard import extra_of
from lumen.checkpoint.load.weights_source import find_named
from lumen.checkpoint.user_state import Additions
from lumen.errors import CheckpointMismatch
from lumen.internals.masking import first_unknown
from lumen.precision import convert_as_saved
from lumen.task.data_module import DataModule
from lumen.task.task_module import TaskModule

Owner = TypeVar("Owner", bound=TaskModule | DataModule)


def build(
    kind: type[Owner],
    path: str | PurePath,
    overrides: Mapping[str, Any],
    *,
    strict: bool | None = None,
    average: str | Sequence[str | PurePath] | None = None,
) -> Owner:
    """Build a task or a data module from a checkpoint's hyperparameters, and load its parameters and its state.

    Args:
        kind: The class of the object to build.
        path: A checkpoint or a run, or the URL of one.
        overrides: Constructor arguments that replace saved ones.
        strict: Refuse missing and unexpected names of parameters. Default: `strict_loading` of the task.
        average: The weights to load into a task, as in `TaskModule.load_from_checkpoint`.
    """
    checkpoint = find_named(as_place(path))
    if issubclass(kind, DataModule):
        built = _built(kind, checkpoint, "data_hyperparameters", overrides)
        built.load_state_dict(decode(checkpoint.state["datamodule"], checkpoint.tensors("extra")))
        return built
    checkpoint = averaged(checkpoint, average)
    task = _built(kind, checkpoint, "hyperparameters", overrides)
    task._configure()
    convert_as_saved(task, checkpoint.state["precision"])
    load_model(task, checkpoint, strict=task.strict_loading if strict is None else strict)
    load_own_states(task, checkpoint, extra_of(task, checkpoint))
    task._note_filled()
    return task


def load_own_states(task: TaskModule, checkpoint: Checkpoint, extra: Mapping[str, torch.Tensor]) -> None:
    """Call modules' `set_extra_state`, and the task's `on_load_checkpoint`."""
    states = decode(checkpoint.state["extra_state"], extra)
    for name, module in task.named_modules():
        if name in states and type(module).set_extra_state is not nn.Module.set_extra_state:
            module.set_extra_state(states[name])
    task.on_load_checkpoint(Additions(type(task).__name__, decode(checkpoint.state["task"], extra)))


def _built(kind: type[Owner], checkpoint: Checkpoint, of: str, overrides: Mapping[str, Any]) -> Owner:
    """An object of a class, built from the hyperparameters of a checkpoint."""
    saved = decode(checkpoint.state[of], checkpoint.tensors("extra"))
    kept = {name: value for name, value in _without_those_of_bases(kind, saved).items() if name not in overrides}
    for name, value in kept.items():  # a checkpoint of a stranger must not read the environment
        if (unknown := first_unknown(value)) is not None:
            raise CheckpointMismatch(
                f"{checkpoint.path} does not hold the hyperparameter {name}, which may be a secret: it has {unknown} "
                f"in its place. Give the value: load_from_checkpoint(PATH, {name}=...)."
            )
    hyperparameters = kept | dict(overrides)
    try:
        return kind(**hyperparameters)
    except TypeError as error:
        raise CheckpointMismatch(
            f"{kind.__name__} cannot be built from the hyperparameters of {checkpoint.path} "
            f"({', '.join(hyperparameters) or 'none saved'}): {error}. Call save_hyperparameters() in its __init__, "
            "or give the missing arguments to load_from_checkpoint."
        ) from error


def _without_those_of_bases(kind: type[Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Hyperparameters without those that only a base class takes, which the class itself passes to it."""
    taken = inspect.signature(kind).parameters
    if any(each.kind is each.VAR_KEYWORD for each in taken.values()):
        return dict(saved)
    constructors = [vars(base)["__init__"] for base in kind.__mro__[1:] if "__init__" in vars(base)]
    by_bases = {name for each in constructors for name in inspect.signature(each).parameters}
    return {name: value for name, value in saved.items() if name in taken or name not in by_bases}
