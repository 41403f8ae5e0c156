"""Checkpoints on disk: exact round trips, and no damage, fault, kill or attack that goes unnoticed or spreads."""

import errno
import hashlib
import io
import json
import math
import multiprocessing
import os
import pickle
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections import Counter, OrderedDict, defaultdict
from enum import IntEnum
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lumen.checkpoint.codec import decode, encode
from lumen.checkpoint.storage import (
    Checkpoint,
    clean_leftovers,
    find_checkpoints,
    newest_valid,
    read_info,
    remove_checkpoint,
    set_aside,
    write_checkpoint,
    write_safetensors,
)
from lumen.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch

# ------------------------------------------------------------------------------------------------------------ codec


def same(a, b):
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return a == b


def raw(tensor):
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def round_trip(value):
    tensors = {}
    return decode(json.loads(json.dumps(encode(value, tensors, "value"), allow_nan=False)), tensors)


SIGNALLING_NAN = struct.unpack("<d", struct.pack("<Q", 0xFFF0000000000123))[0]
LEAVES = [
    *(None, True, False, 0, -1, 2**63, -(2**200), 10**5000, 0.0, -0.0, 0.1, 5e-324, 1.7976931348623157e308),
    *(math.nan, -math.nan, SIGNALLING_NAN, math.inf, -math.inf, "", "ü\0\ud800", "$tuple", b"", b"\x00\xff"),
    *(Path("a/b"), Path("/"), torch.bfloat16, torch.device("cuda:3"), torch.device("cpu"), torch.Size([2, 0])),
    *((), [], {}, set(), frozenset()),
]


@pytest.mark.parametrize("value", LEAVES, ids=lambda value: repr(value)[:20] if value != 10**5000 else "huge")
def test_every_plain_value_survives_exactly(value):
    assert same(round_trip(value), value)


def random_value(rng, depth):
    if depth == 0 or rng.random() < 0.3:
        return rng.choice(LEAVES)
    hashable = [1, 2.5, "a", "$a", None, True, (1, ("b", -0.0)), -7, "a.b", b"x"]
    items = [random_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    match rng.randrange(6):
        case 0:
            return items
        case 1:
            return tuple(items)
        case 2:
            return set(rng.sample(hashable, 3))
        case 3:
            return {rng.choice(["$tuple", "$dict", "plain", ""]): item for item in items}
        case 4:
            return dict(zip(rng.sample(hashable[:-1], len(items)), items, strict=True))
        case _:
            return rng.choice([torch.randn(2, 1), np.arange(3, dtype=np.uint16), torch.tensor(1, dtype=torch.int8)])


def test_random_nested_data_survives_exactly():
    rng = random.Random(0)
    for _ in range(500):
        value = random_value(rng, 5)
        assert same(round_trip(value), value), value


def test_scalars_and_dictionaries_of_other_kinds_become_plain_ones():
    value = [np.float32(0.1), np.int8(-3), np.bool_(True), np.str_("x"), np.bytes_(b"y"), np.float64("inf")]
    assert same(round_trip(value), [float(np.float32(0.1)), -3, True, "x", b"y", math.inf])
    ordered, default, counter = OrderedDict(b=1, a=2), defaultdict(list, {3: [4]}), Counter("aab")
    assert same(round_trip([ordered, default, counter]), [{"b": 1, "a": 2}, {3: [4]}, {"a": 2, "b": 1}])
    assert same(round_trip({np.int64(4): 1}), {4: 1})


@pytest.mark.parametrize("dtype", ["?", "u1", "u2", "u4", "u8", "i1", "i8", "f2", "f4", "f8", "c8", "c16"])
def test_arrays_of_any_strides_survive(dtype):
    array = np.arange(24).reshape(4, 6).astype(dtype)
    views = [array, array.T, array[::-1, ::2], np.broadcast_to(array[0], (3, 6)), array[2, 3:4].reshape(()), array[:0]]
    assert same(round_trip(views), views)


def test_tensors_with_one_path_are_kept_apart():
    value = {"a.b": torch.tensor(1), "a": {"b": torch.tensor(2), "b'": torch.tensor(3)}}
    assert same(round_trip(value), value)


class Colour(IntEnum):
    RED = 1


class Text(str):
    pass


REFUSED = {
    "lambda": lambda: None,
    "module": torch.nn.Linear(1, 1),
    "enum": Colour.RED,
    "subclass": Text("x"),
    "complex": 1j,
    "type": int,
    "long double": np.longdouble(1),
    "date": np.datetime64("2020-01-01T00", "ns"),
    "duration": np.timedelta64(1, "ns"),
    "object array": np.array([None]),
    "text array": np.array(["a"]),
    "swapped array": np.array([1.0]).astype(">f8"),
    "masked array": np.ma.masked_array([1], [True]),
    "tensor as key": {(torch.tensor(1),): 1},
    "bytes as key": {b"x": 1},
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_saved_is_named_with_its_path(kind):
    with pytest.raises(
        CheckpointError, match=r"callbacks\.Mine\.items\[1\].*(cannot be saved|be part of a key)"
    ) as error:
        encode({"Mine": {"items": [0, REFUSED[kind]]}}, {}, "callbacks")
    assert len(str(error.value)) < 300


def test_a_cycle_and_endless_nesting_are_errors():
    cycle = {"a": []}
    cycle["a"].append((cycle,))
    with pytest.raises(CheckpointError, match=r"x\.a\[0\]\[0\]: this dict contains itself"):
        encode(cycle, {}, "x")
    deep = []
    for _ in range(101):
        deep = [deep]
    with pytest.raises(CheckpointError, match="nested more than 100 deep"):
        encode(deep, {}, "x")
    assert same(round_trip(deep[0]), deep[0])
    shared = [1]
    assert same(round_trip([shared, shared]), [[1], [1]])


MALFORMED = [
    *({"$tuple": 5}, {"$tuple": []} | {"b": 1}, {"$unknown": 1}, {"$int": 5}, {"$int": "z"}, {"$float": "00"}),
    *({"$bytes": "?"}, {"$path": 3}, {"$dtype": "load"}, {"$dtype": []}, {"$device": "nowhere"}, {"$size": ["a"]}),
    *({"$size": [[]]}, {"$dict": [[1]]}, {"$dict": [[[], 1]]}, {"$tensor": "gone"}, {"$array": []}, {"$set": [[]]}),
]


@pytest.mark.parametrize("value", MALFORMED, ids=str)
def test_malformed_data_is_reported_as_damage(value):
    with pytest.raises(CheckpointDamaged, match="cannot be decoded"):
        decode([value], {})


# ------------------------------------------------------------------------------------------------------ round trips

KNOWN = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz]
KNOWN += [
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.complex64,
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.uint32,
]
KNOWN += [torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64]
DTYPES = [*KNOWN, torch.complex128, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2]  # safetensors does not know them all
SHAPES = [(), (0,), (3, 0, 2), (1,), (7,), (2, 3, 5)]


def tensor_of(dtype, shape):
    size = math.prod(shape) * dtype.itemsize
    data = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8)
    return data.view(dtype).reshape(shape)


