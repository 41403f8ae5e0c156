"""Which parts of a checkpoint's tensors a process writes: each finds it out by itself, and they fill all tensors."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import partial
from heapq import heapreplace
from typing import Any, final

import torch

from lumen.checkpoint.sharded import copies, is_first, is_sharded, own_box, own_part
from lumen.errors import CheckpointError
from lumen.strategies.processes import Processes

_ON_ALL = ("model", "optimizer")  # sections whose plain tensors every process holds
Sections = Mapping[str, Mapping[str, torch.Tensor]]
Spec = tuple[torch.dtype, tuple[int, ...]]


@final
@dataclass(frozen=True)
class Box:
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
    specs = {
        section: {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        for section, tensors in sections.items()
    }
    common = {
        section: {name: tensor for name, tensor in tensors.items() if section in _ON_ALL or is_sharded(tensor)}
        for section, tensors in sections.items()
    }
    loads: dict[int, list[tuple[int, int]]] = {}
    boxes: dict[str, dict[str, Box]] = {}
    for section, tensors in common.items():
        sizes = {name: _nbytes(specs[section][name]) for name in tensors}
        largest_first = sorted(sorted(tensors), key=sizes.__getitem__, reverse=True)
        of_zero = {
            name
            for name, tensor in tensors.items()
            if section == "model" and trained is not None and name not in trained and not is_sharded(tensor)
        }
        left_out = {
            name
            for name in largest_first
            if (processes.rank > 0 if name in of_zero else not _is_written_here(tensors[name], loads, processes))
        }
        boxes[section] = {
            name: Box(tensor.dtype, *own_box(tensor))
            for name, tensor in sections[section].items()
            if name not in left_out
        }
    return Share(sections, boxes, specs)


def _nbytes(spec: Spec) -> int:
    return math.prod(spec[1]) * spec[0].itemsize


def _is_written_here(tensor: torch.Tensor, loads: dict[int, list[tuple[int, int]]], processes: Processes) -> bool:
    """Whether this process writes its part.

    Args:
        tensor: A tensor that all hold, or hold parts of.
        loads: Bytes that each copy has been given so far, as a heap, by the number of copies; brought up to date.
        processes: Among whom.
    """
    index, count = copies(tensor, processes)
    heap = loads.setdefault(count, [(0, each) for each in range(count)])
    load, writer = heap[0]
    heapreplace(heap, (load + _nbytes((tensor.dtype, tuple(tensor.shape))), writer))
    return writer == index and (own_part(tensor).numel() > 0 or (tensor.numel() == 0 and is_first(tensor)))


def _check_same(specs: Mapping[str, str], processes: Processes) -> None:
    """Compare what all hold. Collective."""
    if processes.world_size == 1:
        return
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
