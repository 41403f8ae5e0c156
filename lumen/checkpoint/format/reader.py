"""Reader of a checkpoint that verifies every byte it uses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from pathlib import PurePath
from types import MappingProxyType
from typing import Any, Literal, final

import torch

from lumen.checkpoint.format.codec import JSON
from lumen.checkpoint.format.manifest import (
    STATE,
    Chunk,
    Manifest,
    StoredTensor,
    check_file,
    is_uncommitted,
    read_json,
    read_manifest,
)
from lumen.checkpoint.format.safetensors_file import check_header, is_contiguous_on_host
from lumen.checkpoint.format.storage import explain_read_errors, get_storage, path_exists
from lumen.data.nested import fill_tensor
from lumen.distributed.dtensor import get_local_tensor, list_saved_blocks
from lumen.distributed.processes import SINGLE_PROCESS, Processes
from lumen.errors import CheckpointDamaged, CheckpointGone, CheckpointMismatch
from lumen.internals.garbage import collect_young_only

_READ_BYTES = 4 << 20  # size of one read when only part of each row is kept
#: Entries of the state of a run, and their types in JSON.
_STATE_TYPES: dict[str, type] = {"seed": int, "schedulers": list, "monitors": list, "ranks": list} | dict.fromkeys(
    ("progress", "precision", "configured", "loggers", "metrics", "logged_as", "hyperparameters", "modes", "built",
     "data_hyperparameters", "extra_state", "settings", "data", "optimizer"), dict,
)  # fmt: skip


@final
class Checkpoint:
    """Complete (committed) checkpoint, verified when opened; tensors are read lazily.

    Attributes:
        path: Directory of the checkpoint.
        info: Plain data that was given as `info` when the checkpoint was written.
        state: The JSON that was given as `state`, not yet decoded.
        aliases: Names of tied tensors of the section "model": alias to stored name.
        averages: Tensors of the section "model" that are read as a mean. The sources of each mean are tuples of
            checkpoint, section and name; `with_averages` sets them.
    """

    averages: Mapping[str, Sequence[tuple[Checkpoint, str, str]]] = MappingProxyType({})

    def __init__(
        self, path: PurePath, manifest: Manifest, state: dict[str, JSON], data_offsets: Mapping[str, Mapping[str, int]]
    ) -> None:
        self.path = path
        self.info = manifest.info
        self.state = state
        self.aliases = manifest.aliases
        self._sections = manifest.sections
        self._data_offsets = data_offsets
        sizes = {name: size for name, (size, _) in manifest.files.items()}
        self._open_reader = partial(get_storage(path).make_piece_reader, path, sizes)
        self._read_into = self._open_reader()

    @staticmethod
    def open(
        path: PurePath,
        verify: Literal["checksums", "sizes"] = "checksums",
        *,
        sections: Sequence[str] | None = None,
        processes: Processes = SINGLE_PROCESS,
    ) -> Checkpoint:
        """Verify a checkpoint and open it. Collective: every one of `processes` must call this.

        Args:
            path: Directory of the checkpoint, the same on every process.
            verify: "checksums" reads every byte, each on one of the processes; "sizes" checks the size and the header
                of every file.
            sections: Sections to verify; only these can be read. The state is included only if `STATE` is listed.
                Default: everything.
            processes: The processes that open the checkpoint together; default: only this process.

        Raises:
            CheckpointDamaged: A file or tensor is missing, changed, malformed, or outside the directory; the message
                names it.
            CheckpointError: The checkpoint has another format version, or this user may not read it. An error of one
                process is raised on all.
        """
        with collect_young_only():
            return processes.run_on_all(partial(_open_verified, path, verify, sections, processes))

    def list_tensor_names(self, section: str) -> list[str]:
        """Return the names of a section's tensors, in the order they were written."""
        return list(self._get_section(section))

    def get_spec(self, section: str, name: str) -> tuple[torch.dtype, torch.Size]:
        """Return the dtype and shape of a tensor without reading it."""
        spec = self._get_stored_tensor(section, name)
        if averaged := self._find_averaged(section, name):
            source, where, stored = averaged[0]
            return source.get_spec(where, stored)[0], torch.Size(spec.shape)
        return spec.dtype, torch.Size(spec.shape)

    def read_tensor(self, section: str, name: str) -> torch.Tensor:
        """Read a tensor into new host memory.

        Raises:
            CheckpointMismatch: The checkpoint has no such tensor.
            CheckpointDamaged: The file of the tensor changed since the checkpoint was opened.
        """
        shape = self._get_stored_tensor(section, name).shape
        return self.read_block(section, name, (0,) * len(shape), shape)

    def read_block(self, section: str, name: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Read a block of a tensor into new host memory; only the overlapping rows are read from the files.

        Args:
            section: "model", "optimizer" or "extra".
            name: Name of the tensor in the section.
            offsets: Index at which the block begins, in each dimension.
            shape: Shape of the block, which must be inside the tensor.

        Raises:
            CheckpointMismatch: The checkpoint has no such tensor.
            CheckpointDamaged: The file of the tensor changed since the checkpoint was opened.
        """
        spec = self._get_stored_tensor(section, name)
        if averaged := self._find_averaged(section, name):
            return _average_blocks(each.read_block(where, stored, offsets, shape) for each, where, stored in averaged)
        data = torch.empty(math.prod(shape) * spec.dtype.itemsize, dtype=torch.uint8, device="cpu")
        self._read_into_bytes(name, spec, offsets, data.reshape(*shape, spec.dtype.itemsize))
        return data.view(spec.dtype).reshape(tuple(shape))

    def read_shard(self, section: str, name: str, like: torch.Tensor, *, is_replicated: bool = False) -> torch.Tensor:
        """Read this process's shard of a tensor into new host memory, with the sharding of `like`.

        Args:
            section: "model", "optimizer" or "extra".
            name: Name of the tensor in the section.
            like: A tensor with the sharding of the shard; for a plain tensor, all values are read.
            is_replicated: Every process reads all values.
        """
        _, shape = self.get_spec(section, name)
        blocks = list_saved_blocks(like, shape, is_replicated=is_replicated)
        found = [self.read_block(section, name, *block) for block in blocks]
        return torch.cat(found) if len(found) > 1 else found[0]

    def as_mapping(self, section: str, read: Callable[[str], torch.Tensor] | None = None) -> Mapping[str, torch.Tensor]:
        """Return a section as a mapping that reads a tensor at each lookup.

        Args:
            section: "model", "optimizer" or "extra".
            read: Function that returns the tensor of a name; default: `read_tensor` of this section.
        """
        return _TensorMapping(self._get_section(section), partial(self.read_tensor, section) if read is None else read)

    def copy_into(self, section: str, name: str, destination: torch.Tensor) -> None:
        """Read a tensor into an existing tensor on any device, in place; a sharded one receives this process's shard.

        Raises:
            CheckpointMismatch: The checkpoint has no such tensor; `destination` has another dtype or shape (nothing is
                cast); or `destination` is an expanded tensor, which cannot hold all values.
            CheckpointDamaged: The file of the tensor changed since the checkpoint was opened.
        """
        spec, dtype = self._get_stored_tensor(section, name), self.get_spec(section, name)[0]
        if destination.dtype != dtype or destination.shape != spec.shape or destination.is_meta:
            raise CheckpointMismatch(
                f"{self.path}: {section}/{name} is {dtype} {list(spec.shape)}, but the tensor to fill is "
                f"{destination.dtype} {list(destination.shape)} on {destination.device}, and Lumen does not cast. "
                "Build the model as it was when the checkpoint was saved."
            )
        local, blocks = get_local_tensor(destination.detach()), list_saved_blocks(destination)
        if not is_contiguous_on_host(local) or self._find_averaged(section, name):
            values = self.read_shard(section, name, destination).to(local.device)
            fill_tensor(local, values)
            if 0 in local.stride() and not torch.allclose(local, values, rtol=0.0, atol=0.0, equal_nan=True):
                raise CheckpointMismatch(
                    f"{self.path}: {section}/{name} has different values where the model's tensor, made by expand, "
                    "stores a single value. Register the tensor with clone()."
                )
        else:  # as_strided: a single element counts as contiguous whatever its stride is
            flat = local.as_strided((local.numel(),), (1,)).view(torch.uint8)
            begin = 0
            for offsets, shape in blocks:
                size = math.prod(shape) * spec.dtype.itemsize
                data = flat[begin : begin + size].reshape(*shape, spec.dtype.itemsize)
                self._read_into_bytes(name, spec, offsets, data)
                begin += size

    def with_averages(self, averages: Mapping[str, Sequence[tuple[Checkpoint, str, str]]]) -> Checkpoint:
        """Return a copy of this checkpoint that reads tensors of the section "model" as means of other tensors.

        Sources have the same shape. Sums are computed in float64, in the given order. The result has the dtype of the
        first source, or float32 if that dtype is narrower. This method reads no data.

        Args:
            averages: For the name of each averaged tensor, its sources: tuples of checkpoint, section and name of a
                tensor.
        """
        averaged = copy(self)
        averaged.averages = averages
        return averaged

    def release(self) -> None:
        """Close the checkpoint's files, or free read-ahead memory; the checkpoint can still be read."""
        self._read_into = self._open_reader()
        for each in {id(source): source for averaged in self.averages.values() for source, _, _ in averaged}.values():
            each.release()

    def _find_averaged(self, section: str, name: str) -> Sequence[tuple[Checkpoint, str, str]]:
        return self.averages.get(name, ()) if section == "model" else ()

    def _get_section(self, section: str) -> Mapping[str, StoredTensor]:
        if section not in self._sections:
            raise CheckpointMismatch(f"{self.path} has no section {section!r}, only {sorted(self._sections)}.")
        return self._sections[section]

    def _get_stored_tensor(self, section: str, name: str) -> StoredTensor:
        specs = self._get_section(section)
        if name not in specs:
            raise CheckpointMismatch(
                f"{self.path} has no tensor {name!r} in {section!r} (found {len(specs)} other tensors)."
            )
        return specs[name]

    def _read_into_bytes(self, name: str, spec: StoredTensor, offsets: Sequence[int], data: torch.Tensor) -> None:
        """Read a block of a tensor as bytes, because not every dtype can be copied into a slice.

        Args:
            name: Name of the tensor, for messages.
            spec: Dtype, shape and chunks of the tensor.
            offsets: Index at which the block begins, in each dimension.
            data: Destination of the bytes: uint8, with the block's shape and a last dimension for the bytes of an
                element.
        """
        for chunk in spec.chunks:
            begins = [max(o, p) for o, p in zip(offsets, chunk.offsets, strict=True)]
            sizes = zip(offsets, data.shape[:-1], chunk.offsets, chunk.shape, strict=True)
            ends = [min(o + n, p + m) for o, n, p, m in sizes]
            if all(begin < end for begin, end in zip(begins, ends, strict=True)):
                in_chunk = [slice(b - o, e - o) for b, e, o in zip(begins, ends, chunk.offsets, strict=True)]
                in_block = tuple(slice(b - o, e - o) for b, e, o in zip(begins, ends, offsets, strict=True))
                self._read_rows(name, chunk, in_chunk, data[in_block])

    def _read_rows(self, name: str, chunk: Chunk, block: Sequence[slice], data: torch.Tensor) -> None:
        """Read a block of a chunk by rows of the first dimension, which are contiguous in the file."""
        row_shape = chunk.shape[1:]
        row_bytes = math.prod(row_shape) * data.shape[-1]
        rows = block[0] if block else slice(0, 1)
        begin = self._data_offsets[chunk.file][name] + rows.start * row_bytes
        if data.is_contiguous() and data.numel() == (rows.stop - rows.start) * row_bytes:
            self._read_bytes(chunk.file, begin, data)
            return
        rows_per_read = max(1, _READ_BYTES // row_bytes)
        for row in range(0, len(data), rows_per_read):
            target = data[row : row + rows_per_read]
            piece = torch.empty((len(target), *row_shape, data.shape[-1]), dtype=torch.uint8, device="cpu")
            self._read_bytes(chunk.file, begin + row * row_bytes, piece)
            target.copy_(piece[(slice(None), *block[1:])])

    def _read_bytes(self, file: str, begin: int, data: torch.Tensor) -> None:
        """Fill a contiguous uint8 tensor with the bytes of a file, starting at offset `begin`."""
        path, view = self.path / file, data.reshape(-1).numpy().data
        with _explain_removal(self.path), explain_read_errors(path):
            count = self._read_into(file, begin, view)
        if count != len(view):
            raise CheckpointDamaged(f"{path} became shorter while it was read.")


def _open_verified(path: PurePath, verify: str, sections: Sequence[str] | None, processes: Processes) -> Checkpoint:
    """Check sizes and headers of all files, and the checksums of this process's share of the files."""
    with _explain_removal(path):
        manifest = read_manifest(path)
        files = {n: each for n, each in manifest.files.items() if sections is None or n.partition("/")[0] in sections}
        largest_first = sorted(files, key=lambda name: -files[name][0])
        hashed = set(largest_first[processes.rank :: processes.world_size] if verify == "checksums" else ())
        for name, (size, sha256) in files.items():
            check_file(path, name, size, sha256 if name in hashed else None)
        contents = {file: held for file, held in manifest.contents.items() if file in files}
        if sections is not None:
            known = {section: specs for section, specs in manifest.sections.items() if section in sections}
            manifest = manifest._replace(sections=known)
        begins = {file: check_header(path / file, held) for file, held in contents.items()}
        return Checkpoint(path, manifest, _read_state(path) if STATE in files else {}, begins)


def _read_state(path: PurePath) -> dict[str, Any]:
    """Return the JSON of `state.json`; check that the state of a run has every entry with its type."""
    state: dict[str, Any] = read_json(path / STATE)
    if {"progress", "seed"}.isdisjoint(state):  # not the state of a run
        return state
    if wrong := [name for name, kind in _STATE_TYPES.items() if type(state.get(name)) is not kind]:
        raise CheckpointDamaged(f"{path / STATE} is malformed: {', '.join(wrong)}. Resume from a different checkpoint.")
    return state


@contextmanager
def _explain_removal(path: PurePath) -> Iterator[None]:
    """Context for a read, which raises an error if the checkpoint is removed during the read.

    Raises:
        CheckpointGone: The checkpoint was removed.
    """
    try:
        yield
    except CheckpointDamaged as error:
        with explain_read_errors(path):
            is_gone = is_uncommitted(path) or not path_exists(path)
        if is_gone:
            raise CheckpointGone(
                f"{path} does not exist, or was removed while it was read, perhaps by its run, which keeps only the "
                "newest checkpoints (keep_last of ModelCheckpoint). Read a newer checkpoint."
            ) from error
        raise


def _average_blocks(blocks: Iterator[torch.Tensor]) -> torch.Tensor:
    """Return the mean of blocks, at least in float32; only one block is in memory in addition to the sum."""
    total = next(blocks)
    dtype, count = total.dtype, 1
    for block in blocks:
        if count == 1:
            total = total.to(torch.complex128 if dtype.is_complex else torch.float64, copy=True)
        total += block.double() if dtype.itemsize == 1 else block  # torch cannot add float8
        count += 1
    return total if count == 1 else total.div_(count).to(torch.float32 if dtype.itemsize < 4 else dtype)


@final
class _TensorMapping(Mapping[str, torch.Tensor]):
    def __init__(self, names: Mapping[str, StoredTensor], read: Callable[[str], torch.Tensor]) -> None:
        self._names = names
        self._read = read

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._read(name)

    def __contains__(self, name: object) -> bool:  # `Mapping.__contains__` would read the tensor
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