def save(directory, **sections):
    write_checkpoint(directory, sections, {}, info={"step": int(directory.name[5:])})
    return directory


def small(directory, value=1.0, max_file_bytes=64):
    """A checkpoint with two model files, an optimizer file and state."""
    sections = {
        "model": {"a": torch.full((4, 4), value), "b": torch.full((3,), value, dtype=torch.bfloat16)},
        "optimizer": {"a.exp_avg": torch.full((4, 4), -value)},
        "extra": {},
    }
    info = {"step": int(directory.name[5:]), "metrics": {"loss": math.nan}, "finished": False, "best": (1, 2)}
    state = {"epoch": encode({1: (2, 3)}, {}, "epoch"), "value": value}
    write_checkpoint(directory, sections, state, aliases={"tied": "a"}, info=info, max_file_bytes=max_file_bytes)
    return directory


def assert_small(directory, value=1.0):
    checkpoint = Checkpoint.open(directory)
    assert checkpoint.state == {"epoch": {"$dict": [[1, {"$tuple": [2, 3]}]]}, "value": value}
    assert checkpoint.names("model") == ["a", "b"]
    assert torch.equal(checkpoint.tensor("model", "a"), torch.full((4, 4), value))
    assert torch.equal(checkpoint.tensor("model", "b"), torch.full((3,), value, dtype=torch.bfloat16))
    assert torch.equal(checkpoint.tensor("optimizer", "a.exp_avg"), torch.full((4, 4), -value))


@pytest.mark.parametrize("max_file_bytes", [1, 300, 2 << 30])
def test_every_dtype_and_shape_survives_bit_for_bit(tmp_path, max_file_bytes):
    tensors = {f"{dtype}/{shape}": tensor_of(dtype, shape) for dtype in DTYPES for shape in SHAPES}
    path = tmp_path / "step-1"
    write_checkpoint(path, {"model": tensors}, {}, info={}, max_file_bytes=max_file_bytes)
    checkpoint = Checkpoint.open(path)
    assert checkpoint.names("model") == list(tensors)
    for name, tensor in tensors.items():
        assert checkpoint.spec("model", name) == (tensor.dtype, tensor.shape)
        assert same(checkpoint.tensor("model", name), tensor)
        target = tensor_of(tensor.dtype, tensor.shape)
        address = target.data_ptr()
        checkpoint.copy_into("model", name, target)
        assert same(target, tensor)
        assert target.data_ptr() == address
    lazy = checkpoint.tensors("model")
    assert list(lazy) == list(tensors)
    assert len(lazy) == len(tensors)
    assert all(same(lazy[name], tensor) for name, tensor in tensors.items())
    assert "nothing" not in lazy


