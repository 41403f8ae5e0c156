"""Writing a checkpoint: beside its place, synced, checked as a reader will, and committed by one rename."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import lumen
from lumen.checkpoint.codec import JSON, encode
from lumen.checkpoint.disk import explained, fsync_directory, new_file
from lumen.checkpoint.folder import set_aside, temporary_name
from lumen.checkpoint.manifest import FORMAT_VERSION, MANIFEST, STATE, digest
from lumen.checkpoint.reader import Checkpoint
from lumen.checkpoint.safetensors_files import widest_first, write_safetensors
from lumen.checkpoint.sharded import is_sharded, whole
from lumen.errors import CheckpointDamaged, CheckpointError
from lumen.strategies.processes import Processes

Sections = Mapping[str, Mapping[str, torch.Tensor]]
Files = Sequence[tuple[str, str, Mapping[str, torch.Tensor]]]


def write_checkpoint(
    directory: Path,
    sections: Sections,
    state: Mapping[str, JSON],
    *,
    aliases: Mapping[str, str] | None = None,
    info: Mapping[str, Any],
    max_file_bytes: int = 2 << 30,
    processes: Processes | None = None,
) -> None:
    """Write a checkpoint that is either complete under its name or not there at all, even after a kill or power loss.

    Rank 0 writes. Beyond the tensors themselves every process needs the memory of one tensor at most. Collective: every
    rank must call this.

    Args:
        directory: Where it will be, for example `runs/gpt/checkpoints/step-00000200`. A damaged checkpoint there is
            renamed to `<name>.damaged-<k>`.
        sections: Tensors of any dtype, shape, strides and device, by section ("model", "optimizer", "extra") and name.
        state: What `lumen.checkpoint.codec.encode` returned, by name.
        aliases: Names of tied tensors of the section "model" that are stored under another name: alias to stored name.
        info: Plain data kept in the manifest, so that listing checkpoints need not open `state`.
        max_file_bytes: Most bytes of tensors in one file; a larger tensor gets a file of its own.
        processes: Those of the run; default: this one alone.

    Raises:
        CheckpointError: `directory` holds a committed checkpoint; a tensor, `state` or `info` cannot be saved; or the
            disk refuses. Nothing that existed before is changed, and nothing half-written is left under `directory`.
    """
    processes = Processes() if processes is None else processes
    files = list(_files(sections, max_file_bytes))
    order = [(section, name) for section, _, group in files for name in widest_first(group) if is_sharded(group[name])]
    left = iter(processes.broadcast(order))

    def value(section: str, name: str) -> torch.Tensor:
        tensor = sections[section][name]
        if is_sharded(tensor):
            next(left)
        return whole(tensor)

    def take_part() -> None:
        for section, name in left:
            whole(sections[section][name])

    def write() -> None:
        try:
            _write(directory, sections, files, value, state, aliases or {}, info)
        except Exception:
            take_part()  # with the others, which do not know of it yet
            raise

    if processes.rank > 0:
        take_part()
    processes.on_rank_zero(write)


def _write(
    directory: Path,
    sections: Sections,
    files: Files,
    value: Callable[[str, str], torch.Tensor],
    state: Mapping[str, JSON],
    aliases: Mapping[str, str],
    info: Mapping[str, Any],
) -> None:
    check_tensors(sections)
    manifest: dict[str, JSON] = {
        "format": FORMAT_VERSION,
        "lumen": lumen.__version__,
        "info": _encode_info(info),
        "aliases": _checked_aliases(aliases, sections),
    }
    state_bytes = _json_bytes("state", state)
    _holds_damaged(directory)  # refuses before any work what could not be committed after it
    temporary = temporary_name(directory)
    with explained("write", directory):
        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
            temporary.mkdir()
            _write_files(temporary, sections, files, value, state_bytes, manifest)
            Checkpoint.open(temporary, verify="sizes")  # what was written is what a reader will find
            if _holds_damaged(directory):
                set_aside(directory)
            os.rename(temporary, directory)
            fsync_directory(directory.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def check_tensors(sections: Sections) -> None:
    """Refuse what safetensors files cannot hold.

    Raises:
        CheckpointError: Names the tensor.
    """
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


def _is_plain_dense(tensor: torch.Tensor) -> bool:
    wrapper = hasattr(tensor, "__tensor_flatten__") and not is_sharded(tensor)  # its bytes are elsewhere
    return not (wrapper or tensor.is_quantized or tensor.is_meta) and tensor.layout == torch.strided


def _checked_aliases(aliases: Mapping[str, str], sections: Sections) -> dict[str, str]:
    model = sections.get("model", {})
    for alias, name in aliases.items():
        if alias in model or name not in model:
            raise CheckpointError(f"the alias {alias!r} of {name!r} must name a tensor of `model` and be none itself.")
    return dict(aliases)


def _encode_info(info: Mapping[str, Any]) -> JSON:
    found: dict[str, torch.Tensor] = {}
    encoded = encode(dict(info), found, "info")
    if found:
        raise CheckpointError(f"{next(iter(found))}: `info` holds no tensors. Convert it with `item()` or `tolist()`.")
    return encoded


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


def _write_files(
    root: Path,
    sections: Sections,
    files: Files,
    value: Callable[[str, str], torch.Tensor],
    state_bytes: bytes,
    manifest: dict[str, JSON],
) -> None:
    """Write all files, add their and the tensors' descriptions to the manifest, and write it last."""
    records: dict[str, JSON] = {}
    described: dict[str, dict[str, JSON]] = {section: {} for section in sections}
    for section, file, group in files:
        (root / section).mkdir(exist_ok=True)
        records[file] = write_safetensors(root / file, group, partial(value, section))
        described[section] |= {name: _describe(tensor, file) for name, tensor in group.items()}
    for section in sorted({section for section, _, _ in files}):
        fsync_directory(root / section)
    records[STATE] = _write_bytes(root / STATE, state_bytes)
    manifest |= {"files": records, "sections": described}
    manifest["digest"] = digest(manifest)
    _write_bytes(root / MANIFEST, _json_bytes("manifest", manifest))
    fsync_directory(root)


def _files(sections: Sections, max_file_bytes: int) -> Iterator[tuple[str, str, dict[str, torch.Tensor]]]:
    """Section, path and tensors of every file, in the order in which they are written."""
    for section, tensors in sections.items():
        for index, group in enumerate(_bounded(tensors, max_file_bytes)):
            yield section, f"{section}/00000-{index:05d}.safetensors", group  # the first number: the writing process


def _bounded(tensors: Mapping[str, torch.Tensor], max_file_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    group: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        tensor_bytes = tensor.numel() * tensor.dtype.itemsize
        if group and size + tensor_bytes > max_file_bytes:
            yield group
            group, size = {}, 0
        group[name] = tensor
        size += tensor_bytes
    if group:
        yield group


def _describe(tensor: torch.Tensor, file: str) -> JSON:
    shape = list(tensor.shape)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": shape, "chunks": [[file, [0] * len(shape), shape]]}


def _write_bytes(path: Path, data: bytes) -> dict[str, int | str]:
    with new_file(path) as file:
        file.write(data)
    return file.record()
