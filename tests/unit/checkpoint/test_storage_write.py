"""Written checkpoints: exact round trips, and refused values."""

import hashlib
import json
import math
import os

import pytest
import torch
from safetensors.torch import load_file

from lumen.checkpoint.format.folder import read_info
from lumen.checkpoint.format.reader import Checkpoint
from lumen.checkpoint.save.writer import write_checkpoint
from lumen.errors import CheckpointError, CheckpointMismatch
from tests.helpers.checkpoints import (
    DTYPES,
    FILES,
    KNOWN,
    SHAPES,
    assert_small,
    is_same_tensor,
    make_tensor,
    read_tensor_bytes,
    save,
    save_small,
)


@pytest.mark.parametrize("max_file_bytes", [1, 300, 2 << 30])
def test_every_dtype_and_shape_survives_bit_for_bit(tmp_path, max_file_bytes):
    tensors = {f"{dtype}/{shape}": make_tensor(dtype, shape) for dtype in DTYPES for shape in SHAPES}
    path = tmp_path / "step-1"
    write_checkpoint(path, {"model": tensors}, {}, info={}, max_file_bytes=max_file_bytes)
    checkpoint = Checkpoint.open(path)
    assert checkpoint.list_tensor_names("model") == list(tensors)
    for name, tensor in tensors.items():
        assert checkpoint.get_spec("model", name) == (tensor.dtype, tensor.shape)
        assert is_same_tensor(checkpoint.read_tensor("model", name), tensor)
        target = make_tensor(tensor.dtype, tensor.shape)
        address = target.data_ptr()
        checkpoint.copy_into("model", name, target)
        assert is_same_tensor(target, tensor)
        assert target.data_ptr() == address
    lazy = checkpoint.as_mapping("model")
    assert list(lazy) == list(tensors)
    assert len(lazy) == len(tensors)
    assert all(is_same_tensor(lazy[name], tensor) for name, tensor in tensors.items())
    assert "nothing" not in lazy


def test_files_are_bounded_and_readable_by_safetensors(tmp_path):
    tensors = {f"t{i}": make_tensor(dtype, (2, 3)) for i, dtype in enumerate(DTYPES)} | {"big": torch.randn(200)}
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
        assert read_tensor_bytes(found[name]) == read_tensor_bytes(tensor)
        assert found[name].dtype == (tensor.dtype if tensor.dtype in KNOWN else torch.uint8)
    assert not list(tmp_path.glob("*.tmp-*"))


def test_views_are_saved_with_their_values(tmp_path):
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
        assert torch.equal(checkpoint.read_tensor("model", name), view), name


def test_copy_into_fills_views_and_never_casts(tmp_path):
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
        checkpoint.read_tensor("model", "v")
    with pytest.raises(CheckpointMismatch, match="no section 'modle'"):
        checkpoint.list_tensor_names("modle")


def test_a_default_device_changes_nothing(tmp_path):
    path = save(tmp_path / "step-1", model={"w": torch.randn(4, 2).T})
    with torch.device("meta"):
        save(tmp_path / "step-2", model={"w": Checkpoint.open(path).read_tensor("model", "w").T})
        assert Checkpoint.open(tmp_path / "step-2").read_tensor("model", "w").device.type == "cpu"


def test_the_manifest_tells_what_is_inside(tmp_path):
    path = save_small(tmp_path / "step-00000007")
    assert sorted(p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()) == [
        *("manifest.json", "model/00000-00000.safetensors", "model/00000-00001.safetensors"),
        *("optimizer/00000-00000.safetensors", "state.json"),
    ]
    assert not (path / "extra").exists()
    checkpoint = Checkpoint.open(path, verify="sizes")
    assert checkpoint.list_tensor_names("extra") == []
    assert checkpoint.aliases == {"tied": "a"}
    assert is_same_tensor(checkpoint.info, read_info(path))
    assert is_same_tensor(
        checkpoint.info, {"step": 7, "metrics": {"loss": math.nan}, "finished": False, "best": (1, 2)}
    )
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["format"] == 4
    for name, record in manifest["files"].items():
        data = (path / name).read_bytes()
        assert record == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def test_a_committed_checkpoint_is_never_overwritten(tmp_path):
    path = save_small(tmp_path / "step-1")
    with pytest.raises(CheckpointError, match="never overwrites"):
        save(path, model={"w": torch.ones(1)})
    assert_small(path)
    assert os.listdir(tmp_path) == ["step-1"]


def test_a_damaged_checkpoint_is_set_aside(tmp_path):
    path = tmp_path / "step-1"
    path.touch()
    for name in (FILES[2], "manifest.json"):
        save_small(path)
        os.truncate(path / name, 5)
    save_small(path, value=2.0)
    assert_small(path, value=2.0)
    assert sorted(os.listdir(tmp_path)) == ["step-1", *(f"step-1.damaged-{k}" for k in (1, 2, 3))]


BAD_SAVES = {
    "sparse": ({"model": {"w": torch.eye(2).to_sparse()}}, {}, "model/w: a Tensor of torch.float32"),
    "meta": ({"model": {"w": torch.empty(2, device="meta")}}, {}, "model/w: .* meta cannot be saved"),
    "reserved name": ({"model": {"__metadata__": torch.ones(1)}}, {}, "reserves this name"),
    "object in info": ({}, {"x": object()}, r"info\.x: an object of type object cannot be saved"),
    "tensor in info": ({}, {"x": torch.ones(1)}, r"info\.x: `info` cannot hold tensors"),
}


@pytest.mark.parametrize("kind", BAD_SAVES)
def test_unsupported_state_raises_before_writing(tmp_path, kind):
    sections, info, complaint = BAD_SAVES[kind]
    with pytest.raises(CheckpointError, match=complaint):
        write_checkpoint(tmp_path / "runs" / "step-1", sections, {}, info=info)
    assert os.listdir(tmp_path) == []


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "checkpoints").touch()
    with pytest.raises(CheckpointError, match=r"cannot write .*checkpoints.* A file is in the way"):
        save_small(tmp_path / "checkpoints" / "step-1")
