"""Whole matrices for optimizers that compute with them, where parameters are cut up over processes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from lumen.errors import ConfigError
from lumen.internals.fully_shard import shards
from lumen.internals.optimizers import attributes_of_all_optimizers
from lumen.optim.lookahead import needs_closure


@final
class WholeMatrices(Optimizer):
    """Lets an optimizer see whole parameters under FSDP: Muon, Shampoo, and others that compute with matrices.

    On parts of a matrix `torch.optim.Muon` sums in another order, whose rounding in 16 bits changes a tenth of an
    update, and fails for matrices with fewer rows than processes; most others compute something else altogether. Inside
    of this one an optimizer makes the same update as on one process. Where nothing is cut up it steps as it is.

    One parameter after the other is gathered with its gradient and its state, stepped on every process, and cut up
    again, the state too, by rows. So a process holds one whole parameter at a time. A step of Muon costs what it
    computes under DDP, and three all-gathers of the size of the parameters.

    Learning rates, groups and state are those of the optimizer inside, as the same objects, so that schedules, gradient
    scalers and checkpoints need know nothing of it. That optimizer must treat each parameter by itself, and keep what
    it needs in `state[parameter]` or in its groups.

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
        if needs_closure(optimizer):
            raise ConfigError(
                f"WholeMatrices: {type(optimizer).__name__} makes several evaluations of a closure in one step; use an "
                "optimizer that makes one step per gradient."
            )
        self.optimizer = optimizer
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.share()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle all attributes: `Optimizer` would leave out those that torch does not know."""
        return super().__getstate__() | {"optimizer": self.optimizer}

    def share(self) -> None:
        """Take over groups and state of the optimizer inside, after it has loaded or replaced them."""
        self.state, self.param_groups = self.optimizer.state, self.optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the optimizer inside. Collective, where parameters are cut up.

        Args:
            closure: Called first, as by any optimizer of torch: returns the loss.

        Returns:
            The loss that the closure returned; None without one.

        Raises:
            ConfigError: The optimizer inside keeps something of all parameters together.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not any(_is_cut(parameter) for group in self.param_groups for parameter in group["params"]):
            self.optimizer.step()
            return loss
        optimizer, groups, state, before = self.optimizer, self.param_groups, self.state, self._counters()
        try:
            for group in groups:
                after: dict[str, Any] = {}
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        other, after = after, self._step(parameter, group, state)
                        self._refuse({key for key in other if key != "params" and _differ(other[key], after[key])})
                group.update({key: value for key, value in after.items() if key != "params"})
        finally:
            optimizer.param_groups, optimizer.state = groups, state
        self._refuse({name for name, value in self._counters().items() if before.get(name, value) != value})
        return loss

    def _step(self, parameter: Any, group: dict[str, Any], state: Any) -> dict[str, Any]:
        """Step one parameter. Returns what the group is afterwards."""
        whole = nn.Parameter(_whole(parameter.detach()), requires_grad=parameter.requires_grad)
        whole.__dict__.update(parameter.__dict__)
        whole.grad = _whole(parameter.grad)
        self.optimizer.param_groups = [stepped := {**group, "params": [whole]}]
        self.optimizer.state = defaultdict(dict)
        if parameter in state:
            self.optimizer.state[whole] = _each(state[parameter], _whole)
        self.optimizer.step()
        self._refuse({str(key) for key in self.optimizer.state if key is not whole})
        _own(parameter.detach()).copy_(_own(_cut(whole.detach(), parameter)))
        if whole in self.optimizer.state:
            state[parameter] = _each(self.optimizer.state[whole], partial(_cut, like=parameter))
        return stepped

    def _counters(self) -> dict[str, Any]:
        """Attributes of the optimizer inside that hold a number, which a step may count up."""
        known = attributes_of_all_optimizers()
        return {
            name: value
            for name, value in vars(self.optimizer).items()
            if name not in known and type(value) in (int, float, bool)
        }

    def _refuse(self, kept: set[str]) -> None:
        """Refuse what belongs to no parameter and changes with each."""
        if kept:
            raise ConfigError(
                f"WholeMatrices: {type(self.optimizer).__name__} keeps {', '.join(sorted(kept))} of all parameters "
                "together, and each is stepped by itself. Keep it in state[parameter] or in the groups."
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore groups and state of the optimizer inside."""
        self.optimizer.load_state_dict(state_dict)
        self.share()


def muons_on_parts(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Each `torch.optim.Muon` in an optimizer that is not in a `WholeMatrices` and would work on what is cut up."""
    if isinstance(optimizer, WholeMatrices):
        return
    if isinstance(optimizer, getattr(torch.optim, "Muon", ())) and any(
        each.is_shard()
        for group in optimizer.param_groups
        for parameter in group["params"]
        for each in getattr(parameter, "placements", ())
    ):
        yield optimizer
    inside = [getattr(optimizer, "optimizer", None), *getattr(optimizer, "optimizers", ())]
    for each in inside:
        if isinstance(each, Optimizer):
            yield from muons_on_parts(each)


def _differ(one: Any, other: Any) -> bool:
    return not torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one != other)


def _is_cut(tensor: Any) -> bool:
    return hasattr(tensor, "full_tensor")  # a DTensor


def _whole(tensor: Any) -> Any:
    return tensor.full_tensor() if _is_cut(tensor) else tensor


def _own(tensor: Any) -> Any:
    return tensor.to_local() if _is_cut(tensor) else tensor


def _cut(tensor: torch.Tensor, like: Any) -> torch.Tensor:
    """This process's rows of a tensor that all have, as a DTensor beside a sharded one; nothing is communicated."""
    if not _is_cut(like) or not tensor.ndim:
        return tensor
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    mesh = like.device_mesh
    placements = [Replicate() if shards(each) and each.dim >= tensor.ndim else each for each in like.placements]
    rows = distribute_tensor(tensor, mesh, placements, src_data_rank=None).to_local().clone()  # a view keeps the rest
    return DTensor.from_local(rows, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    """Nested containers with their tensors changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _each(each, change) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_each(each, change) for each in value)
    return value