def test_files_are_bounded_and_readable_by_safetensors(tmp_path):
    tensors = {f"t{i}": tensor_of(dtype, (2, 3)) for i, dtype in enumerate(DTYPES)} | {"big": torch.randn(200)}
    path = tmp_path / "step-1"
    write_checkpoint(path, {"model": tensors}, {}, info={}, max_file_bytes=100)
    found = {}
    for file in (path / "model").iterdir():
        data = file.read_bytes()
        header = int.from_bytes(data[:8], "little")
        assert header % 8 == 0
        entries = json.loads(data[8 : 8 + header])
        assert all(entries[name]["data_offsets"][0] % t.itemsize == 0 for name, t in tensors.items() if name in entries)
        loaded = load_file(file)
        assert len(data) - 8 - header <= 100 or list(loaded) == ["big"]
        found |= loaded
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert raw(found[name]) == raw(tensor)
        assert found[name].dtype == (tensor.dtype if tensor.dtype in KNOWN else torch.uint8)
    assert not list(tmp_path.glob("*.tmp-*"))


def test_views_of_any_kind_are_saved_as_what_they_show(tmp_path):
    base = torch.randn(6, 4)
    values = torch.randn(4, dtype=torch.complex64)
    views = {
        "transposed": base.T,
        "strided": base[::2, 1:3],
        "expanded": base[:1].expand(5, 4),
        "conjugated": values.conj(),
        "negated": values.conj().imag,
        "parameter": torch.nn.Parameter(base),
        "same memory": base,
    }
    checkpoint = Checkpoint.open(save(tmp_path / "step-1", model=views))
    for name, view in views.items():
        assert torch.equal(checkpoint.tensor("model", name), view), name


def test_copy_into_fills_views_and_parameters_and_casts_nothing(tmp_path):
    checkpoint = Checkpoint.open(save(tmp_path / "step-1", model={"w": torch.arange(6.0).reshape(2, 3)}))
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    checkpoint.copy_into("model", "w", parameter)
    assert torch.equal(parameter, torch.arange(6.0).reshape(2, 3))
    whole = torch.zeros(3, 4)
    checkpoint.copy_into("model", "w", whole[:, 1:3].T)
    assert torch.equal(whole[:, 1:3].T, parameter)
    assert whole[:, [0, 3]].eq(0).all()
    for target in (torch.zeros(2, 3, dtype=torch.float64), torch.zeros(3, 2), torch.zeros(2, 3, device="meta")):
        with pytest.raises(CheckpointMismatch, match=r"model/w is torch.float32 \[2, 3\]"):
            checkpoint.copy_into("model", "w", target)
    with pytest.raises(CheckpointMismatch, match="no tensor 'v'"):
        checkpoint.tensor("model", "v")
    with pytest.raises(CheckpointMismatch, match="no section 'modle'"):
        checkpoint.names("modle")


def test_a_default_device_changes_nothing(tmp_path):
    path = save(tmp_path / "step-1", model={"w": torch.randn(4, 2).T})
    with torch.device("meta"):
        save(tmp_path / "step-2", model={"w": Checkpoint.open(path).tensor("model", "w").T})
        assert Checkpoint.open(tmp_path / "step-2").tensor("model", "w").device.type == "cpu"


def test_the_manifest_tells_what_is_inside(tmp_path):
    path = small(tmp_path / "step-00000007")
    assert sorted(p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()) == [
        *("manifest.json", "model/00000-00000.safetensors", "model/00000-00001.safetensors"),
        *("optimizer/00000-00000.safetensors", "state.json"),
    ]
    assert not (path / "extra").exists()
    checkpoint = Checkpoint.open(path, verify="sizes")
    assert checkpoint.names("extra") == []
    assert checkpoint.aliases == {"tied": "a"}
    assert same(checkpoint.info, read_info(path))
    assert same(checkpoint.info, {"step": 7, "metrics": {"loss": math.nan}, "finished": False, "best": (1, 2)})
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["format"] == 1
    for name, record in manifest["files"].items():
        data = (path / name).read_bytes()
        assert record == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def handmade(directory, dtype, shape, regions):
    """A checkpoint of one tensor in several chunks, each in a file of its own."""
    save(directory, model={"w": tensor_of(dtype, shape), "other": torch.ones(2)})
    tensor = Checkpoint.open(directory).tensor("model", "w")
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

    tamper(directory, edit)
    return tensor


def tamper(directory, edit):
    """Change a manifest and make its digest right again, as an attacker would."""
    path = directory / "manifest.json"
    manifest = json.loads(path.read_text())
    edit(manifest)
    del manifest["digest"]
    canonical = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps(manifest | {"digest": hashlib.sha256(canonical.encode()).hexdigest()}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.float8_e5m2, torch.complex128])
@pytest.mark.parametrize(
    "regions",
    [
        [((0, 2), (0, 3)), ((2, 5), (0, 3))],
        [((2, 5), (1, 3)), ((0, 2), (0, 3)), ((2, 5), (0, 1))],
        [((0, 5), (0, 1)), ((0, 5), (1, 2)), ((0, 5), (2, 3)), ((5, 5), (0, 3))],
    ],
    ids=["rows", "mixed", "columns"],
)
def test_a_tensor_in_several_chunks_is_assembled(tmp_path, dtype, regions):
    tensor = handmade(tmp_path / "step-1", dtype, (5, 3), regions)
    checkpoint = Checkpoint.open(tmp_path / "step-1")
    assert same(checkpoint.tensor("model", "w"), tensor)
    assert torch.equal(checkpoint.tensor("model", "other"), torch.ones(2))


