"""Manifest of all files and tensors of a checkpoint; files are hashed when written and checked when read."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import combinations
from pathlib import PurePath
from typing import Any, NamedTuple, TypeVar, final

import torch

from lumen.checkpoint.format.codec import JSON, decode, get_dtype
from lumen.checkpoint.format.storage import MANIFEST, explain_read_errors, explain_storage_errors, get_storage
from lumen.errors import CheckpointDamaged, CheckpointError

_READ_BYTES = 4 << 20  # size of a piece that stays in the processor's cache between hashing and writing


@final
class HashingWriter:
    """Writer of a file that hashes the written bytes."""

    def __init__(self, write: Callable[[memoryview], int]) -> None:
        self._write = write
        self._sha256 = hashlib.sha256()
        self._bytes = 0

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        view = memoryview(data)
        for start in range(0, len(view), _READ_BYTES):
            piece = view[start : start + _READ_BYTES]
            self._sha256.update(piece)
            self._bytes += self._write(piece)

    def record(self) -> dict[str, int | str]:
        """Return the size in `bytes` and the `sha256` of the bytes written so far."""
        return {"bytes": self._bytes, "sha256": self._sha256.hexdigest()}


@contextmanager
def create_hashed_file(path: PurePath) -> Iterator[HashingWriter]:
    """Create a file with the guarantees of `Storage.create`.

    Raises:
        CheckpointError: The file exists, or the storage refuses.
    """
    with explain_storage_errors("write", path), get_storage(path).create(path) as write:
        yield HashingWriter(write)


def check_file(directory: PurePath, name: str, size: int, sha256: str | None) -> None:
    """Check that a file is inside a directory, and has the given size in bytes and the given checksum (unless None).

    Raises:
        CheckpointDamaged: The file is outside the directory, or its size or checksum differs.
    """
    storage, path = get_storage(directory), directory / name
    storage.check_inside(directory, name)
    with explain_read_errors(path):
        if (found := storage.get_size(path)) != size:
            raise CheckpointDamaged(f"{path} has {found} bytes instead of {size}.")
        if sha256 is not None and compute_sha256(path, size) != sha256:
            raise CheckpointDamaged(f"{path} was changed: its checksum is wrong.")


def compute_sha256(path: PurePath, size: int) -> str:
    """Return the checksum of a file of `size` bytes."""
    storage, digest = get_storage(path), hashlib.sha256()
    read_into = storage.make_piece_reader(path.parent, {path.name: size})
    memory = memoryview(bytearray(min(size, storage.piece_bytes)))
    for start in range(0, size, storage.piece_bytes):
        piece = memory[: size - start]
        digest.update(piece[: read_into(path.name, start, piece)])
    return digest.hexdigest()


def read_json(path: PurePath) -> dict[str, JSON]:
    """Return the JSON object in a file.

    Raises:
        CheckpointDamaged: The file is missing or holds anything else.
    """
    storage = get_storage(path)
    with explain_read_errors(path):
        data = storage.read(path, storage.get_size(path))
    return parse_json(path, data)


def parse_json(path: PurePath, data: bytes | bytearray) -> dict[str, JSON]:
    """Return the JSON object in bytes that were read from `path`.

    Raises:
        CheckpointDamaged: The bytes hold anything else.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"{path} is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise CheckpointDamaged(f"{path} holds no JSON object.")
    return value


FORMAT_VERSION = 4
_MAX_BYTES = 1 << 30  # ten thousand processes and a million tensors need less
STATE = "state.json"
_FILE_NAME = re.compile(r"state\.json|[a-z_]+/[\w-]+\.safetensors", re.ASCII)
_FIRST_LINE = re.compile(rb'\{"sha256": "([0-9a-f]{64})",\n')
_HEAD_KEYS = ("format", "lumen", "info", "files")
Parsed = TypeVar("Parsed")


@final
class Chunk(NamedTuple):
    """Block of a tensor that is stored in one file: offset in each dimension of the tensor, and shape."""

    file: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@final
