"""Nested batches: traversal, moves to a device, and conversions."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from copy import copy
from functools import cache
from numbers import Real
from typing import Any, final

import torch
from torch.nn.utils.rnn import PackedSequence

from lumen.errors import ConfigError
from lumen.internals.tensors import copy_all

_NUMBERS = (torch.Tensor, Real)
_BATCHES_AHEAD = 2
_SMALL_BYTES = 1 << 16  # For copies this small, the host does not wait even without pinned memory.


def move_batch(batch: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Copy every tensor of a nested batch to a device, keeping the structure.

    The function traverses mappings, lists, tuples, named tuples and dataclasses. It calls `to` of other objects that
    have it (such as a `PackedSequence`), without a dtype, and returns the rest (None, strings, numbers) unchanged.
    Copies are asynchronous only from pinned memory to CUDA: elsewhere a tensor might be read before its copy has ended.

    Args:
        batch: A tensor, or nested collections of tensors and other objects.
        device: The device to copy to.
        dtype: The dtype of all floating-point tensors; None: keep the dtypes.
    """
    non_blocking = device.type == "cuda"

    def moved(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return part.to(device, dtype if part.is_floating_point() else None, non_blocking=non_blocking)
        if isinstance(part, PackedSequence):
            return part.to(device, non_blocking=non_blocking)  # type: ignore[arg-type]
        return part.to(device) if callable(getattr(part, "to", None)) else part

    return map_leaves(batch, moved)


def move_data_to_device(batch: Any, device: torch.device | str | int) -> Any:
    """Copy every tensor of a nested batch to a device, keeping the structure.

    Args:
        batch: A tensor, or nested mappings, lists, tuples, dataclasses and objects with a `to` method.
        device: A device, its name, or the number of an accelerator.

    Raises:
        ConfigError: The device does not exist.
    """
    return move_batch(batch, as_device("move_data_to_device", device) or torch.device("cpu"))


def as_device(who: str, device: Any) -> torch.device | None:
    """Return an argument as a `torch.device`; None stays None.

    Raises:
        ConfigError: torch does not know a device of this name or number.
    """
    try:
        return None if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        argument = "map_location: " if who == "load_from_checkpoint" else ""
        raise ConfigError(
            f'{who}: {argument}expected a device, such as "cpu" or "cuda:0", found {device!r}.'
        ) from error


def fill_tensor(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copy `values` into a tensor of equal shape in place; elements repeated by `expand` get the value of the first."""
    tensor, values = _drop_expanded(tensor, values)
    tensor.copy_(values)


def fill_tensors(tensors: Iterable[torch.Tensor], values: Iterable[torch.Tensor]) -> None:
    """Call `fill_tensor` for several tensors on one device at once."""
    pairs = [_drop_expanded(tensor, value) for tensor, value in zip(tensors, values, strict=True)]
    if pairs:
        copy_all([tensor for tensor, _ in pairs], [value for _, value in pairs])


def _drop_expanded(tensor: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both tensors without the repeated elements of the first: index 0 of expanded dimensions."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor, values = tensor.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    return tensor, values


@final
class CopyStream:
    """Copier of batches to a CUDA device, on a separate stream, in parallel with queued kernels.

    Only copies from pinned memory overlap with computation. Objects other than dense CPU tensors, and batches of less
    than `_SMALL_BYTES`, are copied on the current stream: changing streams costs the host more than a small copy. The
    host runs ahead by at most `_BATCHES_AHEAD` batches, because the memory of a batch is free only after the device has
    used it.

    Args:
        device: The CUDA device to copy to.
        dtype: The dtype of all floating-point tensors; None: keep the dtypes.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype | None) -> None:
        self._device, self._dtype = device, dtype
        self._stream = _get_copy_stream(device)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._pending_copies: deque[torch.cuda.Event] = (
            deque()
        )  # one per pending batch, set when the work before it is done

    def move_batch(self, batch: Any) -> Any:
        """Copy a batch like `move_batch`, in a stream of its own.

        The current stream waits for the copies. The host waits for the copies of an earlier batch, which is
        `_BATCHES_AHEAD` batches old.
        """
        if sum(part.nbytes for part in iterate_tensors(batch) if _is_copied_alone(part)) < _SMALL_BYTES:
            return move_batch(batch, self._device, self._dtype)
        current = torch.cuda.current_stream(self._device)
        if len(self._pending_copies) < _BATCHES_AHEAD:
            begun = torch.cuda.Event()  # type: ignore[no-untyped-call]
        else:
            begun = self._pending_copies.popleft()
            begun.synchronize()
        begun.record(current)
        self._pending_copies.append(begun)

        def copied(part: Any) -> Any:
            if not (isinstance(part, torch.Tensor) and _is_copied_alone(part)):
                return part
            moved = part.to(self._device, non_blocking=True)
            moved.record_stream(current)  # Otherwise the next copy could reuse the memory while it is read.
            return moved

        with torch.cuda.stream(self._stream):
            batch = map_leaves(batch, copied)
            self._copied.record()
        current.wait_event(self._copied)
        return move_batch(batch, self._device, self._dtype)


def _is_copied_alone(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_nested


@cache
def _get_copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the copy stream of a device, shared by all runs, because torch caches memory per stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def map_leaves(data: Any, function: Callable[[Any], Any], is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Apply a function to every leaf of nested data, keeping the structure.

    The function traverses mappings, lists, tuples, named tuples without a `to` method, and dataclasses, except those
    for which `is_leaf` returns True.
    """
    if isinstance(data, torch.Tensor) or (is_leaf is not None and is_leaf(data)):
        return function(data)
    if isinstance(data, Mapping):
        converted = {key: map_leaves(value, function, is_leaf) for key, value in data.items()}
        if type(data) is dict:
            return converted
        if isinstance(data, MutableMapping):
            kept = copy(data)  # keeps attributes of subclasses
            for key, value in converted.items():  # a `ModelOutput` of transformers refuses `update`
                kept[key] = value
            return kept
        return type(data)(converted)  # type: ignore[call-arg]
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        if hasattr(data, "to"):
            return function(data)
        return type(data)(*(map_leaves(value, function, is_leaf) for value in data))
    if isinstance(data, (list, tuple)):
        return type(data)([map_leaves(value, function, is_leaf) for value in data])
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        names = [field.name for field in dataclasses.fields(data)]
        fields = {name: map_leaves(getattr(data, name), function, is_leaf) for name in names}
        made = copy(data)  # `replace()` would fail for init=False and InitVar fields.
        for name, value in fields.items():
            object.__setattr__(made, name, value)
        return made
    return function(data)


def detach_all(data: Any) -> Any:
    """Return the nested data with `detach` called on every tensor."""
    return map_leaves(data, lambda part: part.detach() if isinstance(part, torch.Tensor) else part)


def as_tensors(data: Any, device: torch.device) -> Any:
    """Return the nested data with numbers converted to tensors, and all tensors moved to a device."""
    return map_leaves(data, lambda part: torch.as_tensor(part, device=device) if isinstance(part, _NUMBERS) else part)


def iterate_tensors(batch: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a nested batch, depth first."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from iterate_tensors(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from iterate_tensors(value)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            yield from iterate_tensors(getattr(batch, field.name))


def flatten_leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of plain data, each with its path: `trainer.max_steps`. A list without mappings is a leaf."""
    if isinstance(tree, Mapping) and tree:
        for name, value in tree.items():
            yield from flatten_leaves(value, f"{path}.{name}" if path else str(name))
    elif isinstance(tree, list) and any(isinstance(each, Mapping) for each in tree):
        for number, value in enumerate(tree):
            yield from flatten_leaves(value, f"{path}[{number}]")
    elif path:
        yield path, tree
