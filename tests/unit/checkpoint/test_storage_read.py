"""Damage and attacks on a stored checkpoint: each one is detected."""

import hashlib
import json
import os
import shutil
from itertools import combinations_with_replacement

import pytest
import torch

from lumen.checkpoint.format.folder import find_checkpoints, open_newest_valid, read_info
from lumen.checkpoint.format.reader import Checkpoint
from lumen.errors import CheckpointDamaged, CheckpointError
from tests.helpers.checkpoints import (
    FILES,
    REGIONS,
    assert_small,
    count_read_bytes,
    is_same_tensor,
    save,
    save_small,
    tamper_with_manifest,
    write_chunked,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.float8_e5m2, torch.complex128])
@pytest.mark.parametrize("regions", REGIONS.values(), ids=REGIONS)
def test_a_tensor_in_several_chunks_is_assembled(tmp_path, dtype, regions):
    tensor = write_chunked(tmp_path / "step-1", dtype, (5, 3), regions)
    checkpoint = Checkpoint.open(tmp_path / "step-1")
    assert is_same_tensor(checkpoint.read_tensor("model", "w"), tensor)
    assert torch.equal(checkpoint.read_tensor("model", "other"), torch.ones(2))


def test_a_manifest_of_gigabytes_is_not_read(tmp_path):
    save_small(tmp_path / "step-1")
    manifest = tmp_path / "step-1/manifest.json"
    os.truncate(manifest, 20 << 30)  # the disk holds no data of it
    with pytest.raises(CheckpointDamaged, match=rf"{manifest} has {20 << 30} bytes, but a manifest has at most"):
        Checkpoint.open(tmp_path / "step-1")
    assert find_checkpoints(tmp_path) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2, torch.complex128])
def test_block_equals_slice_of_tensor(tmp_path, dtype):
    regions = [((2, 5), (1, 3)), ((0, 2), (0, 3)), ((2, 5), (0, 1))]
    tensor = write_chunked(tmp_path / "step-1", dtype, (5, 3), regions)
    checkpoint = Checkpoint.open(tmp_path / "step-1")
    for rows in combinations_with_replacement(range(6), 2):
        for columns in combinations_with_replacement(range(4), 2):
            part = checkpoint.read_block(
                "model", "w", (rows[0], columns[0]), (rows[1] - rows[0], columns[1] - columns[0])
            )
            assert is_same_tensor(part, tensor[slice(*rows), slice(*columns)]), (rows, columns)


@pytest.mark.parametrize(
    "destination",
    [torch.empty(5, 3), torch.empty(3, 5).t(), torch.empty(5, 6)[:, ::2]],
    ids=["in a row", "transposed", "every other column"],
)
def test_copy_into_assembles_chunks_in_place(tmp_path, destination):
    tensor = write_chunked(
        tmp_path / "step-1", torch.float32, (5, 3), [((3, 5), (0, 3)), ((0, 3), (0, 1)), ((0, 3), (1, 3))]
    )
    memory, strides = destination.data_ptr(), destination.stride()
    Checkpoint.open(tmp_path / "step-1").copy_into("model", "w", destination)
    assert is_same_tensor(destination, tensor)
    assert (destination.data_ptr(), destination.stride()) == (memory, strides)


@pytest.mark.parametrize(
    ("offsets", "shape", "mib"),
    [((0, 0), (1024, 1024), 4), ((256, 0), (512, 1024), 2), ((100, 7), (256, 9), 1), ((1024, 0), (0, 1024), 0)],
)
def test_only_the_rows_of_a_box_are_read(tmp_path, offsets, shape, mib):
    tensor = torch.arange(1 << 20, dtype=torch.float32).reshape(1024, 1024)
    checkpoint = Checkpoint.open(save(tmp_path / "step-1", model={"w": tensor}))
    before = count_read_bytes()
    part = checkpoint.read_block("model", "w", offsets, shape)
    assert mib << 20 <= count_read_bytes() - before < (mib << 20) + 50_000
    assert torch.equal(part, tensor[tuple(slice(o, o + n) for o, n in zip(offsets, shape, strict=True))])
    assert ("w" in checkpoint.as_mapping("model"), "v" in checkpoint.as_mapping("model")) == (True, False)
    assert count_read_bytes() - before < (mib << 20) + 60_000


@pytest.mark.parametrize(
    ("regions", "complaint"),
    [
        ([((0, 2), (0, 3))], "have 6 of its 15 elements"),
        ([((0, 3), (0, 3)), ((2, 4), (0, 3))], "overlap"),
        ([((0, 5), (0, 2)), ((0, 5), (1, 2))], "overlap"),
        ([((0, 5), (0, 3)), ((0, 5), (0, 3))], "have 30 of its 15 elements"),
    ],
)
def test_chunks_that_do_not_cover_tensor_are_damage(tmp_path, regions, complaint):
    write_chunked(tmp_path / "step-1", torch.float32, (5, 3), regions)
    with pytest.raises(CheckpointDamaged, match=complaint):
        Checkpoint.open(tmp_path / "step-1")


