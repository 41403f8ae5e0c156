"""Private names of `torch.distributed.fsdp`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any, final

import torch

from lumen.errors import ConfigError
from lumen.internals.torch_versions import need


def local_block_of(whole: torch.Size, mesh: Any, placements: Sequence[Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offset and shape of this process's shard of a DTensor in each dimension; nothing is communicated."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offsets = compute_local_shape_and_global_offset(whole, mesh, placements)
    return tuple(offsets), tuple(shape)


def shards(placement: Any) -> bool:
    """Return True if a placement divides a dimension, also the second time, as FSDP2 does after tensor parallelism."""
    return placement.is_shard() or type(placement).__name__ == "_StridedShard"


def prepare_roots(roots: Sequence[Any], units: Sequence[Any]) -> None:
    """Let any unit be called first, in a hook or by a data set that plays a policy: torch takes the first for a root.

    Args:
        roots: Modules to which `fully_shard` has been applied, that are in no other one.
        units: All to which it has been applied.

    Raises:
        ConfigError: This version of torch lacks private names that FSDP's strategy uses.
    """
    for root in roots:
        _need_to_shard(root)

    def begin(*call: Any) -> None:
        for handle in handles:
            handle.remove()
        for root in roots:
            root._get_fsdp_state()._lazy_init()

    inner = [unit for unit in units if unit not in roots]
    hook = torch.compiler.disable(begin)  # type: ignore[no-untyped-call]
    handles = [unit.register_forward_pre_hook(hook, prepend=True) for unit in inner]


def _need_to_shard(root: Any) -> None:
    """Check that this torch has the private names.

    Args:
        root: A module to which `fully_shard` has been applied.

    Raises:
        ConfigError: This version of torch lacks some of them.
    """
    need("strategy: fsdp", import_module("torch.distributed.tensor._utils"), "compute_local_shape_and_global_offset")
    need("strategy: fsdp", root, "_get_fsdp_state")
    state = root._get_fsdp_state()
    need("strategy: fsdp", state, "_state_ctx", "_fsdp_param_group", "_lazy_init")
    for group in _groups(state):
        need("strategy: fsdp", group, "fsdp_params")
        if not hasattr(root, "set_reduce_scatter_unused_params"):
            need("strategy: fsdp", group, "post_backward", "reduce_grads")
        if not hasattr(root, "reset_iter_state"):
            need("strategy: fsdp", group, "_training_state", "_partial_reduce_output")
            need("strategy: fsdp", state, "_root_post_backward_final_callback")


def _groups(state: Any) -> list[Any]:
    """The groups of parameters of one unit; none if it has no parameters of its own."""
    return list(filter(None, getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]))


def sum_unused(unit: Any) -> None:
    """Have all trainable parameters of a unit reduced, also those that a backward gave no gradient, as zeros."""
    if hasattr(unit, "set_reduce_scatter_unused_params"):  # since torch 2.13
        unit.set_reduce_scatter_unused_params(True, recurse=False)
        return
    for group in _groups(unit._get_fsdp_state()):
        group.post_backward = _with_zeros(group, group.post_backward)


def _with_zeros(group: Any, post_backward: Callable[[], None]) -> Callable[..., None]:
    def with_zeros(*unused: Any) -> None:
        for each in group.fsdp_params if group.reduce_grads else ():
            whole = getattr(each, "_unsharded_param", None)
            if whole is None or not whole.requires_grad or each.unsharded_accumulated_grad is not None:
                continue
            if whole.grad is None:
                whole.grad = torch.zeros_like(whole)
        post_backward()

    return with_zeros


@final
class Exchanges:
    """Counts what units communicate in a forward and backward, for another in the place of one that has failed.

    Args:
        units: Modules to which `fully_shard` has been applied, that are sharded over all processes.

    Raises:
        ConfigError: This version of torch cannot drop a forward that has failed.
    """

    def __init__(self, units: Sequence[Any]) -> None:
        from torch.distributed.fsdp import FSDPModule

        if not hasattr(FSDPModule, "reset_iter_state"):
            raise ConfigError(
                f"halve_on_oom: under FSDP it needs torch 2.13 or newer, which can drop a forward that failed; this is "
                f"{torch.__version__}. Leave it out, and make batch_size of the training loader smaller; "
                "global_batch_size keeps what a step is."
            )
        from torch.distributed.fsdp._fully_shard import _fsdp_api, _fsdp_collectives

        self._made = self._seen = 0
        self._repeats = False
        need("halve_on_oom under FSDP", _fsdp_api, "AllGather", "ReduceScatter")
        need("halve_on_oom under FSDP", _fsdp_collectives, "DefaultAllGather", "DefaultReduceScatter")
        gather = _counted(_fsdp_api.AllGather, _fsdp_collectives.DefaultAllGather(), self)
        scatter = _counted(_fsdp_api.ReduceScatter, _fsdp_collectives.DefaultReduceScatter(), self)
        for unit in units:
            unit.set_custom_all_gather(gather)
            unit.set_custom_reduce_scatter(scatter)

    def begin(self) -> None:
        """A forward and its backward begin."""
        self._seen = 0
        if not self._repeats:
            self._made = 0
        self._repeats = False

    def end(self, *, repeats: bool) -> None:
        """They end here, whatever they have come to.

        Args:
            repeats: The next forward and backward do not wait again for what was communicated since `begin`; else what
                is communicated next, outside of them too, is none of it.
        """
        self._repeats = repeats
        self._made = self._made if repeats else 0
        self._seen = 0

    def make(self, exchange: Callable[[], Any], output: torch.Tensor, own: torch.Tensor) -> Any:
        """Communicate, unless it is done already: then nobody else would, and each has sent what this process has.

        Args:
            exchange: Starts the communication, which fills `output`.
            output: Where it writes.
            own: What this process gives to it; a part of `output` where that is gathered.
        """
        if self._seen < self._made:
            self._seen += 1
            if own.numel() > output.numel():
                output.zero_()
            elif own.numel():  # zeros might be no values of a parameter: of a standard deviation, for one
                for place in output.view(-1, own.numel()):
                    if place.data_ptr() != own.data_ptr():
                        place.copy_(own)
            return None
        work = exchange()
        self._seen += 1
        self._made = self._seen
        return work


def _counted(kind: type, plain: Any, exchanges: Exchanges) -> Any:
    """What communicates as `plain` does, and is counted."""

    def allocate(self: Any, *args: Any, **options: Any) -> torch.Tensor:
        return plain.allocate(*args, **options)  # type: ignore[no-any-return]

    def call(self: Any, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        exchange = partial(plain, output_tensor, input_tensor, *args, **options)
        return exchanges.make(exchange, output_tensor, input_tensor)

    return type(f"Counted{kind.__name__}", (kind,), {"allocate": allocate, "__call__": call})()


def forget_iteration(root: Any) -> None:
    """Drop the state of forwards that had no backward, and gradients that were not reduced."""
    state = root._get_fsdp_state()
    groups = [group for each in state._state_ctx.all_states for group in _groups(each)]
    parameters = [each for group in groups for each in group.fsdp_params]
    for parameter in parameters:
        if "unsharded_accumulated_grad" in vars(parameter):  # since torch 2.15 it is the gradient below
            parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):  # it has been gathered before
            parameter._unsharded_param.grad = None
    if hasattr(root, "reset_iter_state"):  # since torch 2.13
        with _kept_gradients([parameter.sharded_param for parameter in parameters]):
            root.reset_iter_state()
        return
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    for group in groups:
        group._training_state = TrainingState.POST_BACKWARD  # nothing is left to sum
        group._partial_reduce_output = None
    state._root_post_backward_final_callback()
    state._state_ctx.iter_forward_root = None


@contextmanager
def _kept_gradients(parameters: list[Any]) -> Iterator[None]:
    """The context in which accumulated gradients are kept: torch 2.15 drops them with the rest."""
    gradients = [parameter.grad for parameter in parameters]
    yield
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
