"""Checkpoints on disk: written beside, checksummed, committed by one rename, and read back without trusting a byte.

    step-00000200/
        model/00000-00000.safetensors    one folder for each section with tensors; files of bounded size
        state.json                       everything that is no tensor
        manifest.json                    every file and every tensor that must be there, and its own digest

A directory without a valid manifest does not exist for readers. Nothing is ever overwritten or unpickled.
"""

import errno
import hashlib
import importlib.metadata
import json
import math
import os
import re
import secrets
import shutil
import stat
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal, final

import torch

from lumen.checkpoint.codec import JSON, decode, encode, named_dtype
from lumen.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch

FORMAT_VERSION = 1
_MANIFEST = "manifest.json"
_STATE = "state.json"
_FILE_NAME = re.compile(r"state\.json|[a-z_]+/[\w-]+\.safetensors", re.ASCII)
_STEP_NAME = re.compile(r"step-([0-9]+)(-validating)?")  # the suffix: saved before that step's validation was done
_PIECE_BYTES = 4 << 20  # hashed and then written while it is still in the processor's cache
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError)

_SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ADVICE = {
    errno.ENOSPC: "Free space on that disk or choose another directory.",
    errno.EDQUOT: "The disk quota is used up: free space or choose another directory.",
    errno.EFBIG: "No file may grow that large there: raise the limit (`ulimit -f`) or choose another directory.",
    errno.EACCES: "Give this user the right to write there or choose another directory.",
    errno.EPERM: "Give this user the right to write there or choose another directory.",
    errno.EROFS: "The file system is read-only: choose another directory.",
    errno.ENOENT: "A directory was removed while it was in use: leave the run's directory alone while it runs.",
    errno.ENOTDIR: "A file is in the way: move it or choose another directory.",
    errno.EEXIST: "A file is in the way: move it or choose another directory.",
}


@dataclass(frozen=True)
class _Chunk:
    file: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Spec:
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[_Chunk, ...]


# ---------------------------------------------------------------------------------------------------------- writing


def write_checkpoint(
    directory: Path,
    sections: Mapping[str, Mapping[str, torch.Tensor]],
    state: Mapping[str, JSON],
    *,
    aliases: Mapping[str, str] | None = None,
    info: Mapping[str, Any],
    max_file_bytes: int = 2 << 30,
) -> None:
    """Write a checkpoint that is either complete under its name or not there at all, even after a kill or power loss.

    Beyond the tensors themselves it needs the memory of one tensor at most.

    Args:
        directory: Where it will be, for example `runs/gpt/checkpoints/step-00000200`. A damaged checkpoint there is
            renamed to `<name>.damaged-<k>`.
        sections: Tensors of any dtype, shape, strides and device, by section ("model", "optimizer", "extra") and name.
        state: What `lumen.checkpoint.codec.encode` returned, by name.
        aliases: Names of tied tensors of the section "model" that are stored under another name: alias to stored name.
        info: Plain data kept in the manifest, so that listing checkpoints need not open `state`.
        max_file_bytes: Most bytes of tensors in one file; a larger tensor gets a file of its own.

    Raises:
        CheckpointError: `directory` holds a committed checkpoint; a tensor, `state` or `info` cannot be saved; or the
            disk refuses. Nothing that existed before is changed, and nothing half-written is left under `directory`.
    """
    _check_savable(sections, aliases or {})
    state_bytes = _json_bytes("state", state)
    manifest: dict[str, JSON] = {
        "format": FORMAT_VERSION,
        "lumen": _lumen_version(),
        "info": _encode_info(info),
        "aliases": dict(aliases or {}),
        "files": {},
        "sections": {},
    }
    _holds_damaged(directory)
    temporary = _temporary_name(directory)
    try:
        with _explained("write", temporary):
            directory.parent.mkdir(parents=True, exist_ok=True)
            temporary.mkdir()
        for section, tensors in sections.items():
            manifest["sections"][section] = _write_section(
                temporary, section, tensors, max_file_bytes, manifest["files"]
            )
        manifest["files"][_STATE] = _write_file(temporary / _STATE, lambda write: write(state_bytes))
        manifest["digest"] = _digest(manifest)
        manifest_bytes = _json_bytes("manifest", manifest)
        _write_file(temporary / _MANIFEST, lambda write: write(manifest_bytes))
        Checkpoint.open(temporary, verify="sizes")  # what was written is what a reader will find
        with _explained("write", directory):
            fsync_directory(temporary)
            if _holds_damaged(directory):
                set_aside(directory)
            os.rename(temporary, directory)
            fsync_directory(directory.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, int | str]:
    """Write one safetensors file, one tensor at a time, and wait until it is on the disk.

    A dtype that safetensors does not know (complex128) is stored as its bytes: U8 with one more dimension.

    Returns:
        The file's size in `bytes` and its `sha256`.

    Raises:
        CheckpointError: The file exists, or the disk refuses.
    """
    order = sorted(
        tensors, key=lambda name: -tensors[name].dtype.itemsize
    )  # keeps every tensor aligned to its item size
    header: dict[str, JSON] = {"__metadata__": {"format": "pt"}}  # which some readers insist on
    end = 0
    for name in order:
        dtype, shape, size = _stored_as(tensors[name].dtype, tuple(tensors[name].shape))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    def fill(write: Callable[[bytes | memoryview], None]) -> None:
        write(len(text).to_bytes(8, "little") + text)
        for name in order:
            write(_bytes_of(tensors[name]))

    return _write_file(path, fill)


