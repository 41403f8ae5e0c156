"""Several optimizers as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from itertools import chain, combinations, islice
from typing import Any, final

import torch
from torch.optim import Optimizer

from lumen.errors import ConfigError
from lumen.optim.wrappers import needs_closure


@final
class MultiOptimizer(Optimizer):
    """Several optimizers that step together, such as Muon for matrices and AdamW for the rest.

    Its groups are the groups of the optimizers inside, in order and as the same objects. `state` reads and writes the
    states of these optimizers. So schedulers, gradient clipping, gradient scalers and checkpoints work as with any
    optimizer. To schedule only some of the groups, build the scheduler with the optimizer inside that has these groups.
    The `defaults` are the options that all optimizers have: `OneCycleLR` cycles momentum only if each optimizer has it
    by the same name.

    Args:
        optimizers: A list of at least one optimizer. No two of them may hold the same parameter.
        by_hand: True if the optimizers are stepped one by one. Then they may share parameters, and need closures.

    Raises:
        ConfigError: The list is empty, an entry is no optimizer or needs a closure, or two hold the same parameter.
    """

    def __init__(self, optimizers: Sequence[Optimizer], *, by_hand: bool = False) -> None:
        self.optimizers = list(optimizers)
        if not by_hand:
            _check_optimizers(self.optimizers)
        common = set.intersection(*(set(each.defaults) for each in self.optimizers))
        defaults = {key: value for key, value in self.optimizers[0].defaults.items() if key in common}
        super().__init__(_join_groups(self.optimizers), defaults)
        self.state = _States(self.optimizers)  # type: ignore[assignment]

    def __getstate__(self) -> dict[str, Any]:
        """Pickle all attributes, because `Optimizer` would leave out attributes that torch does not know."""
        return super().__getstate__() | {"optimizers": self.optimizers}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise an error. Add the group to one of the optimizers inside instead.

        Raises:
            ConfigError: The optimizer for the new group is unknown.
        """
        if not any(param_group is each for each in _join_groups(self.optimizers)):
            raise ConfigError(
                "MultiOptimizer: which optimizer is to have the new parameter group? Add it to that one, before "
                "MultiOptimizer is built of them."
            )
        self.param_groups.append(param_group)  # `Optimizer.__init__` adds each group by this method.

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step each optimizer once.

        Args:
            closure: Function that computes loss and gradients, called once for all optimizers, and returns the loss.

        Returns:
            The loss that the closure returned; None without a closure.

        Raises:
            ConfigError: A group was added or removed after the optimizers were combined.
        """
        self.check_groups()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def check_groups(self) -> None:
        """Check that the optimizers inside still have the groups with which they were combined.

        Raises:
            ConfigError: A group was added or removed.
        """
        if [*map(id, self.param_groups)] != [*map(id, _join_groups(self.optimizers))]:
            raise ConfigError(
                "several optimizers: parameter groups were added or replaced after configure_optimizers or "
                "MultiOptimizer combined the optimizers, so Lumen cannot step or save all groups. Give the optimizers "
                "all groups when you build them, and load states with the load_state_dict of MultiOptimizer. To train "
                "a group later, set requires_grad of its parameters to False until then."
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the states of the optimizers inside.

        Raises:
            ConfigError: The state has other groups, or other numbers of parameters in them. Nothing is loaded then.
        """
        saved, sizes = (
            [len(group["params"]) for group in each] for each in (state_dict["param_groups"], self.param_groups)
        )
        if saved != sizes:
            raise ConfigError(
                f"MultiOptimizer: the state has {saved} parameters per group, the optimizers have {sizes}. "
                "Build the optimizers as they were when the state was saved."
            )
        groups = iter(state_dict["param_groups"])
        for optimizer in self.optimizers:
            mine = list(islice(groups, len(optimizer.param_groups)))
            numbers = set(chain(*(group["params"] for group in mine)))
            state = {number: each for number, each in state_dict["state"].items() if number in numbers}
            optimizer.load_state_dict({"state": state, "param_groups": mine})
        self.share()

    def share(self) -> None:
        """Take over the groups of the optimizers inside, after these have loaded or replaced their groups."""
        self.param_groups[:] = _join_groups(self.optimizers)


@final
class _States(MutableMapping[torch.Tensor, dict[str, Any]]):
    """The states of several optimizers as one mapping, from parameter to its state."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._owners = {
            parameter: optimizer
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    def __getitem__(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return the state of a parameter; a new, empty state if the parameter has no state, as in any optimizer."""
        return self._owners[parameter].state[parameter]  # type: ignore[no-any-return]

    def __setitem__(self, parameter: torch.Tensor, entries: dict[str, Any]) -> None:
        self._owners[parameter].state[parameter] = entries

    def __delitem__(self, parameter: torch.Tensor) -> None:
        del self._owners[parameter].state[parameter]

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._owners and parameter in self._owners[parameter].state

    def __iter__(self) -> Iterator[torch.Tensor]:
        # Entries for no parameter, or for one that a different optimizer holds, are internal to their optimizer.
        return (key for each in self._optimizers for key in each.state if self._owners.get(key) is each)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def get(self, parameter: torch.Tensor, default: Any = None) -> Any:
        """Return the state of a parameter, or `default` if the parameter has no state."""
        return super().get(parameter, default) if parameter in self else default


def _join_groups(optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def _check_optimizers(optimizers: Sequence[Optimizer]) -> None:
    if not optimizers:
        raise ConfigError("MultiOptimizer: the list is empty. Pass at least one optimizer.")
    for each in optimizers:
        if not isinstance(each, Optimizer):
            raise ConfigError(f"MultiOptimizer: expected optimizers, found {type(each).__name__}.")
        if needs_closure(each):
            raise ConfigError(
                f"MultiOptimizer: {type(each).__name__} evaluates a closure several times in one step. "
                "Use optimizers that make one step per gradient."
            )
    held = [{parameter for group in each.param_groups for parameter in group["params"]} for each in optimizers]
    for (first, ours), (second, theirs) in combinations(zip(optimizers, held, strict=True), 2):
        if both := len(ours & theirs):
            raise ConfigError(
                f"MultiOptimizer: {type(first).__name__} and {type(second).__name__} hold the same parameters, {both} "
                "of them, which would move twice in each step. Give each parameter to one optimizer."
            )
