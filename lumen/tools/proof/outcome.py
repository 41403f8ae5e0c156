"""Records of what one process computed in a short training, as plain data, and their comparison."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple, final

import torch

from lumen.distributed.dtensor import gather_full_tensor
from lumen.tools.check.report import iterate_leaves

_PERIOD, _PROJECTIONS = 4093, 3


def measure_tensors(thing: Any) -> tuple[str, tuple[float, ...]]:
    """Return the digest of the bytes of tensors, and numbers that are close for close tensors: norm and projections.

    Args:
        thing: Tensors, sharded or not, and plain data, nested in any way.
    """
    found, sums = hashlib.sha256(), [0.0] * (1 + _PROJECTIONS)
    for _, tensor in iterate_tensors(thing):
        value = (
            gather_full_tensor(tensor.detach(), tensor).to_dense().cpu().contiguous().clone()
        )  # A numpy view would keep FSDP's tensor alive.
        found.update(f"{value.dtype}{tuple(value.shape)}".encode())
        found.update(value.reshape(-1).view(torch.uint8).numpy().data if value.numel() else b"")
        flat = value.reshape(-1)
        flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
        for number, part in enumerate(_project(flat.double())):
            sums[number] += part
    return found.hexdigest()[:16], (math.sqrt(sums[0]), *sums[1:])


def _project(flat: torch.Tensor) -> list[float]:
    """Return the squared norm of a vector, and its projections onto fixed vectors."""
    rows, rest = divmod(len(flat), _PERIOD)
    body, tail = flat[: rows * _PERIOD].view(rows, _PERIOD), flat[rows * _PERIOD :]
    columns = _make_projections()
    heights = torch.cos(torch.arange(rows + 1, dtype=torch.float64) * 0.7 + 0.3)
    projections = heights[:rows] @ body @ columns + heights[rows] * (tail @ columns[:rest])
    return [float(flat @ flat), *projections.tolist()]


@cache
def _make_projections() -> torch.Tensor:
    places = torch.arange(_PERIOD, dtype=torch.float64)
    return torch.stack([torch.cos(places * factor + factor) for factor in (0.0, 1.1, 2.3)], 1)


def iterate_tensors(thing: Any, place: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in a batch or an output with their paths. Numbers and strings become tensors."""
    for where, leaf in iterate_leaves(thing, place):
        for each in leaf if isinstance(leaf, list | tuple) else [leaf]:
            if isinstance(each, torch.Tensor):
                yield where, each
            elif isinstance(each, bool | int | float):
                yield where, torch.tensor(each)
            elif isinstance(each, str):
                yield where, torch.tensor(list(each.encode()), dtype=torch.uint8)


def get_loss(output: Any) -> torch.Tensor | None:
    """Return the loss in the output of a training step, or None."""
    if isinstance(output, Mapping):
        output = output.get("loss")
    if isinstance(output, tuple | list) and output:
        output = output[0]
    return output if isinstance(output, torch.Tensor) else None


def count_units(batch: Any) -> dict[str, int]:
    """Return candidate numbers of units in a batch: samples, non-padding tokens, masked elements."""
    found: dict[str, int] = {}
    for place, tensor in iterate_tensors(batch, "batch"):
        if tensor.ndim and "samples" not in found:
            found["samples"] = len(tensor)
        if tensor.is_floating_point() or tensor.is_complex() or not tensor.ndim:
            continue
        for value in (-100, 0, -1, 1):
            found[f"{place} != {value}"] = int((tensor != value).sum())
        found[f"the sum of {place}"] = int(tensor.sum())
    return found


#: Kinds of events, in order within a step. Events of a micro-batch come from the process that computed it.
OF_MICRO_BATCHES = ("order", "batch", "input", "module", "loss", "partial")
OF_STEPS = ("built", "start", "gradient", "parameter", "buffer", "optimizer")


@final
class Event(NamedTuple):
    """Value that was computed.

    Attributes:
        step: Number of completed optimizer updates; for "parameter" and "buffer" including the present update.
        micro: Number of the micro-batch in its epoch over all processes, or -1 for events of the step.
        kind: Kind of the event, one of `OF_MICRO_BATCHES` and `OF_STEPS`.
        name: Name of a module, parameter or buffer. From the second event in a micro-batch on, `#` and a number follow.
        digest: Hash of all bytes of the value.
        numbers: Norm of the value, and its projections onto fixed vectors, in float64.
    """

    step: int
    micro: int
    kind: str
    name: str
    digest: str
    numbers: tuple[float, ...]

    @property
    def key(self) -> tuple[int, int, str, str]:
        """Key of the event, which is the same in all runs."""
        return self.step, self.micro, self.kind, self.name

    @property
    def when(self) -> tuple[int, int, int]:
        """Sort key of the event among the events of all processes."""
        if self.kind in ("built", "start"):
            return -1, 0, 0
        if self.kind in OF_MICRO_BATCHES:
            return self.step, 0, self.micro
        return self.step - (self.kind != "gradient"), 1 + OF_STEPS.index(self.kind), 0