def _check_savable(sections: Mapping[str, Mapping[str, torch.Tensor]], aliases: Mapping[str, str]) -> None:
    for section, tensors in sections.items():
        if not re.fullmatch("[a-z_]+", section):
            raise CheckpointError(f"{section!r} cannot name a section: use small letters and underscores.")
        for name, tensor in tensors.items():
            if name == "__metadata__":
                raise CheckpointError(f"{section}/{name}: safetensors reserves this name. Rename the tensor.")
            if not _is_plain_dense(tensor):
                raise CheckpointError(
                    f"{section}/{name}: a {type(tensor).__name__} of {tensor.dtype}, {tensor.layout}, {tensor.device} "
                    "cannot be saved; checkpoints hold plain dense tensors. Convert it, for example with `to_dense()`."
                )
    model = sections.get("model", {})
    for alias, name in aliases.items():
        if alias in model or name not in model:
            raise CheckpointError(f"the alias {alias!r} of {name!r} must name a tensor of `model` and be none itself.")


def _is_plain_dense(tensor: torch.Tensor) -> bool:
    wrapper = hasattr(tensor, "__tensor_flatten__")  # a DTensor, for example, whose bytes are elsewhere
    return not (wrapper or tensor.is_quantized or tensor.is_meta) and tensor.layout == torch.strided


def _encode_info(info: Mapping[str, Any]) -> JSON:
    found: dict[str, torch.Tensor] = {}
    encoded = encode(dict(info), found, "info")
    if found:
        raise CheckpointError(f"{next(iter(found))}: `info` holds no tensors. Convert it with `item()` or `tolist()`.")
    return encoded


def _write_section(
    root: Path, section: str, tensors: Mapping[str, torch.Tensor], max_file_bytes: int, files: dict[str, JSON]
) -> JSON:
    """Write one section's files, add them to `files`, and return the description of its tensors."""
    described: dict[str, JSON] = {}
    if tensors:
        with _explained("write", root / section):
            (root / section).mkdir()
    for index, names in enumerate(_bounded(tensors, max_file_bytes)):
        file = f"{section}/00000-{index:05d}.safetensors"  # the first number is the writing process
        files[file] = write_safetensors(root / file, {name: tensors[name] for name in names})
        for name in names:
            shape = list(tensors[name].shape)
            dtype = str(tensors[name].dtype).removeprefix("torch.")
            described[name] = {"dtype": dtype, "shape": shape, "chunks": [[file, [0] * len(shape), shape]]}
    if tensors:
        with _explained("write", root / section):
            fsync_directory(root / section)
    return described


def _bounded(tensors: Mapping[str, torch.Tensor], max_file_bytes: int) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        tensor_bytes = tensor.numel() * tensor.dtype.itemsize
        if names and size + tensor_bytes > max_file_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensor_bytes
    if names:
        yield names


