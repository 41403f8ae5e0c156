"""What one process has computed in a short training, in the order in which it did: plain data."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from functools import lru_cache
from typing import Any, NamedTuple, final
from zlib import crc32

import torch

from lumen.distributed.dtensor import is_sharded

_PERIOD, _PROJECTIONS = 4093, 3


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor on this process. Collective where it is sharded."""
    sharded: Any = tensor.detach()
    value: torch.Tensor = sharded.full_tensor() if is_sharded(tensor) else sharded
    return value.to_dense() if value.layout is not torch.strided else value


def measure(tensors: list[torch.Tensor], *, quick: bool = False) -> tuple[str, tuple[float, ...]]:
    """The digest of some tensors' bits, and numbers that are as near to each other as the tensors are.

    Args:
        tensors: Whole or sharded.
        quick: A checksum will do.
    """
    found: Any = _Checksum() if quick else hashlib.sha256()
    sums = [0.0] * (1 + _PROJECTIONS)
    for tensor in tensors:
        value = whole(tensor).cpu().contiguous().clone()  # numpy would keep FSDP from freeing what it looks at
        found.update(f"{value.dtype}{tuple(value.shape)}".encode())
        found.update(value.reshape(-1).view(torch.uint8).numpy().data if value.numel() else b"")
        flat = value.reshape(-1)
        flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
        for number, part in enumerate(_numbers(flat.double())):
            sums[number] += part
    return found.hexdigest()[:16], (math.sqrt(sums[0]), *sums[1:])


@final
class _Checksum:
    """One of 32 bits, with the methods of a hash."""

    def __init__(self) -> None:
        self._code = 0

    def update(self, data: Any) -> None:
        self._code = crc32(data, self._code)

    def hexdigest(self) -> str:
        return f"{self._code:08x}"


def _numbers(flat: torch.Tensor) -> list[float]:
    """The square of a vector's norm, and its projections."""
    rows, rest = divmod(len(flat), _PERIOD)
    body, tail = flat[: rows * _PERIOD].view(rows, _PERIOD), flat[rows * _PERIOD :]
    columns = _columns()
    heights = torch.cos(torch.arange(rows + 1, dtype=torch.float64) * 0.7 + 0.3)
    projections = heights[:rows] @ body @ columns + heights[rows] * (tail @ columns[:rest])
    return [float(flat @ flat), *projections.tolist()]


@lru_cache(maxsize=1)
def _columns() -> torch.Tensor:
    places = torch.arange(_PERIOD, dtype=torch.float64)
    return torch.stack([torch.cos(places * factor + factor) for factor in (0.0, 1.1, 2.3)], 1)