@final
class EventWriter:
    """Writer of events, which numbers the events of the same kind and name in a micro-batch.

    Args:
        events: The list to append to.
    """

    def __init__(self, events: list[Event]) -> None:
        self._events, self._counts = events, Counter[tuple[int, int, str, str]]()

    def add(self, step: int, micro: int, kind: str, name: str, value: Any) -> None:
        """Append an event, with the digest and the numbers of a value."""
        key = step, micro, kind, name
        self._counts[key] += 1
        name = name if self._counts[key] == 1 else f"{name}#{self._counts[key]}"
        self._events.append(Event(step, micro, kind, name, *measure_tensors(value)))


@final
@dataclass
class Outcome:
    """Record of one process of a variant.

    Attributes:
        events: All computed values, in order.
        rows: Steps and values by name that rank 0 logged.
        draws: Steps and micro-batches in which a training step drew from the global generators.
        counts: Candidate numbers of units, by place in the batch, for each micro-batch of the first step.
        classes: Class of each module, by name.
        lines: File, first line and last line of user classes, by role: a module's name, `task`, `data`, `dataset`,
            `sampler`, `batch sampler`, `collate fn`, `worker init fn` or `optimizer`.
        written: Steps, hooks and names of the parameters and buffers that user hooks wrote.
        moved: Names of parameters and buffers that a validation changed.
        training: Names of modules in training mode during a validation.
        logged: Function, file and line that first logged each value.
        calls: Calls of user code that may return different values, only in a new interpreter: the number of events
            before the call, and the attributes of `OutsideCall`.
        repeats: True if a second run computed the same, so that no such call is the cause of a difference.
        probes: Indices of the sampler, read twice with the same seeds; dataset lengths.
        values: The dictionaries that `validate` returned, joined.
        workers: Number of workers of the training loader.
        by_hand: True if the task uses manual optimization, in which each batch is a step.
        is_exact: True if the trainer has `reduction="exact"`.
        dtypes: All dtypes of losses.
        plan: The owner of a plan for tensor parallelism: "task", "model" of transformers, or "".
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
    calls: list[tuple[int, str, str, int, str]] = field(default_factory=list)
    repeats: bool = False
    probes: dict[str, list[Any]] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    workers: int = 0
    by_hand: bool = False
    is_exact: bool = False
    dtypes: list[str] = field(default_factory=list)
    plan: str = ""

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Outcome:
        """Return the outcome from its attributes in JSON."""
        events = [Event(*event) for event in data["events"]]
        counts = {int(micro): counted for micro, counted in data["counts"].items()}
        return Outcome(**{**data, "events": events, "counts": counts})

    def iterate_events(self, *kinds: str) -> Iterator[Event]:
        """Return the events of some kinds."""
        return (event for event in self.events if event.kind in kinds)


FLOAT64, FLOAT32 = 1e-10, 1e-5
#: Tolerance for cut layers in float64: Adam divides a gradient that is only rounding, as of a key's bias, by its size.
CUT_LAYERS = 1e-7


@final
class OutcomeDifference(NamedTuple):
    """Difference between two outcomes.

    Attributes:
        largest: The largest difference of a value, relative to the value's norm if the norm is more than 1.
        at: The reference's event that differs first, or None if no event differs.
    """

    largest: float
    at: Event | None


def compare_outcomes(
    reference: Outcome, other: Outcome, tolerance: float, kinds: Sequence[str] = ()
) -> OutcomeDifference:
    """Compare the events of two outcomes, in the order of the second outcome.

    Args:
        reference: The outcome that counts as correct.
        other: The outcome to check.
        tolerance: The largest difference that counts as equal. 0 requires bitwise identical values.
        kinds: Kinds of events to compare. Default: all except partial gradients.
    """
    wanted = set(kinds or (*OF_MICRO_BATCHES, *OF_STEPS)) - ({"partial"} if not kinds else set())
    known = {event.key: event for event in reference.events if event.kind in wanted}
    largest, at = 0.0, None
    for event in other.events:
        expected = known.get(event.key)
        if expected is None or event.digest == expected.digest:
            continue
        size = compute_distance(expected, event)
        largest = max(largest, size)
        if at is None and (size > tolerance or tolerance == 0):
            at = expected
    if at is None:
        at = _find_missing(known, other, wanted)
        largest = math.inf if at else largest
    return OutcomeDifference(largest, at)


def _find_missing(known: dict[tuple[int, int, str, str], Event], other: Outcome, wanted: set[str]) -> Event | None:
    """Return the first event of the reference that the other outcome lacks in its steps, or None."""
    have = {event.key for event in other.events}
    steps = {event.step for event in other.iterate_events("loss", "gradient")}
    kinds = {"gradient", *wanted} & {"gradient", *OF_MICRO_BATCHES}
    lacks = (event for event in known.values() if event.kind in kinds and event.step in steps and event.key not in have)
    return next(lacks, None)


def compute_distance(one: Event, other: Event) -> float:
    """Return the difference of two tensors by their projections, relative to their norm if it is more than 1."""
    if len(one.numbers) != len(other.numbers):
        return math.inf
    if any(not math.isfinite(number) for number in (*one.numbers, *other.numbers)):
        return 0.0 if repr(one.numbers) == repr(other.numbers) else math.inf
    distance = max(abs(a - b) for a, b in zip(one.numbers, other.numbers, strict=True))
    return distance / max(1.0, one.numbers[0], other.numbers[0])


def merge_outcomes(outcomes: Sequence[Outcome]) -> Outcome:
    """Merge the outcomes of all ranks: the step events of rank 0, and the micro-batch events of every rank.

    Equal events of ranks that compute the same micro-batch are one event.
    """
    first = outcomes[0]
    micro_batch_events = [event for outcome in outcomes[1:] for event in outcome.iterate_events(*OF_MICRO_BATCHES)]
    events = {(event.key, event.digest): event for event in (*first.events, *micro_batch_events)}
    by_time = sorted(events.values(), key=lambda event: event.when)
    return replace(
        first,
        events=by_time,
        draws=[draw for outcome in outcomes for draw in outcome.draws],
        counts={micro: counts for outcome in outcomes for micro, counts in outcome.counts.items()},
    )


def compare_values(reference: Outcome, other: Outcome, tolerance: float) -> tuple[float, list[str], set[str]]:
    """Compare the logged values of two outcomes. Rows of `fit` that only one outcome has are ignored.

    Returns:
        The largest difference, without float32 rounding. Names of values that differ by more than the tolerance, in
        order. Names of float32 values that differ by rounding (`_is_rounding_of_float32`).
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
        size = compute_relative_difference(one, value)
        if size > tolerance > 0 and _is_rounding_of_float32(one, value):
            rounded.add(name)
            continue
        largest = max(largest, size)
        if size > (0.0 if _are_counts(one, value) else tolerance):
            wrong[name] = None
    return largest, [*wrong], rounded


