"""Reader and writer of one safetensors file, tensor by tensor, with verification of the header."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePath

import torch

from lumen.checkpoint.format.codec import JSON
from lumen.checkpoint.format.manifest import create_hashed_file, parse_json
from lumen.checkpoint.format.storage import explain_read_errors, get_storage
from lumen.errors import CheckpointDamaged

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.complex64: "C64", torch.bool: "BOOL",
}  # fmt: skip
BATCHED_COPY_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64)  # torch supports these
_BATCHED_WRITE_BYTES = 1 << 20


def is_supported_dtype(dtype: torch.dtype) -> bool:
    """Return True if safetensors files can hold a dtype."""
    return dtype in _DTYPES


def write_safetensors(
    path: PurePath, tensors: Mapping[str, torch.Tensor], get_tensor: Callable[[str], torch.Tensor] | None = None
) -> dict[str, int | str]:
    """Write one safetensors file, one tensor at a time, and wait until the file is durable.

    A dtype that safetensors does not support (complex128) is stored as bytes: U8 with one more dimension.

    Args:
        path: The file to create.
        tensors: The tensors by name, on any device.
        get_tensor: Function that returns the tensor to write for a name; called in order of falling item size. Default:
            lookup in `tensors`.

    Returns:
        The file's size in `bytes` and its `sha256`.

    Raises:
        CheckpointError: The file exists, or the storage refuses.
    """
    names = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)  # falling item size aligns every tensor
    header: dict[str, JSON] = {"__metadata__": {"format": "pt"}}  # some readers require this entry
    end = 0
    for name in names:
        header[name] = _make_header_entry(tensors[name].dtype, tuple(tensors[name].shape), end)
        end = header[name]["data_offsets"][1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    get = tensors.__getitem__ if get_tensor is None else get_tensor
    with create_hashed_file(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for batch in _batch_small_tensors(tensors, names):
            values = [get(name) for name in batch]
            file.write(as_bytes_view(values[0] if len(values) == 1 else torch.cat([*map(flatten_tensor, values)])))
    return file.record()


def _batch_small_tensors(tensors: Mapping[str, torch.Tensor], names: Sequence[str]) -> Iterator[list[str]]:
    """Yield batches of names that are written at once, because many small writes are slow."""
    group: list[str] = []
    size = 0
    kind: torch.dtype | None = None
    for name in names:
        tensor = tensors[name]
        if group and not (tensor.dtype == kind in BATCHED_COPY_DTYPES and size + tensor.nbytes <= _BATCHED_WRITE_BYTES):
            yield group
            group, size = [], 0
        group.append(name)
        size, kind = size + tensor.nbytes, tensor.dtype
    if group:
        yield group


def check_header(path: PurePath, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, int]:
    """Check that a file holds exactly the tensors that the manifest lists for the file, without extra bytes.

    Args:
        path: The safetensors file.
        tensors: Dtype and shape of each tensor in the manifest, by name.

    Returns:
        Offset in bytes from the start of the file at which each tensor begins, by name.

    Raises:
        CheckpointDamaged: The file holds something else; the message names the first difference.
    """
    header, start, size = _read_raw_header(path)
    if unmatched := sorted(header.keys() ^ tensors.keys()):
        raise CheckpointDamaged(f"{path} and the manifest disagree: only one of them has the tensor {unmatched[0]!r}.")
    begins: dict[str, int] = {}
    end = 0
    try:
        for name in sorted(tensors, key=lambda name: header[name]["data_offsets"]):
            expected = _make_header_entry(*tensors[name], end)
            if header[name] != expected:
                raise ValueError(f"the tensor {name!r} is {header[name]} instead of {expected}")
            begins[name] = start + end
            end = expected["data_offsets"][1]
        if start + end != size:
            raise ValueError(f"{size - start - end} bytes belong to no tensor")
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointDamaged(f"{path} has unexpected content: {error}.") from error
    return begins


def read_header(path: PurePath) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return dtype and shape of every tensor of a safetensors file; pass them to `check_header` before reading.

    Raises:
        CheckpointDamaged: The file is not a safetensors file, or has a dtype that torch lacks.
    """
    header, _, _ = _read_raw_header(path)
    known = {text: dtype for dtype, text in _DTYPES.items()}
    tensors = {}
    for name, entry in header.items():
        try:
            dtype, shape = known[entry["dtype"]], tuple(entry["shape"])
        except (KeyError, TypeError) as error:
            raise CheckpointDamaged(f"{path} has an entry that cannot be read: {name!r}: {entry!r}.") from error
        if any(type(size) is not int or size < 0 for size in shape):
            raise CheckpointDamaged(f"{path} has an invalid shape for {name!r}: {shape}.")
        tensors[name] = dtype, shape
    return tensors


def _read_raw_header(path: PurePath) -> tuple[dict[str, JSON], int, int]:
    """Return the entries of a file's header, the offset at which the data begins and the file size, both in bytes."""
    storage = get_storage(path)
    with explain_read_errors(path):
        size = storage.get_size(path)
        read_into = storage.make_piece_reader(path.parent, {path.name: size})
        read_into(path.name, 0, memoryview(length := bytearray(min(8, size))))
        start = 8 + int.from_bytes(length, "little")
        if start > size:
            raise CheckpointDamaged(f"{path} is not a safetensors file, or ends inside its header.")
        read_into(path.name, 8, memoryview(text := bytearray(start - 8)))
    header = parse_json(path, text)
    header.pop("__metadata__", None)
    return header, start, size


def _make_header_entry(dtype: torch.dtype, shape: tuple[int, ...], begin: int) -> dict[str, JSON]:
    """Return a tensor's entry in the header; `begin` counts from the end of the header."""
    offsets = [begin, begin + math.prod(shape) * dtype.itemsize]
    if dtype in _DTYPES:
        return {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": offsets}
    return {"dtype": "U8", "shape": [*shape, dtype.itemsize], "data_offsets": offsets}


def as_bytes_view(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's bytes; a view without a copy if the tensor is contiguous on the host."""
    return flatten_tensor(tensor).view(torch.uint8).numpy().data


def flatten_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements in one dimension; without a copy if the tensor is contiguous on the host.

    Raises:
        RuntimeError: The tensor's memory was freed.
    """
    plain = tensor.detach()
    if not is_contiguous_on_host(plain):
        plain = torch.empty(plain.shape, dtype=plain.dtype, device="cpu").copy_(plain)
    # `reshape` would ignore freed memory, and treats a single element as contiguous with any stride.
    return plain.as_strided((plain.numel(),), (1,))


def is_contiguous_on_host(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is contiguous on the host, without lazy conjugation or negation."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
