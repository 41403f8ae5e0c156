"""What one process has computed in a short training, as plain data in its order, and how two such records differ."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple, final

import torch

from lumen.distributed.dtensor import is_sharded
from lumen.tools.check.show import leaves

_PERIOD, _PROJECTIONS = 4093, 3


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor on this process. Collective where it is sharded."""
    sharded: Any = tensor.detach()
    value: torch.Tensor = sharded.full_tensor() if is_sharded(tensor) else sharded
    return value.to_dense() if value.layout is not torch.strided else value


def measure(thing: Any) -> tuple[str, tuple[float, ...]]:
    """The digest of the bits of tensors, and numbers that are as near to each other as the tensors are.

    Args:
        thing: Tensors, whole or sharded, and plain data, nested in any way.
    """
    found, sums = hashlib.sha256(), [0.0] * (1 + _PROJECTIONS)
    for _, tensor in tensors_in(thing):
        value = whole(tensor).cpu().contiguous().clone()  # numpy would keep FSDP from freeing what it looks at
        found.update(f"{value.dtype}{tuple(value.shape)}".encode())
        found.update(value.reshape(-1).view(torch.uint8).numpy().data if value.numel() else b"")
        flat = value.reshape(-1)
        flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
        for number, part in enumerate(_numbers(flat.double())):
            sums[number] += part
    return found.hexdigest()[:16], (math.sqrt(sums[0]), *sums[1:])


def _numbers(flat: torch.Tensor) -> list[float]:
    """The square of a vector's norm, and its projections."""
    rows, rest = divmod(len(flat), _PERIOD)
    body, tail = flat[: rows * _PERIOD].view(rows, _PERIOD), flat[rows * _PERIOD :]
    columns = _columns()
    heights = torch.cos(torch.arange(rows + 1, dtype=torch.float64) * 0.7 + 0.3)
    projections = heights[:rows] @ body @ columns + heights[rows] * (tail @ columns[:rest])
    return [float(flat @ flat), *projections.tolist()]


@cache
def _columns() -> torch.Tensor:
    places = torch.arange(_PERIOD, dtype=torch.float64)
    return torch.stack([torch.cos(places * factor + factor) for factor in (0.0, 1.1, 2.3)], 1)


