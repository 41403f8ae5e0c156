"""Layers built in `configure_model`: parameters are built on the meta device, then initialized module by module.

A process never holds more parameters than its shards and one module. Values are bitwise identical under every strategy,
because the seed and the module's name determine a module's random numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from lumen.data.nested import iterate_tensors, map_leaves
from lumen.distributed.dtensor import distribute_like, get_local_tensor, is_sharded, make_dtensor
from lumen.errors import ConfigError, TrainingError
from lumen.errors.arguments import format_first_names
from lumen.internals.attributes import replaced_attribute
from lumen.internals.tensors import (
    TorchDispatchMode,
    get_direct_parameters,
    get_gradient_hooks,
    get_reset_name,
    get_schema,
    get_storage_id,
    is_copy,
    is_copy_in_place,
    set_gradient_hooks,
    uses_shape_only,
)
from lumen.random import Domain, hash_name, make_key, preserve_generators, seed_generators
from lumen.task.hooks import is_overridden
from lumen.task.task_module import TaskModule

_Layout = tuple[Any, ...]
_ADVICE = (
    "The task's init_weights(module, name) initializes layers built in configure_model, by default with the "
    "module's reset_parameters. Override init_weights for other modules. Load pretrained values by init_from, or "
    "build the layers in __init__."
)


@final
@dataclass(eq=False)
class MetaParameter:
    """Parameter that was built on the meta device, with the operations that initialized it.

    Attributes:
        name: The parameter's first name in the task.
        dtype: The dtype in which it was built and is initialized.
        operations: Names of the operations that wrote it, in order.
        copies_data: True if the last operation copied real data, which the meta device loses.
        by_initialiser: True if initializers of modules, such as `reset_parameters`, made all operations.
        value_id: An object that parameters share if their values are copies of each other.
        casts: The dtypes to which the values were cast since `value_id` was set.
        planned: The list `operations` after `configure_model`; None before.
        loses_data: The value of `copies_data` after `configure_model`.
        places: The modules that hold it, with its name in each; several if it is tied.
        target: The parameter to fill: the built one, or its replacement by a strategy.
        unsharded: The unsharded parameter, while modules that write it are initialized.
        materialized: The parameter on the device with its values, or this process's shard; None before.
        has_gaps: True if operations have written no element, or not all elements.
        source: The parameter to copy values from, if it is a copy and `init_weights` treats both alike.
        source_casts: The dtypes to which the copied values of `source` are cast.
    """

    name: str
    dtype: torch.dtype
    operations: list[str] = field(default_factory=list)
    copies_data: bool = False
    by_initialiser: bool = True
    value_id: object = field(default_factory=object)
    casts: tuple[torch.dtype, ...] = ()
    planned: list[str] | None = None
    loses_data: bool = False
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    target: Any = None
    unsharded: nn.Parameter | None = None
    materialized: nn.Parameter | None = None
    has_gaps: bool = False
    source: MetaParameter | None = None
    source_casts: tuple[torch.dtype, ...] = ()

    def record_write(self, operation: str, *, by_initialiser: bool, copies_data: bool) -> None:
        """Record an in-place operation, which has changed the values."""
        self.operations.append(operation)
        self.by_initialiser, self.copies_data = self.by_initialiser and by_initialiser, copies_data
        self.value_id, self.casts = object(), ()

    def copy_values_from(self, source: MetaParameter) -> None:
        """Record a copy of the values of another parameter."""
        self.operations, self.by_initialiser = [*source.operations], source.by_initialiser
        self.copies_data, self.value_id, self.casts = source.copies_data, source.value_id, source.casts
        if self.dtype != source.dtype:
            self.casts = (*self.casts, self.dtype)

    def clear_operations(self) -> None:
        """Forget the recorded operations."""
        self.operations.clear()
        self.by_initialiser = True

    def make_blank(self, device: str) -> nn.Parameter:
        """Return a parameter of this shape, filled with NaN, so that elements that are never written can be found."""
        fill = torch.nan if self.dtype.is_floating_point or self.dtype.is_complex else 0
        values = torch.full(self.target.shape, fill, dtype=self.dtype, device=device)
        return nn.Parameter(values, requires_grad=self.target.requires_grad)

    def set_in_modules(self, parameter: nn.Parameter) -> None:
        """Set a parameter in all modules that hold it."""
        for module, key in self.places:
            set_parameter(module, key, parameter)


def set_parameter(module: nn.Module, key: str, parameter: nn.Parameter) -> None:
    """Set a parameter of a module, by its name in the module."""
    if type(module).__setattr__ is nn.Module.__setattr__:
        get_direct_parameters(module)[key] = parameter
    else:  # torch's RNNs keep a second list of their parameters
        setattr(module, key, parameter)


@final
class InitRecorder(TorchDispatchMode):
    """Mode that records how parameters are initialized: by in-place operations, also through views, and by copies.

    Attributes:
        written: The parameters that were written since this set was emptied.
        protected: Ids of storages that must not be written, with the name of the parameter, for the error.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: set[MetaParameter] = set()
        self.protected: dict[int, str] = {}
        self._in_initialiser = False
        # The storage is kept, because its id could be reused.
        self._tracked: dict[int, tuple[MetaParameter, _Layout, Any]] = {}

    def track(self, tensor: torch.Tensor, parameter: MetaParameter) -> None:
        """Record operations on a tensor as operations on a parameter."""
        storage = get_local_tensor(tensor).untyped_storage()
        self._tracked[get_memory_id(tensor)] = parameter, _get_layout(tensor), storage

    def untrack(self, tensor: torch.Tensor) -> None:
        """Undo `track`, so that the tensor's memory can be freed."""
        self._tracked.pop(get_memory_id(tensor), None)

    def find_parameter(self, tensor: torch.Tensor) -> MetaParameter | None:
        """Return the parameter whose memory a tensor shares, wholly or in part, or None."""
        return self._tracked.get(get_memory_id(tensor), (None,))[0]

    def find_whole(self, tensor: torch.Tensor) -> MetaParameter | None:
        """Return the parameter if the tensor covers it in the same layout; None for other views and tensors."""
        parameter, layout, _ = self._tracked.get(get_memory_id(tensor), (None, None, None))
        return parameter if layout == _get_layout(tensor) else None

    @contextmanager
    def mark_initialiser(self, module: nn.Module) -> Iterator[None]:
        """Mark the writes of a module's own initializer within the context, regardless of its caller."""
        name = get_reset_name(module)
        reset = getattr(module, name, None)

        def marked_reset(*args: Any, **kwargs: Any) -> Any:
            self._in_initialiser = True
            try:
                return reset(*args, **kwargs)  # type: ignore[misc]
            finally:
                self._in_initialiser = False

        with nullcontext() if reset is None else replaced_attribute(module, name, marked_reset):
            yield

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operation, arguments = get_schema(function).name.removeprefix("aten::"), [*args, *kwargs.values()]
        pairs = zip(get_schema(function).arguments, args, strict=False)
        written = [tensor for argument, value in pairs if argument.is_write for tensor in iterate_tensors(value)]
        for tensor in written:
            if name := self.protected.get(get_memory_id(tensor)):
                raise ConfigError(
                    f"init_weights writes {name} by {operation}, but {name} has its values already. Write only "
                    "parameters of the given module and its submodules."
                )
        result = function(*args, **kwargs)
        if written:
            sources = [*iterate_tensors(args[1:2])] if is_copy_in_place(operation) else []
            self._record_writes(operation, written, sources, arguments)
        else:
            self._record_results(operation, result, arguments)
        return result

    def _record_writes(self, operation: str, written: list[Any], sources: list[Any], arguments: list[Any]) -> None:
        description = f"{operation}({_format_numbers(arguments)})"
        copies_data = any(not each.is_meta and each.numel() > 1 for each in iterate_tensors(arguments))
        for number, tensor in enumerate(written):
            if parameter := self.find_parameter(tensor):
                source = self.find_whole(sources[number]) if len(sources) == len(written) else None
                is_whole = parameter is self.find_whole(tensor)
                if source is not None and is_whole and sources[number].shape == tensor.shape:
                    parameter.copy_values_from(source)
                else:
                    parameter.record_write(description, by_initialiser=self._in_initialiser, copies_data=copies_data)
                self.written.add(parameter)

    def _record_results(self, operation: str, result: Any, arguments: list[Any]) -> None:
        """Record tensors on the meta device that an operation computed from parameters."""
        if uses_shape_only(operation):
            return
        sources = [(each, source) for each in iterate_tensors(arguments) if (source := self.find_parameter(each))]
        for output in iterate_tensors(result) if sources else ():
            if not output.is_meta or self.find_parameter(output):
                continue
            each, source = sources[0]
            parameter = MetaParameter(source.name, output.dtype)
            if is_copy(operation) and self.find_whole(each) is source:
                parameter.copy_values_from(source)
            else:
                text = f"{operation}({_format_numbers(arguments)}) of {source.name}"
                parameter.record_write(text, by_initialiser=False, copies_data=False)
            self.track(output, parameter)


