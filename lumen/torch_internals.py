"""Every private name of torch that Lumen uses. Where one is gone there is another way, or one error before any work.

What all runs need is looked for when this is imported, what some need where they begin: never first in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from functools import cache
from importlib import import_module
from types import FunctionType
from typing import Any, Literal, final

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, SequentialLR
from torch.utils.data import DataLoader

from lumen.errors import ConfigError

#: The versions of torch that Lumen was tried with.
TRIED = ("2.11.0", "2.13.0", "2.14.1", "2.15.0")


def need(user: str, owner: Any, *names: str) -> None:
    """Look for names before they are used.

    Raises:
        ConfigError: This torch lacks some; says which torch to install.
    """
    if missing := [name for name in names if not hasattr(owner, name)]:
        raise ConfigError(
            f"torch {torch.__version__} has no {', '.join(missing)}, which {user} needs. Lumen was tried with torch "
            f"{', '.join(TRIED)}: install one of these."
        )


# ---------------------------------------------------------------------- modules and tensors

with suppress(ImportError):
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

need("Lumen", nn.Module(), "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
need("Lumen", torch.Tensor, "_version", "_is_view", "_backward_hooks", "_post_accumulate_grad_hooks")
need("Lumen", torch.UntypedStorage, "_cdata")
need("Lumen", torch, "_foreach_mul_", "_foreach_clamp_min_", "_foreach_clamp_max_", "_foreach_norm", "_foreach_copy_")
need("Lumen", torch.ops.aten.zero_.default, "_schema")
if "TorchDispatchMode" not in globals():
    need("Lumen", torch.utils, "_python_dispatch.TorchDispatchMode")


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """A module's own parameters, not those of modules in it; what is put in is the module's."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """A module's own buffers, not those of modules in it; what is put in is the module's."""
    return module._buffers


def own_persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """A module's own buffers that are saved."""
    return {name: b for name, b in module._buffers.items() if name not in module._non_persistent_buffers_set}


def persistent_buffers(module: nn.Module) -> list[torch.Tensor]:
    """The plain buffers of a module and those in it that are saved, a shared one once; fast enough for each step."""
    modules: list[nn.Module | None] = [module]
    found = {}  # in order
    for each in modules:
        if each is None:
            continue
        if each._modules:
            modules += each._modules.values()
        for name, buffer in each._buffers.items() if each._buffers else ():
            if type(buffer) is torch.Tensor and name not in each._non_persistent_buffers_set:
                found[id(buffer)] = buffer
    return list(found.values())


def writes_to(tensor: torch.Tensor) -> int:
    """How often a tensor has been written."""
    return tensor._version


def is_view(tensor: torch.Tensor) -> bool:
    """Whether a tensor shares another one's memory, so far as autograd knows."""
    return tensor._is_view()


def storage_id(tensor: torch.Tensor) -> int:
    """What tensors have in common that share memory, on the meta device too."""
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]


def schema_of(operation: Any) -> Any:
    """Name and arguments of an operation that a `TorchDispatchMode` is shown."""
    return operation._schema


def copies(operation: str) -> bool:
    """Whether the operation of a schema gives a tensor's values in memory of their own."""
    return operation in ("clone", "_to_copy")


def copies_in_place(operation: str) -> bool:
    """Whether the operation of a schema gives its first tensor, or tensors, the values of its second."""
    return operation in ("copy_", "_foreach_copy_")


def takes_shape_alone(operation: str) -> bool:
    """Whether the operation of a schema makes a tensor like another one, whose values it does not read."""
    return operation.endswith("_like") or operation.startswith("new_")


def reset_name(module: nn.Module) -> str:
    """Name of the method that gives a module its first values, if it has one."""
    return "_reset_parameters" if isinstance(module, nn.MultiheadAttention) else "reset_parameters"


def own_reset(module: nn.Module) -> Callable[[], Any] | None:
    """The method that gives a module its first values; None if it has none."""
    reset: Callable[[], Any] | None = getattr(module, reset_name(module), None)
    return reset


Hooks = tuple[Any, Any]


def hooks_of(parameter: Any) -> Hooks:
    """The hooks on a parameter's gradient and on its accumulated gradient, where handles find them; None: no hooks."""
    return parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)