def test_stored_bytes_cannot_stand_for_two_chunks(tmp_path):
    write_chunked(tmp_path / "step-1", torch.float32, (4, 3), [((0, 2), (0, 3)), ((2, 4), (0, 3))])

    def edit(manifest):
        first, second = manifest["sections"]["model"]["w"]["chunks"]
        del manifest["files"][second[0]]
        second[0] = first[0]

    tamper_with_manifest(tmp_path / "step-1", edit)
    with pytest.raises(CheckpointDamaged, match=r"places model/w in 'model/00000-00000\.safetensors'"):
        Checkpoint.open(tmp_path / "step-1")


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte_is_named(tmp_path, name):
    path = save_small(tmp_path / "step-1")
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
    path = save_small(tmp_path / "step-1")
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
    checkpoint = Checkpoint.open(save_small(tmp_path / "step-1"))
    os.truncate(tmp_path / "step-1" / FILES[2], 100)
    with pytest.raises(CheckpointDamaged, match=f"{FILES[2]} became shorter"):
        checkpoint.read_tensor("model", "a")
    (tmp_path / "step-1" / FILES[2]).unlink()
    with pytest.raises(CheckpointDamaged, match=FILES[2]):
        checkpoint.read_tensor("model", "a")


def list_chunks(manifest):
    return manifest["sections"]["model"]["a"]["chunks"]


def renamed(name):
    def edit(manifest):
        manifest["files"][name] = manifest["files"].pop(FILES[2])
        list_chunks(manifest)[0][0] = name

    return edit


TAMPERINGS = {
    "parent path": renamed("../step-2/model/00000-00000.safetensors"),
    "parent inside": renamed("model/../../step-2/model/00000-00000.safetensors"),
    "absolute path": renamed("/etc/passwd"),
    "zero byte": renamed("model/a\0.safetensors"),
    "other suffix": renamed("model/evil.pkl"),
    "other section": lambda m: list_chunks(m)[0].__setitem__(0, FILES[4]),
    "unlisted file": lambda m: list_chunks(m)[0].__setitem__(0, "model/none.safetensors"),
    "unhashable file": lambda m: list_chunks(m)[0].__setitem__(0, []),
    "no state": lambda m: m["files"].pop("state.json"),
    "negative size": lambda m: m["files"][FILES[2]].__setitem__("bytes", -1),
    "boolean size": lambda m: m["files"][FILES[2]].__setitem__("bytes", True),
    "files as list": lambda m: m.__setitem__("files", []),
    "files as number": lambda m: m["files"].__setitem__(FILES[2], 3),
    "no sections": lambda m: m.pop("sections"),
    "null section": lambda m: m["sections"].__setitem__("model", None),
    "no chunk": lambda m: list_chunks(m).clear(),
    "a chunk twice": lambda m: list_chunks(m).append(list_chunks(m)[0]),
    "an empty chunk twice": lambda m: list_chunks(m).append([FILES[2], [0, 0], [0, 4]]),
    "short chunk": lambda m: list_chunks(m)[0].pop(),
    "chunk outside": lambda m: list_chunks(m)[0].__setitem__(1, [1, 0]),
    "fractional shape": lambda m: m["sections"]["model"]["a"].__setitem__("shape", [4.0, 4]),
    "fractional chunk": lambda m: list_chunks(m)[0].__setitem__(2, [4.0, 4]),
    "chunk of other rank": lambda m: list_chunks(m)[0].__setitem__(2, [16]),
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
    save_small(tmp_path / "step-2")
    path = save_small(tmp_path / "step-1")
    tamper_with_manifest(path, TAMPERINGS[kind])
    with pytest.raises(CheckpointDamaged, match=r"step-1/(manifest\.json|model/)"):
        Checkpoint.open(path)


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"null", b"\xff", b"[" * 100_000, b"9" * 5000, b'{"digest": NaN}', b'{"a": "\\ud800"}']
)
def test_an_unparsable_manifest_is_damage(tmp_path, text):
    path = save_small(tmp_path / "step-1")
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
def test_header_that_contradicts_manifest_is_damage(tmp_path, header, data_bytes):
    path = save_small(tmp_path / "step-1")
    data = len(header).to_bytes(8, "little") + header + bytes(data_bytes)
    (path / FILES[2]).write_bytes(data)
    record = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    tamper_with_manifest(path, lambda manifest: manifest["files"].__setitem__(FILES[2], record))
    with pytest.raises(CheckpointDamaged, match=FILES[2]):
        Checkpoint.open(path)


def test_linked_folder_is_refused_but_linked_checkpoint_opens(tmp_path):
    path = save_small(tmp_path / "step-1")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "step-1").symlink_to(path)
    assert_small(tmp_path / "runs" / "step-1")
    shutil.move(path / "model", tmp_path / "outside")
    (path / "model").symlink_to(tmp_path / "outside")
    with pytest.raises(CheckpointDamaged, match="leaves the checkpoint"):
        Checkpoint.open(path)


def test_another_format_version_is_no_damage(tmp_path):
    path = save_small(tmp_path / "step-1")
    tamper_with_manifest(path, lambda manifest: manifest.__setitem__("format", 9))
    for reader in (Checkpoint.open, read_info, lambda p: open_newest_valid(p.parent, print), save_small):
        with pytest.raises(CheckpointError, match="has format 9") as error:
            reader(path)
        assert not isinstance(error.value, CheckpointDamaged)
    assert find_checkpoints(tmp_path) == [path]
