"""Optimizers around another optimizer: `WholeMatrices` for sharded parameters, and `Lookahead`."""

from __future__ import annotations

import inspect
import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from lumen.data.nested import map_leaves
from lumen.distributed.dtensor import get_local_block, get_local_tensor, is_sharded, is_split, make_dtensor
from lumen.errors import ConfigError
from lumen.internals.optimizers import list_common_attributes

_REFUSAL = re.compile(r"assert closure(?! is None)|if (closure is None|not closure):(\s*#.*)?\s*raise ")


def needs_closure(optimizer: Optimizer) -> bool:
    """Return True if an optimizer's `step` needs a closure that evaluates loss and gradients, as with LBFGS and SAM."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and (closure.default is closure.empty or _requires_closure(type(optimizer).step))


@cache
def _requires_closure(step: Callable[..., Any]) -> bool:
    """Return True if the source of a `step(closure=None)` raises an error without a closure."""
    try:
        return bool(_REFUSAL.search(inspect.getsource(step)))
    except (OSError, TypeError):  # The source is not available.
        return False


class _OptimizerWrapper(Optimizer, ABC):
    """Base class of optimizers around one other, with the same objects as groups and state as the optimizer inside.

    So schedulers, gradient scalers and checkpoints work as with the optimizer inside.

    Args:
        optimizer: The optimizer inside, which makes the steps.
        settings: Further settings of the groups, with their defaults.

    Raises:
        ConfigError: The optimizer needs a closure.
    """

    def __init__(self, optimizer: Optimizer, **settings: Any) -> None:
        if needs_closure(optimizer):
            raise ConfigError(
                f"{type(self).__name__}: {type(optimizer).__name__} evaluates a closure several times in one step. "
                "Use an optimizer that makes one step per gradient."
            )
        self.optimizer = optimizer
        super().__init__(optimizer.param_groups, optimizer.defaults | settings)
        self.share()

    def share(self) -> None:
        """Take over groups and state of the optimizer inside, after it has loaded or replaced its own."""
        self.state, self.param_groups = self.optimizer.state, self.optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters.

        Args:
            closure: Function that returns the loss, called first, as by any optimizer of torch.

        Returns:
            The loss that the closure returned; None without a closure.

        Raises:
            ConfigError: The optimizer inside cannot be used with this class.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_inner()
        return loss

    @abstractmethod
    def _step_inner(self) -> None:
        """Make one step of the optimizer inside, with the additions of the subclass."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore groups and state of the optimizer inside."""
        self.optimizer.load_state_dict(state_dict)
        self.share()


@final
class Lookahead(_OptimizerWrapper):
    """Lookahead around an optimizer: every k steps, slow weights move a part of the way to the parameters.

    The parameters are then set to the slow weights. Zhang et al., Lookahead Optimizer: k steps forward, 1 step back,
    2019. It shares learning rates, groups and state with the optimizer inside. After its first update, a parameter has
    slow weights of its shape and dtype, `state[parameter]["slow"]`. A group counts its steps since the last slow step
    in `group["lookahead_step"]`. An update that a gradient scaler skips does not count.

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
        self.k, self.alpha = k, alpha
        super().__init__(optimizer, lookahead_step=0)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle all attributes, because `Optimizer` would leave out attributes that torch does not know."""
        return super().__getstate__() | {"optimizer": self.optimizer, "k": self.k, "alpha": self.alpha}

    def _step_inner(self) -> None:
        """Make one fast step, and after every k-th a slow step."""
        moving = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        starts = {each: each.clone() for each in moving if "slow" not in self.state.get(each, ())}
        self.optimizer.step()
        for parameter, start in starts.items():  # Optimizers initialize only an empty state, so this comes after.
            self.state[parameter]["slow"] = start
        for group in self.param_groups:
            group["lookahead_step"] = (group.get("lookahead_step", 0) + 1) % self.k  # The group may be new.
            if group["lookahead_step"] == 0:
                for parameter in group["params"]:
                    if (slow := self.state.get(parameter, {}).get("slow")) is not None:
                        parameter.copy_(slow.lerp_(parameter, self.alpha))


