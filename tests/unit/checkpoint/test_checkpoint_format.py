"""Page on the checkpoint format: enough to read a checkpoint without Lumen, with every existing name."""

import ast
import hashlib
import json
import math
import re
import types
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

from lumen.checkpoint import Checkpoint
from lumen.checkpoint.format.codec import decode, encode
from lumen.checkpoint.format.manifest import FORMAT_VERSION
from lumen.checkpoint.format.safetensors_file import is_supported_dtype
from lumen.checkpoint.save.writer import write_checkpoint
from tests.helpers import ROOT
from tests.helpers.checkpoints import DTYPES, SHAPES, is_same_tensor, make_tensor, save_small
from tests.helpers.tasks import FEATURES, Regression, Saving, bare_trainer, loader

PAGE = (ROOT / "docs/reference/checkpoint-format.md").read_text()
(CODE,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
READER = types.ModuleType("reader")
exec(compile(CODE, "docs/reference/checkpoint-format.md", "exec"), vars(READER))


def test_reader_is_short_and_independent_of_lumen():
    """At most 50 lines, which import the standard library, torch and safetensors only."""
    assert len([line for line in CODE.splitlines() if line]) <= 50
    assert max(map(len, CODE.splitlines())) <= 120
    imports = [node for node in ast.walk(ast.parse(CODE)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {alias.name for node in imports for alias in node.names if isinstance(node, ast.Import)}
    names |= {node.module for node in imports if isinstance(node, ast.ImportFrom)}
    standard = {"base64", "hashlib", "json", "math", "re", "struct", "pathlib"}
    assert names <= standard | {"torch", "safetensors.torch"}


def assert_read_alike(path):
    """Assert that the page's reader and Lumen read the same, bitwise."""
    tensors, state, info = READER.read(path)
    checkpoint = Checkpoint.open(path)
    for section in ("model", "optimizer", "extra"):
        expected = {name: checkpoint.read_tensor(section, name) for name in checkpoint.list_tensor_names(section)}
        if section == "model":
            expected |= {alias: expected[name] for alias, name in checkpoint.aliases.items()}
        assert is_same_tensor(tensors[section], expected)
    assert list(state) == list(checkpoint.state)
    for part, encoded in checkpoint.state.items():
        source = "optimizer" if part == "optimizer" else "extra"
        assert is_same_tensor(state[part], decode(encoded, checkpoint.as_mapping(source))), part
    assert is_same_tensor(info, checkpoint.info)
    return tensors, state, info


# ---------------------------------------------------------------------- checkpoints of runs


class Everything(Regression):
    """Task with tied and frozen parameters, buffers, metrics, and additional state."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES)
        self.again = nn.Linear(FEATURES, 16)
        self.again.weight = self.net[0].weight
        self.kept = nn.Parameter(torch.randn(3), requires_grad=False)
        self.mean = MeanMetric()

    def forward(self, inputs):
        return self.net(self.norm(inputs)) + self.again(inputs).mean(1, keepdim=True)

    def training_step(self, batch):
        loss = super().training_step(batch)
        self.mean.update(loss.detach())
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def on_save_checkpoint(self, checkpoint):
        checkpoint["mine"] = {"average": self.net[0].weight.detach() * 0.5, 3: ("a", {1, 2}), "huge": 2**80}


def write(path, strategy):
    """Save in the middle of the second epoch."""
    options = {"global_batch_size": 8, "max_steps": 9, "callbacks": [Saving(9, path)]}
    bare_trainer(path.parent, strategy=strategy, **options).fit(Everything(), loader(40, 4))


@pytest.fixture(scope="module")
def written_checkpoints(group, tmp_path_factory):
    """Write checkpoints with one process, and two under FSDP."""
    folder = tmp_path_factory.mktemp("written")
    write(folder / "single", "single")
    group(2).run(write, folder / "fsdp", "fsdp")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single", "fsdp"])
def test_reader_agrees_with_lumen_on_checkpoints_of_runs(written_checkpoints, strategy):
    tensors, state, info = assert_read_alike(written_checkpoints / strategy)
    assert torch.equal(tensors["model"]["again.weight"], tensors["model"]["net.0.weight"])
    assert tensors["optimizer"]["net.0.weight.exp_avg"].shape == (16, FEATURES)
    moment = state["optimizer"]["state"]["net.0.weight"]["exp_avg"]
    assert torch.equal(moment, tensors["optimizer"]["net.0.weight.exp_avg"])
    assert state["task"]["mine"][3] == ("a", {1, 2})
    assert state["task"]["mine"]["huge"] == 2**80
    assert len(state["ranks"]) == (2 if strategy == "fsdp" else 1)
    assert (info["step"], info["epoch"]) == (9, 1)


def test_fsdp_checkpoint_has_chunks_to_assemble(written_checkpoints):
    manifest = json.loads((written_checkpoints / "fsdp/manifest.json").read_text())
    chunks = manifest["sections"]["model"]["net.0.weight"]["chunks"]
    assert [[offsets, shape] for _, offsets, shape in chunks] == [[[0, 0], [8, 6]], [[8, 0], [8, 6]]]
    assert len({file for file, _, _ in chunks}) == 2


# ---------------------------------------------------------------------- contents that the format can hold


VALUES = {
    "plain": [None, True, 1, -(2**63), 2**63, 0.1, -0.0, 1e300, "text", "$text", [], {}, {"": {"a": [1]}}],
    "floats": [math.inf, -math.inf, math.nan, 5e-324],
    "tagged": [(), (1, (2,)), {3, 4}, frozenset({5}), b"\x00\xff", Path("a/b"), torch.Size([2, 3])],
    "of torch": [torch.bfloat16, torch.device("cpu"), torch.device("cuda:1")],
    "keys": {2: "a", 0.5: "b", None: "c", (1, "x"): "d", True: "e"},
    "dollar": {"$tensor": "no tensor"},
    "ordered": OrderedDict(b=1, a=2),
    "tensors": [torch.randn(2, 3), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)],
    "leaf": torch.ones(3).requires_grad_(),
    "array": {"whole": np.arange(6).reshape(2, 3), "none": np.zeros((0, 2), np.float32)},
}


def test_reader_supports_every_dtype_shape_and_type(tmp_path):
    torch.manual_seed(0)
    extra = {}
    state = {name: encode(value, extra, name) for name, value in VALUES.items()}
    model = {f"{dtype} {list(shape)}": make_tensor(dtype, shape) for dtype in DTYPES for shape in SHAPES}
    assert not all(is_supported_dtype(tensor.dtype) for tensor in model.values())
    sections = {"model": model, "optimizer": {}, "extra": extra}
    info = {"step": 1, "best": math.nan, "pair": (1, 2)}
    write_checkpoint(tmp_path / "step-1", sections, state, info=info, max_file_bytes=64)
    assert len(list((tmp_path / "step-1/model").iterdir())) > 10
    assert_read_alike(tmp_path / "step-1")


# ---------------------------------------------------------------------- manifests that a reader must refuse


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def shorten(file):
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [flip, shorten, Path.unlink], ids=["a bit flipped", "a byte short", "missing"])
def test_the_reader_notices_damage_to_any_file(tmp_path, damage):
    files = [
        path.relative_to(tmp_path / "step-0") for path in save_small(tmp_path / "step-0").rglob("*") if path.is_file()
    ]
    assert len(files) == 5
    for number, file in enumerate(files, 1):
        path = save_small(tmp_path / f"step-{number}")
        READER.read(path)
        damage(path / file)
        with pytest.raises((ValueError, OSError)):
            READER.read(path)


def test_reader_detects_changed_manifest_that_is_valid_json(tmp_path):
    manifest = save_small(tmp_path / "step-1") / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"lumen"', '"lemon"'))
    with pytest.raises(ValueError, match="the manifest was changed"):
        READER.read(tmp_path / "step-1")


def rewrite_manifest(directory, edit):
    """Change a manifest and update its checksum, like an attacker."""
    path = directory / "manifest.json"
    manifest = json.loads(path.read_text())
    edit(manifest)
    del manifest["sha256"]
    rest = json.dumps(manifest).encode()[1:]
    path.write_bytes(b'{"sha256": "%b",\n%b' % (hashlib.sha256(rest).hexdigest().encode(), rest))


def move_chunk(manifest):
    manifest["files"]["../step-2/state.json"] = manifest["files"]["state.json"]


def overlap_chunks(manifest):
    spec = manifest["sections"]["model"]["a"]
    (file, _, _), spec["shape"] = spec["chunks"][0], [8, 4]
    spec["chunks"] = [[file, [0, 0], [4, 4]]] * 2


def enlarge_shape(manifest):
    manifest["sections"]["model"]["a"]["shape"] = [2**40, 4]


def change_format(manifest):
    manifest["format"] = FORMAT_VERSION + 1


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (move_chunk, "may be elsewhere"), (overlap_chunks, "overlap"), (enlarge_shape, "not whole"),
        (change_format, "this reads format 4"),
    ],
)  # fmt: skip
def test_reader_validates_manifest_with_correct_checksum(tmp_path, edit, says):
    path = save_small(tmp_path / "step-1")
    rewrite_manifest(path, lambda manifest: None)
    READER.read(path)
    rewrite_manifest(path, edit)
    with pytest.raises(ValueError, match=says):
        READER.read(path)


# ---------------------------------------------------------------------- statements of the page


def read_table_names(first):
    """Return the names in backticks in the first column of the table that begins with a row."""
    (table,) = re.findall(rf"^\| `{first}`.*?(?=\n\n)", PAGE, re.S | re.M)
    return {name for row in table.splitlines() for name in re.findall(r"`([^`]+)`", row.split("|")[1])}


def test_page_lists_manifest_and_state_entries_and_version(written_checkpoints):
    for strategy in ("single", "fsdp"):
        assert read_table_names("sha256") == set(
            json.loads((written_checkpoints / strategy / "manifest.json").read_text())
        )
        assert read_table_names("seed") == set(Checkpoint.open(written_checkpoints / strategy).state)
    assert f"A reader of format {FORMAT_VERSION} reads format {FORMAT_VERSION}" in PAGE


def test_the_page_names_every_tag():
    tags = {*READER.TENSORS, *READER.OTHERS}
    assert tags == set(re.findall(r'`\{"(\$\w+)":', PAGE))


def test_manifest_has_three_lines_as_documented(written_checkpoints):
    lines = (written_checkpoints / "single/manifest.json").read_text().splitlines()
    shown = re.search(r"JSON in three lines:\n\n```\n(.*?)\n```", PAGE, re.S)[1].splitlines()
    assert len(lines) == len(shown) == 3
    head, rest = json.loads(f"{{{lines[1][:-1]}}}"), json.loads(f"{{{lines[2]}")
    assert list(head) == re.findall(r'"(\w+)": ', shown[1])
    assert list(rest) == re.findall(r'"(\w+)": ', shown[2])
