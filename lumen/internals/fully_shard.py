"""Private names of `torch.distributed.fsdp`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

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
