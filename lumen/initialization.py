"""Layers built in `configure_model`: parameters first on the meta device, then given their values module by module.

No process ever holds more of them than its share and one module, and they are the same bits under every strategy: what
a module draws is keyed by the seed and the module's name.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import nn

from lumen.checkpoint.sharded import from_part, is_sharded, own_part, placed_like
from lumen.errors import ConfigError
from lumen.hooks import overrides
from lumen.random import Domain, make_key, preserved_generators, seed_generators
from lumen.task import TaskModule
from lumen.torch_internals import TorchDispatchMode, copies, own_parameters, schema_of, storage_id

_ADVICE = (
    "Parameters of layers built in configure_model get their values from the task's init_weights(module, name), by "
    "default from the module's reset_parameters: define it for modules that make theirs otherwise. Values from "
    "elsewhere, such as a pretrained model's, are loaded by init_from; or build the layers in __init__."
)


@final
@dataclass(eq=False)
class _Parameter:
    """A parameter that was built on the meta device.

    Attributes:
        name: Its first name in the task.
        dtype: In which it was built, and gets its values.
        made: The operations in place by which it got its values.
        fed: The last of them brought data along.
        built: As `made`, but by `configure_model`; None if nobody has looked.
        loses: As `fed`: these data are lost on the meta device.
        places: The modules that hold it, and how they call it; more than one if it is tied.
        target: What is to be filled: as it was built, or what a strategy put in its place.
        whole: All of it, while modules that write it are initialised.
        real: It, once it is made.
    """

    name: str
    dtype: torch.dtype
    made: list[str] = field(default_factory=list)
    fed: bool = False
    built: list[str] | None = None
    loses: bool = False
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    target: Any = None
    whole: nn.Parameter | None = None
    real: nn.Parameter | None = None

    def blank(self, device: str) -> nn.Parameter:
        """One of its shape; what nobody writes stays NaN."""
        fill = torch.nan if self.dtype.is_floating_point or self.dtype.is_complex else 0
        values = torch.full(self.target.shape, fill, dtype=self.dtype, device=device)
        return nn.Parameter(values, requires_grad=self.target.requires_grad)

    def put(self, parameter: nn.Parameter) -> None:
        """Let its modules hold it."""
        for module, key in self.places:
            _put(module, key, parameter)


def _put(module: nn.Module, key: str, parameter: nn.Parameter) -> None:
    if type(module).__setattr__ is nn.Module.__setattr__:
        own_parameters(module)[key] = parameter
    else:  # torch's RNNs keep a list of their own
        setattr(module, key, parameter)


@final
class _Recorder(TorchDispatchMode):
    """Records operations in place on parameters, through their views too.

    Attributes:
        written: The parameters that were written since this was emptied.
        refused: Storages that must not be written, and what they hold.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: set[_Parameter] = set()
        self.refused: dict[int, str] = {}
        self._known: dict[int, tuple[_Parameter, torch.Tensor]] = {}  # the tensor, or another could get its storage

    def know(self, tensor: torch.Tensor, parameter: _Parameter) -> None:
        self._known[_storage(tensor)] = parameter, tensor

    def forget(self, tensor: torch.Tensor) -> None:
        self._known.pop(_storage(tensor), None)

    def find(self, tensor: torch.Tensor) -> _Parameter | None:
        return self._known.get(_storage(tensor), (None,))[0]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operation, given = schema_of(function).name.removeprefix("aten::"), [*args, *kwargs.values()]
        pairs = zip(schema_of(function).arguments, args, strict=False)
        written = [tensor for argument, value in pairs if argument.is_write for tensor in _tensors([value])]
        for tensor in written:
            if holder := self.refused.get(_storage(tensor)):
                raise ConfigError(
                    f"init_weights writes {holder} by {operation}, which has its values already. Let it write "
                    "parameters of the module that it is given, and of the modules in that one."
                )
        result = function(*args, **kwargs)
        numbers = ", ".join(f"{value:g}" for value in given if isinstance(value, (int, float)))
        for tensor in written:
            if parameter := self.find(tensor):
                parameter.made.append(f"{operation}({numbers})")
                parameter.fed = any(not each.is_meta and each.numel() > 1 for each in _tensors(given))
                self.written.add(parameter)
        if copies(operation) and result.is_meta and (source := self.find(args[0])):
            self.know(result, _Parameter(source.name, result.dtype, [*source.made], source.fed))
        return result


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _storage(tensor: torch.Tensor) -> int:
    return storage_id(own_part(tensor))


