"""Plans which blocks of a checkpoint's tensors each process writes, so that together they cover every tensor once."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass
from functools import partial
from heapq import heapreplace
from typing import Any, NamedTuple, final

import torch

from lumen.distributed.dtensor import copies, is_first, is_sharded, local_block, local_tensor
from lumen.distributed.processes import Processes
from lumen.errors import CheckpointError

_ON_ALL = ("model", "optimizer")  # sections whose plain tensors every process holds
Sections = Mapping[str, Mapping[str, torch.Tensor]]
TensorSpec = tuple[torch.dtype, tuple[int, ...]]


@final
class Block(NamedTuple):
    """A block of a tensor: its dtype, its offset in each dimension of the tensor, and its shape."""

    dtype: torch.dtype
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the block in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@final
@dataclass(frozen=True)
class WritePlan:
    """The blocks that one process writes.

    Attributes:
        sections: The tensors, or copies of the blocks in `blocks`, by section and name.
        blocks: Dtype, offset and shape of each block, by section and name.
        specs: Dtype and shape of all tensors that this process knows, also of those it writes nothing of.
    """

    sections: Sections
    blocks: Mapping[str, Mapping[str, Block]]
    specs: Mapping[str, Mapping[str, TensorSpec]]

    def local_tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """The tensors of the blocks, by section and name."""
        return {
            section: {name: local_tensor(self.sections[section][name]) for name in blocks}
            for section, blocks in self.blocks.items()
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.nbytes for blocks in self.blocks.values() for block in blocks.values())

    @property
    def count(self) -> int:
        """Number of all blocks."""
        return sum(map(len, self.blocks.values()))


def plan_writes(sections: Sections, processes: Processes, trained: Container[str] | None = None) -> WritePlan:
    """Divide tensors among processes. Collective: every rank must call this.

    A block is written by one of the processes that hold a copy of it, so that each of them writes about as much.
    Tensors that may differ between processes (buffers, untrained parameters) are all written by rank 0.
    In sections other than "model" and "optimizer" a plain tensor belongs to its process: no other may have its name.

    Args:
        sections: Tensors by section and name, whole or sharded.
        processes: The processes among which they are divided.
        trained: Names in "model" of tensors that are equal on all processes that hold them whole; default: all.

    Raises:
        CheckpointError: A tensor cannot be saved, or the processes have different ones; the message names it.
    """
    processes.together(partial(check_tensors, sections))
    check_same(sections, processes)
    return processes.together(partial(_own_plan, sections, processes, trained))


def _specs_of_all(sections: Sections) -> dict[str, str]:
    """What must agree on all processes: dtype, shape and sharding of each tensor that all of them hold."""
    return {
        f"{section}/{name}": f"{tensor.dtype} {list(tensor.shape)}"
        + (f" cut up by {getattr(tensor, 'placements', ())}" if is_sharded(tensor) else "")
        for section, tensors in sections.items()
        for name, tensor in tensors.items()
        if section in _ON_ALL or is_sharded(tensor)
    }


def _own_plan(sections: Sections, processes: Processes, trained: Container[str] | None) -> WritePlan:
    division, blocks = _Division(processes, trained), {}
    for section, tensors in sections.items():
        ours: Collection[str] = tensors.keys()
        if processes.world_size > 1:
            largest_first = sorted(tensors.items(), key=lambda item: (-item[1].nbytes, item[0]))
            ours = {name for name, tensor in largest_first if division.is_ours(section, name, tensor)}
        blocks[section] = {
            name: Block(each.dtype, *local_block(each)) for name, each in tensors.items() if name in ours
        }
    specs = {
        section: {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        for section, tensors in sections.items()
    }
    return WritePlan(sections, blocks, specs)


@final
class _Division:
    """Decides who writes which tensor; with the same result on all processes if they ask in the same order."""

    def __init__(self, processes: Processes, trained: Container[str] | None) -> None:
        self._processes = processes
        self._trained = trained
        self._loads: dict[int, list[tuple[int, int]]] = {}  # bytes that each copy has got, by the number of copies

    def is_ours(self, section: str, name: str, tensor: torch.Tensor) -> bool:
        """Whether this process writes a tensor, or the shard of it that is here."""
        if is_sharded(tensor):  # of the copies of each shard one is written
            return self._has_turn(tensor) and _holds_some(tensor)
        if section not in _ON_ALL:  # nobody else has it
            return True
        if section == "optimizer" or self._trained is None or name in self._trained:  # equal on all
            return self._has_turn(tensor)
        return self._processes.rank == 0

    def _has_turn(self, tensor: torch.Tensor) -> bool:
        """Assign a tensor to the replica with the fewest bytes so far. Returns whether that is this process's."""
        index, count = copies(tensor, self._processes)
        heap = self._loads.setdefault(count, [(0, each) for each in range(count)])
        load, writer = heap[0]
        heapreplace(heap, (load + tensor.nbytes, writer))
        return writer == index


def _holds_some(tensor: torch.Tensor) -> bool:
    """Whether this process holds elements of a sharded tensor; an empty one counts as held by the first process."""
    return local_tensor(tensor).numel() > 0 or (tensor.numel() == 0 and is_first(tensor))


def check_same(sections: Sections, processes: Processes) -> None:
    """Refuse tensors that differ between processes. Collective: every rank must call this.

    Raises:
        CheckpointError: A tensor differs; the message names it.
    """
    if processes.world_size == 1:
        return
    specs = _specs_of_all(sections)
    ordered = {name: specs[name] for name in sorted(specs)}
    digests = processes.gather(hashlib.sha256(repr(ordered).encode()).digest())
    if len(set(digests)) == 1:
        return
    held = processes.gather(ordered)
    rank, other = next((rank, other) for rank, other in enumerate(held) if other != held[0])
    name = next(name for name in sorted({*held[0], *other}) if held[0].get(name) != other.get(name))
    raise CheckpointError(
        f"{name} is {held[0].get(name, 'not there')} on rank 0 and {other.get(name, 'not there')} on rank {rank}. "
        "Every process must have the same model and optimizer, and average the same."
    )


def check_tensors(sections: Sections) -> None:
    """Refuse tensors that safetensors files cannot hold.

    Raises:
        CheckpointError: A tensor is not dense, or has a reserved name; the message names it.
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
    if is_sharded(tensor):
        sharded: Any = tensor
        summed = not any(placement.is_partial() for placement in sharded.placements)
        return summed and _is_plain_dense(local_tensor(tensor))
    wrapper = hasattr(tensor, "__tensor_flatten__")  # its bytes are elsewhere
    return not (wrapper or tensor.is_quantized or tensor.is_meta) and tensor.layout == torch.strided
