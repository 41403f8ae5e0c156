"""Writer of checkpoints: each process writes its blocks of tensors; rank 0 checks all files and commits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from heapq import heapreplace
from pathlib import PurePath
from types import MappingProxyType
from typing import Any, final

import torch

from lumen.checkpoint.format.codec import JSON, Tensors, encode
from lumen.checkpoint.format.folder import refuse_foreign_path, set_aside_damaged
from lumen.checkpoint.format.manifest import FORMAT_VERSION, STATE, create_hashed_file, encode_manifest
from lumen.checkpoint.format.reader import Checkpoint
from lumen.checkpoint.format.safetensors_file import write_safetensors
from lumen.checkpoint.format.storage import (
    MANIFEST,
    Draft,
    explain_read_errors,
    explain_storage_errors,
    get_storage,
    path_exists,
)
from lumen.distributed.dtensor import get_local_tensor, get_replica, holds_first_shard, is_sharded, list_saved_blocks
from lumen.distributed.processes import SINGLE_PROCESS, Processes
from lumen.errors import CheckpointDamaged, CheckpointError
from lumen.version import __version__

MAX_FILE_BYTES = 2 << 30
_CHECKED_ON_ALL_RANKS = ("model", "optimizer")  # sections whose plain tensors every process holds
Sections = Mapping[str, Mapping[str, torch.Tensor]]
TensorSpec = tuple[torch.dtype, tuple[int, ...]]
Written = tuple[dict[str, JSON], dict[str, dict[str, JSON]]]  # files and descriptions of tensors, as in the manifest


def write_checkpoint(
    directory: PurePath,
    sections: Sections | WritePlan,
    state: Mapping[str, JSON],
    *,
    aliases: Mapping[str, str] = MappingProxyType({}),
    info: Mapping[str, Any],
    max_file_bytes: int = MAX_FILE_BYTES,
    processes: Processes = SINGLE_PROCESS,
) -> None:
    """Write a checkpoint that is either complete or absent under its name, even after a kill or power loss.

    Every process writes the blocks that `plan_writes` assigns. In addition to the tensors, the write needs memory for
    one tensor at most. Collective: every rank must call this.

    Args:
        directory: Final path, for example `runs/gpt/checkpoints/step-00000200`. A damaged checkpoint there is renamed
            to `<name>.damaged-<k>`.
        sections: Tensors of any dtype, shape, strides and device, by section ("model", "optimizer", "extra") and name;
            or the `WritePlan` for such tensors.
        state: JSON that `lumen.checkpoint.format.codec.encode` returned, by name; only rank 0's is written.
        aliases: Names of tied tensors of the section "model" that are stored under another name: alias to stored name.
        info: Plain data in the manifest, so that a listing of checkpoints need not open `state`; only rank 0's is
            written.
        max_file_bytes: Maximum number of bytes of tensors in one file; a larger block gets its own file.
        processes: The processes of the run; default: only this process.

    Raises:
        CheckpointError: `directory` holds a complete checkpoint; a tensor or `info` cannot be saved; the processes hold
            different tensors; or the storage refuses. The error is the same on every rank. Existing files are
            unchanged, and no partial checkpoint remains under `directory`.
    """
    plan = sections if isinstance(sections, WritePlan) else plan_writes(sections, processes)
    storage, state_bytes, head = get_storage(directory), b"", dict[str, JSON]()

    def begin() -> Draft:
        """Refuse, before any work, data that cannot be saved or committed, and create the draft."""
        nonlocal state_bytes
        head.update(format=FORMAT_VERSION, lumen=__version__, info=_encode_info(info), aliases=dict(aliases))
        state_bytes = json.dumps(state, allow_nan=False).encode()
        if holds_damaged := _holds_damaged(directory):
            refuse_foreign_path(directory)
        with explain_storage_errors("write", directory):
            try:
                return storage.begin(directory)
            except FileExistsError:  # a damaged checkpoint must be renamed first
                if not holds_damaged:
                    raise
                set_aside_damaged(directory)
                return storage.begin(directory)

    def commit(draft: Draft, written: Callable[[], list[Written]]) -> None:
        """Write the state and, last, the manifest; then commit. After an error, remove the draft."""
        with explain_storage_errors("write", directory):
            try:
                files, sections = _merge_written(written(), plan.specs)
                files[STATE] = _write_bytes(draft.root / STATE, state_bytes)
                _write_bytes(draft.root / MANIFEST, encode_manifest(head | {"files": files, "sections": sections}))
                Checkpoint.open(draft.root, verify="sizes")  # check the files as a reader does
                if draft.root != draft.directory and _holds_damaged(directory):
                    set_aside_damaged(directory)
                storage.commit(draft)
            except BaseException:
                with suppress(OSError):
                    storage.remove(draft.root)
                raise

    draft = processes.run_on_rank_zero(begin)
    processes.run_and_conclude(
        partial(_write_files, draft, plan, max_file_bytes, processes.rank), partial(commit, draft)
    )


def _merge_written(written: Iterable[Written], specs: Mapping[str, Mapping[str, TensorSpec]]) -> Written:
    """Merge the files of all processes, and the descriptions of all tensors with all of their chunks."""
    files: dict[str, JSON] = {}
    sections = {
        section: {name: _describe_tensor(each, []) for name, each in held.items()} for section, held in specs.items()
    }
    for records, described in written:
        files |= records
        for section, tensors in described.items():
            for name, entry in tensors.items():
                if known := sections[section].get(name):
                    known["chunks"] += entry["chunks"]
                else:  # a tensor of another process
                    sections[section][name] = entry
    return files, sections


def _encode_info(info: Mapping[str, Any]) -> JSON:
    encoded = encode(dict(info), found := Tensors(), "info")
    if found:
        raise CheckpointError(
            f"{next(iter(found))}: `info` cannot hold tensors. Convert it with `item()` or `tolist()`."
        )
    return encoded


def _holds_damaged(directory: PurePath) -> bool:
    """Return True if a path exists but is not an intact checkpoint; raise CheckpointError if it is intact."""
    with explain_read_errors(directory):
        if not path_exists(directory):
            return False
    try:
        Checkpoint.open(directory)
    except CheckpointDamaged:
        return True
    raise CheckpointError(
        f"{directory} holds a complete checkpoint, which Lumen never overwrites. Remove the checkpoint or choose a "
        "different run name."
    )


def _write_files(draft: Draft, plan: WritePlan, max_file_bytes: int, rank: int) -> Written:
    """Write this process's files; return their sizes and checksums, and the file of each block."""
    files: dict[str, JSON] = {}
    described: dict[str, dict[str, JSON]] = {}
    storage = get_storage(draft.root)
    with explain_storage_errors("write", draft.root):
        for section, tensors in plan.tensors.items():
            if not tensors:
                continue
            chunks: dict[str, list[JSON]] = {}
            with storage.make_directory(draft.root / section):
                for index, keys in enumerate(_split_into_files(tensors, plan.names, max_file_bytes)):
                    file = f"{section}/{rank:05d}-{index:05d}{draft.mark}.safetensors"
                    blocks = {name: tensors[key] for name, key in keys.items()}
                    files[file] = write_safetensors(draft.root / file, blocks)
                    for name, key in keys.items():
                        chunk = [file, list(plan.offsets[section][key]), list(blocks[name].shape)]
                        chunks.setdefault(name, []).append(chunk)
                described[section] = {
                    name: _describe_tensor(plan.specs[section][name], found) for name, found in chunks.items()
                }
    return files, described