class StoredTensor(NamedTuple):
    """Dtype and shape of a stored tensor, and its chunks, which cover the tensor exactly."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@final
class ManifestHead(NamedTuple):
    """Manifest without its tensors.

    Attributes:
        files: Size in bytes and sha256 of every file, by its path in the checkpoint.
        info: Plain data that was given as `info` to `write_checkpoint`.
    """

    files: Mapping[str, tuple[int, str]]
    info: dict[str, Any]


@final
class Manifest(NamedTuple):
    """Verified and consistent manifest.

    Attributes:
        files: Size in bytes and sha256 of every file, by its path in the checkpoint.
        sections: Dtype, shape and chunks of every tensor, by section and name.
        contents: Dtype and shape of every entry of a safetensors file, by file and name.
        aliases: Names of tied tensors of the section "model": alias to stored name.
        info: Plain data that was given as `info` to `write_checkpoint`.
    """

    files: Mapping[str, tuple[int, str]]
    sections: Mapping[str, Mapping[str, StoredTensor]]
    contents: Mapping[str, Mapping[str, tuple[torch.dtype, tuple[int, ...]]]]
    aliases: dict[str, str]
    info: dict[str, Any]


def compute_digest(manifest: Mapping[str, JSON]) -> str:
    """Return the digest of a manifest's JSON, to be compared with the entry "digest"."""
    rest = {key: value for key, value in manifest.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def encode_manifest(manifest: Mapping[str, JSON]) -> bytes:
    """Return the bytes of a manifest's file: JSON in three lines.

    Line 1 is a checksum of the other lines, so that they can be verified without parsing. Line 2 is the part that a
    listing needs. Line 3 contains all tensors.
    """
    full = {**manifest, "digest": compute_digest(manifest)}
    head = json.dumps({key: full[key] for key in _HEAD_KEYS}, allow_nan=False)
    rest = json.dumps({key: value for key, value in full.items() if key not in _HEAD_KEYS}, allow_nan=False)
    lines = f"{head[1:-1]},\n{rest[1:]}".encode()
    return b'{"sha256": "%b",\n%b' % (hashlib.sha256(lines).hexdigest().encode(), lines)


def is_uncommitted(path: PurePath) -> bool:
    """Return True if a directory has no manifest, on a storage that cannot rename directories."""
    return bool(get_storage(path).find_uncommitted(path.parent, [path]))


def is_committed(directory: PurePath) -> bool:
    """Return True if a directory has an intact manifest of any format version: the checkpoint is complete (committed).

    Raises:
        CheckpointError: The user may not read the file.
    """
    try:
        _read_manifest_bytes(directory)
    except CheckpointDamaged:
        return False
    return True


def read_manifest(directory: PurePath) -> Manifest:
    """Read and verify the manifest of a checkpoint, without checking other files.

    Raises:
        CheckpointDamaged: The manifest is missing, was changed, or contradicts itself.
        CheckpointError: The manifest has another format version, or this user may not read it.
    """
    return _parse_with(directory, _read_manifest_bytes(directory), _parse_manifest)


def read_head(directory: PurePath) -> ManifestHead:
    """Read and verify a manifest without parsing its tensors.

    Raises:
        CheckpointDamaged: The manifest is missing, was changed, or contradicts itself.
        CheckpointError: The manifest has another format version, or this user may not read it.
    """
    text = _read_manifest_bytes(directory)
    if first := _FIRST_LINE.match(text):
        text = b"{%b}" % text[first.end() : text.find(b",\n", first.end())]
    return _parse_with(directory, text, _parse_head)


def _read_manifest_bytes(directory: PurePath) -> bytes:
    """Return the bytes of an intact manifest."""
    storage, path = get_storage(directory), directory / MANIFEST
    with explain_read_errors(directory):
        found = storage.get_status(path)
    if found is None:
        raise CheckpointDamaged(f"{directory} is not a complete checkpoint: {MANIFEST} is missing.")
    if found.size_bytes > _MAX_BYTES:
        raise CheckpointDamaged(f"{path} has {found.size_bytes} bytes, but a manifest has at most {_MAX_BYTES} bytes.")
    storage.check_inside(directory, MANIFEST)
    with explain_read_errors(path):
        text = bytes(storage.read(path, found.size_bytes))
    if first := _FIRST_LINE.match(text):
        is_intact = hashlib.sha256(memoryview(text)[first.end() :]).hexdigest().encode() == first[1]
    else:  # not written by `encode_manifest`
        manifest = parse_json(path, text)
        is_intact = manifest.get("digest") == compute_digest(manifest)
    if not is_intact:
        raise CheckpointDamaged(f"{path} was changed or cut off: its digest is wrong.")
    return text


def _parse_with(directory: PurePath, text: bytes, parse: Callable[[dict[str, JSON]], Parsed]) -> Parsed:
    """Parse a manifest of the current format version."""
    manifest = parse_json(path := directory / MANIFEST, text)
    if manifest.get("format") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format {manifest.get('format')!r} (by Lumen {manifest.get('lumen')!r}), but this Lumen reads "
            f"format {FORMAT_VERSION}. Use the version of Lumen that wrote the checkpoint."
        )
    try:
        return parse(manifest)
    except (KeyError, TypeError, ValueError, AttributeError, CheckpointDamaged) as error:
        raise CheckpointDamaged(f"{path} is malformed: {type(error).__name__}: {error}.") from error


