"""Checkpoints on disk: make, compare and modify them, also like an attacker."""

import hashlib
import json
import math
import re
import struct
from pathlib import Path

import numpy as np
import torch

from lumen.checkpoint.format.codec import encode
from lumen.checkpoint.format.reader import Checkpoint
from lumen.checkpoint.format.safetensors_file import write_safetensors
from lumen.checkpoint.save.writer import write_checkpoint

KNOWN = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64),
]
DTYPES = [*KNOWN, torch.complex128, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2]  # safetensors lacks some of them
SHAPES = [(), (0,), (3, 0, 2), (1,), (7,), (2, 3, 5)]
FILES = [
    *("manifest.json", "state.json", "model/00000-00000.safetensors", "model/00000-00001.safetensors"),
    "optimizer/00000-00000.safetensors",
]  # files of a `small` checkpoint
#: Layouts of shards of a tensor with five rows and three columns.
REGIONS = {
    "rows": [((0, 2), (0, 3)), ((2, 5), (0, 3))],
    "mixed": [((2, 5), (1, 3)), ((0, 2), (0, 3)), ((2, 5), (0, 1))],
    "columns": [((0, 5), (0, 1)), ((0, 5), (1, 2)), ((0, 5), (2, 3)), ((5, 5), (0, 3))],
}


def is_same_tensor(a, b):
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, dict):
        return is_same_tensor(list(a.items()), list(b.items()))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(is_same_tensor, a, b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and read_tensor_bytes(a) == read_tensor_bytes(b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return a == b


def read_tensor_bytes(tensor):
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def make_tensor(dtype, shape):
    size = math.prod(shape) * dtype.itemsize
    data = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8)
    return data.view(dtype).reshape(shape)


def count_read_bytes():
    """Return the bytes that this process has read, from any source."""
    return int(re.search("rchar: ([0-9]+)", Path("/proc/self/io").read_text())[1])


def read_memory_mib(which):
    """Return the memory of this process in MiB: "VmRSS" is the current use, "VmHWM" the peak."""
    return int(re.search(which + r":\s+([0-9]+) kB", Path("/proc/self/status").read_text())[1]) / 1024


def save(directory, **sections):
    write_checkpoint(directory, sections, {}, info={"step": int(directory.name[5:])})
    return directory


def save_small(directory, value=1.0, max_file_bytes=64):
    """Write a checkpoint with two model files, an optimizer file and state."""
    sections = {
        "model": {"a": torch.full((4, 4), value), "b": torch.full((3,), value, dtype=torch.bfloat16)},
        "optimizer": {"a.exp_avg": torch.full((4, 4), -value)},
        "extra": {},
    }
    info = {"step": int(directory.name[5:]), "metrics": {"loss": math.nan}, "finished": False, "best": (1, 2)}
    state = {"epoch": encode({1: (2, 3)}, {}, "epoch"), "value": value}
    write_checkpoint(directory, sections, state, aliases={"tied": "a"}, info=info, max_file_bytes=max_file_bytes)
    return directory


def read_tensors(path, *sections):
    """Return the tensors of a checkpoint, by section and name."""
    checkpoint = Checkpoint.open(path)
    return {(section, name): each for section in sections for name, each in checkpoint.as_mapping(section).items()}


def assert_small(directory, value=1.0):
    checkpoint = Checkpoint.open(directory)
    assert checkpoint.state == {"epoch": {"$dict": [[1, {"$tuple": [2, 3]}]]}, "value": value}
    assert checkpoint.list_tensor_names("model") == ["a", "b"]
    assert torch.equal(checkpoint.read_tensor("model", "a"), torch.full((4, 4), value))
    assert torch.equal(checkpoint.read_tensor("model", "b"), torch.full((3,), value, dtype=torch.bfloat16))
    assert torch.equal(checkpoint.read_tensor("optimizer", "a.exp_avg"), torch.full((4, 4), -value))


def tamper_with_manifest(directory, edit):
    """Change a manifest and update its digest, like an attacker."""
    path = directory / "manifest.json"
    manifest = json.loads(path.read_text())
    edit(manifest)
    del manifest["digest"]
    canonical = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps(manifest | {"digest": hashlib.sha256(canonical.encode()).hexdigest()}))


def write_chunked(directory, dtype, shape, regions):
    """Write a checkpoint of one tensor in several chunks, each in a separate file."""
    save(directory, model={"w": make_tensor(dtype, shape), "other": torch.ones(2)})
    tensor = Checkpoint.open(directory).read_tensor("model", "w")
    (directory / "model/00000-00000.safetensors").unlink()
    records, chunks = {}, []
    for rank, region in enumerate(regions):
        file = f"model/{rank:05d}-00000.safetensors"
        part = tensor[tuple(slice(*bounds) for bounds in region)]
        others = {"other": torch.ones(2)} if rank == 0 else {}
        records[file] = write_safetensors(directory / file, {"w": part, **others})
        chunks.append([file, [begin for begin, _ in region], list(part.shape)])

    def edit(manifest):
        manifest["files"] |= records
        manifest["sections"]["model"]["w"]["chunks"] = chunks

    tamper_with_manifest(directory, edit)
    return tensor