@pytest.mark.parametrize(
    ("regions", "complaint"),
    [
        ([((0, 2), (0, 3))], "have 6 of its 15 elements"),
        ([((0, 3), (0, 3)), ((2, 4), (0, 3))], "overlap"),
        ([((0, 5), (0, 2)), ((0, 5), (1, 2))], "overlap"),
        ([((0, 5), (0, 3)), ((0, 5), (0, 3))], "have 30 of its 15 elements"),
    ],
)
def test_chunks_that_do_not_cover_a_tensor_exactly_are_damage(tmp_path, regions, complaint):
    handmade(tmp_path / "step-1", torch.float32, (5, 3), regions)
    with pytest.raises(CheckpointDamaged, match=complaint):
        Checkpoint.open(tmp_path / "step-1")


def test_stored_bytes_cannot_stand_for_two_chunks(tmp_path):
    handmade(tmp_path / "step-1", torch.float32, (4, 3), [((0, 2), (0, 3)), ((2, 4), (0, 3))])

    def edit(manifest):
        first, second = manifest["sections"]["model"]["w"]["chunks"]
        del manifest["files"][second[0]]
        second[0] = first[0]

    tamper(tmp_path / "step-1", edit)
    with pytest.raises(CheckpointDamaged, match=r"places model/w in 'model/00000-00000\.safetensors'"):
        Checkpoint.open(tmp_path / "step-1")


# ----------------------------------------------------------------------------------------------- damage and attacks


def files_of(directory):
    return sorted(p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file())


