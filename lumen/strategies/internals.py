"""What `fully_shard` has no call for, or not before torch 2.13, done through its internals."""

from __future__ import annotations

from typing import Any

import torch


def sum_unused(unit: Any) -> None:
    """Let processes sum all trainable parameters of a unit, also where a backward gave some of them no gradient."""
    if hasattr(unit, "set_reduce_scatter_unused_params"):
        unit.set_reduce_scatter_unused_params(True, recurse=False)
        return
    group = unit._get_fsdp_state()._fsdp_param_group
    if group is None:  # it has no parameters of its own
        return
    post_backward = group.post_backward

    def with_zeros(*unused: Any) -> None:
        for each in group.fsdp_params if group.reduce_grads else ():
            whole = getattr(each, "_unsharded_param", None)
            if whole is None or not whole.requires_grad or each.unsharded_accumulated_grad is not None:
                continue
            if whole.grad is None:
                whole.grad = torch.zeros_like(whole)
        post_backward()

    group.post_backward = with_zeros


def forget_iteration(root: Any) -> None:
    """Forget forwards that had no backward, and what was interrupted, with the gradients that nobody has summed."""
    state = root._get_fsdp_state()
    groups = [group for each in state._state_ctx.all_states if (group := each._fsdp_param_group) is not None]
    for parameter in (each for group in groups for each in group.fsdp_params):
        parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):  # it has been gathered before
            parameter._unsharded_param.grad = None
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
        return
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    for group in groups:
        group._training_state = TrainingState.POST_BACKWARD  # nothing is left to sum
        group._partial_reduce_output = None
    state._root_post_backward_final_callback()
    state._state_ctx.iter_forward_root = None