def _stored_as(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[str, list[int], int]:
    """Return a tensor's dtype and shape in a safetensors file, and its size in bytes."""
    size = math.prod(shape) * dtype.itemsize
    if dtype in _SAFETENSORS_DTYPES:
        return _SAFETENSORS_DTYPES[dtype], list(shape), size
    return "U8", [*shape, dtype.itemsize], size


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's bytes, without a copy if they lie in host memory in their order."""
    plain = tensor.detach()
    if plain.device.type != "cpu" or not plain.is_contiguous() or plain.is_conj() or plain.is_neg():
        plain = torch.empty(plain.shape, dtype=plain.dtype, device="cpu").copy_(plain)
    return plain.reshape(-1).view(torch.uint8).numpy().data


def _write_file(path: Path, fill: Callable[[Callable[[bytes | memoryview], None]], None]) -> dict[str, int | str]:
    digest = hashlib.sha256()
    size = 0

    def write(data: bytes | memoryview) -> None:
        nonlocal size
        view = memoryview(data)
        for start in range(0, len(view), _PIECE_BYTES):
            piece = view[start : start + _PIECE_BYTES]
            digest.update(piece)
            size += file.write(piece)

    with _explained("write", path), open(path, "xb") as file:
        fill(write)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def _json_bytes(what: str, value: Mapping[str, JSON]) -> bytes:
    try:
        data = json.dumps(value, allow_nan=False).encode()
        exact = json.loads(data) == value
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{what} is not JSON: {error}. Encode it with `lumen.checkpoint.codec.encode`."
        ) from error
    if not exact:  # json.dumps turns tuples into lists and keys into strings without a word
        raise CheckpointError(f"{what} is not exactly JSON. Encode it with `lumen.checkpoint.codec.encode`.")
    return data


def _digest(manifest: Mapping[str, JSON]) -> str:
    rest = {key: value for key, value in manifest.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _lumen_version() -> str:
    try:
        return importlib.metadata.version("lumen")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


@contextmanager
def _explained(verb: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "Check the disk.")
        raise CheckpointError(f"cannot {verb} {error.filename or path}: {error.strerror or error}. {advice}") from error


def fsync_directory(path: Path) -> None:
    """Make renames and new names in a directory survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot sync a directory
            raise
    finally:
        os.close(descriptor)


def _temporary_name(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.tmp-{secrets.token_hex(4)}")


def _holds_damaged(directory: Path) -> bool:
    """Whether something that is no intact checkpoint has the name; an intact one is an error."""
    if not os.path.lexists(directory):
        return False
    try:
        Checkpoint.open(directory)
    except CheckpointDamaged:
        return True
    raise CheckpointError(
        f"{directory} holds a committed checkpoint, which is never overwritten. Remove it or choose another run name."
    )


# ---------------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class _Manifest:
    files: dict[str, tuple[int, str]]  # size in bytes and sha256
    sections: dict[str, dict[str, _Spec]]
    aliases: dict[str, str]
    info: dict[str, Any]


@final
class Checkpoint:
    """A committed checkpoint, verified when it was opened; its tensors are read one by one when they are asked for.

    Attributes:
        path: Its directory.
        info: What was given as `info` when it was written.
        state: What was given as `state`, still encoded.
        aliases: Tied tensors of the section "model": alias to stored name.
    """

    def __init__(
        self, path: Path, manifest: _Manifest, state: dict[str, JSON], begins: Mapping[tuple[str, str], int]
    ) -> None:
        self.path = path
        self.info = manifest.info
        self.state = state
        self.aliases = manifest.aliases
        self._sections = manifest.sections
        self._begins = begins

    @staticmethod
    def open(path: Path, verify: Literal["checksums", "sizes"] = "checksums") -> "Checkpoint":
        """Verify a checkpoint and open it.

        Args:
            path: Its directory.
            verify: "checksums" reads every byte; "sizes" checks that every file is there with its size, and its header.

        Raises:
            CheckpointDamaged: Something is missing, changed, malformed, or outside the directory; the message names it.
            CheckpointError: The checkpoint has another format version, or this user may not read it.
        """
        manifest = _parse_manifest(path)
        for name, (size, sha256) in manifest.files.items():
            _check_file(path, name, size, sha256 if verify == "checksums" else None)
        return Checkpoint(path, manifest, _read_json(path / _STATE), _check_headers(path, manifest))

    def names(self, section: str) -> list[str]:
        """Return the names of a section's tensors, in the order they were written."""
        return list(self._section(section))

    def spec(self, section: str, name: str) -> tuple[torch.dtype, torch.Size]:
        """Return the dtype and shape of a tensor without reading it."""
        spec = self._spec(section, name)
        return spec.dtype, torch.Size(spec.shape)

    def tensor(self, section: str, name: str) -> torch.Tensor:
        """Read a tensor into new memory of the host.

        Raises:
            CheckpointMismatch: There is no such tensor.
            CheckpointDamaged: Its file changed since the checkpoint was opened.
        """
        spec = self._spec(section, name)
        parts = ((chunk, self._read(name, chunk, spec.dtype)) for chunk in spec.chunks)
        if len(spec.chunks) == 1:
            whole = next(parts)[1]
        else:  # assembled as bytes, as not every dtype can be copied into a slice
            whole = torch.empty((*spec.shape, spec.dtype.itemsize), dtype=torch.uint8, device="cpu")
            for chunk, part in parts:
                region = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.shape, strict=True))
                whole[region] = part.reshape(*chunk.shape, spec.dtype.itemsize)
        return whole.reshape(-1).view(spec.dtype).reshape(spec.shape)

    def tensors(self, section: str) -> Mapping[str, torch.Tensor]:
        """Return a section as a mapping that reads a tensor each time it is looked up."""
        return _Tensors(self, section)

    def copy_into(self, section: str, name: str, destination: torch.Tensor) -> None:
        """Read a tensor into an existing one, on any device, in place.

        Raises:
            CheckpointMismatch: There is no such tensor, or `destination` has another dtype or shape: nothing is cast.
            CheckpointDamaged: Its file changed since the checkpoint was opened.
        """
        dtype, shape = self.spec(section, name)
        if destination.dtype != dtype or destination.shape != shape or destination.is_meta:
            raise CheckpointMismatch(
                f"{self.path}: {section}/{name} is {dtype} {list(shape)}, but it would be read into "
                f"{destination.dtype} {list(destination.shape)} on {destination.device}, and nothing is cast. "
                "Build it as it was when this was saved."
            )
        with torch.no_grad():
            destination.copy_(self.tensor(section, name))

    def _section(self, section: str) -> dict[str, _Spec]:
        if section not in self._sections:
            raise CheckpointMismatch(f"{self.path} has no section {section!r}, only {sorted(self._sections)}.")
        return self._sections[section]

    def _spec(self, section: str, name: str) -> _Spec:
        specs = self._section(section)
        if name not in specs:
            raise CheckpointMismatch(f"{self.path} has no tensor {name!r} in {section!r} (it has {len(specs)} others).")
        return specs[name]

    def _read(self, name: str, chunk: _Chunk, dtype: torch.dtype) -> torch.Tensor:
        data = torch.empty(math.prod(chunk.shape) * dtype.itemsize, dtype=torch.uint8, device="cpu")
        path = self.path / chunk.file
        with _readable(path), open(path, "rb") as file:
            file.seek(self._begins[chunk.file, name])
            if file.readinto(data.numpy().data) != len(data):
                raise CheckpointDamaged(f"{path} became shorter while it was read.")
        return data


