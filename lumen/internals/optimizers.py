"""Private names of torch's optimizers and schedulers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, SequentialLR
from torch.utils.hooks import RemovableHandle

from lumen.internals.torch_versions import need

try:
    from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

    _WRAPPER: Any = Optimizer.profile_hook_step(lambda optimizer: None).__code__
    _is_profiled = torch._C._autograd._profiler_enabled
except (ImportError, AttributeError):
    _WRAPPER = None  # every step is called with its wrapper, whoever listens there
_ZERO_GRAD = Optimizer.zero_grad  # as it is now: somebody may replace it


@final
class StepGuard:
    """Calls a function before every `step` of an optimizer, except for calls of `bare_step`.

    Args:
        optimizer: The optimizer to watch.
        refuse: Called before each step; raises if the step must not be made.
    """

    def __init__(self, optimizer: Optimizer, refuse: Callable[[], None]) -> None:
        self._refuse = refuse
        self._handle: RemovableHandle | None = None
        with suppress(AttributeError):  # one of a class that leaves out Optimizer.__init__ has no hooks
            self._handle = optimizer.register_step_pre_hook(self)

    def __call__(self, *_: Any) -> None:
        """The pre-step hook that torch calls."""
        self._refuse()

    def remove(self) -> None:
        """Stop watching."""
        if self._handle is not None:
            self._handle.remove()


def bare_step(optimizer: Optimizer) -> Callable[[], Any]:
    """`optimizer.step`, without the wrapper that torch puts around it where nobody listens there.

    The wrapper calls hooks, and opens a range for profilers, which takes some 35 us: longer than the update of a small
    model. The figure of the benchmark `tiny`, at most 1.03, needs this: 1.00 with it and 1.06 without. Nothing else
    looks into torch's tables of hooks.
    """
    step, hooks = type(optimizer).step, getattr(optimizer, "_optimizer_step_pre_hooks", None)
    if (
        _WRAPPER is None
        or getattr(step, "__code__", None) is not _WRAPPER
        or "step" in vars(optimizer)
        or hooks is None
        or len(hooks) > 1
        or (hooks and type(next(iter(hooks.values()))) is not StepGuard)
        or getattr(optimizer, "_optimizer_step_post_hooks", True)
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
        or _is_profiled()
    ):
        return optimizer.step
    return step.__wrapped__.__get__(optimizer)  # type: ignore[attr-defined,no-any-return]


def drop_gradients(optimizer: Optimizer) -> None:
    """Call `optimizer.zero_grad`, or do what torch's does without the range that it opens for profilers."""
    if getattr(optimizer.zero_grad, "__func__", None) is not _ZERO_GRAD:
        optimizer.zero_grad(set_to_none=True)
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def has_stepped(optimizer: Any) -> None:
    """Mark a resumed optimizer as stepped, or torch would warn that the schedule has moved before it."""
    optimizer._opt_called = True


def has_state_dict_hooks(optimizer: Optimizer) -> bool:
    """Whether a hook is registered that changes what an optimizer saves or loads."""
    kinds = ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")
    return any(getattr(optimizer, f"_optimizer_{kind}_hooks", None) for kind in kinds)


def torchs_state_dict(optimizer: Optimizer) -> dict[str, Any]:
    """Return what torch would save; nothing for a class that leaves out `Optimizer.__init__`."""
    return Optimizer.state_dict(optimizer) if hasattr(optimizer, "_optimizer_state_dict_pre_hooks") else {}


@cache
def attributes_of_all_optimizers() -> frozenset[str]:
    """Names of the attributes that every optimizer of torch has, and of those that schedulers set on it."""
    return frozenset(vars(Optimizer([nn.Parameter(torch.zeros(1))], {}))) | {"step", "_opt_called"}


need("Lumen", LRScheduler, "_update_lr")


def move_schedule(scheduler: LRScheduler, position: float) -> None:
    """Set the learning rates to those of a scheduler at a position: a step, or any number between two."""
    scheduler._update_lr(position)  # type: ignore[arg-type]


def set_by_hand(state: dict[str, Any]) -> dict[str, Any]:
    """A scheduler's state without the entries that follow from the others."""
    return {key: value for key, value in state.items() if key != "_schedule_phases"}


def schedules_in(scheduler: Any) -> tuple[list[Any], list[int]]:
    """The schedules that a `SequentialLR` or `ChainedScheduler` is made of, and where one follows another."""
    assert isinstance(scheduler, (SequentialLR, ChainedScheduler))
    return getattr(scheduler, "_schedulers", []), getattr(scheduler, "_milestones", [])  # unknown ones are not checked