def tensors_in(thing: Any, place: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in a batch or an output, with where they are; numbers too, as tensors."""
    if isinstance(thing, torch.Tensor):
        yield place, thing
    elif isinstance(thing, bool | int | float):
        yield place, torch.tensor(thing)
    elif isinstance(thing, str):
        yield place, torch.tensor(list(thing.encode()), dtype=torch.uint8)
    elif isinstance(thing, Mapping):
        for name, value in thing.items():
            yield from tensors_in(value, f"{place}[{name!r}]")
    elif isinstance(thing, list | tuple):
        for number, value in enumerate(thing):
            yield from tensors_in(value, f"{place}[{number}]")
    elif is_dataclass(thing):
        for name, value in vars(thing).items():
            yield from tensors_in(value, f"{place}.{name}")


def loss_in(output: Any) -> torch.Tensor | None:
    """The loss in what a training step returned."""
    if isinstance(output, Mapping):
        output = output.get("loss")
    if isinstance(output, tuple | list) and output:
        output = output[0]
    return output if isinstance(output, torch.Tensor) else None


def counts_in(batch: Any) -> dict[str, int]:
    """What could be the number of units in a batch: samples, tokens that are no padding, what a mask marks."""
    found: dict[str, int] = {}
    for place, tensor in tensors_in(batch, "batch"):
        if tensor.ndim and "samples" not in found:
            found["samples"] = len(tensor)
        if tensor.is_floating_point() or tensor.is_complex() or not tensor.ndim:
            continue
        for value in (-100, 0, -1, 1):
            found[f"{place} != {value}"] = int((tensor != value).sum())
        found[f"the sum of {place}"] = int(tensor.sum())
    return found


#: What an event is about, in the order of a step. Those of a micro-batch come from the process that computed it.
OF_MICRO_BATCHES = ("order", "batch", "input", "module", "loss", "partial")
OF_STEPS = ("built", "start", "gradient", "parameter", "buffer", "validated", "optimizer")


@final
class Event(NamedTuple):
    """One thing that was computed.

    Attributes:
        step: Optimizer updates completed before it; of "parameter" and "buffer" including this one.
        micro: Number of the micro-batch in its epoch, as one process would count; -1: it is of no single one.
        what: One of `OF_MICRO_BATCHES` and `OF_STEPS`.
        name: Of a module, a parameter, a buffer; how often it came before in this micro-batch, after a `#`.
        digest: A hash of all its bits.
        numbers: Its norm, and projections of it onto fixed vectors, in float64.
    """

    step: int
    micro: int
    what: str
    name: str
    digest: str
    numbers: tuple[float, ...]

    @property
    def key(self) -> tuple[int, int, str, str]:
        """What it is in any run."""
        return self.step, self.micro, self.what, self.name

    @property
    def when(self) -> tuple[int, int, int]:
        """Its place in a run, among those of other processes."""
        if self.what in ("built", "start"):
            return -1, 0, 0
        if self.what in OF_MICRO_BATCHES:
            return self.step, 0, self.micro
        return self.step - (self.what != "gradient"), 1 + OF_STEPS.index(self.what), 0


@final
@dataclass
class Outcome:
    """All that one process of a variant tells.

    Attributes:
        events: Everything computed, in order.
        rows: What loggers got: step, and values by name. Of rank 0.
        draws: Steps and micro-batches in which a training step moved the global generators.
        counts: Of each micro-batch of the first step, what could be a number of units in it: by place in the batch.
        classes: Class of each module, by name.
        lines: Where classes of the user's own are written, by what they are: a module's name, `task`, `data`,
            `dataset`, `sampler`: file, first line, last line.
        written: By which hooks parameters and buffers were written: step, the hook, name.
        moved: What a validation has left changed.
        training: Modules that were in training mode in a validation.
        logged: Where each value of an evaluation was logged: the function, its file and line.
        probes: What samples are, and what the sampler says, read twice with the same keys; lengths of the data set.
        values: The dictionaries that `validate` returned, joined.
        workers: How many the training loader has.
        by_hand: The task moves its optimizers itself, so that each batch is a step.
        dtypes: Every dtype that a loss had.
        seconds: How long it took.
    """

    events: list[Event] = field(default_factory=list)
    rows: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    draws: list[tuple[int, int]] = field(default_factory=list)
    counts: dict[int, dict[str, int]] = field(default_factory=dict)
    classes: dict[str, str] = field(default_factory=dict)
    lines: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    written: list[tuple[int, str, str]] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)
    training: list[str] = field(default_factory=list)
    logged: dict[str, str] = field(default_factory=dict)
    probes: dict[str, list[Any]] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    workers: int = 0
    by_hand: bool = False
    dtypes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """As JSON can have it."""
        return asdict(self) | {"events": [list(event) for event in self.events]}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Outcome:
        """What `to_json` gave, read again."""
        events = [
            Event(step, micro, what, name, digest, tuple(numbers))
            for step, micro, what, name, digest, numbers in data["events"]
        ]
        rows = [(step, values) for step, values in data["rows"]]
        counts = {int(micro): counted for micro, counted in data["counts"].items()}
        draws = [(step, micro) for step, micro in data["draws"]]
        lines = {name: tuple(each) for name, each in data["lines"].items()}
        written = [tuple(each) for each in data["written"]]
        read = {"events": events, "rows": rows, "counts": counts, "draws": draws, "lines": lines, "written": written}
        return Outcome(**{**data, **read})

    def of(self, *what: str) -> Iterator[Event]:
        """The events about something."""
        return (event for event in self.events if event.what in what)
