"""Task whose parameters torch's `fully_shard` shards over processes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lumen.data.nested import iterate_tensors, map_leaves
from lumen.errors import ConfigError, TrainingError
from lumen.errors.arguments import format_first_names
from lumen.internals.fully_shard import prepare_roots, reduce_unused, reset_iteration
from lumen.internals.tensors import (
    Hooks,
    get_direct_parameters,
    get_gradient_hooks,
    get_version,
    is_view,
    set_gradient_hooks,
)
from lumen.metrics.torchmetrics_states import find_metrics
from lumen.strategies.fsdp_units import list_outermost
from lumen.strategies.ordered_sum import OrderedScatter, OrderedSum
from lumen.strategies.step_module import StepModule
from lumen.strategies.strategy import make_exact_error
from lumen.task.materialize import redirect_references


@final
class ShardedTask:
    """Task with sharded parameters, and a record of the parameters that each micro-batch gathers, writes or trains.

    The constructor shards the parameters in place. Parameters and buffers that are not on the meta device first get the
    values of rank 0.

    Args:
        task: The task to shard.
        units: The modules whose parameters are gathered together, inner modules first.
        mesh: The device mesh. Parameters are sharded over its last dimension. In a mesh of two dimensions, parameters
            are replicated over the first.
        device: The device of this process.
        name: The class of the strategy, for errors.
        reshard: The value of `reshard_after_forward` of `fully_shard`.
        policy: The value of `mp_policy` of `fully_shard`; inputs of the task's modules are cast, inputs of its steps
            are not.
        output_dtype: The dtype to which outputs of the task's modules are cast; None casts no outputs.
        offload: True to keep parameters, gradients and optimizer state on the CPU.
        is_manual: True for manual optimization: `units` hold all parameters, and each outermost unit is a root, because
            no parameter can be gathered for the whole step.

    Attributes:
        root: The module around the task that runs its steps; the unit of all parameters outside the other units.
        units: All units; `root` is the last one, if it is a unit.
        outputs: The outputs of units in the current training forward that require gradients.
        arrived: The names of the parameters that received a gradient since this set was cleared.
        all_reduce_sum: The function that sums numbers over the processes, to compare the units that they call; None
            skips the comparison.
    """

    def __init__(
        self,
        task: nn.Module,
        units: Sequence[nn.Module],
        mesh: DeviceMesh,
        device: torch.device,
        *,
        name: str,
        reshard: bool | int,
        policy: MixedPrecisionPolicy,
        output_dtype: torch.dtype | None,
        offload: bool,
        is_manual: bool = False,
    ) -> None:
        self.root: Any = StepModule(task)
        self._name = name
        self.units: list[Any] = [*units] if is_manual else [*units, self.root]
        self._roots: list[Any] = list_outermost(task, name) if is_manual else [self.root]
        self.outputs: list[torch.Tensor] = []
        self.arrived: set[str] = set()
        self.all_reduce_sum: Callable[[list[float]], list[float]] | None = None
        self.is_watched = mesh.size() > 1 and not is_manual
        self._in_forward = False
        # Gathered parameters: tensor, version and requires_grad.
        self._versions: dict[str, tuple[nn.Parameter, int, bool]] = {}
        self._places: dict[str, tuple[nn.Module, str]] = {}
        self._hooks: dict[str, Hooks] = {}
        self._hooked: set[int] = set()
        reshard = is_manual or reshard  # an optimizer may step before a unit is called again
        self._reshards = reshard
        self._syncs = True, True
        self._has_run = False
        offload_policy = CPUOffloadPolicy(pin_memory=device.type != "cpu") if offload else OffloadPolicy()
        names = {id(module): name for name, module in task.named_modules()}
        modules = [*task.modules()]
        attributes = [
            (module, key, {**p.__dict__})
            for module in modules
            for key, p in _get_direct_parameters(module)
            if p.__dict__
        ]
        for unit in self.units:
            keys = _list_unsharded(unit)
            before = [get_direct_parameters(module)[key] for module, key in keys]
            _check_parameters(keys, names, name)
            _move_to_device(keys, unit, device)
            is_root = unit is self.root  # `root` is called with the inputs of the step, which are not cast
            unit.register_forward_hook(_disable_compile(_copy_views))
            fully_shard(
                unit,
                mesh=mesh,
                reshard_after_forward=None if is_root and reshard is True else reshard,
                mp_policy=MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype, None, not is_root),
                offload_policy=offload_policy,
            )
            for (module, key), earlier in zip(keys, before, strict=True):
                assert earlier is not None
                self._redirect_references(module, key, earlier, f"{names[id(module)]}.{key}".lstrip("."))
            self._watch_unit(unit, keys, names)
            if not is_root:
                unit.register_forward_hook(_disable_compile(self._capture_output))
                unit.register_forward_pre_hook(_disable_compile(self._check_same_unit), prepend=True)
        prepare_roots(self._roots, self.units)
        for module, key, values in attributes:
            get_direct_parameters(module)[key].__dict__.update(values)
        self._parameters = list(task.parameters())
        self._trained = [] if is_manual else [parameter.requires_grad for parameter in self._parameters]
        for metric in find_metrics(task).values():
            metric.to(device)
        if mesh.size() > 1:
            for unit in self.units:
                reduce_unused(unit)
        if policy.param_dtype is not None or output_dtype is not None:
            _cast_inputs_and_outputs(task, policy.param_dtype, output_dtype)

    # ------------------------------------------------------------------ micro-batches

    def _watch_unit(self, unit: nn.Module, keys: list[tuple[nn.Module, str]], names: dict[int, str]) -> None:
        """Record which parameters of a unit receive gradients."""
        places = {f"{names[id(module)]}.{key}".lstrip("."): (module, key) for module, key in keys}
        self._places |= places

        def note_parameters(module: nn.Module, args: Any) -> None:
            for name, (owner, key) in places.items():
                parameter = get_direct_parameters(owner)[key]
                assert parameter is not None
                if self.is_watched:
                    self._note_gathered(name, parameter)
                if parameter.requires_grad and not is_placed(parameter):
                    self._call_gradient_hooks(name, parameter)

        # Runs after the hook of fully_shard, which gathers the parameters.
        unit.register_forward_pre_hook(_disable_compile(note_parameters))

    def _call_gradient_hooks(self, name: str, unsharded: nn.Parameter) -> None:
        """Call a user's hooks on a parameter with its unsharded gradient, as under every strategy."""
        on_gradient, on_accumulated = self._hooks[name]
        if on_gradient and not get_gradient_hooks(unsharded)[0]:
            set_gradient_hooks(unsharded, (on_gradient, get_gradient_hooks(unsharded)[1]))
        if id(unsharded) in self._hooked:
            return
        if on_accumulated is not None:
            set_gradient_hooks(unsharded, (get_gradient_hooks(unsharded)[0], on_accumulated))
        if self.is_watched:
            unsharded.register_post_accumulate_grad_hook(partial(self._mark_arrived, name))  # type: ignore[no-untyped-call]
        self._hooked.add(id(unsharded))

    def _redirect_references(self, module: nn.Module, key: str, earlier: nn.Parameter, name: str) -> None:
        """Redirect references from a replaced parameter to the sharded one, and keep its hooks."""
        on_gradient, on_accumulated = get_gradient_hooks(earlier)
        on_gradient = OrderedDict() if on_gradient is None else on_gradient
        set_gradient_hooks(get_direct_parameters(module)[key], (on_gradient, None))  # also finds later hooks
        self._hooks[name] = on_gradient, on_accumulated
        if isinstance(earlier, DTensor):  # tensor parallelism has created it, and nothing else refers to it
            return
        redirect_references(earlier, partial(self._get_current, module, key, name), name)

    def _get_current(self, module: nn.Module, key: str, name: str) -> nn.Parameter | None:
        """Return the parameter that a module holds now, for references to the replaced parameter.

        Raises:
            ConfigError: A training step uses the parameter while it is not gathered.
        """
        parameter = get_direct_parameters(module)[key]
        if self._in_forward and is_placed(parameter):
            raise ConfigError(
                f"{self._name}: training_step uses {name} through a reference outside the module, while the unit "
                f"of {name} is not gathered. Units are {self._describe_units()}. Use {name} in the forward of its "
                "unit, or choose other units with wrap: parameters outside all units are gathered for the whole step."
            )
        return parameter

    def _note_gathered(self, name: str, parameter: nn.Parameter) -> None:
        """Record the version and `requires_grad` of a gathered parameter, because a write to it would be lost."""
        if not is_placed(parameter):
            self._versions.setdefault(name, (parameter, get_version(parameter), parameter.requires_grad))

    def refuse_writes(self) -> None:
        """Refuse changes to parameters while they were gathered: these changes would be lost.

        Raises:
            TrainingError: Parameters were written, frozen or unfrozen; the message names the parameters.
        """
        written = [name for name, (tensor, version, _) in self._versions.items() if get_version(tensor) != version]
        toggled = [name for name, (tensor, _, trained) in self._versions.items() if tensor.requires_grad != trained]
        self._versions.clear()
        if toggled:
            raise TrainingError(
                f"{self._name}: {format_first_names(toggled)} was frozen or unfrozen in a step or a hook while it was "
                "gathered; the change would be lost with the gathered copy. Freeze and unfreeze between steps: in "
                "on_train_epoch_start, on_train_batch_end or on_before_zero_grad."
            )
        if written:
            raise TrainingError(
                f"{self._name}: {format_first_names(written)} was written in a step or a hook while it was gathered; "
                "the change would be lost with the gathered copy. Write in on_before_zero_grad, on_validation_start or "
                "on_validation_end, where each process holds its shard."
            )

    def _capture_output(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._in_forward:
            self.outputs += [each for each in iterate_tensors(output) if each.requires_grad]

    def _check_same_unit(self, unit: nn.Module | None, args: Any = ()) -> None:
        """Refuse a step in which ranks call different units; None means the end of the forward. Collective."""
        if self.all_reduce_sum is None or not self._in_forward:
            return
        number = float(len(self.units) if unit is None else self.units.index(unit))
        total, squares, world = self.all_reduce_sum([number, number**2, 1.0])
        if total**2 != world * squares:
            raise TrainingError(
                f"{self._name}: the ranks call different units in one training_step, or units in a different order. "
                f"Units are {self._describe_units()}. Call all units on every rank, with a weight of 0 where the "
                "result is unused; or choose units with wrap so that one unit holds both branches; or use ddp."
            )

    def _mark_arrived(self, name: str, parameter: nn.Parameter) -> None:
        self.arrived.add(name)

    def call(self, step: str, *args: Any) -> Any:
        """Run a step of the task, with the parameters of `root` gathered.

        Raises:
            ConfigError: The step uses parameters of a unit without calling the unit.
        """
        self._has_run = True
        self.outputs.clear()
        self._in_forward = step == "training_step"
        try:
            output = self.root(step, *args)
            self._check_same_unit(None)
            outputs = [each for each in iterate_tensors(output) if self._in_forward and isinstance(each, DTensor)]
            if any(map(is_placed, outputs)):
                raise RuntimeError("the loss is made of mixed torch.Tensor and DTensor")
            if outputs:
                raise ConfigError(
                    "Mesh: training_step computes the loss from the weight of a layer that parallel_plan cuts. Use the "
                    "whole weight: weight.full_tensor() if isinstance(weight, torch.distributed.tensor.DTensor)."
                )
            return output
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise ConfigError(
                f"{self._name}: {step} uses parameters of a module without calling the module, but only a call gathers "
                f"the parameters: {str(error).splitlines()[0]} Units are {self._describe_units()}. Wrap modules that "
                "are called, such as whole blocks."
            ) from error
        finally:
            self._in_forward = False

    def _describe_units(self) -> str:
        names = [name for name, module in self.root.task.named_modules() if module in self.units]
        return format_first_names(names) or "none"

    def sum_in_order(self, sums: OrderedSum, replicas: int, rank: int) -> None:
        """Sum gradients in the order of micro-batches.

        Args:
            sums: The sums of this process.
            replicas: Number of groups of processes that hold all parameters.
            rank: The rank of this process.
        """
        if any(on_accumulated for _, on_accumulated in self._hooks.values()):
            raise make_exact_error("register_post_accumulate_grad_hook. Use register_hook")
        for unit in self.units:
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(enable=True)  # a factor in the communication needs NCCL
            unit.set_custom_reduce_scatter(OrderedScatter(sums, replicas, rank))

    def begin_micro_batch(self, *, sync: bool, sync_replicas: bool, keep: bool) -> None:
        """Prepare for a micro-batch.

        Args:
            sync: True if the backward sums the gradients over the processes.
            sync_replicas: True if it also sums the shards of replicas.
            keep: True if parameters stay gathered after the forward.
        """
        for unit in self.units:
            if (sync, sync_replicas) != self._syncs:
                unit.set_requires_gradient_sync(sync, recurse=False)
                unit.set_requires_all_reduce(sync_replicas, recurse=False)
            unit.set_reshard_after_backward(not keep, recurse=False)
        self._syncs = sync, sync_replicas

    def refresh_units(self) -> None:
        """Set up the units again if parameters were frozen or unfrozen. Collective in that case."""
        trained = [parameter.requires_grad for parameter in self._parameters]
        if trained != self._trained:
            self._trained = trained
            for unit in self.units:  # a frozen unit has no dtype for its gradients yet
                unit.unshard()
                unit.reshard()

    def reshard(self) -> None:
        """Free all gathered parameters; each process keeps its shards."""
        self.outputs.clear()
        for unit in self.units:
            unit.reshard()

    def list_missing(self) -> list[str]:
        """Return the names of the trainable parameters without a gradient."""
        return [name for name, parameter in self.list_trained() if name not in self.arrived]

    def list_trained(self) -> list[tuple[str, nn.Parameter]]:
        """Return the trainable parameters, with their names."""
        parts = [(name, get_direct_parameters(module)[key]) for name, (module, key) in self._places.items()]
        return [(name, each) for name, each in parts if each is not None and each.requires_grad]

    # ------------------------------------------------------------------ evaluation

    def unshard(self) -> None:
        """Gather all parameters until `end_evaluation`. Collective: every rank must call this."""
        for unit in self.units:
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()
        for name, (owner, key) in self._places.items():
            if (parameter := get_direct_parameters(owner)[key]) is not None:
                self._note_gathered(name, parameter)

    def end_evaluation(self) -> None:
        """Free all gathered parameters, and drop the state of forwards without a backward."""
        for unit in self.units if self._reshards is True else ():
            if unit is not self.root:
                unit.set_reshard_after_forward(True, recurse=False)
        self.clear_step()

    def clear_step(self) -> None:
        """Drop the state that an interrupted step or evaluation has left."""
        self.arrived.clear()
        self._versions.clear()
        if self._has_run:
            for root in self._roots:
                reset_iteration(root)
        self.reshard()


def is_placed(parameter: torch.Tensor | None) -> bool:
    """Return True if a parameter is sharded by `fully_shard`, and not gathered now.

    A gathered parameter of tensor parallelism is a DTensor too, on the mesh of one `tensor` group.
    """
    return isinstance(parameter, DTensor) and "shard" in (parameter.device_mesh.mesh_dim_names or ())


def _get_direct_parameters(module: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    return [(key, parameter) for key, parameter in get_direct_parameters(module).items() if parameter is not None]


def _list_unsharded(unit: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return the modules and names of the parameters of a unit that are not sharded yet; tied parameters once."""
    found: dict[int, tuple[nn.Module, str]] = {}
    for module in unit.modules():
        for key, parameter in _get_direct_parameters(module):
            if not is_placed(parameter):
                found.setdefault(id(parameter), (module, key))
    return list(found.values())


def _check_parameters(keys: list[tuple[nn.Module, str]], names: dict[int, str], strategy: str) -> None:
    parameters = {f"{names[id(module)]}.{key}".lstrip("."): get_direct_parameters(module)[key] for module, key in keys}
    dtypes: dict[torch.dtype, str] = {}
    for name, parameter in parameters.items():
        assert parameter is not None
        if nn.parameter.is_lazy(parameter):
            raise ConfigError(
                f"{strategy}: {name} has no shape yet. Run a batch through lazy modules when they are built."
            )
        if parameter.ndim == 0:
            raise ConfigError(f"{strategy}: {name} has no dimension to shard. Give the parameter the shape (1,).")
        if parameter.requires_grad and not parameter.numel():
            raise ConfigError(f"{strategy}: {name} has no elements to train. Set its requires_grad to False.")
        if parameter.requires_grad:
            dtypes.setdefault(parameter.dtype, name)
    if len(dtypes) > 1:
        listed = ", ".join(f"{name} in {str(dtype)[6:]}" for dtype, name in dtypes.items())
        raise ConfigError(
            f"{strategy}: the trainable parameters of one unit have several dtypes: {listed}. Use one dtype, or make "
            "separate units of the modules that differ (wrap)."
        )


def _move_to_device(keys: list[tuple[nn.Module, str]], unit: nn.Module, device: torch.device) -> None:
    """Move parameters and buffers that are not on the meta device, with rank 0's values. Collective."""
    is_distributed = dist.get_world_size() > 1
    parameters = [get_direct_parameters(module)[key] for module, key in keys]
    for tensor in (*parameters, *unit.buffers()):
        assert tensor is not None
        if isinstance(tensor, DTensor):
            continue
        tensor.data = tensor.data.contiguous()  # fully_shard requires contiguous tensors
        if not tensor.is_meta:
            tensor.data = tensor.data.to(device)
            if is_distributed:
                dist.broadcast(tensor.data, 0)


def _disable_compile(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that `torch.compile` does not trace, like the hooks of `fully_shard`."""
    return torch.compiler.disable(hook)  # type: ignore[no-any-return, no-untyped-call]


def _copy_views(module: nn.Module, args: Any, output: Any) -> Any:
    """Copy outputs that are views: an in-place operation on a view would drop the hook that gathers in the backward."""

    def copy_if_view(each: Any) -> Any:
        return each.clone() if isinstance(each, torch.Tensor) and each.requires_grad and is_view(each) else each

    has_views = any(each.requires_grad and is_view(each) for each in iterate_tensors(output))
    return map_leaves(output, copy_if_view) if has_views else None


def _cast_inputs_and_outputs(module: nn.Module, inputs: torch.dtype | None, outputs: torch.dtype | None) -> None:
    """Cast inputs and outputs of the outermost modules that have a `forward`."""

    def cast(values: Any, dtype: torch.dtype | None) -> Any:
        return map_leaves(
            values,
            lambda each: each.to(dtype) if isinstance(each, torch.Tensor) and each.is_floating_point() else each,
        )

    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            _cast_inputs_and_outputs(child, inputs, outputs)
        elif next(child.parameters(), None) is not None:
            if inputs is not None:
                child.register_forward_pre_hook(
                    lambda _, args, options: (cast(args, inputs), cast(options, inputs)), with_kwargs=True
                )
            if outputs is not None:
                child.register_forward_hook(lambda _, args, output: cast(output, outputs))