@final
class _Tensors(Mapping[str, torch.Tensor]):
    def __init__(self, checkpoint: Checkpoint, section: str) -> None:
        self._checkpoint = checkpoint
        self._section = section
        self._names = dict.fromkeys(checkpoint.names(section))

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._checkpoint.tensor(self._section, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EIO):
            raise CheckpointDamaged(f"{path} is missing or unreadable: {error.strerror}.") from error
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror or error}."
        ) from error  # intact, as far as we know


def _parse_json(path: Path, data: bytes) -> dict[str, JSON]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"{path} is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise CheckpointDamaged(f"{path} holds no JSON object.")
    return value


def _read_json(path: Path) -> dict[str, JSON]:
    with _readable(path):
        data = path.read_bytes()
    return _parse_json(path, data)


def _read_manifest(directory: Path) -> dict[str, JSON]:
    """Return a manifest whose digest is right, whatever its format version."""
    path = directory / _MANIFEST
    if not os.path.lexists(path):
        raise CheckpointDamaged(f"{directory} is no committed checkpoint: it has no {_MANIFEST}.")
    _check_inside(directory, _MANIFEST)
    manifest = _read_json(path)
    if manifest.get("digest") != _digest(manifest):
        raise CheckpointDamaged(f"{path} was changed or cut off: its digest is wrong.")
    return manifest


