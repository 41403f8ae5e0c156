"""Records which operations give parameters on the meta device their values, when a model is built and when filled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import nn

from lumen.distributed.dtensor import local_tensor
from lumen.errors import ConfigError
from lumen.internals.tensors import (
    TorchDispatchMode,
    copies,
    copies_in_place,
    own_parameters,
    reset_name,
    schema_of,
    storage_id,
    takes_shape_alone,
)

_Layout = tuple[Any, ...]


@final
@dataclass(eq=False)
class Built:
    """A parameter that was built on the meta device, with the operations that gave it its values.

    Attributes:
        name: Its first name in the task.
        dtype: The dtype in which it was built, and in which it is initialised.
        made: Names of the operations that wrote it, in order.
        fed: The last operation copied real data, which the meta device loses.
        by_itself: All operations were made by initialisers of modules, such as `reset_parameters`.
        value: An object that parameters have in common whose values are copies of each other.
        casts: The dtypes to which the values were cast since `value` was set.
        built: `made` as it was after `configure_model`; None before.
        loses: `fed` as it was after `configure_model`.
        places: The modules that hold it, with its name in each; more than one if it is tied.
        target: The parameter to fill: as it was built, or as a strategy has replaced it.
        whole: The whole parameter, while modules that write it are initialised.
        real: The parameter on the device with its values, or this process's part of it; None before.
        has_gaps: No operation has written it, or not all of its elements.
        source: The parameter whose values it takes, if it is a copy and `init_weights` treats both alike.
        through: The dtypes to which the values of `source` are cast on the way.
    """

    name: str
    dtype: torch.dtype
    made: list[str] = field(default_factory=list)
    fed: bool = False
    by_itself: bool = True
    value: object = field(default_factory=object)
    casts: tuple[torch.dtype, ...] = ()
    built: list[str] | None = None
    loses: bool = False
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    target: Any = None
    whole: nn.Parameter | None = None
    real: nn.Parameter | None = None
    has_gaps: bool = False
    source: Built | None = None
    through: tuple[torch.dtype, ...] = ()

    def write(self, operation: str, *, by_itself: bool, fed: bool) -> None:
        """Note an in-place operation, which has given it other values."""
        self.made.append(operation)
        self.by_itself, self.fed = self.by_itself and by_itself, fed
        self.value, self.casts = object(), ()

    def take(self, source: Built) -> None:
        """Note that it was given the values of another parameter."""
        self.made, self.by_itself, self.fed = [*source.made], source.by_itself, source.fed
        self.value, self.casts = source.value, source.casts
        if self.dtype != source.dtype:
            self.casts = (*self.casts, self.dtype)

    def forget(self) -> None:
        """Note that its values are gone."""
        self.made.clear()
        self.by_itself = True

    def blank(self, device: str) -> nn.Parameter:
        """A parameter of its shape, filled with NaN, so that elements that are never written can be found."""
        fill = torch.nan if self.dtype.is_floating_point or self.dtype.is_complex else 0
        values = torch.full(self.target.shape, fill, dtype=self.dtype, device=device)
        return nn.Parameter(values, requires_grad=self.target.requires_grad)

    def put(self, parameter: nn.Parameter) -> None:
        """Set a parameter in all modules that hold it."""
        for module, key in self.places:
            put(module, key, parameter)


def put(module: nn.Module, key: str, parameter: nn.Parameter) -> None:
    """Set a parameter of a module, by its name there."""
    if type(module).__setattr__ is nn.Module.__setattr__:
        own_parameters(module)[key] = parameter
    else:  # torch's RNNs keep a list of their own
        setattr(module, key, parameter)


@final
class Recorder(TorchDispatchMode):
    """Records how parameters get their values: by in-place operations, through views too, and by copies.

    Attributes:
        written: The parameters that were written since this was emptied.
        refused: Ids of storages that must not be written, with what they hold, for the error.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: set[Built] = set()
        self.refused: dict[int, str] = {}
        self._is_by_itself = False
        self._known: dict[int, tuple[Built, _Layout, Any]] = {}  # the storage, or another could get its place

    def know(self, tensor: torch.Tensor, parameter: Built) -> None:
        """Record operations on a tensor as operations on a parameter."""
        self._known[storage_of(tensor)] = parameter, _layout(tensor), local_tensor(tensor).untyped_storage()

    def forget(self, tensor: torch.Tensor) -> None:
        """Undo `know`, so that the tensor's memory can be freed."""
        self._known.pop(storage_of(tensor), None)

    def find(self, tensor: torch.Tensor) -> Built | None:
        """The parameter whose memory a tensor shares, wholly or in part; None if it is unknown."""
        return self._known.get(storage_of(tensor), (None,))[0]

    def whole(self, tensor: torch.Tensor) -> Built | None:
        """The parameter that a tensor is the whole of, in the same layout; None for any other view."""
        parameter, layout, _ = self._known.get(storage_of(tensor), (None, None, None))
        return parameter if layout == _layout(tensor) else None

    @contextmanager
    def own_initialiser(self, module: nn.Module) -> Iterator[None]:
        """The context in which writes by a module's own initialiser are marked as such, whoever calls it."""
        name = reset_name(module)
        reset, attributes = getattr(module, name, None), vars(module)
        before = name in attributes

        def noted(*args: Any, **kwargs: Any) -> Any:
            self._is_by_itself = True
            try:
                return reset(*args, **kwargs)  # type: ignore[misc]
            finally:
                self._is_by_itself = False

        if reset is not None:
            attributes[name] = noted
        try:
            yield
        finally:
            if before:
                attributes[name] = reset
            else:
                attributes.pop(name, None)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operation, given = schema_of(function).name.removeprefix("aten::"), [*args, *kwargs.values()]
        pairs = zip(schema_of(function).arguments, args, strict=False)
        written = [tensor for argument, value in pairs if argument.is_write for tensor in _tensors([value])]
        for tensor in written:
            if holder := self.refused.get(storage_of(tensor)):
                raise ConfigError(
                    f"init_weights writes {holder} by {operation}, which has its values already. Let it write "
                    "parameters of the module that it is given, and of the modules in that one."
                )
        result = function(*args, **kwargs)
        if written:
            sources = [*_tensors(args[1:2])] if copies_in_place(operation) else []
            self._note_writes(operation, written, sources, given)
        else:
            self._note_results(operation, result, given)
        return result

    def _note_writes(self, operation: str, written: list[Any], sources: list[Any], given: list[Any]) -> None:
        description = f"{operation}({_numbers(given)})"
        fed = any(not each.is_meta and each.numel() > 1 for each in _tensors(given))
        for number, tensor in enumerate(written):
            if parameter := self.find(tensor):
                source = self.whole(sources[number]) if len(sources) == len(written) else None
                if source is not None and parameter is self.whole(tensor) and sources[number].shape == tensor.shape:
                    parameter.take(source)
                else:
                    parameter.write(description, by_itself=self._is_by_itself, fed=fed)
                self.written.add(parameter)

    def _note_results(self, operation: str, result: Any, given: list[Any]) -> None:
        """Record tensors on the meta device that an operation made from parameters' values."""
        if takes_shape_alone(operation):
            return
        sources = [(each, source) for each in _tensors(given) if (source := self.find(each))]
        for made in _tensors([result]) if sources else ():
            if not made.is_meta or self.find(made):
                continue
            each, source = sources[0]
            parameter = Built(source.name, made.dtype)
            if copies(operation) and self.whole(each) is source:
                parameter.take(source)
            else:
                parameter.write(f"{operation}({_numbers(given)}) of {source.name}", by_itself=False, fed=False)
            self.know(made, parameter)


def _numbers(given: list[Any]) -> str:
    return ", ".join(f"{value:g}" for value in given if isinstance(value, (int, float)))


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _layout(tensor: torch.Tensor) -> _Layout:
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset()


def storage_of(tensor: torch.Tensor) -> int:
    """An id of the memory of this process's part of a tensor; equal for its views."""
    return storage_id(local_tensor(tensor))