@contextmanager
def _on_meta(recorder: _Recorder, present: set[int]) -> Iterator[None]:
    """The context in which parameters that a module is given go to the meta device; buffers stay where they are.

    The objects stay the same, so that what is tied stays tied.
    """
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if type(parameter) is nn.Parameter and id(parameter) not in present:
            if not parameter.is_meta:
                outline = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
                outline.__dict__.update(parameter.__dict__)
                torch.utils.swap_tensors(parameter, outline)  # type: ignore[no-untyped-call]
            if recorder.find(parameter) is None:
                recorder.know(parameter, _Parameter(name, parameter.dtype))
        register(self, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        with recorder:
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@final
class DeferredInit:
    """Builds what a task defines in `configure_model`, and gives it its values when it lies where it belongs.

    Args:
        task: Whose.
    """

    def __init__(self, task: TaskModule) -> None:
        self._task = task
        self._built: dict[str, _Parameter] = {}
        self._recorder = _Recorder()
        self._owned: dict[nn.Module, list[_Parameter]] = {}
        self._open: list[_Parameter] = []
        self._finished: set[nn.Module] = set()
        self._made: dict[int, _Parameter] = {}
        self._problems: list[str] = []

    def configure(self) -> None:
        """Call `configure_model`, once in the life of a task, with parameters on the meta device.

        Raises:
            ConfigError: It needs their values, or has buffers there too.
        """
        task, recorder = self._task, _Recorder()
        if task._is_configured:
            return
        if overrides(task, "configure_model"):
            try:
                with _on_meta(recorder, {id(parameter) for parameter in task.parameters()}):
                    task.configure_model()
            except (RuntimeError, TypeError) as error:
                if not re.search("meta|incompatible tensor type", str(error)):
                    raise
                raise ConfigError(
                    f"configure_model of {type(task).__name__} needs the values of parameters, which have none yet: "
                    f"{str(error).splitlines()[0]}. {_ADVICE}"
                ) from error
        task._is_configured = True
        for name, parameter in task.named_parameters():
            if parameter.is_meta and (found := recorder.find(parameter)):
                self._built[name] = _Parameter(name, found.dtype, built=found.made, loses=found.fed)
        if names := [name for name, buffer in task.named_buffers() if buffer.is_meta]:
            raise ConfigError(
                f"{len(names)} buffers are on the meta device: {_some(names)}. Build them really: in configure_model "
                "Lumen itself puts parameters there, and parameters only."
            )

    @torch.no_grad()
    def materialize(self, seed: int, device: torch.device) -> None:
        """Give every parameter on the meta device its values, or this process's part of them.

        Nothing is communicated. Generators are afterwards as they were before.

        Args:
            seed: Of the run.
            device: Where the parameters are to be.

        Raises:
            ConfigError: Some get no values, or others than `configure_model` gave them.
        """
        self._find()
        if not self._owned:
            return
        overridden = overrides(self._task, "init_weights")
        with preserved_generators():
            for name, module in self._task.named_modules():
                if module not in self._finished and any(each.real is None for each in self._below(module)):
                    self._initialise(name, module, seed)
                    while self._open:
                        self._close(self._open.pop(), device, overridden=overridden)
        if self._problems:
            count, more = len(self._problems), "; ..." if len(self._problems) > 4 else ""
            raise ConfigError(
                f"{count} parameters would not begin as configure_model of {type(self._task).__name__} built them: "
                f"{'; '.join(self._problems[:4])}{more}. {_ADVICE}"
            )

    def _find(self) -> None:
        """Find the parameters on the meta device, whatever a strategy has made of them, and their first owners."""
        found: dict[int, _Parameter] = {}
        for prefix, module in self._task.named_modules():
            for key, tensor in own_parameters(module).items():
                if tensor is None or not tensor.is_meta:
                    if tensor is not None:
                        self._recorder.refused[_storage(tensor)] = f"{prefix}.{key}"
                    continue
                if id(tensor) not in found:
                    name = f"{prefix}.{key}" if prefix else key
                    found[id(tensor)] = self._built.get(name) or _Parameter(name, tensor.dtype)
                    found[id(tensor)].target = tensor
                    self._owned.setdefault(module, []).append(found[id(tensor)])
                found[id(tensor)].places.append((module, key))
        for parameter in found.values():
            outline = parameter.blank("meta")
            self._recorder.know(outline, parameter)
            parameter.put(outline)

    def _below(self, module: nn.Module) -> Iterator[_Parameter]:
        return (each for part in module.modules() for each in self._owned.get(part, ()))

    def _initialise(self, name: str, module: nn.Module, seed: int) -> None:
        """Run a module's initialiser; one that writes parameters of modules in it, after theirs, as constructors do."""
        written = self._run(name, module, seed)
        if any(each.whole is None for each in written):
            for below_name, below in reversed([*module.named_modules(prefix=name)][1:]):
                if not written.isdisjoint(self._below(below)):
                    self._initialise(below_name, below, seed)
            self._run(name, module, seed)
        self._finished.add(module)

    def _run(self, name: str, module: nn.Module, seed: int) -> set[_Parameter]:
        """Initialise a module whose parameters have no values yet. Returns the parameters that were written."""
        for parameter in self._owned.get(module, ()):
            if parameter.whole is None:
                parameter.whole = parameter.blank("cpu")
                self._recorder.know(parameter.whole, parameter)
                parameter.put(parameter.whole)
                self._open.append(parameter)
            else:
                parameter.whole.fill_(torch.nan if parameter.whole.is_floating_point() else 0)
            parameter.made.clear()
        tied = [(key, each) for key, each in own_parameters(module).items() if id(each) in self._made]
        for key, each in tied:  # it has its values from its first owner: here it is written in vain
            assert each is not None
            _put(module, key, self._made[id(each)].blank("cpu"))
        self._recorder.written.clear()
        seed_generators(make_key(seed, Domain.INIT, _number(name)))
        with self._recorder:
            self._task.init_weights(module, name)
        for key, each in tied:
            assert each is not None
            _put(module, key, each)
        return set(self._recorder.written)

    def _close(self, parameter: _Parameter, device: torch.device, *, overridden: bool) -> None:
        """Keep this process's part of a parameter that has its values, and free the rest."""
        whole, target, parameter.whole = parameter.whole, parameter.target, None
        assert whole is not None
        self._recorder.forget(whole)
        if problem := _problem(parameter, whole, overridden=overridden):
            self._problems.append(problem)
        part = placed_like(whole.detach().to(target.dtype), target)
        if is_sharded(target):
            own = own_part(part).clone().to(device)  # a view would keep the rest alive
            part = from_part(own, target, target.shape)
        parameter.real = nn.Parameter(part.to(device), requires_grad=target.requires_grad)
        parameter.real.__dict__.update(target.__dict__)
        parameter.put(parameter.real)
        self._made[id(parameter.real)] = parameter
        self._recorder.refused[_storage(parameter.real)] = parameter.name


def _problem(parameter: _Parameter, whole: nn.Parameter, *, overridden: bool) -> str | None:
    """What is wrong with the values of a parameter."""
    built, made = parameter.built, parameter.made
    if whole.numel() and (not made or (whole.is_floating_point() and whole.isnan().any())):
        kind = type(parameter.places[0][0]).__name__
        return f"{parameter.name} gets no values, or not all ({kind} has no reset_parameters that writes it)"
    if built is None:
        return None
    if not overridden and built != made:
        return f"{parameter.name} was made by {' '.join(built) or 'its constructor'}, would now be by {' '.join(made)}"
    if parameter.loses and built[-1] not in made:
        return f"{parameter.name} was given data by {built[-1]}"
    return None


def _number(name: str) -> int:
    """64 bits of a module's name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
