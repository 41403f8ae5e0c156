"""Reads what `training_step` returned; the errors for anything else say what to return instead."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import nn

from lumen.errors import TrainingError


def without_gradient(task: nn.Module) -> TrainingError:
    """The error for a loss that requires no gradient."""
    trained = any(parameter.requires_grad for parameter in task.parameters())
    if not torch.is_grad_enabled():
        why = "gradients are switched off, by torch.set_grad_enabled(False) or a context that was not left. Put it back"
    elif not trained:
        why = "no parameter of the task has requires_grad. Unfreeze those that are to be trained"
    else:
        why = (
            "it was detached, made anew by torch.tensor, or computed under no_grad, by argmax or of frozen parameters "
            "alone. Compute it of the model's outputs by differentiable operations"
        )
    return TrainingError(
        f"training_step returned a loss without a gradient (requires_grad is False), so nothing can be learned: {why}. "
        "For a micro-batch to leave out return None."
    )


def read_output(output: Any) -> tuple[torch.Tensor | None, float | None]:
    """The loss and the weight in what `training_step` returned; None where there is none.

    Raises:
        TrainingError: The output has another form, or the loss is no scalar.
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
        raise _wrong_output("loss", loss, _instead(loss))
    if weight is None:
        return loss, None
    if not isinstance(weight, Real) and not (isinstance(weight, torch.Tensor) and weight.numel() == 1):
        raise _wrong_output("weight", weight, "A weight is one number, such as the number of tokens.")
    return loss, float(weight)


def _wrong_output(part: str, value: Any, instead: str) -> TrainingError:
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
        f"the {part} found is {found}. {instead}"
    )


def _instead(loss: Any) -> str:
    """What to return instead of a loss of the wrong shape or type."""
    if not isinstance(loss, torch.Tensor):
        if isinstance(loss, Mapping):
            return "Name the loss 'loss' in it."
        number = isinstance(loss, Real) or hasattr(loss, "dtype")
        return "Return the tensor itself, not its value: a number has no gradient." if number else "Return the loss."
    if loss.numel() != 1:
        return "Bring it to one number, by mean() or by sum() with a weight." if loss.numel() else "It is empty."
    if loss.is_complex():
        return "A complex number cannot be minimised: return its abs() or a part of it."
    return "Whole numbers have no gradient: compute the loss in floating point."