def _format_numbers(arguments: list[Any]) -> str:
    return ", ".join(f"{value:g}" for value in arguments if isinstance(value, (int, float)))


def _get_layout(tensor: torch.Tensor) -> _Layout:
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset()


def get_memory_id(tensor: torch.Tensor) -> int:
    """Return an id of the memory of this process's part of a tensor; views have equal ids."""
    return get_storage_id(get_local_tensor(tensor))


@final
class ReplacedParameter(nn.Parameter):
    """Parameter that was replaced: operations on it use its replacement."""

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], _: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch with the replacement."""
        return function(*map_leaves(args, get_current), **map_leaves(kwargs or {}, get_current))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy of the replacement."""
        return deepcopy(get_current(self), memo)


def get_current(value: Any) -> Any:
    """Return the replacement of a replaced parameter; return any other object unchanged."""
    if type(value) is not ReplacedParameter:
        return value
    return value.__dict__["_get_current"]()


def replace_parameter(old: nn.Parameter, new: nn.Parameter, module: nn.Module, key: str) -> nn.Parameter:
    """Replace a parameter by a new one, and keep the old object if torch can swap their contents.

    Args:
        old: A leaf parameter; its hooks are kept.
        new: The parameter with the new contents; no other reference to it may exist.
        module: The module that holds `old`.
        key: The parameter's name in `module`.

    Returns:
        The parameter for the module: `old`, or `new` if weak references to `old` or views of it exist.
    """
    hooks = get_gradient_hooks(old)
    with suppress(RuntimeError):  # weak references to `old`, or views of it, exist
        torch.utils.swap_tensors(old, new)  # type: ignore[no-untyped-call]
        set_gradient_hooks(old, hooks)
        return old
    set_gradient_hooks(new, hooks)
    redirect_references(old, partial(get_direct_parameters(module).__getitem__, key), key)
    return new