def tensors_in(thing: Any, place: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in a batch or an output, with where they are; numbers and texts too, as tensors."""
    for where, leaf in leaves(thing, place):
        for each in leaf if isinstance(leaf, list | tuple) else [leaf]:
            if isinstance(each, torch.Tensor):
                yield where, each
            elif isinstance(each, bool | int | float):
                yield where, torch.tensor(each)
            elif isinstance(each, str):
                yield where, torch.tensor(list(each.encode()), dtype=torch.uint8)


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
OF_STEPS = ("built", "start", "gradient", "parameter", "buffer", "optimizer")


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

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Outcome:
        """Read the attributes of an outcome that JSON has kept."""
        events = [Event(*event) for event in data["events"]]
        counts = {int(micro): counted for micro, counted in data["counts"].items()}
        return Outcome(**{**data, "events": events, "counts": counts})

    def of(self, *what: str) -> Iterator[Event]:
        """The events about something."""
        return (event for event in self.events if event.what in what)


FLOAT64, FLOAT32 = 1e-10, 1e-5


@final
class Apart(NamedTuple):
    """How two outcomes differ.

    Attributes:
        largest: The largest difference of anything, relative to its norm where that is more than 1.
        at: The event that differed first, as the reference has it; None: no event did.
    """

    largest: float
    at: Event | None


def compare(reference: Outcome, other: Outcome, tolerance: float, what: Sequence[str] = ()) -> Apart:
    """Compare what both have computed, in the order in which the other one did.

    Args:
        reference: The record that is taken as right.
        other: What is to be shown.
        tolerance: That counts as no difference; 0: the bits must be equal.
        what: What events must be about; default: everything but parts of gradients.
    """
    wanted = set(what or (*OF_MICRO_BATCHES, *OF_STEPS)) - ({"partial"} if not what else set())
    known = {event.key: event for event in reference.events if event.what in wanted}
    largest, at = 0.0, None
    for event in other.events:
        expected = known.get(event.key)
        if expected is None or event.digest == expected.digest:
            continue
        size = distance(expected, event)
        largest = max(largest, size)
        if at is None and (size > tolerance or tolerance == 0):
            at = expected
    if at is None:
        at = _missing(known, other, wanted)
        largest = math.inf if at else largest
    return Apart(largest, at)


def _missing(known: dict[tuple[int, int, str, str], Event], other: Outcome, wanted: set[str]) -> Event | None:
    """What the reference has of the other one's steps that the other one lacks."""
    have = {event.key for event in other.events}
    steps = {event.step for event in other.of("loss", "gradient")}
    kinds = {"gradient", *wanted} & {"gradient", *OF_MICRO_BATCHES}
    lacks = (event for event in known.values() if event.what in kinds and event.step in steps and event.key not in have)
    return next(lacks, None)


def distance(one: Event, other: Event) -> float:
    """The difference of two tensors, from their projections, relative to their norm where that is more than 1."""
    if len(one.numbers) != len(other.numbers):
        return math.inf
    if any(not math.isfinite(number) for number in (*one.numbers, *other.numbers)):
        return 0.0 if repr(one.numbers) == repr(other.numbers) else math.inf
    apart = max(abs(a - b) for a, b in zip(one.numbers, other.numbers, strict=True))
    return apart / max(1.0, one.numbers[0], other.numbers[0])


def merged(outcomes: Sequence[Outcome]) -> Outcome:
    """What all ranks have computed together: rank 0's steps, everybody's micro-batches."""
    first = outcomes[0]
    others = [event for outcome in outcomes[1:] for event in outcome.of(*OF_MICRO_BATCHES)]
    by_time = sorted([*first.events, *others], key=lambda event: event.when)
    return replace(
        first,
        events=by_time,
        draws=[draw for outcome in outcomes for draw in outcome.draws],
        counts={micro: counts for outcome in outcomes for micro, counts in outcome.counts.items()},
    )


def values_apart(reference: Outcome, other: Outcome, tolerance: float) -> tuple[float, list[str], set[str]]:
    """Compare the logged values that both have, and all values of an evaluation; see `_is_rounding_of_float32`.

    Returns:
        The largest difference, but for that of rounded values; the names of values that differ by more than is allowed,
        the first one first; names of values that differ by the rounding of float32, which is all that they hold.
    """
    known = {(step, name): value for step, values in reference.rows for name, value in values.items()}
    pairs = [
        (name, known[step, name], value)
        for step, values in other.rows
        for name, value in values.items()
        if (step, name) in known
    ]
    pairs += [(name, value, other.values.get(name, math.nan)) for name, value in reference.values.items()]
    largest, wrong, rounded = 0.0, dict[str, None](), set[str]()
    for name, one, value in pairs:
        size = number_apart(one, value)
        if size > tolerance > 0 and _is_rounding_of_float32(one, value):
            rounded.add(name)
            continue
        largest = max(largest, size)
        if size > (0.0 if _are_counts(one, value) else tolerance):
            wrong[name] = None
    return largest, [*wrong], rounded


def _is_rounding_of_float32(one: float, other: float) -> bool:
    """Return True if two numbers were computed in float32, whatever their task's precision, and differ by its rounding.

    torchmetrics objects sum in it by default. A number that was computed in float64 has more digits than it holds.
    """
    in_float32 = all(torch.tensor(each, dtype=torch.float32).item() == each for each in (one, other))
    return in_float32 and not _are_counts(one, other) and number_apart(one, other) <= FLOAT32


def _are_counts(one: float, other: float) -> bool:
    return float(one).is_integer() and float(other).is_integer()


def number_apart(one: float, other: float) -> float:
    """The difference of two numbers, relative to them where they are more than 1."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    apart = abs(one - other) / max(1.0, abs(one), abs(other))
    return apart if math.isfinite(apart) else math.inf


_FITS = 1e-6


def cause_of_parts(ours: Outcome, theirs: Outcome) -> str | None:
    """By what weights two gradients add up to that of both batches together, and what in the batches these count.

    The numbers of a gradient are linear in it but for the norm, so that they add up as gradients do.

    Args:
        ours: A step of micro-batches, with what the gradients were after each of them.
        theirs: The same samples in half as many.

    Returns:
        A sentence; None: it is no weighted mean of them.
    """
    micro = sorted({event.micro for event in ours.of("partial") if event.step == 0})[:2]
    joint = sorted({event.micro for event in theirs.of("partial") if event.step == 0})[:1]
    if len(micro) < 2 or not joint:
        return None
    named = [_vector(ours, micro[0]), _vector(ours, micro[1]), _vector(theirs, joint[0])]
    names = [name for name in named[0] if all(name in each for each in named)]
    first, sums, total = (torch.tensor([each[name] for name in names], dtype=torch.float64).flatten() for each in named)
    # The weight w for which 2 w first + 2 (1 - w) second is total: each of the two was counted as one half.
    apart, rest = 2 * (2 * first - sums), total - 2 * (sums - first)
    share = float(apart @ rest / (apart @ apart))  # NaN if nothing differs
    if not 0 < share < 1 or float((rest - share * apart).abs().max()) > _FITS * float(total.abs().max()):
        return None
    counts = [ours.counts.get(number, {}) for number in micro]
    units = [
        what for what, one in counts[0].items()
        if one and (other := counts[1].get(what)) and what != "samples" and abs(one / (one + other) - share) < _FITS
    ]  # fmt: skip
    one, other = (each.get(units[0] if units else "samples", 0) for each in counts)
    found = f"where {units[0]}: {one} in the first micro-batch, {other} in the second" if units else "of some kind"
    return (
        f"two micro-batches count {share:.4f} and {1 - share:.4f} in the gradient of both together, not one half each: "
        f"the loss is a mean over units {found}. Return (loss, weight) with that count as the weight."
    )


def _vector(outcome: Outcome, micro: int) -> dict[str, tuple[float, ...]]:
    first = (event for event in outcome.of("partial") if (event.step, event.micro) == (0, micro))
    return {event.name: event.numbers[1:] for event in first}