FILES = ["manifest.json", "state.json", "model/00000-00000.safetensors", "model/00000-00001.safetensors"]
FILES += ["optimizer/00000-00000.safetensors"]


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte_is_named(tmp_path, name):
    path = small(tmp_path / "step-1")
    data = (path / name).read_bytes()
    for position in {*range(0, len(data), max(1, len(data) // 60)), len(data) - 1}:
        (path / name).write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        with pytest.raises(CheckpointDamaged, match=name):
            Checkpoint.open(path)
    (path / name).write_bytes(data)
    assert_small(path)


@pytest.mark.parametrize("verify", ["checksums", "sizes"])
@pytest.mark.parametrize("name", FILES)
def test_a_short_long_or_missing_file_is_named(tmp_path, name, verify):
    path = small(tmp_path / "step-1")
    data = (path / name).read_bytes()
    for changed in (b"", data[:7], data[:-1], data + b"\0"):
        (path / name).write_bytes(changed)
        with pytest.raises(CheckpointDamaged, match=name):
            Checkpoint.open(path, verify)
    (path / name).unlink()
    with pytest.raises(CheckpointDamaged, match=name):
        Checkpoint.open(path, verify)
    os.mkfifo(path / name)  # opening it would wait for ever
    with pytest.raises(CheckpointDamaged, match=name):
        Checkpoint.open(path, verify)


def test_a_file_that_changes_after_opening_is_damage(tmp_path):
    checkpoint = Checkpoint.open(small(tmp_path / "step-1"))
    os.truncate(tmp_path / "step-1" / FILES[2], 100)
    with pytest.raises(CheckpointDamaged, match=f"{FILES[2]} became shorter"):
        checkpoint.tensor("model", "a")
    (tmp_path / "step-1" / FILES[2]).unlink()
    with pytest.raises(CheckpointDamaged, match=FILES[2]):
        checkpoint.tensor("model", "a")


def chunks_of(manifest):
    return manifest["sections"]["model"]["a"]["chunks"]


def renamed(name):
    def edit(manifest):
        manifest["files"][name] = manifest["files"].pop(FILES[2])
        chunks_of(manifest)[0][0] = name

    return edit


TAMPERINGS = {
    "parent path": renamed("../step-2/model/00000-00000.safetensors"),
    "parent inside": renamed("model/../../step-2/model/00000-00000.safetensors"),
    "absolute path": renamed("/etc/passwd"),
    "zero byte": renamed("model/a\0.safetensors"),
    "other suffix": renamed("model/evil.pkl"),
    "other section": lambda m: chunks_of(m)[0].__setitem__(0, FILES[4]),
    "unlisted file": lambda m: chunks_of(m)[0].__setitem__(0, "model/none.safetensors"),
    "unhashable file": lambda m: chunks_of(m)[0].__setitem__(0, []),
    "no state": lambda m: m["files"].pop("state.json"),
    "negative size": lambda m: m["files"][FILES[2]].__setitem__("bytes", -1),
    "boolean size": lambda m: m["files"][FILES[2]].__setitem__("bytes", True),
    "files as list": lambda m: m.__setitem__("files", []),
    "files as number": lambda m: m["files"].__setitem__(FILES[2], 3),
    "no sections": lambda m: m.pop("sections"),
    "null section": lambda m: m["sections"].__setitem__("model", None),
    "no chunk": lambda m: chunks_of(m).clear(),
    "a chunk twice": lambda m: chunks_of(m).append(chunks_of(m)[0]),
    "an empty chunk twice": lambda m: chunks_of(m).append([FILES[2], [0, 0], [0, 4]]),
    "short chunk": lambda m: chunks_of(m)[0].pop(),
    "chunk outside": lambda m: chunks_of(m)[0].__setitem__(1, [1, 0]),
    "fractional shape": lambda m: m["sections"]["model"]["a"].__setitem__("shape", [4.0, 4]),
    "fractional chunk": lambda m: chunks_of(m)[0].__setitem__(2, [4.0, 4]),
    "chunk of other rank": lambda m: chunks_of(m)[0].__setitem__(2, [16]),
    "other dtype": lambda m: m["sections"]["model"]["a"].__setitem__("dtype", "int32"),
    "wider dtype": lambda m: m["sections"]["model"]["a"].__setitem__("dtype", "float64"),
    "unknown dtype": lambda m: m["sections"]["model"]["a"].__setitem__("dtype", "load"),
    "other shape": lambda m: m["sections"]["model"].__setitem__(
        "a", {"dtype": "float32", "shape": [2, 8], "chunks": [[FILES[2], [0, 0], [2, 8]]]}
    ),
    "huge shape": lambda m: m["sections"]["model"].__setitem__(
        "a", {"dtype": "float32", "shape": [10**4000] * 2, "chunks": [[FILES[2], [0, 0], [10**4000] * 2]]}
    ),
    "tensor dropped": lambda m: m["sections"]["model"].pop("b"),
    "tensor renamed": lambda m: m["sections"]["model"].__setitem__("c", m["sections"]["model"].pop("b")),
    "tensor added": lambda m: m["sections"]["model"].__setitem__("c", m["sections"]["model"]["b"]),
    "alias of nothing": lambda m: m["aliases"].__setitem__("x", "y"),
    "alias unhashable": lambda m: m["aliases"].__setitem__("x", []),
    "info as list": lambda m: m.__setitem__("info", [1]),
    "info with tensor": lambda m: m.__setitem__("info", {"x": {"$tensor": "a"}}),
}


@pytest.mark.parametrize("kind", TAMPERINGS)
def test_a_tampered_manifest_is_refused(tmp_path, kind):
    small(tmp_path / "step-2")
    path = small(tmp_path / "step-1")
    tamper(path, TAMPERINGS[kind])
    with pytest.raises(CheckpointDamaged, match=r"step-1/(manifest\.json|model/)"):
        Checkpoint.open(path)


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"null", b"\xff", b"[" * 100_000, b"9" * 5000, b'{"digest": NaN}', b'{"a": "\\ud800"}']
)
def test_an_unparsable_manifest_is_damage(tmp_path, text):
    path = small(tmp_path / "step-1")
    (path / "manifest.json").write_bytes(text)
    with pytest.raises(CheckpointDamaged, match=r"manifest\.json"):
        Checkpoint.open(path)
    assert find_checkpoints(tmp_path) == []


ENTRY = {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}
HEADERS = [
    *(b"", b"[]", b"{", b"[" * 50_000, b'{"a": 3}', json.dumps({"a": ENTRY | {"shape": [8, 2]}}).encode()),
    *(json.dumps({"a": ENTRY | {"data_offsets": x}}).encode() for x in ([], [0], [4, 68], [-64, 0], ["0", 64], None)),
    *(json.dumps({"a": ENTRY | {"dtype": "I32"}}).encode(), json.dumps({"b": ENTRY}).encode()),
    *(json.dumps({"a": entry}).encode() for entry in ({"dtype": "F32", "shape": [4, 4]}, ENTRY | {"x": 1})),
]
CASES = [*((header, 64) for header in HEADERS), (json.dumps({"a": ENTRY}).encode(), 72)]


@pytest.mark.parametrize(("header", "data_bytes"), CASES, ids=lambda x: x[:70].decode() if isinstance(x, bytes) else x)
def test_a_header_that_disagrees_with_the_manifest_is_damage(tmp_path, header, data_bytes):
    path = small(tmp_path / "step-1")
    data = len(header).to_bytes(8, "little") + header + bytes(data_bytes)
    (path / FILES[2]).write_bytes(data)
    record = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    tamper(path, lambda manifest: manifest["files"].__setitem__(FILES[2], record))
    with pytest.raises(CheckpointDamaged, match=FILES[2]):
        Checkpoint.open(path)


@pytest.mark.parametrize("name", FILES)
def test_a_link_that_leaves_the_checkpoint_is_refused(tmp_path, name):
    path = small(tmp_path / "step-1")
    shutil.move(path / name, tmp_path / "outside")
    (path / name).symlink_to(tmp_path / "outside")
    with pytest.raises(CheckpointDamaged, match=f"{name} is a link that leaves"):
        Checkpoint.open(path)


def test_a_linked_folder_inside_a_checkpoint_is_refused_but_a_linked_checkpoint_opens(tmp_path):
    path = small(tmp_path / "step-1")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "step-1").symlink_to(path)
    assert_small(tmp_path / "runs" / "step-1")
    shutil.move(path / "model", tmp_path / "outside")
    (path / "model").symlink_to(tmp_path / "outside")
    with pytest.raises(CheckpointDamaged, match="leaves the checkpoint"):
        Checkpoint.open(path)