def _split_into_files(
    tensors: Mapping[str, torch.Tensor], names: Mapping[str, str], max_file_bytes: int
) -> Iterator[dict[str, str]]:
    """Yield the keys of the blocks of each file, by the name of the tensor.

    A file has one block of a tensor. Only a file with a single block exceeds `max_file_bytes`.
    """
    group, size = dict[str, str](), 0
    for key, tensor in tensors.items():
        name = names.get(key, key)
        if group and (size + tensor.nbytes > max_file_bytes or name in group):
            yield group
            group, size = {}, 0
        group[name] = key
        size += tensor.nbytes
    if group:
        yield group


def _describe_tensor(spec: TensorSpec, chunks: list[JSON]) -> JSON:
    dtype, shape = spec
    return {"dtype": str(dtype).removeprefix("torch."), "shape": list(shape), "chunks": chunks}


def _write_bytes(path: PurePath, data: bytes) -> dict[str, int | str]:
    with create_hashed_file(path) as file:
        file.write(data)
    return file.record()


# ---------------------------------------------------------------------- assignment of blocks to processes


@final
@dataclass(frozen=True)
class WritePlan:
    """Blocks that one process writes.

    Attributes:
        tensors: The blocks, by section and name: plain tensors of any device, the run's own or copies.
        offsets: The index at which each block begins, in each dimension of its tensor.
        names: The names of tensors of which this process writes several blocks, by the names of further blocks.
        specs: Dtype and shape of all tensors known to this process, including tensors that other processes write.
    """

    tensors: Sections
    offsets: Mapping[str, Mapping[str, tuple[int, ...]]]
    specs: Mapping[str, Mapping[str, TensorSpec]]
    names: Mapping[str, str]


def plan_writes(sections: Sections, processes: Processes, trained: Container[str] | None = None) -> WritePlan:
    """Divide tensors among processes. Collective: every rank must call this.

    One of the processes that hold a copy of a block writes the block; each process writes about the same number of
    bytes. Rank 0 writes all tensors that may differ between processes (buffers, untrained parameters). In sections
    other than "model" and "optimizer", a plain tensor belongs to its process, and its name must be unique.

    Args:
        sections: Tensors by section and name, sharded or unsharded.
        processes: The processes among which the tensors are divided.
        trained: Names of "model" tensors that are equal on all processes that hold them unsharded; default: all.

    Raises:
        CheckpointError: A tensor cannot be saved, or the processes have different ones; the message names it.
    """
    processes.run_on_all(partial(check_tensors, sections))
    check_same_on_ranks(sections, processes)
    return processes.run_on_all(partial(_plan_local_blocks, sections, processes, trained))


