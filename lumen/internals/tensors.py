"""Private names of torch's modules and tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from lumen.internals.torch_versions import check_attributes

with suppress(ImportError):
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

check_attributes("Lumen", nn.Module(), "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set",
     "_load_state_dict_pre_hooks", "_load_from_state_dict", "_forward_pre_hooks", "_forward_hooks",
     "_backward_hooks", "_backward_pre_hooks")  # fmt: skip
check_attributes("Lumen", torch.Tensor, "_version", "_is_view", "_backward_hooks", "_post_accumulate_grad_hooks")
check_attributes("Lumen", torch.UntypedStorage, "_cdata")
check_attributes("Lumen", torch, "_foreach_add_", "_foreach_mul_", "_foreach_clamp_min_", "_foreach_clamp_max_",
    "_foreach_norm", "_foreach_copy_", "_foreach_lerp_")  # fmt: skip
check_attributes("Lumen", torch.ops.aten.zero_.default, "_schema")
if "TorchDispatchMode" not in globals():
    check_attributes("Lumen", torch.utils, "_python_dispatch.TorchDispatchMode")
EXTRA_STATE = "_extra_state"
"""The name that torch gives to what a module's `get_extra_state` returns."""


def get_direct_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return a module's own parameters by name, without its submodules; the module's own dictionary, not a copy."""
    return module._parameters


def get_direct_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return a module's own buffers by name, without its submodules; the module's own dictionary, not a copy."""
    return module._buffers


def get_direct_persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return a module's own buffers that its `state_dict` saves."""
    return {name: b for name, b in module._buffers.items() if is_saved(module, name)}


def list_forward_pre_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """Return the hooks that a module calls before its `forward`."""
    return list(module._forward_pre_hooks.values())


def is_plain_linear(module: nn.Module) -> bool:
    """Return True if a call of a module computes `F.linear` of its weight and bias, and nothing else."""
    hooks = module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks
    return type(module).forward is nn.Linear.forward and "forward" not in vars(module) and not any(hooks)


def may_run_backward_again() -> bool:
    """Return False if the backward in progress frees its graph; True with `retain_graph`, or if torch cannot say."""
    is_graph_kept = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return torch.compiler.is_compiling() or is_graph_kept is None or bool(is_graph_kept())


def get_pruned_name(hook: Any) -> str:
    """Return the name of the tensor that a hook of `torch.nn.utils.prune` computes."""
    name: str = hook._tensor_name
    return name


def is_saved(module: nn.Module, name: str) -> bool:
    """Return True if a module's `state_dict` contains its own parameter or buffer with this name."""
    return name not in module._non_persistent_buffers_set


def list_persistent_buffers(module: nn.Module) -> list[torch.Tensor]:
    """Return the plain persistent buffers of a module and its submodules, each once; fast enough for every step."""
    modules: list[nn.Module | None] = [module]
    found = {}  # a dictionary, to keep the order
    for each in modules:
        if each is None:
            continue
        if each._modules:
            modules += each._modules.values()
        for name, buffer in each._buffers.items() if each._buffers else ():
            if type(buffer) is torch.Tensor and name not in each._non_persistent_buffers_set:
                found[id(buffer)] = buffer
    return list(found.values())


def get_version(tensor: torch.Tensor) -> int:
    """Return the number of in-place writes to a tensor: its version counter."""
    return tensor._version


def is_view(tensor: torch.Tensor) -> bool:
    """Return True if autograd tracks a tensor as a view of a different tensor."""
    return tensor._is_view()


def get_storage_id(tensor: torch.Tensor) -> int:
    """Return an id of a tensor's storage, equal for all tensors that share it, also on the meta device."""
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]


def get_schema(operation: Any) -> Any:
    """Return the name and arguments of an operator with which torch calls a `TorchDispatchMode`."""
    return operation._schema


def is_copy(operation: str) -> bool:
    """Return True if an operator with this schema name returns its input's values in new memory."""
    return operation in ("clone", "_to_copy")


def is_copy_in_place(operation: str) -> bool:
    """Return True if an operator with this schema name copies its second tensor (or list of tensors) into its first."""
    return operation in ("copy_", "_foreach_copy_")


def uses_shape_only(operation: str) -> bool:
    """Return True if an operator with this schema name uses only shape and dtype of its input, not the values."""
    return operation.endswith("_like") or operation.startswith("new_")


def get_reset_name(module: nn.Module) -> str:
    """Return the name of the method that initialises a module's parameters, if the module has one."""
    return "_reset_parameters" if isinstance(module, nn.MultiheadAttention) else "reset_parameters"


def get_reset_method(module: nn.Module) -> Callable[[], Any] | None:
    """Return the method that initialises a module's parameters, such as `reset_parameters`, or None."""
    reset: Callable[[], Any] | None = getattr(module, get_reset_name(module), None)
    return reset


Hooks = tuple[Any, Any]


def get_gradient_hooks(parameter: Any) -> Hooks:
    """Return two hook dictionaries of a parameter, each or None: on its gradient, and after accumulation."""
    return parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)


def set_gradient_hooks(parameter: Any, hooks: Hooks) -> None:
    """Give a parameter the hook dictionaries of a second parameter, so that both share later changes."""
    parameter._backward_hooks, parameter._post_accumulate_grad_hooks = hooks


def multiply_all(tensors: list[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply one or more tensors in place by one factor, in a few kernels."""
    torch._foreach_mul_(tensors, factor)


def add_to_all(tensors: list[torch.Tensor], number: float) -> None:
    """Add a number to all tensors, in a few kernels."""
    torch._foreach_add_(tensors, number)


def clamp_all(tensors: list[torch.Tensor], limit: float) -> None:
    """Clamp one or more tensors to [-most, most] in place, in a few kernels."""
    torch._foreach_clamp_min_(tensors, -limit)
    torch._foreach_clamp_max_(tensors, limit)


def copy_all(tensors: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Copy values into one or more tensors, in a few kernels if all are on one device."""
    torch._foreach_copy_(tensors, values)


def compute_norms(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the 2-norm of each of one or more tensors, in a few kernels."""
    return torch._foreach_norm(tensors)


def lerp_all(tensors: list[torch.Tensor], ends: list[torch.Tensor], weight: float) -> None:
    """Interpolate each tensor in place towards its end, in a few kernels: 0 keeps the tensor, 1 sets the end."""
    torch._foreach_lerp_(tensors, ends, weight)


def compute_max_abs(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the largest absolute value in each of one or more tensors; NaN if a tensor contains NaN."""
    return torch._foreach_norm(tensors, torch.inf)


def has_load_hooks(module: nn.Module) -> bool:
    """Return True if a user's module changes how a state dict is loaded."""
    owner = type(module)._load_from_state_dict.__module__.partition(".")[0]
    return bool(module._load_state_dict_pre_hooks) or owner not in ("torch", "torchmetrics")


def call_load_hooks(module: nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Load a module, without its submodules, from a state dict as torch does; entries that do not fit are ignored."""
    module._load_from_state_dict(state, prefix, {}, False, [], [], [])
