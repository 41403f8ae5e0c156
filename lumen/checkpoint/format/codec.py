"""Exact conversion of plain Python data to JSON and back: types, order of dictionaries and floats are preserved.

JSON has no tuples, sets, bytes or integer keys. Such a value becomes an object with one key, its tag, that starts with
"$". Tensors and arrays are not part of the JSON: they are collected by name, and the JSON refers to the name.
"""

import base64
import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from lumen.errors import CheckpointDamaged, CheckpointError
from lumen.errors.arguments import describe_type
from lumen.internals.masking import ObjectName, Reference

JSON: TypeAlias = Any
"""Data that `json.dumps` accepts and `json.loads` returns."""
Tensors: TypeAlias = dict[str, torch.Tensor]
"""Tensors by name."""

_MAX_DEPTH = 100  # far below Python's recursion limit, so that all saved data can be loaded

_LEAVES: dict[type, tuple[str, Callable[[Any], str]]] = {
    bytes: ("$bytes", lambda value: base64.b64encode(value).decode()),
    type(Path()): ("$path", str),
    torch.dtype: ("$dtype", lambda value: str(value).removeprefix("torch.")),
    torch.device: ("$device", str),
    Reference: ("$env", str),
    ObjectName: ("$object", str),
}
_SEQUENCES: dict[type, str] = {tuple: "$tuple", torch.Size: "$size", set: "$set", frozenset: "$frozenset"}
_SCALARS: dict[str, Any] = {  # numpy scalars whose arithmetic is not Python's
    kind.__name__: kind
    for kind in (np.float16, np.float32, np.int8, np.int16, np.int32, np.uint8, np.uint16, np.uint32, np.uint64)
}
_DICTS = (dict, OrderedDict, defaultdict, Counter)
_DTYPES = {name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}
_KEYS = (str, int, float, bool, type(None), tuple)


def encode(value: Any, tensors: Tensors, where: str) -> JSON:
    """Convert plain data to JSON, and collect its tensors.

    Plain data: None, bool, int, float, str, bytes, list, tuple, dict (keys: str, int, float, bool, None, tuple), set,
    frozenset, `pathlib.Path`, `torch.dtype`, `torch.device`, `torch.Size`, numpy scalars (float64, int64, bool, str and
    bytes become Python scalars), numeric numpy arrays and tensors. Ordered, default and counting dictionaries become
    plain dictionaries. Other mappings and sequences, such as OmegaConf's, become dictionaries and lists.

    Args:
        value: Plain data, as listed above.
        tensors: Dictionary that receives each tensor and array of any shape and dtype, by path. The tensors share
            memory with `value`.
        where: Path of `value` for error messages and names of tensors, for example "callbacks.EarlyStopping".

    Raises:
        CheckpointError: `value` holds anything else, contains itself, or is nested more than 100 deep.
    """
    return _encode(value, tensors, where, ())


