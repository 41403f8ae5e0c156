"""Steps of a task: their arguments, and the results that `training_step` may return."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from itertools import takewhile
from numbers import Real
from operator import itemgetter
from typing import Any, Self, final

import torch
from torch import nn

from lumen.errors import ConfigError, TrainingError
from lumen.task.hooks import NOT_CALLED, as_defined

#: Arguments of a step in Lightning 1, with their replacements.
REMOVED_ARGUMENTS: Mapping[str, str] = {
    "optimizer_idx": (
        "Lumen calls a step once for all optimizers. For several optimizers set automatic_optimization = False and "
        "call self.optimizers(), or combine the optimizers in a lumen.optim.MultiOptimizer."
    ),
    "hiddens": NOT_CALLED["task"]["tbptt_split_batch"],
}


def make_argument_picker(
    step: Callable[..., Any], *, several: bool = False
) -> Callable[[tuple[Any, int, int]], tuple[Any, ...]]:
    """Return a function that picks a step's arguments from (batch, batch_idx, dataloader_idx), by its signature.

    Args:
        step: The task's method. A decorator that keeps its signature (`functools.wraps`) is allowed.
        several: True if several loaders are read one after the other. Only then `*args`, or a third argument with a
            default and another name than `dataloader_idx`, gets the loader's index.

    Raises:
        ConfigError: The signature has other arguments.
    """
    names = ("batch", "batch_idx", "dataloader_idx")
    parameters = list(inspect.signature(step).parameters.values())
    if "dataloader_iter" in [parameter.name for parameter in parameters]:
        if len(parameters) > 1:
            raise ConfigError(f"{as_defined(step)}: dataloader_iter must be the only argument.")
        return lambda given: (OneBatchIterator(given),)
    if removed := [parameter.name for parameter in parameters if parameter.name in REMOVED_ARGUMENTS]:
        raise ConfigError(f"{as_defined(step)}: Lumen does not pass {removed[0]}. {REMOVED_ARGUMENTS[removed[0]]}")
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    given = max(sum(p.default is p.empty for p in positional), 3 if several else 2)
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        chosen = list(range(given))
    else:
        taken = takewhile(lambda each: each[0] < given or each[1].name in names, enumerate(positional))
        chosen = [names.index(p.name) if p.name in names[1:] else place for place, p in taken]
    if not chosen or max(chosen) > 2 or any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters):
        raise ConfigError(
            f"{as_defined(step)}: a step takes (batch), (batch, batch_idx) or (batch, batch_idx, dataloader_idx); or "
            "(dataloader_iter) alone."
        )
    first = chosen[0]
    is_range = chosen == list(range(first, first + len(chosen)))
    return itemgetter(slice(first, first + len(chosen))) if is_range else itemgetter(*chosen)


@final
class OneBatchIterator:
    """Iterator over one batch, for a step with the argument `dataloader_iter`.

    Args:
        given: The batch on the device, its index, and the index of its loader.
    """

    def __init__(self, given: tuple[Any, int, int]) -> None:
        self._given: tuple[Any, int, int] | None = given

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[Any, int, int]:
        """Return the batch, its index, and the index of its loader.

        Raises:
            TrainingError: The step asked for a second batch.
        """
        given, self._given = self._given, None
        if given is None:
            raise TrainingError(
                "a step took two batches from dataloader_iter, but each call provides one batch. Set "
                "accumulate_grad_batches, or use larger batches."
            )
        return given


def make_no_gradient_error(task: nn.Module) -> TrainingError:
    """Return the error for a loss that requires no gradient."""
    trained = any(parameter.requires_grad for parameter in task.parameters())
    if not torch.is_grad_enabled():
        reason = (
            "gradients are disabled, by torch.set_grad_enabled(False) or a context that was not exited. Enable "
            "gradients again"
        )
    elif not trained:
        reason = "no parameter of the task has requires_grad. Unfreeze the parameters to train"
    else:
        reason = (
            "the loss was detached, created by torch.tensor, or computed under no_grad, by argmax or from frozen "
            "parameters only. Compute the loss from the model's outputs by differentiable operations"
        )
    return TrainingError(
        "training_step returned a loss without a gradient (requires_grad is False), so nothing can be learned: "
        f"{reason}. To skip a micro-batch, return None."
    )


def read_output(output: Any) -> tuple[torch.Tensor | None, float | None]:
    """Return the loss and the weight from a result of `training_step`; None for a missing part.

    Raises:
        TrainingError: The result has a different form, or the loss is not a scalar.
    """
    loss, weight = output, None
    if isinstance(output, torch.Tensor) and output.numel() == 1 and output.is_floating_point():
        return output, None
    if isinstance(output, dict) and "loss" in output:
        loss, weight = output["loss"], output.get("weight")
    elif isinstance(output, tuple) and len(output) == 2:
        loss, weight = output
    if loss is None:
        return None, None
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        raise _make_output_error("loss", loss, _describe_valid_loss(loss))
    if weight is None:
        return loss, None
    if not isinstance(weight, Real) and not (isinstance(weight, torch.Tensor) and weight.numel() == 1):
        raise _make_output_error("weight", weight, "A weight is one number, such as the number of tokens.")
    return loss, float(weight)


def _make_output_error(part: str, value: Any, advice: str) -> TrainingError:
    found = type(value).__name__
    if isinstance(value, torch.Tensor):
        found = f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    elif isinstance(value, (Real, str)):
        found += f" {value!r}"
    elif isinstance(value, Mapping):
        found += f" with the keys {', '.join(map(repr, value)) or 'of none'}"
    elif isinstance(value, (list, tuple)):
        found += f" of {len(value)}"
    return TrainingError(
        "training_step must return a scalar loss, (loss, weight), a dictionary with 'loss' (and 'weight'), or None; "
        f"the {part} found is {found}. {advice}"
    )


def _describe_valid_loss(loss: Any) -> str:
    """Return advice for a loss of the wrong shape or type."""
    if not isinstance(loss, torch.Tensor):
        if isinstance(loss, Mapping):
            return "Store the loss under the key 'loss'."
        number = isinstance(loss, Real) or hasattr(loss, "dtype")
        return "Return the tensor itself, not its value: a number has no gradient." if number else "Return the loss."
    if loss.numel() != 1:
        return (
            "Reduce the loss to one number, by mean(), or by sum() with a weight."
            if loss.numel()
            else "The loss is empty."
        )
    if loss.is_complex():
        return "A complex number cannot be minimized: return its abs(), or its real or imaginary part."
    return "Whole numbers have no gradient: compute the loss in floating point."