def redirect_references(old: nn.Parameter, find: Callable[[], Any], name: str) -> None:
    """Make every reference to a parameter lead to its replacement.

    Args:
        old: The replaced parameter; its memory is freed.
        find: Function that returns the replacement; called at each use.
        name: The parameter's name, for the error if a gradient still reaches `old` through a view.
    """

    def refuse(_: torch.Tensor) -> None:
        raise TrainingError(
            f"a gradient reached {name} through a view that was created before training replaced this parameter. "
            "Create the view inside the step."
        )

    set_gradient_hooks(old, (None, None))
    if old.requires_grad and old.is_leaf:
        old.register_hook(refuse)  # type: ignore[no-untyped-call]
    if not old.is_meta:
        old.data = old.data.new_empty(0)
    vars(old)["_get_current"] = find
    old.__class__ = ReplacedParameter


def update_references(optimizer: Optimizer) -> None:
    """Make an optimizer train the replacements of replaced parameters.

    Raises:
        ConfigError: The optimizer then has one parameter twice.
    """
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(type(parameter) is ReplacedParameter for parameter in held):
        return
    for group in optimizer.param_groups:
        group["params"][:] = map(get_current, group["params"])
    for parameter in held:
        if type(parameter) is ReplacedParameter and parameter in optimizer.state:
            optimizer.state[get_current(parameter)] = optimizer.state.pop(parameter)
    if repeated := len(held) - len({id(get_current(parameter)) for parameter in held}):
        raise ConfigError(
            f"the optimizer has {repeated} parameters twice: the parameter itself, and a reference from before the "
            "strategy sharded the parameter. Select parameters by name, with self.named_parameters(), in "
            "configure_optimizers."
        )