@final
class WholeMatrices(_OptimizerWrapper):
    """Optimizer that gives the optimizer inside unsharded parameters under FSDP, as Muon and Shampoo need.

    On shards of a matrix `torch.optim.Muon` sums in a different order, whose 16-bit rounding changes a tenth of an
    update. It fails for matrices with fewer rows than processes. Most other such optimizers compute a wrong update on
    shards. With `WholeMatrices` an optimizer makes the same update as on one process. Without sharded parameters
    `WholeMatrices` only calls the optimizer inside.

    Lumen gathers one parameter at a time with its gradient and its state, and steps it on every process. Then Lumen
    shards the parameter and its state again, by rows. So a process holds one unsharded parameter at a time. A step of
    Muon costs the computation of a step under DDP, and three all-gathers of the size of the parameters.

    `WholeMatrices` shares learning rates, groups and state with the optimizer inside. That optimizer must treat each
    parameter alone, and keep its data in `state[parameter]` or in its groups.

    Args:
        optimizer: The optimizer of the parameters, such as `torch.optim.Muon(matrices, lr=0.02)`.

    Raises:
        ConfigError: The optimizer needs a closure.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(
                f"WholeMatrices: expected an optimizer, found {type(optimizer).__name__}. Write "
                "WholeMatrices(torch.optim.Muon(matrices, lr=0.02))."
            )
        super().__init__(optimizer)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle all attributes, because `Optimizer` would leave out attributes that torch does not know."""
        return super().__getstate__() | {"optimizer": self.optimizer}

    def _step_inner(self) -> None:
        """Make one step of the optimizer inside. Collective, where parameters are sharded.

        Raises:
            ConfigError: The optimizer inside keeps values of all parameters together.
        """
        if not any(is_sharded(parameter) for group in self.param_groups for parameter in group["params"]):
            self.optimizer.step()
            return
        optimizer, groups, state, before = self.optimizer, self.param_groups, self.state, self._get_counters()
        try:
            for group in groups:
                after: dict[str, Any] = {}
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        other, after = after, self._step_parameter(parameter, group, state)
                        self._refuse_state(
                            {key for key in other if key != "params" and _is_different(other[key], after[key])}
                        )
                group.update({key: value for key, value in after.items() if key != "params"})
        finally:
            optimizer.param_groups, optimizer.state = groups, state
        self._refuse_state({name for name, value in self._get_counters().items() if before.get(name, value) != value})

    def _step_parameter(self, parameter: Any, group: dict[str, Any], state: Any) -> dict[str, Any]:
        """Step one parameter. Returns the group after the step."""
        unsharded = nn.Parameter(_gather_full(parameter.detach()), requires_grad=parameter.requires_grad)
        unsharded.__dict__.update(parameter.__dict__)
        unsharded.grad = _gather_full(parameter.grad)
        self.optimizer.param_groups = [stepped := {**group, "params": [unsharded]}]
        self.optimizer.state = defaultdict(dict)
        if parameter in state:
            self.optimizer.state[unsharded] = map_leaves(state[parameter], _gather_full)
        self.optimizer.step()
        self._refuse_state({str(key) for key in self.optimizer.state if key is not unsharded})
        get_local_tensor(parameter.detach()).copy_(get_local_tensor(_shard_like(unsharded.detach(), parameter)))
        if unsharded in self.optimizer.state:
            state[parameter] = map_leaves(self.optimizer.state[unsharded], partial(_shard_like, like=parameter))
        return stepped

    def _get_counters(self) -> dict[str, Any]:
        """Return the numeric attributes of the optimizer inside, which may be counters of steps."""
        known = list_common_attributes()
        return {
            name: value
            for name, value in vars(self.optimizer).items()
            if name not in known and type(value) in (int, float, bool)
        }

    def _refuse_state(self, kept: set[str]) -> None:
        """Raise an error if the step of one parameter has changed values that belong to no parameter."""
        if kept:
            raise ConfigError(
                f"WholeMatrices: {type(self.optimizer).__name__} keeps {', '.join(sorted(kept))} for all parameters "
                "together, but WholeMatrices steps each parameter alone. Keep such values in state[parameter] or in "
                "the groups."
            )


def list_on_parts(optimizer: Optimizer) -> list[Optimizer]:
    """Return an optimizer and all optimizers inside that are not in a `WholeMatrices`: they get shards."""
    if isinstance(optimizer, WholeMatrices):
        return []
    inside = [getattr(optimizer, "optimizer", None), *getattr(optimizer, "optimizers", ())]
    found = [optimizer]
    for each in inside:
        if isinstance(each, Optimizer):
            found += list_on_parts(each)
    return found


def muons_on_parts(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yield each `torch.optim.Muon` in an optimizer that has sharded parameters and is not in a `WholeMatrices`."""
    for each in list_on_parts(optimizer):
        if isinstance(each, getattr(torch.optim, "Muon", ())) and any(
            is_split(parameter) for group in each.param_groups for parameter in group["params"]
        ):
            yield each


def _is_different(one: Any, other: Any) -> bool:
    return not torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one != other)


def _gather_full(value: Any) -> Any:
    """Gather a DTensor; return any other value as it is."""
    return value.full_tensor() if is_sharded(value) else value


def _shard_like(value: Any, like: Any) -> Any:
    """Shard a tensor that every process holds like the DTensor `like`, without communication; return others as is."""
    if not (is_sharded(like) and isinstance(value, torch.Tensor) and value.ndim):
        return value
    block = zip(*get_local_block(like, value.shape), strict=True)
    rows = value[tuple(slice(offset, offset + size) for offset, size in block)].clone()  # A view would keep the rest.
    return make_dtensor(rows, like, value.shape)