def _parse_head(manifest: dict[str, JSON]) -> ManifestHead:
    files = {name: (_check_count(record["bytes"]), str(record["sha256"])) for name, record in manifest["files"].items()}
    for name in files:
        if not _FILE_NAME.fullmatch(name):
            raise ValueError(f"the file name {name!r} is not allowed: the file could be outside the checkpoint")
    if STATE not in files:
        raise ValueError(f"{STATE} is not listed")
    return ManifestHead(files, dict(decode(manifest["info"], {})))


def _parse_manifest(manifest: dict[str, JSON]) -> Manifest:
    head = _parse_head(manifest)
    sections = {
        section: {name: _parse_tensor(f"{section}/{name}", tensor) for name, tensor in tensors.items()}
        for section, tensors in manifest["sections"].items()
    }
    aliases = dict(manifest["aliases"])
    for alias, name in aliases.items():
        if name not in sections["model"]:
            raise ValueError(f"{alias!r} is an alias of {name!r}, which is missing")
    return Manifest(head.files, sections, _group_tensors_by_file(head.files, sections), aliases, head.info)


def _check_count(value: JSON) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"a count was expected, not {value!r}")
    return value


def _parse_tensor(where: str, tensor: JSON) -> StoredTensor:
    shape = tuple(map(_check_count, tensor["shape"]))
    chunks = tuple(
        Chunk(str(file), tuple(map(_check_count, offsets)), tuple(map(_check_count, chunk_shape)))
        for file, offsets, chunk_shape in tensor["chunks"]
    )
    _check_chunks_cover(where, shape, chunks)
    return StoredTensor(get_dtype(tensor["dtype"]), shape, chunks)


def _check_chunks_cover(where: str, shape: tuple[int, ...], chunks: tuple[Chunk, ...]) -> None:
    """Check that chunks cover a shape exactly: all elements once, and no element outside."""
    if len(chunks) == 1 and (chunks[0].offsets, chunks[0].shape) == ((0,) * len(shape), shape):
        return
    for chunk in chunks:
        if any(o + n > size for o, n, size in zip(chunk.offsets, chunk.shape, shape, strict=True)):
            raise ValueError(f"a chunk of {where} in {chunk.file} exceeds its shape {list(shape)}")
    covered = sum(math.prod(chunk.shape) for chunk in chunks)
    if covered != math.prod(shape):
        raise ValueError(f"the chunks of {where} have {covered} of its {math.prod(shape)} elements")
    groups = [[chunk for chunk in chunks if math.prod(chunk.shape)]]
    while groups:
        group = groups.pop()
        cuts = (_split_at_cuts(group, dim) for dim in range(len(shape)))
        if halves := next((halves for halves in cuts if len(halves) > 1), []):
            groups += halves
            continue
        for one, other in combinations(group, 2):
            if _do_overlap(one, other):
                raise ValueError(f"the chunks of {where} in {one.file} and {other.file} overlap")


def _split_at_cuts(chunks: list[Chunk], dim: int) -> list[list[Chunk]]:
    """Group chunks so that a cut across `dim` through the whole tensor separates neighboring groups."""
    groups: list[list[Chunk]] = []
    end = 0
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[dim]):
        if not groups or chunk.offsets[dim] >= end:
            groups.append([])
        groups[-1].append(chunk)
        end = max(end, chunk.offsets[dim] + chunk.shape[dim])
    return groups


def _do_overlap(one: Chunk, other: Chunk) -> bool:
    return all(
        o < p + m and p < o + n for o, n, p, m in zip(one.offsets, one.shape, other.offsets, other.shape, strict=True)
    )


def _group_tensors_by_file(
    files: Mapping[str, Any], sections: Mapping[str, Mapping[str, StoredTensor]]
) -> dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]]:
    contents = {file: dict[str, tuple[torch.dtype, tuple[int, ...]]]() for file in files if file != STATE}
    for section, specs in sections.items():
        for name, spec in specs.items():
            for chunk in spec.chunks:
                held = contents.get(chunk.file)
                if held is None or name in held or not chunk.file.startswith(f"{section}/"):
                    raise ValueError(
                        f"the manifest places {section}/{name} in {chunk.file!r}, which cannot hold the tensor"
                    )
                held[name] = spec.dtype, chunk.shape
    return contents