@contextmanager
def _register_on_meta(recorder: InitRecorder, task: nn.Module) -> Iterator[None]:
    """Move parameters to the meta device when modules register them within the context; buffers stay.

    The parameter objects stay the same, so tied parameters stay tied. Parameters that the task has already stay where
    they are.
    """
    register = nn.Module.register_parameter
    # The objects are kept too: the id of a replaced parameter could be that of a new one.
    present = {id(parameter): parameter for parameter in task.parameters()}

    def register_on_meta(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if type(parameter) is nn.Parameter and id(parameter) not in present:
            if not parameter.is_meta:
                outline = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
                outline.__dict__.update(parameter.__dict__)
                hooks = get_gradient_hooks(parameter)
                torch.utils.swap_tensors(parameter, outline)  # type: ignore[no-untyped-call]
                set_gradient_hooks(parameter, hooks)
            if recorder.find_parameter(parameter) is None:
                recorder.track(parameter, MetaParameter(name, parameter.dtype))
        register(self, name, parameter)

    with replaced_attribute(nn.Module, "register_parameter", register_on_meta), recorder:
        yield


@final
class DeferredInit:
    """Layers of a task's `configure_model`: built on the meta device, and initialized after a strategy has placed them.

    Args:
        task: The task with the `configure_model` to call.
    """

    def __init__(self, task: TaskModule) -> None:
        self._task = task
        self._built_parameters: dict[str, MetaParameter] = {}
        self._recorder = InitRecorder()
        self._parameters_of: dict[nn.Module, list[MetaParameter]] = {}
        self._unsharded: list[MetaParameter] = []
        self._initialized: set[nn.Module] = set()
        self._materialized: dict[int, MetaParameter] = {}

    def configure_model(self) -> None:
        """Call `configure_model`, once per task object, with parameters on the meta device.

        Raises:
            ConfigError: `configure_model` needs values of parameters, or puts buffers on the meta device too.
        """
        task, recorder = self._task, InitRecorder()
        if task._is_configured:
            return
        if is_overridden(task, "configure_model"):
            try:
                with _register_on_meta(recorder, task):
                    task.configure_model()
            except (RuntimeError, TypeError) as error:
                if not re.search("meta|incompatible tensor type", str(error)):
                    raise
                raise ConfigError(
                    f"configure_model of {type(task).__name__} reads values of parameters, but parameters have no "
                    f"values yet: {str(error).splitlines()[0]}. {_ADVICE}"
                ) from error
        task._is_configured = True
        for name, parameter in task.named_parameters():
            if parameter.is_meta and (found := recorder.find_parameter(parameter)):
                self._built_parameters[name] = MetaParameter(
                    name,
                    found.dtype,
                    value_id=found.value_id,
                    casts=found.casts,
                    planned=found.operations,
                    loses_data=found.copies_data,
                )
        if names := [name for name, buffer in task.named_buffers() if buffer.is_meta]:
            raise ConfigError(
                f"{len(names)} buffers are on the meta device: {format_first_names(names)}. Build buffers on a real "
                "device: in configure_model Lumen moves only parameters to the meta device."
            )

    @torch.no_grad()
    def materialize(self, seed: int, device: torch.device) -> None:
        """Give values to every parameter that is on the meta device; a sharded parameter gets this process's shards.

        This method does not communicate. It restores the global generators.

        Args:
            seed: The run's seed; with a module's name it determines the module's random numbers.
            device: The device on which parameters are created.

        Raises:
            ConfigError: Some parameters get no values, or different values than in `configure_model`.
        """
        self._find_meta_parameters()
        if not self._parameters_of:
            return
        with preserve_generators():
            for name, module in self._task.named_modules():
                is_empty = any(each.materialized is None for each in self._iterate_below(module))
                if module not in self._initialized and is_empty:
                    self._initialise_module(name, module, seed)
                    while self._unsharded:
                        self._keep_shard(self._unsharded.pop(), device)
        self._copy_values()
        if problems := [problem for each in self._materialized.values() if (problem := _describe_problem(each))]:
            ending = "; ..." if len(problems) > 4 else ""
            raise ConfigError(
                f"{len(problems)} parameters would begin with other values than in configure_model of "
                f"{type(self._task).__name__}: {'; '.join(problems[:4])}{ending}. {_ADVICE}"
            )

    def _find_meta_parameters(self) -> None:
        """Find the parameters on the meta device, sharded ones too, and the first module that holds each."""
        found: dict[int, MetaParameter] = {}
        self._recorder.protected.clear()  # a strategy may have moved these tensors, and freed their memory
        for prefix, module in self._task.named_modules():
            for key, tensor in get_direct_parameters(module).items():
                if tensor is None or not tensor.is_meta:
                    if tensor is not None:
                        self._recorder.protected[get_memory_id(tensor)] = f"{prefix}.{key}"
                    continue
                if id(tensor) not in found:
                    name = f"{prefix}.{key}" if prefix else key
                    found[id(tensor)] = self._built_parameters.get(name) or MetaParameter(name, tensor.dtype)
                    found[id(tensor)].target = tensor
                    self._parameters_of.setdefault(module, []).append(found[id(tensor)])
                found[id(tensor)].places.append((module, key))
        first: dict[object, MetaParameter] = {}
        for parameter in sorted(found.values(), key=lambda each: len(each.casts)):
            source = first.setdefault(parameter.value_id, parameter)
            if source is not parameter:
                parameter.source, parameter.source_casts = source, parameter.casts[len(source.casts) :]
            outline = parameter.make_blank("meta")
            self._recorder.track(outline, parameter)
            parameter.set_in_modules(outline)

    def _iterate_below(self, module: nn.Module) -> Iterator[MetaParameter]:
        return (each for owner in module.modules() for each in self._parameters_of.get(owner, ()))

    def _initialise_module(self, name: str, module: nn.Module, seed: int) -> None:
        """Initialize a module, after its submodules if it writes their parameters, as constructors do."""
        written = self._run_initialiser(name, module, seed)
        if any(each.unsharded is None for each in written):
            for below_name, below in reversed([*module.named_modules(prefix=name)][1:]):
                if not written.isdisjoint(self._iterate_below(below)):
                    self._initialise_module(below_name, below, seed)
            self._run_initialiser(name, module, seed)
        self._initialized.add(module)

    def _run_initialiser(self, name: str, module: nn.Module, seed: int) -> set[MetaParameter]:
        """Call `init_weights` for a module with blank parameters. Return the parameters that were written."""
        for parameter in self._parameters_of.get(module, ()):
            if parameter.unsharded is None:
                parameter.unsharded = parameter.make_blank("cpu")
                self._recorder.track(parameter.unsharded, parameter)
                parameter.set_in_modules(parameter.unsharded)
                self._unsharded.append(parameter)
            else:
                parameter.unsharded.fill_(torch.nan if parameter.unsharded.is_floating_point() else 0)
            parameter.clear_operations()
        tied = [(key, each) for key, each in get_direct_parameters(module).items() if id(each) in self._materialized]
        for key, each in tied:  # its first owner has initialized it, so writes here go to a blank
            assert each is not None
            set_parameter(module, key, self._materialized[id(each)].make_blank("cpu"))
        self._recorder.written.clear()
        seed_generators(make_key(seed, Domain.INIT, hash_name(name)))
        with self._recorder, self._recorder.mark_initialiser(module):
            self._task.init_weights(module, name)
        for key, each in tied:
            assert each is not None
            set_parameter(module, key, each)
        return set(self._recorder.written)

    def _keep_shard(self, parameter: MetaParameter, device: torch.device) -> None:
        """Keep this process's shard of an initialized parameter, and free the rest."""
        values, target, parameter.unsharded = parameter.unsharded, parameter.target, None
        assert values is not None
        self._recorder.untrack(values)
        parameter.has_gaps = bool(
            values.numel() and (not parameter.operations or (values.is_floating_point() and values.isnan().any()))
        )
        placed = distribute_like(values.detach().to(target.dtype), target)
        if is_sharded(target):
            shard = get_local_tensor(placed).clone().to(device)  # a view would keep the whole parameter in memory
            placed = make_dtensor(shard, target, target.shape)
        materialized = nn.Parameter(placed.to(device), requires_grad=target.requires_grad)
        materialized.__dict__.update(target.__dict__)
        parameter.materialized = replace_parameter(target, materialized, *parameter.places[0])
        parameter.set_in_modules(parameter.materialized)
        self._materialized[id(parameter.materialized)] = parameter
        self._recorder.protected[get_memory_id(parameter.materialized)] = parameter.name

    def _copy_values(self) -> None:
        """Copy values from sources to their copies, unless `init_weights` wrote different values."""
        for parameter in self._materialized.values():
            source = parameter.source
            if source is None or not (parameter.by_initialiser or parameter.operations == source.operations):
                parameter.source = None
                continue
            assert parameter.materialized is not None
            assert source.materialized is not None
            values = get_local_tensor(source.materialized)
            for dtype in parameter.source_casts:
                values = values.to(dtype)
            get_local_tensor(parameter.materialized).copy_(values)


def _describe_problem(parameter: MetaParameter) -> str | None:
    """Describe the error in the values of a parameter; None without an error."""
    built, operations = parameter.planned, parameter.operations
    if parameter.source is not None:
        return None
    if parameter.has_gaps:
        kind = type(parameter.places[0][0]).__name__
        return (
            f"{parameter.name} gets no values, or not all ({kind} has no reset_parameters that writes {parameter.name})"
        )
    if built is None:
        return None
    if parameter.by_initialiser and built != operations:
        before, now = " ".join(built) or "its constructor", " ".join(operations)
        return f"configure_model initialized {parameter.name} by {before}, but init_weights by {now}"
    if parameter.loses_data and built[-1] not in operations:
        return f"configure_model copied data into {parameter.name} by {built[-1]}"
    return None