class Bomb:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def test_no_pickle_is_ever_executed(tmp_path):
    marker = tmp_path / "executed"
    bomb = pickle.dumps(Bomb(marker))
    path = small(tmp_path / "step-1")
    for name in ("model.pt", ".metadata", "model/00000-00002.safetensors", "optimizer/state.pkl"):
        (path / name).write_bytes(bomb)
    assert_small(path)
    for name in FILES:
        data = (path / name).read_bytes()
        (path / name).write_bytes(bomb)
        with pytest.raises(CheckpointDamaged, match=name):
            Checkpoint.open(path, verify="sizes")
        (path / name).write_bytes(data)
    assert not marker.exists()
    pickle.loads(bomb)
    assert marker.exists()  # the bomb is live


def test_another_format_version_is_no_damage(tmp_path):
    path = small(tmp_path / "step-1")
    tamper(path, lambda manifest: manifest.__setitem__("format", 2))
    for reader in (Checkpoint.open, read_info, lambda p: newest_valid(p.parent, print), small):
        with pytest.raises(CheckpointError, match="has format 2") as error:
            reader(path)
        assert not isinstance(error.value, CheckpointDamaged)
    assert find_checkpoints(tmp_path) == [path]


# ------------------------------------------------------------------------------------------- finding and removing


def test_checkpoints_are_found_by_number_and_only_when_committed(tmp_path):
    assert find_checkpoints(tmp_path / "none") == []
    steps = [small(tmp_path / name) for name in ("step-00000009", "step-10", "step-100000000000", "step-00000011")]
    shutil.copytree(steps[0], tmp_path / "step-12.tmp-abcd")
    shutil.copytree(steps[0], tmp_path / "step-13.damaged-1")
    shutil.copytree(steps[0], tmp_path / "other")
    shutil.copytree(steps[0], tmp_path / "step-14")
    (tmp_path / "step-14" / "manifest.json").unlink()
    (tmp_path / "step-15").mkdir()
    (tmp_path / "step-16").touch()
    assert find_checkpoints(tmp_path) == [steps[0], steps[1], steps[3], steps[2]]


def test_the_newest_intact_checkpoint_is_used_and_every_damaged_one_is_reported(tmp_path):
    for step in (8, 9, 10, 11):
        small(tmp_path / f"step-{step}", value=float(step))
    with open(tmp_path / "step-11" / FILES[3], "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    (tmp_path / "step-10" / "manifest.json").unlink()
    (tmp_path / "step-8" / "state.json").unlink()
    reports = []
    assert newest_valid(tmp_path, reports.append).path == tmp_path / "step-9"
    assert len(reports) == 2
    assert "step-11 is damaged" in reports[0]
    assert FILES[3] in reports[0]
    assert "Trying step-10 instead" in reports[0]
    assert "no manifest.json" in reports[1]
    remove_checkpoint(tmp_path / "step-9")
    assert newest_valid(tmp_path, reports.append) is None
    assert "There is no older one" in reports[-1]
    assert newest_valid(tmp_path / "none", reports.append) is None


def test_a_checkpoint_of_a_step_to_be_validated_is_older_than_the_one_after_it(tmp_path):
    for name in ("step-2", "step-10", "step-10-validating", "step-11-validating"):
        write_checkpoint(tmp_path / name, {}, {}, info={})
    names = [path.name for path in find_checkpoints(tmp_path)]
    assert names == ["step-2", "step-10-validating", "step-10", "step-11-validating"]


def test_setting_aside_frees_the_name_and_keeps_the_bytes(tmp_path):
    for k in (1, 2):
        small(tmp_path / "step-1", value=float(k))
        assert set_aside(tmp_path / "step-1") == tmp_path / f"step-1.damaged-{k}"
        assert_small(tmp_path / f"step-1.damaged-{k}", value=float(k))
    assert find_checkpoints(tmp_path) == []
    with pytest.raises(CheckpointError, match=r"cannot rename .*step-1: No such file"):
        set_aside(tmp_path / "step-1")


def test_a_removal_cut_short_leaves_no_half_checkpoint(tmp_path, monkeypatch):
    path = small(tmp_path / "step-1")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda _: (_ for _ in ()).throw(OSError(errno.EIO, "gone")))
        with pytest.raises(CheckpointError, match=r"cannot remove .*step-1"):
            remove_checkpoint(path)
    assert find_checkpoints(tmp_path) == []
    assert not path.exists()
    (tmp_path / "step-2.tmp-beef").symlink_to("/nowhere")
    (tmp_path / "step-3.tmp-cafe").touch()
    small(tmp_path / "step-4")
    clean_leftovers(tmp_path)
    assert os.listdir(tmp_path) == ["step-4"]


def test_what_is_no_checkpoint_is_not_removed(tmp_path):
    (tmp_path / "precious").mkdir()
    for path in (tmp_path / "precious", tmp_path / "none"):
        with pytest.raises(CheckpointError, match="is no checkpoint"):
            remove_checkpoint(path)
    assert (tmp_path / "precious").exists()


# --------------------------------------------------------------------------------------------- saves that must fail


