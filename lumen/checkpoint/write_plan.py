"""Which parts of a checkpoint's tensors a process writes: each finds it out by itself, and they fill all tensors."""

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

from lumen.distributed.dtensor import copies, is_first, is_sharded, own_box, own_part
from lumen.distributed.processes import Processes
from lumen.errors import CheckpointError

_ON_ALL = ("model", "optimizer")  # sections whose plain tensors every process holds
Sections = Mapping[str, Mapping[str, torch.Tensor]]
Spec = tuple[torch.dtype, tuple[int, ...]]


@final
class Box(NamedTuple):
    """A part of a tensor: its dtype, where it begins in each dimension of the tensor, and its own shape."""

    dtype: torch.dtype
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@final
@dataclass(frozen=True)
class Share:
    """What one process writes.

    Attributes:
        sections: The tensors, or copies of the parts in `boxes`, by section and name.
        boxes: The parts, by section and name.
        specs: Dtype and shape of all tensors that this process knows of, also of those it writes nothing of.
    """

    sections: Sections
    boxes: Mapping[str, Mapping[str, Box]]
    specs: Mapping[str, Mapping[str, Spec]]

    def parts(self) -> dict[str, dict[str, torch.Tensor]]:
        """The parts themselves, by section and name."""
        return {
            section: {name: own_part(self.sections[section][name]) for name in boxes}
            for section, boxes in self.boxes.items()
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(box.nbytes for boxes in self.boxes.values() for box in boxes.values())

    @property
    def count(self) -> int:
        """Number of all parts."""
        return sum(map(len, self.boxes.values()))


def share_of(sections: Sections, processes: Processes, trained: Container[str] | None = None) -> Share:
    """Divide tensors among processes. Collective: every rank must call this.

    A part is written by one of those that hold a copy of it, so that each of them writes about as much. What is not
    known to be equal on all, as trained parameters are, is rank 0's: one process's buffers go together. In sections
    other than "model" and "optimizer" a plain tensor is its process's own: nobody else may have one of that name.

    Args:
        sections: Tensors by section and name, whole or sharded.
        processes: Among whom.
        trained: Names in "model" of what is equal on all where it is whole; default: everything there.

    Raises:
        CheckpointError: A tensor cannot be saved, or the processes hold different ones; the message names it.
    """
    processes.together(partial(check_tensors, sections))
    if processes.world_size > 1:
        _check_same(_specs_of_all(sections), processes)
    return processes.together(partial(_own_share, sections, processes, trained))


def _specs_of_all(sections: Sections) -> dict[str, str]:
    """What must be the same on all processes: dtype, shape and cut of each tensor that all of them hold."""
    return {
        f"{section}/{name}": f"{tensor.dtype} {list(tensor.shape)}"
        + (f" cut up by {getattr(tensor, 'placements', ())}" if is_sharded(tensor) else "")
        for section, tensors in sections.items()
        for name, tensor in tensors.items()
        if section in _ON_ALL or is_sharded(tensor)
    }


def _own_share(sections: Sections, processes: Processes, trained: Container[str] | None) -> Share:
    division, boxes = _Division(processes, trained), {}
    for section, tensors in sections.items():
        ours: Collection[str] = tensors.keys()
        if processes.world_size > 1:
            largest_first = sorted(tensors.items(), key=lambda item: (-item[1].nbytes, item[0]))
            ours = {name for name, tensor in largest_first if division.is_ours(section, name, tensor)}
        boxes[section] = {name: Box(each.dtype, *own_box(each)) for name, each in tensors.items() if name in ours}
    specs = {
        section: {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        for section, tensors in sections.items()
    }
    return Share(sections, boxes, specs)


@final
class _Division:
    """Who writes which tensor. All processes find the same, if they ask for what they have in common in one order."""

    def __init__(self, processes: Processes, trained: Container[str] | None) -> None:
        self._processes = processes
        self._trained = trained
        self._loads: dict[int, list[tuple[int, int]]] = {}  # bytes that each copy has got, by the number of copies

    def is_ours(self, section: str, name: str, tensor: torch.Tensor) -> bool:
        """Whether this process writes a tensor, or its part of one."""
        if is_sharded(tensor):  # of the copies of each part one is written
            return self._has_turn(tensor) and _has_part(tensor)
        if section not in _ON_ALL:  # nobody else has it
            return True
        if section == "optimizer" or self._trained is None or name in self._trained:  # equal on all
            return self._has_turn(tensor)
        return self._processes.rank == 0

    def _has_turn(self, tensor: torch.Tensor) -> bool:
        """Give a tensor to the copy that has got the fewest bytes so far. Returns whether that is this process's."""
        index, count = copies(tensor, self._processes)
        heap = self._loads.setdefault(count, [(0, each) for each in range(count)])
        load, writer = heap[0]
        heapreplace(heap, (load + tensor.nbytes, writer))
        return writer == index


def _has_part(tensor: torch.Tensor) -> bool:
    """Whether something of a sharded tensor is here; one without elements is with the first process."""
    return own_part(tensor).numel() > 0 or (tensor.numel() == 0 and is_first(tensor))


def _check_same(specs: Mapping[str, str], processes: Processes) -> None:
    """Compare what all hold. Collective."""
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
    if is_sharded(tensor):
        sharded: Any = tensor
        summed = not any(placement.is_partial() for placement in sharded.placements)
        return summed and _is_plain_dense(own_part(tensor))
    wrapper = hasattr(tensor, "__tensor_flatten__")  # its bytes are elsewhere
    return not (wrapper or tensor.is_quantized or tensor.is_meta) and tensor.layout == torch.strided