def give_hooks(parameter: Any, hooks: Hooks) -> None:
    """Let these be the hooks of a parameter, beside the one whose they are: what is added or removed is for both."""
    parameter._backward_hooks, parameter._post_accumulate_grad_hooks = hooks


def multiply(tensors: list[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply tensors in place, at least one, in a few kernels."""
    torch._foreach_mul_(tensors, factor)


def clamp(tensors: list[torch.Tensor], most: float) -> None:
    """Bring the values of tensors, at least one, to [-most, most] in place, in a few kernels."""
    torch._foreach_clamp_min_(tensors, -most)
    torch._foreach_clamp_max_(tensors, most)


def copy_all(tensors: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Copy values into tensors, at least one, in a few kernels where all lie on one device."""
    torch._foreach_copy_(tensors, values)


def empty_host_cache() -> None:
    """Give back the pinned memory that nothing lies in. torch < 2.13 has no public name for it."""
    empty = getattr(torch.accelerator, "empty_host_cache", None) or getattr(torch._C, "_host_emptyCache", None)
    if empty is not None:
        empty()


def norms(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The norm of each of the tensors, at least one, in a few kernels."""
    return torch._foreach_norm(tensors)


# ---------------------------------------------------------------------- optimizers and schedules

try:
    from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

    _WRAPPER: Any = Optimizer.profile_hook_step(lambda optimizer: None).__code__
    _is_profiled = torch._C._autograd._profiler_enabled
except (ImportError, AttributeError):
    _WRAPPER = None  # every step is called with its wrapper, whoever listens there


_GUARD = -1  # its place among hooks, which torch numbers from 0 on


@final
class StepGuard:
    """Hears of every call of an optimizer's `step`, and is no listener to `bare_step`.

    Args:
        optimizer: It.
        refuse: Called then; raises where the call is not to be.
    """

    def __init__(self, optimizer: Optimizer, refuse: Callable[[], None]) -> None:
        self._refuse = refuse
        # there are none on one of a class that leaves out Optimizer.__init__
        self._hooks = getattr(optimizer, "_optimizer_step_pre_hooks", {})
        self._hooks[_GUARD] = self

    def __call__(self, *_: Any) -> None:
        """As torch calls its hooks."""
        self._refuse()

    def remove(self) -> None:
        """Let everybody call it again."""
        self._hooks.pop(_GUARD, None)


def bare_step(optimizer: Optimizer) -> Callable[[], Any]:
    """`optimizer.step`, without the wrapper that torch puts around it where nobody listens there.

    The wrapper calls hooks, and opens a range for profilers, which takes longer than the update of a small model.
    """
    step, hooks = type(optimizer).step, getattr(optimizer, "_optimizer_step_pre_hooks", None)
    if (
        _WRAPPER is None
        or getattr(step, "__code__", None) is not _WRAPPER
        or "step" in vars(optimizer)
        or hooks is None
        or (hooks and (_GUARD not in hooks or len(hooks) > 1))
        or getattr(optimizer, "_optimizer_step_post_hooks", True)
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
        or _is_profiled()
    ):
        return optimizer.step
    return step.__wrapped__.__get__(optimizer)  # type: ignore[attr-defined,no-any-return]


def has_stepped(optimizer: Any) -> None:
    """Tell a resumed optimizer, or torch would miss its step before the schedule's and warn."""
    optimizer._opt_called = True


def has_state_dict_hooks(optimizer: Optimizer) -> bool:
    """Whether somebody has registered a hook that changes what an optimizer saves or loads."""
    kinds = ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")
    return any(getattr(optimizer, f"_optimizer_{kind}_hooks", None) for kind in kinds)


@cache
def attributes_of_all_optimizers() -> frozenset[str]:
    """Attributes that every optimizer of torch has, and those that schedules set."""
    return frozenset(vars(Optimizer([nn.Parameter(torch.zeros(1))], {}))) | {"step", "_opt_called"}


need("Lumen", LRScheduler, "_update_lr")


def move_schedule(scheduler: LRScheduler, position: float) -> None:
    """Let a schedule give its learning rates at a position, a step or any number between two."""
    scheduler._update_lr(position)  # type: ignore[arg-type]


def set_by_hand(state: dict[str, Any]) -> dict[str, Any]:
    """A schedule's state without what follows from the rest of it."""
    return {key: value for key, value in state.items() if key != "_schedule_phases"}


def schedules_in(scheduler: Any) -> tuple[list[Any], list[int]]:
    """The schedules that a `SequentialLR` or `ChainedScheduler` is made of, and where one follows another."""
    assert isinstance(scheduler, (SequentialLR, ChainedScheduler))
    return getattr(scheduler, "_schedulers", []), getattr(scheduler, "_milestones", [])  # unknown ones are not checked


# ---------------------------------------------------------------------- loaders


try:
    from torch.utils.data._utils.collate import collate_int_fn, collate_tensor_fn, default_collate_fn_map

    _COLLATES: Any = default_collate_fn_map, collate_tensor_fn, collate_int_fn
except ImportError:
    _COLLATES = None


def collates_as_ever() -> bool:
    """Whether nobody has given `default_collate` other functions for tensors and ints; False if that is unknown."""
    if _COLLATES is None:
        return False
    functions, of_tensors, of_ints = _COLLATES
    return functions.get(torch.Tensor) is of_tensors and functions.get(int) is of_ints


def pinning() -> Callable[[Any], Any]:
    """What brings a batch to memory that a GPU can read by itself.

    Raises:
        ConfigError: This torch lacks it.
    """
    try:
        from torch.utils.data._utils.pin_memory import pin_memory
    except ImportError:
        need("pin_memory", torch.utils.data, "_utils.pin_memory.pin_memory")
        raise
    return pin_memory


def iterates_as_ever(kind: type[DataLoader[Any]]) -> bool:
    """Whether a class of loaders has torch's own way to iterate."""
    ways = [(each.__iter__, getattr(each, "_get_iterator", None)) for each in (kind, DataLoader)]
    return ways[0] == ways[1]


def end_workers(iterator: Any) -> None:
    """End the workers of a DataLoader's iterator; garbage collection, after an error, would wait 5 s for each."""
    getattr(iterator, "_shutdown_workers", lambda: None)()
    for worker in getattr(iterator, "_workers", ()):
        if worker.is_alive():  # in the middle of a sample, for more than torch's 5 s
            worker.kill()
            worker.join()


def end_persistent_workers(loader: Any) -> None:
    """End the workers that a DataLoader keeps from pass to pass; the next pass starts new ones."""
    end_workers(getattr(loader, "_iterator", None))
    loader._iterator = None


# ---------------------------------------------------------------------- torch.compile


def need_to_compile() -> None:
    """Look for what compiling in place needs.

    Raises:
        ConfigError: This torch lacks some of it.
    """
    need("compile", nn.Module(), "_compiled_call_impl", "_call_impl")
    need("compile", torch, "_dynamo")
    need("compile", torch._dynamo.config, "patch", "recompile_limit", "fail_on_recompile_limit_hit")
    need("compile", torch._dynamo.exc, "FailOnRecompileLimitHit", "TorchDynamoException", "TorchRuntimeError")


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is compiled, in place or by a wrapper around it."""
    return getattr(module, "_compiled_call_impl", None) is not None or "_orig_mod" in module._modules


def compile_calls(module: nn.Module, options: Mapping[str, Any]) -> None:
    """Make a module's calls compiled ones, where torch passes over the module because its code is torch's own."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    # code that belongs to this one module alone is compiled, and counts its versions alone
    own = FunctionType(call.__code__.replace(), call.__globals__, closure=call.__closure__)
    module._compiled_call_impl = torch.compile(own, **options)


def uncompile(module: nn.Module) -> None:
    """Undo what was compiled in place."""
    del module.__dict__["_compiled_call_impl"]


def limited_versions(most: int) -> AbstractContextManager[Any]:
    """The context in which more compiled versions of one piece of code are an error."""
    limits: AbstractContextManager[Any] = torch._dynamo.config.patch(
        recompile_limit=most, fail_on_recompile_limit_hit=True
    )
    return limits


def is_compilers(error: BaseException | None) -> Literal["versions", "other"] | None:
    """What it is about if an error is torch.compile's: too many versions, or something else; a model's own is not."""
    of_torch = torch._dynamo.exc
    if isinstance(error, of_torch.FailOnRecompileLimitHit):
        return "versions"
    if not isinstance(error, of_torch.TorchDynamoException) or isinstance(error, of_torch.TorchRuntimeError):
        return None
    return "other"


def import_compiler() -> None:
    """Import it before there are process groups: later it would keep the default one for ever, and gloo's threads."""
    with suppress(ImportError):
        import_module("torch._dynamo")


# ---------------------------------------------------------------------- process groups


def set_timeout(group: Any, timeout: timedelta) -> None:
    """Say how long the next collectives of a group wait."""
    if hasattr(dist, "set_timeout"):  # of torch 2.15
        dist.set_timeout(timeout, group)
    else:
        dist.distributed_c10d._set_pg_timeout(timeout, group)


def need_groups() -> None:
    """Look for what processes need.

    Raises:
        ConfigError: This torch lacks some of it.
    """
    if not hasattr(dist, "set_timeout"):
        need("a run of several processes", dist.distributed_c10d, "_set_pg_timeout")


def leave_out_expanded_buffers(module: nn.Module) -> None:
    """Let a `DistributedDataParallel` that is made of a module not copy over buffers in which elements are one."""
    names = [name for name, each in module.named_buffers() if 0 in each.stride() and not each.is_contiguous()]
    module._ddp_params_and_buffers_to_ignore = names  # type: ignore[assignment]


def need_reducer(ddp: Any) -> None:
    """Look for what `end_backward` needs.

    Raises:
        ConfigError: This torch lacks it.
    """
    need("strategy: ddp", ddp.reducer, "_rebuild_buckets")


def end_backward(ddp: Any) -> None:
    """Let a `DistributedDataParallel` look now whether all its parameters got gradients, not in the next forward.

    Raises:
        RuntimeError: Some got none.
    """
    ddp.reducer._rebuild_buckets()


def abort_groups() -> None:
    """End all groups without waiting for anybody; where torch has no such call they end with the process."""
    getattr(dist.distributed_c10d, "_abort_process_group", lambda: None)()


def gloo_over_default_device(found: Any, _: Any) -> Any:
    """Gloo over the default group's device: one of its own has a thread that wakes every 10 ms, 0.3 % of a core.

    Args:
        found: What `torch.distributed` tells a backend about its group.
    """
    gloo: Any = dist.ProcessGroupGloo
    default: Any = dist.group.WORLD
    try:
        options = gloo._Options()
        devices = default._get_backend(torch.device("cpu")).options._devices
        options._timeout, options._devices = found.timeout, devices
    except AttributeError:
        return gloo(found.store, found.group_rank, found.group_size, found.timeout)
    return gloo(found.store, found.group_rank, found.group_size, options)


def watch_workers(agent: Any, look: Callable[[Any], Any]) -> None:
    """Let somebody else look at an elastic agent's workers first, each time.

    Args:
        agent: Has not run yet.
        look: Is given the group of workers; returns what the agent is to make of it, or None to let the agent look.

    Raises:
        ConfigError: This torch lacks it.
    """
    need("the launcher", agent, "_monitor_workers")
    own = agent._monitor_workers
    agent._monitor_workers = lambda group: look(group) or own(group)


# ---------------------------------------------------------------------- fully_shard


def local_box(whole: torch.Size, mesh: Any, placements: Sequence[Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where this process's part of a DTensor begins in each dimension, and its shape; nothing is communicated."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offsets = compute_local_shape_and_global_offset(whole, mesh, placements)
    return tuple(offsets), tuple(shape)


def need_to_shard(root: Any) -> None:
    """Look for what sharding needs.

    Args:
        root: `fully_shard` has been applied to it.

    Raises:
        ConfigError: This torch lacks some of it.
    """
    need("strategy: fsdp", import_module("torch.distributed.tensor._utils"), "compute_local_shape_and_global_offset")
    need("strategy: fsdp", root, "_get_fsdp_state")
    state = root._get_fsdp_state()
    need("strategy: fsdp", state, "_state_ctx", "_fsdp_param_group")
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
    """Let processes sum all trainable parameters of a unit, also where a backward gave some of them no gradient."""
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
    """Forget forwards that had no backward, and what was interrupted, with the gradients that nobody has summed."""
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
    """The context in which sums of gradients stay: torch 2.15 drops them with the rest."""
    gradients = [parameter.grad for parameter in parameters]
    yield
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
