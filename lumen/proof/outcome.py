"""What one process has computed in a short training, in the order in which it did: plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, final

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