def _plan_local_blocks(sections: Sections, processes: Processes, trained: Container[str] | None) -> WritePlan:
    """Return the blocks of this process; all processes take the same decisions in the same order."""
    loads: dict[int, list[tuple[int, int]]] = {}  # bytes assigned to each replica, by the number of replicas

    def is_assigned(tensor: torch.Tensor) -> bool:
        """Assign a tensor to the replica with the fewest bytes; return True if this process has that replica."""
        index, count = get_replica(tensor, processes)
        heap = loads.setdefault(count, [(0, each) for each in range(count)])
        load, writer = heap[0]
        heapreplace(heap, (load + tensor.nbytes, writer))
        return writer == index

    def is_written_here(section: str, name: str, tensor: torch.Tensor) -> bool:
        """Return True if this process writes a tensor, or its shard of the tensor."""
        if is_sharded(tensor):  # one copy of each shard is written; an empty tensor by the first process
            return is_assigned(tensor) and (
                get_local_tensor(tensor).numel() > 0 or (not tensor.numel() and holds_first_shard(tensor))
            )
        if section not in _CHECKED_ON_ALL_RANKS:  # no other process holds the tensor
            return True
        if section == "optimizer" or trained is None or name in trained:  # equal on all processes
            return is_assigned(tensor)
        return processes.rank == 0

    blocks: dict[str, Tensors] = {}
    offsets: dict[str, dict[str, tuple[int, ...]]] = {}
    names: dict[str, str] = {}
    specs: dict[str, dict[str, TensorSpec]] = {}
    for section, tensors in sections.items():
        local_names: Collection[str] = tensors.keys()
        if processes.world_size > 1:
            largest_first = sorted(tensors.items(), key=lambda item: (-item[1].nbytes, item[0]))
            local_names = {name for name, tensor in largest_first if is_written_here(section, name, tensor)}
        blocks[section], offsets[section] = {}, {}
        further: list[tuple[int, str, torch.Tensor, tuple[int, ...]]] = []
        for name in filter(local_names.__contains__, tensors):
            local, row = get_local_tensor(tensors[name]), 0
            saved = list_saved_blocks(tensors[name])
            blocks[section][name], offsets[section][name] = local, saved[0][0]
            for index, (begin, shape) in enumerate(saved if len(saved) > 1 else ()):
                further.append((index, name, local[row : row + shape[0]], begin))
                row += shape[0]
        for index, name, block, begin in sorted(further, key=lambda each: each[0]):
            key = f"{name} (block {index + 1})" if index else name
            blocks[section][key], offsets[section][key], names[key] = block, begin, name
        specs[section] = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    return WritePlan(blocks, offsets, specs, names)


def check_same_on_ranks(sections: Sections, processes: Processes) -> None:
    """Refuse tensors that differ between processes. Collective: every rank must call this.

    Raises:
        CheckpointError: The dtype, shape or sharding of a tensor differs; the message names the tensor.
    """
    if processes.world_size == 1:
        return
    specs = {
        f"{section}/{name}": f"{tensor.dtype} {list(tensor.shape)}"
        + (f" sharded by {getattr(tensor, 'placements', ())}" if is_sharded(tensor) else "")
        for section, tensors in sections.items()
        for name, tensor in tensors.items()
        if section in _CHECKED_ON_ALL_RANKS or is_sharded(tensor)
    }
    ordered = dict(sorted(specs.items()))
    digests = processes.all_gather(hashlib.sha256(repr(ordered).encode()).digest())
    if len(set(digests)) == 1:
        return
    held = processes.all_gather(ordered)
    rank, other = next((rank, other) for rank, other in enumerate(held) if other != held[0])
    name = next(name for name in sorted({*held[0], *other}) if held[0].get(name) != other.get(name))
    raise CheckpointError(
        f"{name} is {held[0].get(name, 'missing')} on rank 0 and {other.get(name, 'missing')} on rank {rank}. Every "
        "process must have the same model and optimizer, and average the same parameters."
    )


def check_tensors(sections: Sections) -> None:
    """Refuse tensors that safetensors files cannot hold.

    Raises:
        CheckpointError: A tensor is not dense, or has a reserved name; the message names it.
    """
    for section, tensors in sections.items():
        for name, tensor in tensors.items():
            if name == "__metadata__":
                raise CheckpointError(f"{section}/{name}: safetensors reserves this name. Rename the tensor.")
            if not _is_plain_dense(tensor):
                raise CheckpointError(
                    f"{section}/{name}: a {type(tensor).__name__} of {tensor.dtype}, {tensor.layout}, {tensor.device} "
                    "cannot be saved; checkpoints hold plain dense tensors. Convert it, for example with `to_dense()`."
                )


def _is_plain_dense(tensor: torch.Tensor) -> bool:
    if is_sharded(tensor):
        sharded: Any = tensor
        summed = not any(placement.is_partial() for placement in sharded.placements)
        return summed and _is_plain_dense(get_local_tensor(tensor))
    wrapper = hasattr(tensor, "__tensor_flatten__")  # the data is in inner tensors
    return not (wrapper or tensor.is_quantized or tensor.is_meta) and tensor.layout == torch.strided