def _is_rounding_of_float32(one: float, other: float) -> bool:
    """Return True if two numbers were computed in float32, in any precision of the task, and differ by its rounding.

    torchmetrics objects sum in float32 by default. A number computed in float64 has more digits than float32 holds.
    """
    in_float32 = all(torch.tensor(each, dtype=torch.float32).item() == each for each in (one, other))
    return in_float32 and not _are_counts(one, other) and compute_relative_difference(one, other) <= FLOAT32


def _are_counts(one: float, other: float) -> bool:
    return float(one).is_integer() and float(other).is_integer()


def compute_relative_difference(one: float, other: float) -> float:
    """Return the difference of two numbers, relative to the larger if it is more than 1."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    difference = abs(one - other) / max(1.0, abs(one), abs(other))
    return difference if math.isfinite(difference) else math.inf


_FIT_TOLERANCE = 1e-6


def explain_parts(ours: Outcome, theirs: Outcome) -> str | None:
    """Find the weights by which two gradients sum to the gradient of the joint batch, and the units that they count.

    The projections of a gradient are linear in the gradient, so they add up as gradients do.

    Args:
        ours: Outcome of a step of micro-batches, with the accumulated gradients after each of them.
        theirs: Outcome of the same samples in half as many micro-batches.

    Returns:
        A sentence on the weights, or None if the joint gradient is not a weighted mean.
    """
    micro = sorted({event.micro for event in ours.iterate_events("partial") if event.step == 0})[:2]
    joint = sorted({event.micro for event in theirs.iterate_events("partial") if event.step == 0})[:1]
    if len(micro) < 2 or not joint:
        return None
    named = [
        _collect_projections(ours, micro[0]),
        _collect_projections(ours, micro[1]),
        _collect_projections(theirs, joint[0]),
    ]
    names = [name for name in named[0] if all(name in each for each in named)]
    first, sums, total = (torch.tensor([each[name] for name in names], dtype=torch.float64).flatten() for each in named)
    # Find w with total = 2 w first + 2 (1 - w) second. Each gradient was accumulated with weight one half.
    difference, rest = 2 * (2 * first - sums), total - 2 * (sums - first)
    share = float(difference @ rest / (difference @ difference))  # NaN if nothing differs
    if not 0 < share < 1 or float((rest - share * difference).abs().max()) > _FIT_TOLERANCE * float(total.abs().max()):
        return None
    counts = [ours.counts.get(number, {}) for number in micro]
    units = [
        unit for unit, one in counts[0].items()
        if one and (other := counts[1].get(unit)) and unit != "samples"
        and abs(one / (one + other) - share) < _FIT_TOLERANCE
    ]  # fmt: skip
    one, other = (each.get(units[0] if units else "samples", 0) for each in counts)
    found = f"where {units[0]}: {one} in the first micro-batch, {other} in the second" if units else "of some kind"
    return (
        f"two micro-batches have the weights {share:.4f} and {1 - share:.4f} in their common gradient, not one half "
        f"each: the loss is a mean over units {found}. Return (loss, weight) with this count as the weight."
    )


def _collect_projections(outcome: Outcome, micro: int) -> dict[str, tuple[float, ...]]:
    first = (event for event in outcome.iterate_events("partial") if (event.step, event.micro) == (0, micro))
    return {event.name: event.numbers[1:] for event in first}