def _parse_manifest(directory: Path) -> _Manifest:
    manifest = _read_manifest(directory)
    path = directory / _MANIFEST
    if manifest.get("format") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format {manifest.get('format')!r} (by Lumen {manifest.get('lumen')!r}), but this Lumen reads "
            f"format {FORMAT_VERSION}. Use the Lumen that wrote it."
        )
    try:
        files = {name: (_count(record["bytes"]), str(record["sha256"])) for name, record in manifest["files"].items()}
        for name in files:
            if not _FILE_NAME.fullmatch(name):
                raise ValueError(f"the file name {name!r} is not allowed: it could lie outside the checkpoint")
        if _STATE not in files:
            raise ValueError(f"{_STATE} is not listed")
        sections = {
            section: {name: _parse_spec(f"{section}/{name}", tensor) for name, tensor in tensors.items()}
            for section, tensors in manifest["sections"].items()
        }
        aliases = dict(manifest["aliases"])
        for alias, name in aliases.items():
            if name not in sections["model"]:
                raise ValueError(f"{alias!r} is an alias of {name!r}, which is not there")
        info = dict(decode(manifest["info"], {}))
    except (*_MALFORMED, CheckpointDamaged) as error:
        raise CheckpointDamaged(f"{path} is malformed: {type(error).__name__}: {error}.") from error
    return _Manifest(files, sections, aliases, info)


def _count(value: JSON) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"a count was expected, not {value!r}")
    return value


def _parse_spec(where: str, tensor: JSON) -> _Spec:
    shape = tuple(_count(n) for n in tensor["shape"])
    chunks = tuple(
        _Chunk(str(file), tuple(_count(o) for o in offsets), tuple(_count(n) for n in chunk_shape))
        for file, offsets, chunk_shape in tensor["chunks"]
    )
    _check_cover(where, shape, chunks)
    return _Spec(named_dtype(tensor["dtype"]), shape, chunks)


def _check_cover(where: str, shape: tuple[int, ...], chunks: tuple[_Chunk, ...]) -> None:
    """Check that chunks fill a shape exactly: inside it, as many elements as it has, none of them twice."""
    for chunk in chunks:
        if any(o + n > size for o, n, size in zip(chunk.offsets, chunk.shape, shape, strict=True)):
            raise ValueError(f"a chunk of {where} in {chunk.file} exceeds its shape {list(shape)}")
    covered = sum(math.prod(chunk.shape) for chunk in chunks)
    if covered != math.prod(shape):
        raise ValueError(f"the chunks of {where} have {covered} of its {math.prod(shape)} elements")
    ordered = sorted((chunk for chunk in chunks if math.prod(chunk.shape)), key=lambda chunk: chunk.offsets)
    for i, one in enumerate(ordered):
        for other in ordered[i + 1 :]:
            if shape and other.offsets[0] >= one.offsets[0] + one.shape[0]:
                break  # all further ones start behind it in the first dimension
            if all(
                o < p + m and p < o + n
                for o, n, p, m in zip(one.offsets, one.shape, other.offsets, other.shape, strict=True)
            ):
                raise ValueError(f"the chunks of {where} in {one.file} and {other.file} overlap")


def _check_inside(directory: Path, name: str) -> None:
    root, real = os.path.realpath(directory), os.path.realpath(directory / name)
    if os.path.commonpath([root, real]) != root:
        raise CheckpointDamaged(f"{directory / name} is a link that leaves the checkpoint.")
    with _readable(directory / name):
        if not stat.S_ISREG(os.stat(real).st_mode):  # opening a pipe would wait for ever
            raise CheckpointDamaged(f"{directory / name} is not a regular file.")


def _check_file(directory: Path, name: str, size: int, sha256: str | None) -> None:
    path = directory / name
    _check_inside(directory, name)
    with _readable(path), open(path, "rb") as file:
        found = os.fstat(file.fileno()).st_size
        if found != size:
            raise CheckpointDamaged(f"{path} has {found} bytes instead of {size}.")
        if sha256 is not None and hashlib.file_digest(file, "sha256").hexdigest() != sha256:
            raise CheckpointDamaged(f"{path} was changed: its checksum is wrong.")


def _check_headers(directory: Path, manifest: _Manifest) -> dict[tuple[str, str], int]:
    """Check each file's own header against the manifest; return where each tensor begins, by file and name."""
    listed: dict[str, dict[str, tuple[str, list[int], int]]] = {name: {} for name in manifest.files if name != _STATE}
    for section, specs in manifest.sections.items():
        for name, spec in specs.items():
            for chunk in spec.chunks:
                if not chunk.file.startswith(f"{section}/") or name in listed.get(chunk.file, (name,)):
                    raise CheckpointDamaged(
                        f"{directory / _MANIFEST} places {section}/{name} in {chunk.file!r}, where it cannot be."
                    )
                listed[chunk.file][name] = _stored_as(spec.dtype, chunk.shape)
    begins = {file: _check_header(directory / file, tensors) for file, tensors in listed.items()}
    return {(file, name): begin for file in begins for name, begin in begins[file].items()}


