"""AdamW with the fused implementation where torch supports it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import AdamW

_FUSED_ON = {"cpu", "cuda", "mps"}


def adamw(
    params: Iterable[Any],
    lr: float = 1e-3,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    amsgrad: bool = False,
) -> AdamW:
    """Build `torch.optim.AdamW` for the trainable parameters, with `fused=True` where torch supports it.

    Args:
        params: Parameters, pairs of name and parameter, or groups, for example from `decay_groups`. Parameters that
            need no gradient and groups that are then empty are left out.
        lr: Learning rate of groups without an `lr`.
        betas: Decay of the running means of gradient and squared gradient, each in [0, 1).
        eps: Term added to the square root of the running mean of squared gradients.
        weight_decay: Decoupled weight decay, scaled by the learning rate; for groups without a `weight_decay`.
        amsgrad: True to divide by the largest running mean so far (Reddi et al., On the Convergence of Adam and
            Beyond, 2018).

    Raises:
        ValueError: A value is out of range, or no parameter is trainable.
    """
    entries = list(params)
    groups = entries if entries and isinstance(entries[0], dict) else [{"params": entries}]
    groups = [group | {"params": _list_trainable(group["params"])} for group in groups]
    groups = [group for group in groups if group["params"]]
    parameters = [_strip_name(entry) for group in groups for entry in group["params"]]
    fused = all(each.device.type in _FUSED_ON and each.is_floating_point() for each in parameters)
    options = {"fused": True} if fused else {}  # Otherwise torch chooses between its other two implementations.
    return AdamW(groups, lr, betas, eps, weight_decay, amsgrad, **options)


def _list_trainable(entries: Any) -> list[Any]:
    return [
        each
        for each in ([entries] if isinstance(entries, torch.Tensor) else entries)
        if _strip_name(each).requires_grad
    ]


def _strip_name(entry: Any) -> torch.Tensor:
    """Return the parameter of an entry, without its name."""
    parameter: torch.Tensor = entry[1] if isinstance(entry, tuple) else entry
    return parameter
