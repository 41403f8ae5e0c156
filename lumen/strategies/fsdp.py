"""Fully sharded data parallelism: each process holds its shard of every parameter, gradient and optimizer state."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from lumen.distributed.context import Context, use_context
from lumen.distributed.process_groups import CUDA_BACKENDS
from lumen.distributed.processes import STARTUP_TIMEOUT_S, TIMEOUT_S
from lumen.errors import ConfigError, TrainingError
from lumen.errors.arguments import check_arguments, format_first_names
from lumen.errors.lightning_names import INSTEAD_IN_STRATEGIES, NEUTRAL_IN_STRATEGIES
from lumen.optim import muons_on_parts, needs_closure
from lumen.strategies.fsdp_task import ShardedTask
from lumen.strategies.fsdp_units import find_modules, find_units, list_outermost
from lumen.strategies.ordered_sum import OrderedSum
from lumen.strategies.step_module import AdditionMonitor, describe_unused, refuse_sparse
from lumen.strategies.strategy import RankInvariant, Strategy, make_exact_error, sync_buffers

_DTYPES = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_Kind = Literal["full_shard", "shard_grad_op", "hybrid_shard", "no_shard",
                "FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"]  # fmt: skip
_UNSHARDED_STRATEGIES = {"full_shard": False, "shard_grad_op": True, "hybrid_shard": False, "no_shard": True}
_meshes: dict[tuple[Any, ...], DeviceMesh] = {}  # a mesh opens process groups, which are never closed


class FSDP(Strategy):
    """Strategy that shards parameters over processes, and gathers a unit's parameters for its forward and backward.

    The strategy uses torch's `fully_shard` (FSDP2). Units are the modules that `wrap`, `wrap_if` or
    `wrap_min_parameters` choose; else the modules of the task's `modules_to_shard`; else the repeated blocks. Repeated
    blocks are modules of one class in the same `nn.ModuleList`, `nn.ModuleDict` or `nn.Sequential`. Parameters outside
    all units are gathered for the whole step. A module that shares a parameter with a module outside is no unit.

    `precision: bf16` or `fp16` uses autocast, with the same results as on one device. Autograd then keeps a 16-bit copy
    of every weight from forward to backward, unless `activation_checkpointing` computes it again. `param_dtype` avoids
    the copies and halves communication, but the results differ from the results on one device.

    Args:
        wrap: The name of a class, or several names: all modules of these classes are units.
        wrap_if: A function of a module's name in the task and the module, which returns True if the module is a unit.
        wrap_min_parameters: The number of parameters, without the parameters of inner units, that makes a module a
            unit; the smallest such modules are units.
        sharding_strategy: `full_shard`; `shard_grad_op`: parameters stay gathered from forward to backward;
            `hybrid_shard`: parameters are sharded within groups of `shard_size` processes and replicated across groups;
            `no_shard`.
        shard_size: The number of processes per replica in `hybrid_shard`, a divisor of the number of processes.
            Default: the processes of a node.
        reshard_after_forward: Free a unit's parameters between forward and backward; a number (a divisor of the
            processes per replica) keeps the parameters sharded over that many processes. Default: the value that
            `sharding_strategy` implies.
        cpu_offload: Keep parameters, gradients and optimizer state in CPU memory, and update them there.
        param_dtype: The dtype, `bf16` or `fp16`, in which parameters are gathered and used. Inputs of the task's
            modules are cast; inputs of its steps (targets) are not. Gradients and the update use the parameters' own
            dtype.
        reduce_dtype: The dtype in which gradients are summed over processes. Default: the dtype of their computation.
        output_dtype: The dtype to which outputs of the task's modules are cast, such as `fp32` for the loss.
        buffer_dtype: The dtype of floating-point buffers.
        activation_checkpointing: The name of a class, or several names: forwards of these modules save only their
            inputs, and run again in the backward.
        find_unused_parameters: Allow steps that leave out parameters, if all processes call the same units; this costs
            a small collective per unit and step.
        broadcast_buffers: Broadcast buffers, such as BatchNorm's statistics, from rank 0 when a step begins.
        reduce_every_backward: Sum gradients in each backward of a step, not only in the last: slower, but a process
            never holds unsharded gradients.
        unshard_in_evaluation: Gather all parameters once for an evaluation. Default: True if the parameters, with their
            gradients and two optimizer states, fit in half of the memory that is free in `setup`.
        timeout_s: The longest time of a step without progress, or of a wait for other processes, before Lumen ends the
            job; in seconds, > 0. Infinity disables the limit.
        startup_timeout_s: The limit until the first step ends, while data is prepared and code compiled; if it is
            longer than `timeout_s`, also in evaluations and between steps.

    Raises:
        ConfigError: Two arguments contradict each other, or an argument has an unknown value.
    """

    spans_processes = True
    shards = True
    is_exact = False
    INSTEAD, NEUTRAL = INSTEAD_IN_STRATEGIES, NEUTRAL_IN_STRATEGIES

    @check_arguments
    def __init__(
        self,
        *,
        wrap: str | list[str] | None = None,
        wrap_if: Callable[[str, nn.Module], bool] | None = None,
        wrap_min_parameters: int | None = None,
        sharding_strategy: _Kind = "full_shard",
        shard_size: int | None = None,
        reshard_after_forward: bool | int | None = None,
        cpu_offload: bool = False,
        param_dtype: Literal["bf16", "fp16", "fp32"] | None = None,
        reduce_dtype: Literal["bf16", "fp16", "fp32"] | None = None,
        output_dtype: Literal["bf16", "fp16", "fp32"] | None = None,
        buffer_dtype: Literal["bf16", "fp16", "fp32"] | None = None,
        activation_checkpointing: str | list[str] | None = None,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
        reduce_every_backward: bool = False,
        unshard_in_evaluation: bool | None = None,
        timeout_s: float = TIMEOUT_S,
        startup_timeout_s: float = STARTUP_TIMEOUT_S,
    ) -> None:
        self._name = type(self).__name__
        _check_arguments(
            self._name, [wrap, wrap_if, wrap_min_parameters], kind := sharding_strategy.lower(), shard_size,
            reshard_after_forward,
        )  # fmt: skip
        self._timeouts = {"timeout_s": timeout_s, "startup_timeout_s": startup_timeout_s}
        self._wrap = (_as_names(wrap), wrap_if, wrap_min_parameters)
        self._kind, self._shard_size = kind, shard_size
        self._reshard = (not _UNSHARDED_STRATEGIES[kind]) if reshard_after_forward is None else reshard_after_forward
        self._offload = cpu_offload
        self._policy = MixedPrecisionPolicy(_DTYPES[param_dtype], _DTYPES[reduce_dtype])
        self._output_dtype, self._buffer_dtype = _DTYPES[output_dtype], _DTYPES[buffer_dtype]
        self._checkpointed = _as_names(activation_checkpointing)
        self._find_unused = find_unused_parameters
        self._broadcast_buffers = broadcast_buffers
        self._reduce_every_backward = reduce_every_backward
        self._unshard_in_evaluation = unshard_in_evaluation
        self._task: nn.Module
        self._sharded: ShardedTask
        self._sums: OrderedSum | None = None
        self._has_zero_loss = False
        self._gathers_once = True
        self._additions: AdditionMonitor | None = None

    @property
    def parameter_device(self) -> torch.device:
        """Device of the parameters between steps: the CPU with `cpu_offload`."""
        return torch.device("cpu") if self._offload else self.device

    def has_collectives_in(self, part: Literal["forward", "backward", "evaluation"]) -> bool:
        """Return False only for an evaluation before which all parameters are gathered.

        On one process too, gradients reach the parameters only in the last backward of a step.
        """
        return part != "evaluation" or not self._gathers_once

    @property
    def numerics(self) -> dict[str, str | bool | None]:
        """Settings that change the computed values and differ from the default, by name."""
        dtypes = {
            "param_dtype": self._policy.param_dtype, "reduce_dtype": self._policy.reduce_dtype,
            "output_dtype": self._output_dtype, "buffer_dtype": self._buffer_dtype,
        }  # fmt: skip
        names: dict[str, str | bool | None] = {name: str(dtype) for name, dtype in dtypes.items() if dtype is not None}
        return names | {"broadcast_buffers": self._broadcast_buffers and None}

    def connect(self) -> None:
        """Open the process groups and make the device mesh: `shard`, or `replicate` x `shard`.

        Raises:
            ConfigError: The number of processes is not divisible by `shard_size`, or by `reshard_after_forward` within
                a replica.
        """
        self.processes.connect(self.device, **self._timeouts)
        self.device_mesh = self._open_mesh(self._choose_mesh())
        self.context = self._open_context()
        if self.is_exact and self.processes.world_size > 1:
            self._refuse_inexact(self.device_mesh)
        if not isinstance(self._reshard, bool) and self._shard_mesh.size(-1) % self._reshard:
            raise ConfigError(
                f"{self._name}: reshard_after_forward = {self._reshard} does not divide the "
                f"{self._shard_mesh.size(-1)} processes that share the parameters. Set true, false or a divisor."
            )

    def _open_context(self) -> Context | None:
        """Return the processes that share sequences. Collective."""
        return None

    def _open_mesh(self, sizes: dict[str, int]) -> DeviceMesh:
        """Return the device mesh with these sizes, by name of dimension. Collective."""
        key = (dist.group.WORLD, self.device.type, *sizes.items())
        if key not in _meshes:
            # Groups split off the default group would get NCCL's options for gloo too.
            needs_override = self.device.type == "cuda" and len(sizes) > 1
            backends: Any = {"backend_override": dict.fromkeys(sizes, CUDA_BACKENDS)} if needs_override else {}
            shape = tuple(sizes.values())
            _meshes[key] = init_device_mesh(self.device.type, shape, mesh_dim_names=tuple(sizes), **backends)
        if self.processes.world_size > 1:
            self.processes.include(_meshes[key].get_all_groups())
        return _meshes[key]

    def _refuse_inexact(self, mesh: DeviceMesh) -> None:
        """Refuse sizes of a mesh with which gradients cannot be summed in the order of micro-batches."""
        names = mesh.mesh_dim_names or ()
        if "tensor" in names:
            raise make_exact_error("Mesh with tensor. Set tensor: 1")
        if self.context is not None:
            raise make_exact_error("Mesh with context. Set context: 1")
        if mesh.size(-1) == 1:
            raise make_exact_error("replicas without shards. Use strategy: ddp")

    def _choose_mesh(self) -> dict[str, int]:
        """Return the sizes of the device mesh, by name of dimension."""
        world = self.processes.world_size
        if self._kind not in ("hybrid_shard", "no_shard"):
            return {"shard": world}
        size = 1 if self._kind == "no_shard" else self._shard_size or self.processes.local_world_size
        if world % size:
            raise ConfigError(f"FSDP: {world} processes cannot be divided into groups of shard_size = {size}.")
        return {"replicate": world // size, "shard": size}

    @property
    def _shard_mesh(self) -> DeviceMesh:
        """The mesh over which `fully_shard` replicates and shards parameters."""
        assert self.device_mesh is not None
        return self.device_mesh

    def setup(self, task: nn.Module) -> None:
        """Shard the parameters; parameters that are not on the meta device first get the values of rank 0.

        Raises:
            ConfigError: A class is not found, a parameter cannot be sharded, or an FSDP strategy with different options
                has sharded the task.
        """
        assert self.device_mesh is not None
        refuse_sparse(task, self._name)
        self._task = task
        options = (
            self.device_mesh, self._wrap, self._reshard, self._offload, self._policy, self._output_dtype,
            self._buffer_dtype, self._checkpointed, self.is_exact, self.context and self.context.size,
        )  # fmt: skip
        earlier, sharded = vars(task).get("_sharded", (None, None))
        if sharded is None:
            sharded = self._shard_task(task, self._shard_mesh)
            vars(task)["_sharded"] = options, sharded  # bypasses nn.Module: the task is a module inside
        elif earlier != options:
            raise ConfigError(
                f"this {type(task).__name__} is already sharded, by a strategy with different options or "
                "processes. Give both trainers the same options, or build a new task and load its checkpoint."
            )
        else:
            sharded.clear_step()
        self._sharded, self._additions, self._has_zero_loss = sharded, AdditionMonitor(), False
        self._sums = OrderedSum(self.processes) if self.is_exact and self.processes.world_size > 1 else None
        if self._sums is not None:
            sharded.sum_in_order(self._sums, self.device_mesh.size() // self.device_mesh.size(-1), self.processes.rank)
        compares_units = self._find_unused and self.processes.world_size > 1
        sharded.all_reduce_sum = self.processes.all_reduce_sum if compares_units else None
        self._gathers_once = self._shard_mesh.size(-1) == 1 or self._should_unshard()

    def _shard_task(self, task: nn.Module, mesh: DeviceMesh) -> ShardedTask:
        classes, is_unit, min_parameters = self._wrap
        units = find_units(task, classes, is_unit, min_parameters)
        is_manual = not getattr(task, "automatic_optimization", True)
        if is_manual:
            units += [module for module in list_outermost(task, self._name) if module not in units]
        for module in find_modules(task, self._checkpointed, "activation_checkpointing"):
            # Only the forward is checkpointed: torch.compile supports that, and no name changes.
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)
        for buffer in task.buffers() if self._buffer_dtype is not None else ():
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(self._buffer_dtype)
        return ShardedTask(
            task, units, mesh, self.device, name=self._name, reshard=self._reshard, policy=self._policy,
            output_dtype=self._output_dtype, offload=self._offload, is_manual=is_manual,
        )  # fmt: skip

    # ------------------------------------------------------------------ training

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that needs unsharded parameters: each process holds only a shard."""
        if needs_closure(optimizer):
            raise ConfigError(
                f"{self._name}: {type(optimizer).__name__} evaluates the loss within its step, which needs "
                "unsharded parameters. Use strategy: ddp, or a different optimizer."
            )
        if any(muons_on_parts(optimizer)):
            raise ConfigError(
                f"{self._name}: torch.optim.Muon computes wrong updates from shards of matrices, and fails for a "
                "matrix with fewer rows than processes. Use lumen.optim.WholeMatrices(torch.optim.Muon(...))."
            )

    def begin_step(self) -> None:
        """Broadcast buffers, if the strategy does, and detect parameters that were frozen or unfrozen.

        Raises:
            TrainingError: Parameters were added after `setup`.
        """
        assert self._additions is not None
        if self._additions.has_additions:
            self._additions.has_additions = False
            self._refuse_added()
        self._sharded.refresh_units()
        if self._sums is not None:
            self._sums.begin_step()
        if self._broadcast_buffers:
            sync_buffers(self, self._task)

    def _refuse_added(self) -> None:
        """Refuse parameters added after `setup`: they are not sharded, and their gradients would not be summed."""
        added = [name for name, each in self._task.named_parameters() if not isinstance(each, DTensor)]
        if added:
            raise TrainingError(
                f"{self._name}: {format_first_names(added)} were added after the parameters were sharded. Create "
                "parameters in __init__ or configure_model, frozen until a step needs them, or use strategy: ddp."
            )

    def call(self, step: str, *args: Any) -> Any:
        """Run a step of the task, with the parameters outside all units gathered."""
        return self._sharded.call(step, *args)

    @contextmanager
    def gradient_sync(self, *, last: bool) -> Iterator[None]:
        """Communicate gradients in the last backward only, unless `reduce_every_backward`."""
        sync, is_exact = last or self._reduce_every_backward, self._sums is not None
        self._sharded.begin_micro_batch(
            sync=sync or is_exact, sync_replicas=last if is_exact else sync, keep=not last and self._reshard is False
        )
        if self._sums is not None:
            self._sums.begin_micro_batch(last=last)
        try:
            with use_context(self.context):
                yield
        finally:
            self._sharded.outputs.clear()

    def make_zero_loss(self) -> torch.Tensor | None:
        """Return a loss of 0 over the outputs of the units; None if no unit was called."""
        self._has_zero_loss = True
        if len(self._sharded.units) == 1:
            return self._sharded.root(None)  # type: ignore[no-any-return]
        parts = [output.sum().float() * 0.0 for output in self._sharded.outputs]
        return torch.stack(parts).sum() if parts else None

    def after_backward(self) -> None:
        """Refuse parameters without a gradient.

        With `find_unused_parameters`, the update skips the parameters that no rank used.

        Raises:
            TrainingError: Parameters have no gradient, without `find_unused_parameters`, or a change of gathered
                parameters would be lost. The message names the parameters.
        """
        sharded, has_zero_loss, self._has_zero_loss = self._sharded, self._has_zero_loss, False
        if not sharded.is_watched:
            return
        sharded.refuse_writes()
        missing = sharded.list_missing()
        sharded.arrived.clear()
        if self._find_unused:
            trained = sharded.list_trained()
            used = self.processes.all_reduce_sum([float(name not in missing) for name, _ in trained])
            for (_, parameter), count in zip(trained, used, strict=True):
                if not count:
                    parameter.grad = None
        elif missing and not has_zero_loss:
            raise TrainingError(describe_unused(missing, self.processes.rank, self._name))

    def collect_rank_invariants(self, grad_norm: torch.Tensor | None) -> dict[RankInvariant, torch.Tensor]:
        """Return the gradient norm, which is the norm over all shards."""
        return {} if grad_norm is None else {"gradient norm": grad_norm}

    # ------------------------------------------------------------------ evaluation

    @contextmanager
    def evaluation(self, *, inference_mode: bool) -> Iterator[None]:
        """Gather all parameters once, if memory allows, so that no forward communicates.

        The evaluation does not use `torch.inference_mode`: parameters gathered there could never be trained again.
        """
        if self._gathers_once:
            self._sharded.unshard()
        try:
            yield
            self._sharded.refuse_writes()
        finally:
            self._sharded.end_evaluation()

    def _should_unshard(self) -> bool:
        """Return True if all parameters are gathered for an evaluation; equal on all ranks. Collective."""
        if not isinstance(self._reshard, bool):  # torch cannot return to resharding over a number of processes
            return False
        if self._unshard_in_evaluation is not None:
            return self._unshard_in_evaluation
        parameters = [parameter for parameter in self._task.parameters() if isinstance(parameter, DTensor)]
        unsharded_bytes = sum(each.numel() * (self._policy.param_dtype or each.dtype).itemsize for each in parameters)
        state_bytes = 3 * sum(each.to_local().numel() * each.dtype.itemsize for each in parameters)
        return all(self.processes.all_gather(unsharded_bytes + state_bytes <= self._get_free_bytes() / 2))

    def _get_free_bytes(self) -> float:
        if self.device.type == "cuda":
            return float(torch.cuda.mem_get_info(self.device)[0])
        pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
        return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE") / self.processes.local_world_size

    def teardown(self) -> None:
        """Leave the task sharded for the next stage."""
        if self._additions is not None:
            self._additions.close()
            self._additions = None


def _as_names(names: str | list[str] | None) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names or ())


def _check_arguments(
    name: str, wraps: list[Any], kind: str, shard_size: int | None, reshard: bool | int | None
) -> None:
    if sum(each is not None for each in wraps) > 1:
        raise ConfigError(
            f"{name}: wrap, wrap_if and wrap_min_parameters each choose the units. Set only one of these options."
        )
    if shard_size is not None and (kind != "hybrid_shard" or shard_size < 1):
        raise ConfigError(
            f"{name}: shard_size = {shard_size} needs sharding_strategy: hybrid_shard, and a value of at least 1."
        )
    if reshard not in (None, False) and _UNSHARDED_STRATEGIES[kind]:
        raise ConfigError(f"{name}: {kind} keeps parameters unsharded after the forward. Remove reshard_after_forward.")
    if not isinstance(reshard, (bool, type(None))) and reshard < 2:
        raise ConfigError(
            f"{name}: reshard_after_forward = {reshard}: expected true, false or a number of processes, at least 2."
        )
