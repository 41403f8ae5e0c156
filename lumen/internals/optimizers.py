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

from lumen.internals.torch_versions import check_attributes

try:
    from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

    _WRAPPER: Any = Optimizer.profile_hook_step(lambda optimizer: None).__code__
    _is_profiled = torch._C._autograd._profiler_enabled
except (ImportError, AttributeError):
    _WRAPPER = None  # every step is called with its wrapper
_ZERO_GRAD = Optimizer.zero_grad  # the function as it is now, because user code may replace it


class ForwardingOptimizer:
    """View of an optimizer that isinstance takes for it, and that forwards other attributes to it.

    Attributes:
        optimizer: The torch optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # isinstance reads this attribute
        return type(self.optimizer)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # a copy that is not filled yet
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return repr(self.optimizer)


@final
class StepGuard:
    """Hook that calls a function before every `step` of an optimizer, except for calls of `get_unwrapped_step`.

    Args:
        optimizer: The optimizer to watch.
        refuse: The function, called before each step; raises if the step is not allowed.
    """

    def __init__(self, optimizer: Optimizer, refuse: Callable[[], None]) -> None:
        self._refuse = refuse
        self._handle: RemovableHandle | None = None
        with suppress(AttributeError):  # a class that omits Optimizer.__init__ has no hooks
            self._handle = optimizer.register_step_pre_hook(self)

    def __call__(self, *_: Any) -> None:
        """Run the check; torch calls this pre-step hook."""
        self._refuse()

    def remove(self) -> None:
        """Remove the hook."""
        if self._handle is not None:
            self._handle.remove()


def get_unwrapped_step(optimizer: Optimizer) -> Callable[[], Any]:
    """Return `optimizer.step` without torch's wrapper, if no hook or profiler uses the wrapper.

    The wrapper calls hooks and opens a profiler range, which takes about 35 us: longer than the update of a small
    model. The benchmark `tiny` needs this function to stay within its limit of 1.03: it measures 1.00 with it and 1.06
    without. No other code reads torch's tables of hooks.
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
    """Call `optimizer.zero_grad`, or do the same without the profiler range of torch's method."""
    if getattr(optimizer.zero_grad, "__func__", None) is not _ZERO_GRAD:
        optimizer.zero_grad(set_to_none=True)
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def disable_fused(optimizer: Any) -> None:
    """Let an optimizer, and those inside, use torch's implementation without `fused`, which rounds differently."""
    for settings in (optimizer.defaults, *optimizer.param_groups):  # a group that is added later copies the defaults
        if settings.get("fused"):
            settings["fused"] = False
    if hasattr(optimizer, "_step_supports_amp_scaling"):  # only `fused` divides by the scale of fp16
        optimizer._step_supports_amp_scaling = False
    for inner in (getattr(optimizer, "optimizer", None), *getattr(optimizer, "optimizers", ())):
        if inner is not None:
            disable_fused(inner)


def mark_as_stepped(optimizer: Any) -> None:
    """Mark a resumed optimizer as stepped; otherwise torch would warn that the scheduler stepped first."""
    optimizer._opt_called = True


def has_state_dict_hooks(optimizer: Optimizer) -> bool:
    """Return True if a registered hook changes the state that an optimizer saves or loads."""
    kinds = ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")
    return any(getattr(optimizer, f"_optimizer_{kind}_hooks", None) for kind in kinds)


def get_torch_state_dict(optimizer: Optimizer) -> dict[str, Any]:
    """Return the state dict of torch's own method; empty for a class that omits `Optimizer.__init__`."""
    return Optimizer.state_dict(optimizer) if hasattr(optimizer, "_optimizer_state_dict_pre_hooks") else {}


@cache
def list_common_attributes() -> frozenset[str]:
    """Return the names of the attributes that every torch optimizer has, or that schedulers set."""
    return frozenset(vars(Optimizer([nn.Parameter(torch.zeros(1))], {}))) | {"step", "_opt_called"}


check_attributes("Lumen", LRScheduler, "_update_lr")


def move_schedule(scheduler: LRScheduler, position: float) -> None:
    """Set the learning rates to a scheduler's values at a position: a step, or a number between two steps."""
    scheduler._update_lr(position)  # type: ignore[arg-type]


def drop_derived_state(state: dict[str, Any]) -> dict[str, Any]:
    """Return a scheduler's state without the entries that follow from other entries."""
    return {key: value for key, value in state.items() if key != "_schedule_phases"}


def get_inner_schedules(scheduler: Any) -> tuple[list[Any], list[int]]:
    """Return the schedulers inside a `SequentialLR` or `ChainedScheduler`, and the milestones between them."""
    assert isinstance(scheduler, (SequentialLR, ChainedScheduler))
    return getattr(scheduler, "_schedulers", []), getattr(scheduler, "_milestones", [])  # empty if torch renames these
