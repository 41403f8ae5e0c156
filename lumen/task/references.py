"""Redirects references to parameters that a strategy has replaced, so that optimizers and users see the new ones."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from functools import partial
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from lumen.data.nested import convert
from lumen.errors import ConfigError, TrainingError
from lumen.internals.tensors import give_hooks, hooks_of, own_parameters


@final
class Replaced(nn.Parameter):
    """A parameter that was replaced: operations on it act on the parameter that has taken its place."""

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], _: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch with the parameter that has taken its place."""
        return function(*convert(args, current), **convert(kwargs or {}, current))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the parameter that has taken its place."""
        return deepcopy(current(self), memo)


def current(value: Any) -> Any:
    """The parameter that has taken a replaced one's place; any other object as it is."""
    if type(value) is not Replaced:
        return value
    return value.__dict__["_current"]()


def become(old: nn.Parameter, new: nn.Parameter, module: nn.Module, key: str) -> nn.Parameter:
    """Replace a parameter by a new one, keeping the old object where torch can swap their contents.

    Args:
        old: A leaf parameter; its hooks stay.
        new: The parameter with the new contents, which nothing else refers to.
        module: The module that holds `old`.
        key: The parameter's name in `module`.

    Returns:
        The parameter that the module is to hold: `old`, unless weak references or views of it exist.
    """
    hooks = hooks_of(old)
    with suppress(RuntimeError):  # somebody has weak references to it, or views of it
        torch.utils.swap_tensors(old, new)  # type: ignore[no-untyped-call]
        give_hooks(old, hooks)
        return old
    give_hooks(new, hooks)
    replace(old, partial(own_parameters(module).__getitem__, key), key)
    return new


def replace(old: nn.Parameter, find: Callable[[], Any], name: str) -> None:
    """Make every reference to a parameter lead to the one that has taken its place.

    Args:
        old: The replaced parameter; its memory is freed.
        find: Returns the parameter that has taken its place; called at each use.
        name: The parameter's name, for the error if a gradient still reaches `old` through a view.
    """

    def refuse(_: torch.Tensor) -> None:
        raise TrainingError(
            f"a gradient has come to {name} through a view of it that was made before training placed it, when it was "
            "another tensor. Make the view in the step, where it is used."
        )

    give_hooks(old, (None, None))
    if old.requires_grad and old.is_leaf:
        old.register_hook(refuse)  # type: ignore[no-untyped-call]
    if not old.is_meta:
        old.data = old.data.new_empty(0)
    vars(old)["_current"] = find
    old.__class__ = Replaced


def refer_to_current(optimizer: Optimizer) -> None:
    """Make an optimizer train the parameters that have taken the place of replaced ones.

    Raises:
        ConfigError: The optimizer then has one parameter twice.
    """
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(type(parameter) is Replaced for parameter in held):
        return
    for group in optimizer.param_groups:
        group["params"][:] = map(current, group["params"])
    for parameter in held:
        if type(parameter) is Replaced and parameter in optimizer.state:
            optimizer.state[current(parameter)] = optimizer.state.pop(parameter)
    if several := len(held) - len({id(current(parameter)) for parameter in held}):
        raise ConfigError(
            f"{several} parameters are in two places of the optimizer: once as they are, and once by a reference from "
            "before the strategy cut them up, which is another object. Tell parameters apart by their names, "
            "self.named_parameters(), in configure_optimizers."
        )