class Saboteur(dict):
    """Tensors whose reading removes something on the disk."""

    def __init__(self, tensors, target):
        super().__init__(tensors)
        self.target = target
        self.reads = 0

    def __getitem__(self, name):
        self.reads += 1
        if self.reads == 2 * len(self):
            for path in self.target():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        return super().__getitem__(name)


def test_a_committed_checkpoint_is_never_overwritten(tmp_path):
    path = small(tmp_path / "step-1")
    tensors = Saboteur({"w": torch.ones(1)}, list)
    with pytest.raises(CheckpointError, match="never overwritten"):
        save(path, model=tensors)
    assert tensors.reads == 0  # refused before any work
    assert_small(path)
    assert os.listdir(tmp_path) == ["step-1"]


def test_a_damaged_checkpoint_is_set_aside(tmp_path):
    path = tmp_path / "step-1"
    path.touch()
    for name in (FILES[2], "manifest.json"):
        small(path)
        os.truncate(path / name, 5)
    small(path, value=2.0)
    assert_small(path, value=2.0)
    assert sorted(os.listdir(tmp_path)) == ["step-1", *(f"step-1.damaged-{k}" for k in (1, 2, 3))]


BAD_SAVES = {
    "sparse": ({"model": {"w": torch.eye(2).to_sparse()}}, {}, {}, {}, "model/w: a Tensor of torch.float32"),
    "meta": ({"model": {"w": torch.empty(2, device="meta")}}, {}, {}, {}, "model/w: .* meta cannot be saved"),
    "reserved name": ({"model": {"__metadata__": torch.ones(1)}}, {}, {}, {}, "reserves this name"),
    "section": ({"../model": {}}, {}, {}, {}, "cannot name a section"),
    "alias of nothing": ({"model": {}}, {}, {"a": "b"}, {}, "alias 'a' of 'b'"),
    "alias that is stored": ({"model": {"a": torch.ones(1), "b": torch.ones(1)}}, {}, {"a": "b"}, {}, "be none itself"),
    "NaN in state": ({}, {"x": math.nan}, {}, {}, "state is not JSON"),
    "object in state": ({}, {"x": object()}, {}, {}, "state is not JSON"),
    "tuple in state": ({}, {"x": (1,)}, {}, {}, "state is not exactly JSON"),
    "integer key": ({}, {"x": {1: 2}}, {}, {}, "state is not exactly JSON"),
    "object in info": ({}, {}, {}, {"x": object()}, r"info\.x: an object of type object cannot be saved"),
    "tensor in info": ({}, {}, {}, {"x": torch.ones(1)}, r"info\.x: `info` holds no tensors"),
}


@pytest.mark.parametrize("kind", BAD_SAVES)
def test_what_cannot_be_saved_is_found_before_anything_is_written(tmp_path, kind):
    sections, state, aliases, info, complaint = BAD_SAVES[kind]
    with pytest.raises(CheckpointError, match=complaint):
        write_checkpoint(tmp_path / "runs" / "step-1", sections, state, aliases=aliases, info=info)
    assert os.listdir(tmp_path) == []


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "checkpoints").touch()
    with pytest.raises(CheckpointError, match=r"cannot write .*checkpoints.* A file is in the way"):
        small(tmp_path / "checkpoints" / "step-1")


@pytest.mark.parametrize("pattern", ["step-2.tmp-*", "step-2.tmp-*/model/00000-00000.safetensors", "."])
def test_a_directory_removed_meanwhile_is_an_error_and_no_checkpoint(tmp_path, pattern):
    folder = tmp_path / "checkpoints"
    small(folder / "step-1")
    tensors = Saboteur(
        {f"t{i}": torch.ones(9) for i in range(8)}, lambda: [folder] if pattern == "." else folder.glob(pattern)
    )
    with pytest.raises(CheckpointError, match=r"step-2|checkpoints"):
        write_checkpoint(folder / "step-2", {"model": tensors}, {}, info={}, max_file_bytes=1)
    assert tensors.reads >= 2 * len(tensors)
    assert find_checkpoints(folder) == ([] if pattern == "." else [folder / "step-1"])
    assert not list(folder.glob("*.tmp-*"))


class Faults:
    """Makes the k-th operation of a save on the disk fail, alone or with all that follow."""

    def __init__(self, patch, k, forever):
        self.done = 0
        self.k = k
        self.forever = forever
        real_open = open
        for name in ("open", "fsync", "mkdir", "rename", "unlink", "rmdir"):
            patch.setattr(os, name, self.failing(getattr(os, name)))

        faults = self

        class Writer(io.FileIO):
            def write(self, data):
                faults.step()
                return super().write(data)

        def opening(path, mode="r", *args, **kwargs):
            self.step()
            return Writer(path, mode) if "x" in mode else real_open(path, mode, *args, **kwargs)

        patch.setattr("builtins.open", opening)

    def step(self):
        self.done += 1
        if self.done == self.k or (self.forever and self.done > self.k):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def failing(self, function):
        def wrapper(*args, **kwargs):
            self.step()
            return function(*args, **kwargs)

        return wrapper


