"""Lookahead around any optimizer."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import cache
from typing import Any, final

import torch
from torch.optim import Optimizer

from lumen.errors import ConfigError

_REFUSAL = re.compile(r"assert closure(?! is None)|if (closure is None|not closure):(\s*#.*)?\s*raise ")


def needs_closure(optimizer: Optimizer) -> bool:
    """Return True if its `step` asks for a closure that evaluates loss and gradients, as those of LBFGS and SAM do."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and (closure.default is closure.empty or _refuses_none(type(optimizer).step))


@cache
def _refuses_none(step: Callable[..., Any]) -> bool:
    """Return True if a `step(closure=None)` raises without a closure, as its source says."""
    try:
        return bool(_REFUSAL.search(inspect.getsource(step)))
    except (OSError, TypeError):  # there is no source
        return False


@final
class Lookahead(Optimizer):
    """Every k steps, move slow weights a part of the way to where the optimizer went, and let it go on from there.

    Zhang et al., Lookahead Optimizer: k steps forward, 1 step back, 2019. Learning rates, groups and state are those of
    the optimizer inside, as the same objects, so that schedulers, gradient scalers and checkpoints need know nothing of
    it. From its first update on, a parameter has slow weights of its shape and dtype, `state[parameter]["slow"]`;
    a group counts its steps since the last exchange in `group["lookahead_step"]`. An update that a gradient scaler
    skips is no step.

    Args:
        optimizer: The optimizer that makes the fast steps, such as AdamW.
        k: Fast steps for each slow step, at least 1.
        alpha: Fraction of the way that the slow weights move, in (0, 1].

    Raises:
        ConfigError: A value is out of range, or the optimizer needs a closure.
    """

    def __init__(self, optimizer: Optimizer, k: int = 5, alpha: float = 0.5) -> None:
        if k < 1 or not 0 < alpha <= 1:
            raise ConfigError(f"Lookahead: k = {k}, alpha = {alpha}; k must be at least 1, alpha in (0, 1].")
        if needs_closure(optimizer):
            raise ConfigError(
                f"Lookahead: {type(optimizer).__name__} makes several evaluations of a closure in one step; "
                "use an optimizer that makes one step per gradient."
            )
        self.optimizer, self.k, self.alpha = optimizer, k, alpha
        super().__init__(optimizer.param_groups, optimizer.defaults | {"lookahead_step": 0})
        self.share()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle all attributes: `Optimizer` would leave out those that torch does not know."""
        return super().__getstate__() | {"optimizer": self.optimizer, "k": self.k, "alpha": self.alpha}

    def share(self) -> None:
        """Take over groups and state of the optimizer inside, after it has loaded or replaced them."""
        self.state, self.param_groups = self.optimizer.state, self.optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One fast step, and after every k-th a slow one.

        Args:
            closure: Called by the optimizer inside, as by any optimizer of torch: returns the loss.

        Returns:
            The loss that the closure returned; None without one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        moving = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        starts = {each: each.clone() for each in moving if "slow" not in self.state.get(each, ())}
        self.optimizer.step()
        for parameter, start in starts.items():  # only now: optimizers take an empty state for a new parameter
            self.state[parameter]["slow"] = start
        for group in self.param_groups:
            group["lookahead_step"] = (group.get("lookahead_step", 0) + 1) % self.k  # it may be new
            if group["lookahead_step"] == 0:
                for parameter in group["params"]:
                    if (slow := self.state.get(parameter, {}).get("slow")) is not None:
                        parameter.copy_(slow.lerp_(parameter, self.alpha))
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore groups and state, those of the slow weights too."""
        self.optimizer.load_state_dict(state_dict)
        self.share()
