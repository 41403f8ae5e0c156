"""Private names of `torch.distributed.fsdp`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

from lumen.internals.torch_versions import check_attributes


def compute_local_block(
    unsharded_shape: torch.Size, mesh: Any, placements: Sequence[Any]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offset and shape of this process's shard of a DTensor in each dimension, without communication."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offsets = compute_local_shape_and_global_offset(unsharded_shape, mesh, placements)
    return tuple(offsets), tuple(shape)


def is_sharding(placement: Any) -> bool:
    """Return True if a placement shards a dimension, also a second time, as FSDP2 does after tensor parallelism."""
    return placement.is_shard() or type(placement).__name__ == "_StridedShard"


def prepare_roots(roots: Sequence[Any], units: Sequence[Any]) -> None:
    """Allow any unit to be called first, in a hook or by a dataset that runs a policy.

    Without this preparation, torch treats the module that is called first as a root.

    Args:
        roots: The modules with `fully_shard` that are not part of another module with `fully_shard`.
        units: All modules with `fully_shard`.

    Raises:
        ConfigError: The installed torch lacks private names that FSDP's strategy uses.
    """
    for root in roots:
        _check_fsdp_names(root)

    def initialize_roots(*_: Any) -> None:
        for handle in handles:
            handle.remove()
        for root in roots:
            root._get_fsdp_state()._lazy_init()

    inner = [unit for unit in units if unit not in roots]
    hook = torch.compiler.disable(initialize_roots)  # type: ignore[no-untyped-call]
    handles = [unit.register_forward_pre_hook(hook, prepend=True) for unit in inner]


def _check_fsdp_names(root: Any) -> None:
    """Check that torch has the private names that sharding needs.

    Args:
        root: A module with `fully_shard`.

    Raises:
        ConfigError: The installed torch lacks a name.
    """
    check_attributes(
        "strategy: fsdp", import_module("torch.distributed.tensor._utils"), "compute_local_shape_and_global_offset"
    )
    check_attributes("strategy: fsdp", root, "_get_fsdp_state")
    state = root._get_fsdp_state()
    check_attributes("strategy: fsdp", state, "_state_ctx", "_fsdp_param_group", "_lazy_init")
    for group in _get_param_groups(state):
        check_attributes("strategy: fsdp", group, "fsdp_params")
        if not hasattr(root, "set_reduce_scatter_unused_params"):
            check_attributes("strategy: fsdp", group, "post_backward", "reduce_grads")
        if not hasattr(root, "reset_iter_state"):
            check_attributes("strategy: fsdp", group, "_training_state", "_partial_reduce_output")
            check_attributes("strategy: fsdp", state, "_root_post_backward_final_callback")


def _get_param_groups(state: Any) -> list[Any]:
    """Return the parameter groups of one unit; empty if the unit has no parameters of its own."""
    return list(filter(None, getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]))


def reduce_unused(unit: Any) -> None:
    """Reduce the gradients of all trainable parameters of a unit; a parameter without a gradient counts as zeros."""
    if hasattr(unit, "set_reduce_scatter_unused_params"):  # since torch 2.13
        unit.set_reduce_scatter_unused_params(True, recurse=False)
        return
    for group in _get_param_groups(unit._get_fsdp_state()):
        group.post_backward = _add_zero_gradients(group, group.post_backward)


def _add_zero_gradients(group: Any, post_backward: Callable[[], None]) -> Callable[..., None]:
    def with_zeros(*_: Any) -> None:
        for each in group.fsdp_params if group.reduce_grads else ():
            unsharded = getattr(each, "_unsharded_param", None)
            if unsharded is None or not unsharded.requires_grad or each.unsharded_accumulated_grad is not None:
                continue
            if unsharded.grad is None:
                unsharded.grad = torch.zeros_like(unsharded)
        post_backward()

    return with_zeros


def reset_iteration(root: Any) -> None:
    """Drop the state of forwards without a backward, and gradients that were not reduced."""
    state = root._get_fsdp_state()
    groups = [group for each in state._state_ctx.all_states for group in _get_param_groups(each)]
    parameters = [each for group in groups for each in group.fsdp_params]
    for parameter in parameters:
        # Since torch 2.15, this value is `_unsharded_param.grad`, which the next lines clear.
        if "unsharded_accumulated_grad" in vars(parameter):
            parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):  # the parameter has been gathered before
            parameter._unsharded_param.grad = None
    if hasattr(root, "reset_iter_state"):  # since torch 2.13
        with _keep_gradients([parameter.sharded_param for parameter in parameters]):
            root.reset_iter_state()
        return
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    for group in groups:
        group._training_state = TrainingState.POST_BACKWARD  # no gradient is left to reduce
        group._partial_reduce_output = None
    state._root_post_backward_final_callback()
    state._state_ctx.iter_forward_root = None


@contextmanager
def _keep_gradients(parameters: list[Any]) -> Iterator[None]:
    """Keep accumulated gradients within the context: torch 2.15 drops them with the other state."""
    gradients = [parameter.grad for parameter in parameters]
    yield
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def allow_anomaly_checks() -> None:
    """Let `detect_anomaly` look for NaN in DTensors: torch has no rule to place the flags that it checks."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.experimental import register_sharding

    register_sharding(torch.ops.aten._is_any_true.default)(lambda flags: [([Replicate()], [Replicate()])])