def _check_header(path: Path, listed: dict[str, tuple[str, list[int], int]]) -> dict[str, int]:
    with _readable(path), open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        start, size = 8 + length, os.fstat(file.fileno()).st_size
        if start > size:
            raise CheckpointDamaged(f"{path} ends inside its header.")
        header = _parse_json(path, file.read(length))
    header.pop("__metadata__", None)
    if odd := sorted(header.keys() ^ listed.keys()):
        raise CheckpointDamaged(f"{path} and {_MANIFEST} disagree: only one of them has the tensor {odd[0]!r}.")
    try:
        begins = {name: start + _count(header[name]["data_offsets"][0]) for name in listed}
        end = start
        for name in sorted(listed, key=lambda name: (begins[name], listed[name][2])):
            dtype, shape, tensor_bytes = listed[name]
            expected = {"dtype": dtype, "shape": shape, "data_offsets": [end - start, end - start + tensor_bytes]}
            if header[name] != expected:
                raise ValueError(f"the tensor {name!r} is {header[name]}, but {_MANIFEST} says {expected}")
            end += tensor_bytes
        if end != size:
            raise ValueError(f"{size - end} bytes belong to no tensor")
    except (*_MALFORMED, IndexError) as error:
        raise CheckpointDamaged(f"{path} and {_MANIFEST} disagree: {error}.") from error
    return begins


# ------------------------------------------------------------------------------------------- finding and removing


def read_info(path: Path) -> dict[str, Any]:
    """Return the `info` of a committed checkpoint by reading its manifest alone.

    Raises:
        CheckpointDamaged: It was never committed, or its manifest was changed.
        CheckpointError: It has another format version, or this user may not read it.
    """
    return _parse_manifest(path).info


def find_checkpoints(folder: Path) -> list[Path]:
    """Return the committed checkpoints of a folder (with a valid manifest; other files are not read), oldest first."""
    return [path for path in _step_directories(folder) if _is_committed(path)]


def newest_valid(folder: Path, report: Callable[[str], None]) -> Checkpoint | None:
    """Open the newest checkpoint of a folder whose every byte is right, or return None if there is none.

    Args:
        folder: Where the checkpoints are.
        report: Told of every damaged one: its name, what is wrong with it, and what is used instead.

    Raises:
        CheckpointError: One cannot be judged: it has another format version, or this user may not read it.
    """
    candidates = _step_directories(folder)
    while candidates:
        path = candidates.pop()
        try:
            return Checkpoint.open(path)
        except CheckpointDamaged as error:
            instead = f"Trying {candidates[-1].name} instead." if candidates else "There is no older one."
            report(f"{path.name} is damaged and is not used: {error} {instead}")
    return None


def clean_leftovers(folder: Path) -> None:
    """Remove what killed saves left behind. Only for the holder of the run's lock: a living save looks the same."""
    for leftover in sorted(folder.glob("*.tmp-*")):
        try:
            if leftover.is_dir() and not leftover.is_symlink():
                shutil.rmtree(leftover)
            else:
                leftover.unlink()
        except OSError as error:
            warnings.warn(f"The leftover {leftover} of a killed save cannot be removed: {error}.", stacklevel=2)


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint; a kill meanwhile never leaves half of one under its name.

    Raises:
        CheckpointError: It is no checkpoint, or it cannot be removed.
    """
    if not (path / _MANIFEST).is_file():
        raise CheckpointError(f"{path} is no checkpoint (it has no {_MANIFEST}), so it is not removed.")
    doomed = _temporary_name(path)
    with _explained("remove", path):
        os.rename(path, doomed)
        fsync_directory(path.parent)
        shutil.rmtree(doomed)


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint to `<name>.damaged-<k>`, so that its name is free and its bytes are kept.

    Raises:
        CheckpointError: It cannot be renamed.
    """
    aside = next(name for k in count(1) if not os.path.lexists(name := path.with_name(f"{path.name}.damaged-{k}")))
    with _explained("rename", path):
        os.rename(path, aside)
        fsync_directory(path.parent)
    return aside


def _step_directories(folder: Path) -> list[Path]:
    with _readable(folder):
        names = os.listdir(folder) if folder.is_dir() else []
    steps = sorted((int(match[1]), match[2] is None, name) for name in names if (match := _STEP_NAME.fullmatch(name)))
    return [folder / name for _, _, name in steps]


def _is_committed(path: Path) -> bool:
    try:
        _read_manifest(path)
    except CheckpointDamaged:
        return False
    return True