@pytest.mark.parametrize("forever", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("occupied", [False, True], ids=["free", "damaged there"])
def test_a_fault_at_any_operation_leaves_all_or_nothing(tmp_path, forever, occupied):
    old = small(tmp_path / "step-1")
    for k in count(1):
        folder = tmp_path / str(k)
        shutil.copytree(old, folder / "step-1")
        if occupied:
            shutil.copytree(old, folder / "step-2")
            os.truncate(folder / "step-2" / "manifest.json", 100)
        error = None
        with pytest.MonkeyPatch.context() as patch:
            faults = Faults(patch, k, forever)
            try:
                small(folder / "step-2", value=2.0)
            except CheckpointError as caught:
                error = caught
        assert_small(folder / "step-1")
        names = sorted(os.listdir(folder))
        if (folder / "step-2") in find_checkpoints(folder):
            assert_small(folder / "step-2", value=2.0)
            assert names == ["step-1", "step-2"] + ["step-2.damaged-1"] * occupied
        else:
            assert error is not None
            assert forever or not [name for name in names if "tmp" in name]
            assert occupied == bool({"step-2", "step-2.damaged-1"} & set(names))
        if k > faults.done:
            break
        assert error is None or "No space left on device" in str(error)
    assert k > 30
    assert error is None


def test_everything_is_on_the_disk_before_the_commit_and_the_commit_after_it(tmp_path, monkeypatch):
    events = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(descriptor):
        events.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real_fsync(descriptor)

    def rename(source, target):
        events.append("renamed")
        real_rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    path = small(tmp_path / "step-1")
    commit = events.index("renamed")
    synced = [os.path.relpath(event, tmp_path).partition("/")[2] for event in events[:commit]]
    assert sorted(synced) == sorted(["", "model", "optimizer", *FILES])
    assert synced[-1] == ""
    assert events[commit + 1 :] == [str(path.parent)]


def test_a_file_system_that_cannot_sync_directories_is_tolerated(tmp_path, monkeypatch):
    real = os.fsync

    def fsync(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    assert_small(small(tmp_path / "step-1"))


# --------------------------------------------------------------------------------------- real processes, real kills

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["lumen.checkpoint.storage"])


def save_onto_a_full_disk(folder, results):
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        save(folder / "step-2", model={"w": torch.ones(10_000), "big": torch.ones(1_000_000)})
    except CheckpointError as error:
        results.send(str(error))


def test_a_full_disk_is_one_clear_error(tmp_path):
    small(tmp_path / "step-1")
    receiver, sender = processes.Pipe(duplex=False)
    process = processes.Process(target=save_onto_a_full_disk, args=(tmp_path, sender))
    process.start()
    sender.close()
    message = receiver.recv()
    process.join()
    assert process.exitcode == 0
    assert "model/00000-00000.safetensors: File too large" in message
    assert "raise the limit" in message
    assert os.listdir(tmp_path) == ["step-1"]
    assert_small(tmp_path / "step-1")


def save_for_ever(folder, first):
    for step in count(first):
        small(folder / f"step-{step}", value=float(step))
        if (step - first) % 3 == 2:
            remove_checkpoint(folder / f"step-{step}")


def test_kill_9_in_the_middle_of_saves_never_leaves_half_a_checkpoint(tmp_path):
    rng = random.Random(0)
    leftovers = 0
    for life in range(15):
        process = processes.Process(target=save_for_ever, args=(tmp_path, 1000 * life + 1))
        process.start()
        while not (tmp_path / f"step-{1000 * life + 1}").exists():
            assert process.is_alive()
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.06))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        leftovers += len(list(tmp_path.glob("*.tmp-*")))
        clean_leftovers(tmp_path)
        names = [path.name for path in find_checkpoints(tmp_path)]
        assert sorted(names) == sorted(os.listdir(tmp_path))  # nothing uncommitted under a checkpoint's name
    for path in find_checkpoints(tmp_path):
        assert_small(path, value=float(path.name[5:]))
    assert len(names) >= 15
    assert leftovers > 0  # the kills did hit saves


MEMORY = """
import resource, sys, torch
from pathlib import Path
from lumen.checkpoint.storage import Checkpoint, write_checkpoint
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
tensors = {f"t{i}": torch.ones(1024, 2048).T for i in range(24)}
write_checkpoint(Path(sys.argv[1]) / "step-1", {"model": {"w": torch.ones(2, 3).T}}, {}, info={})
start = peak()
write_checkpoint(Path(sys.argv[1]) / "step-2", {"model": tensors}, {}, info={})
written = peak()
checkpoint = Checkpoint.open(Path(sys.argv[1]) / "step-2")
for name, tensor in tensors.items():
    checkpoint.copy_into("model", name, tensor)
print(written - start, peak() - start)
"""


def test_saving_and_loading_need_the_memory_of_one_tensor(tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", MEMORY, tmp_path],
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000"},  # without it the C library keeps some freed memory
        check=True,
        capture_output=True,
        text=True,
    )
    written, read = map(float, result.stdout.split())  # in MiB; the tensors have 8 each, 192 together
    assert written < 14
    assert read < 14