def name_objects(value: Any) -> Any:
    """Return data in which the name of its type replaces each object that `encode` refuses."""
    if isinstance(value, Mapping):
        return {key: name_objects(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(name_objects, value))
    try:
        encode(value, Tensors(), "")
    except CheckpointError:
        return ObjectName(describe_type(value))
    return value


def _encode(value: Any, tensors: Tensors, where: str, parents: tuple[int, ...]) -> JSON:
    if isinstance(value, torch.Tensor):
        return {_make_tensor_tag(value): _collect_tensor(value.detach(), tensors, where)}
    if id(value) in parents:
        raise CheckpointError(f"{where}: this {type(value).__name__} contains itself. Remove the cycle.")
    if len(parents) > _MAX_DEPTH:
        raise CheckpointError(f"{where}: nested more than {_MAX_DEPTH} levels deep. Flatten the data.")
    inside, original_type = (*parents, id(value)), type(value)
    value = _as_python_scalar(value)
    if _SCALARS.get(original_type.__name__) is original_type:
        return {"$scalar": [original_type.__name__, _encode(value, tensors, where, inside)]}
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:  # Python refuses to print or parse decimal integers of more than 4300 digits
        return value if -(2**63) <= value < 2**63 else {"$int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
    if kind is list:
        return [_encode(item, tensors, f"{where}[{i}]", inside) for i, item in enumerate(value)]
    if kind in _DICTS:
        return _encode_dict(value, tensors, where, inside)
    if kind in _SEQUENCES:
        items = [_encode(item, tensors, f"{where}[{i}]", inside) for i, item in enumerate(value)]
        return {_SEQUENCES[kind]: sorted(items, key=json.dumps) if kind in (set, frozenset) else items}
    if kind in _LEAVES:
        tag, text = _LEAVES[kind]
        return {tag: text(value)}
    if kind is np.ndarray:
        return {"$array": _collect_tensor(_array_as_tensor(value, where), tensors, where)}
    if isinstance(value, Mapping | Sequence) and not isinstance(value, dict | list | tuple | str | bytes):
        plain = dict(value) if isinstance(value, Mapping) else list(value)  # of OmegaConf, for example
        return _encode(plain, tensors, where, inside)
    raise _make_encoding_error(value, where)


def _encode_dict(value: Any, tensors: Tensors, where: str, inside: tuple[int, ...]) -> JSON:
    pairs = [(_as_python_scalar(key), item, _format_entry_path(where, key)) for key, item in value.items()]
    for key, _, path in pairs:
        if type(key) not in _KEYS:
            raise _make_encoding_error(key, f"{path} (a key)")
    if all(type(key) is str and not key.startswith("$") for key, _, _ in pairs):
        return {key: _encode(item, tensors, path, inside) for key, item, path in pairs}
    return {
        "$dict": [[_encode_key(key, path, inside), _encode(item, tensors, path, inside)] for key, item, path in pairs]
    }


def _encode_key(key: Any, path: str, inside: tuple[int, ...]) -> JSON:
    encoded = _encode(key, found := Tensors(), f"{path} (a key)", inside)
    if found:
        raise CheckpointError(f"{path} (a key): a tensor cannot be saved as part of a key. Use a name or a number.")
    return encoded


def _format_entry_path(where: str, key: Any) -> str:
    return f"{where}.{key}" if isinstance(key, str) else f"{where}[{key!r}]"


def _as_python_scalar(value: Any) -> Any:
    """Return the equal Python scalar of a numpy scalar, or the value itself if there is no equal one (long double)."""
    if not isinstance(value, np.generic) or value.dtype.kind not in "biufUS":
        return value
    scalar = value.item()
    return value if isinstance(scalar, np.longdouble) else scalar


def _make_tensor_tag(tensor: torch.Tensor) -> str:
    if type(tensor) is torch.Tensor and not tensor.requires_grad:
        return "$tensor"
    if isinstance(tensor, nn.Parameter):
        return "$parameter" if tensor.requires_grad else "$frozen_parameter"
    return "$leaf" if tensor.requires_grad and tensor.is_leaf else "$tensor"


def _array_as_tensor(array: np.ndarray[Any, Any], where: str) -> torch.Tensor:
    try:
        return torch.from_numpy(np.require(array, requirements=["C", "A", "W"]))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{where}: a numpy array of {array.dtype} cannot be saved. Convert it to a native numeric dtype."
        ) from error


def _collect_tensor(tensor: torch.Tensor, tensors: Tensors, where: str) -> str:
    name = where
    while name in tensors:  # {"a.b": x, "a": {"b": y}} gives one path twice
        name += "'"
    tensors[name] = tensor
    return name


def _make_encoding_error(value: Any, where: str) -> CheckpointError:
    return CheckpointError(
        f"{where}: an object of type {type(value).__name__} cannot be saved; checkpoints hold plain data and tensors. "
        "Convert it to a dict, list, number, string or tensor (an Enum: its value), or leave it out."
    )


def decode(value: JSON, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the data that `encode` converted to JSON.

    Args:
        value: The JSON that `encode` returned.
        tensors: All collected tensors by name, on any device. The tensors become part of the result; arrays share their
            memory.

    Raises:
        CheckpointDamaged: `value` is not output of `encode`, or refers to a missing tensor.
    """
    try:
        return _decode(value, tensors)
    except (TypeError, ValueError, KeyError, OverflowError, RuntimeError, struct.error) as error:
        raise CheckpointDamaged(f"the saved data cannot be decoded: {type(error).__name__}: {error}") from error


def _decode(value: JSON, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {key: _decode(item, tensors) for key, item in value.items()}
    if len(value) != 1 or tag not in _DECODERS:
        raise ValueError(f"an unknown tag in {sorted(value)}")
    return _DECODERS[tag](value[tag], tensors)


def _decode_items(items: JSON, tensors: Mapping[str, torch.Tensor]) -> list[Any]:
    if not isinstance(items, list):
        raise TypeError(f"a list was expected, not {items!r}")
    return [_decode(item, tensors) for item in items]


def get_dtype(name: str) -> torch.dtype:
    """Return the dtype of a name such as "bfloat16".

    Raises:
        ValueError: torch has no dtype of this name.
    """
    if name not in _DTYPES:
        raise ValueError(f"torch has no dtype {name!r}")
    return _DTYPES[name]


_DECODERS: dict[str, Callable[[JSON, Mapping[str, torch.Tensor]], Any]] = {
    "$int": lambda text, _: int(text, 16),
    "$float": lambda text, _: struct.unpack(">d", bytes.fromhex(text))[0],
    "$bytes": lambda text, _: base64.b64decode(text, validate=True),
    "$path": lambda text, _: Path(text),
    "$dtype": lambda text, _: get_dtype(text),
    "$device": lambda text, _: torch.device(text),
    "$env": lambda text, _: Reference(text),
    "$object": lambda text, _: ObjectName(text),
    "$tuple": lambda items, tensors: tuple(_decode_items(items, tensors)),
    "$size": lambda items, tensors: torch.Size(_decode_items(items, tensors)),
    "$set": lambda items, tensors: set(_decode_items(items, tensors)),
    "$frozenset": lambda items, tensors: frozenset(_decode_items(items, tensors)),
    "$dict": lambda pairs, tensors: dict(_decode_items(pairs, tensors)),
    "$tensor": lambda name, tensors: tensors[name],
    "$leaf": lambda name, tensors: tensors[name].requires_grad_(),
    "$parameter": lambda name, tensors: nn.Parameter(tensors[name]),
    "$frozen_parameter": lambda name, tensors: nn.Parameter(tensors[name], requires_grad=False),
    "$scalar": lambda pair, tensors: _SCALARS[pair[0]](_decode(pair[1], tensors)),
    "$array": lambda name, tensors: tensors[name].cpu().numpy(),
}
