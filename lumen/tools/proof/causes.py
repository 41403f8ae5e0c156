"""Causes of differences between two variants, found from the first difference."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple, final

from lumen.tools.proof.outcome import Event, Outcome, cause_of_parts, compare, merged
from lumen.tools.proof.worker import Result

_ALWAYS = {
    "os.urandom", "os.getrandom", "os.getpid", "uuid.uuid1", "uuid.uuid4", "time.time", "time.time_ns",
    "time.monotonic", "time.perf_counter", "time.process_time", "datetime.now", "datetime.datetime.now",
    "random.SystemRandom", "SystemRandom", "torch.seed", "torch.initial_seed", "torch.Generator", "Generator",
}  # fmt: skip
_WITHOUT_SEED = {
    "default_rng", "np.random.default_rng", "numpy.random.default_rng", "random.Random", "Random",
    "np.random.RandomState", "numpy.random.RandomState", "np.random.seed", "random.seed", "np.random.SeedSequence",
}  # fmt: skip
SETS = "a set, whose order is another one in each interpreter"


@final
class Suspect(NamedTuple):
    """Line of user code that may cause a difference.

    Attributes:
        file: Path of the file.
        line: Number of the line.
        what: The function that the line calls.
    """

    file: str
    line: int
    what: str

    def __str__(self) -> str:
        """Return the function with file and line, for use in a sentence."""
        return f"{self.what}, {self.file}:{self.line}"


def suspects(lines: tuple[str, int, int] | None) -> list[Suspect]:
    """Return the distinct suspects between two lines of a file."""
    if lines is None:
        return []
    file, first, last = lines
    return [each for each in _all(file) if first <= each.line <= last]


@lru_cache(maxsize=64)
def _all(file: str) -> tuple[Suspect, ...]:
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ()
    return tuple(sorted({*_in(tree, file)}, key=lambda each: each.line))


def _in(tree: ast.AST, file: str) -> Iterator[Suspect]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            is_bare = not node.args and not node.keywords
            if name in _ALWAYS or name.startswith("secrets.") or (name in _WITHOUT_SEED and is_bare):
                yield Suspect(file, node.lineno, f"{name}()")
        elif isinstance(node, ast.For | ast.comprehension) and _is_set(node.iter):
            yield Suspect(file, node.iter.lineno, SETS)


def _is_set(node: ast.expr) -> bool:
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("set", "frozenset")
    return isinstance(node, ast.Set | ast.SetComp) or called


Verdict = Literal["proven", "failed", "not promised", "not shown"]
OUTSIDE = "randomness outside the keys"
_KEYED = "Draw from the global generators of torch, numpy or random, which Lumen keys."
_STATE = "Make it a buffer (register_buffer), or keep it by on_save_checkpoint and on_load_checkpoint."


@final
@dataclass
class Cause:
    """Reason why a promise is not proven.

    Attributes:
        kind: Name of this kind of cause.
        place: A module, a parameter or a line.
        text: The finding, and advice on what to do.
        verdict: Verdict on the promise.
    """

    kind: str
    place: str
    text: str
    verdict: Verdict = "failed"


# ---------------------------------------------------------------------- errors


def cause_of_failure(result: Result, reference: Result | None = None) -> Cause:
    """Return the cause of a variant's failure, if possible from the computations before the error.

    Args:
        result: The result of the failed variant.
        reference: The result of the run to compare with, or None.
    """
    failure = result.failure or {}
    if reference is not None and reference.outcomes and (changed := _changing(merged(reference.outcomes))):
        return changed
    if found := cause_on_one_rank(result):
        found.text += f" The run ended by: {failure['message'].splitlines()[0]}"
        return found
    end = "\n  ".join(failure["text"].strip().splitlines()[-6:])
    return Cause(failure["kind"], failure["place"], failure["message"] if failure["ours"] == "True" else end)


def cause_on_one_rank(result: Result) -> Cause | None:
    """Return the cause of a difference between ranks of one variant, or None if the ranks agree."""
    if len(result.outcomes) < 2:
        return None
    first, others = result.outcomes[0], result.outcomes[1:]
    for rank, other in enumerate(others, 1):
        if (at := compare(first, other, 0.0, ("built",)).at) is not None:
            return _built(at, first, f"is another one on rank {rank}")
        if (at := compare(first, other, 0.0, ("gradient", "parameter")).at) is not None:
            return _written(at, first, other, rank)
    return None


def _built(at: Event, outcome: Outcome, how: str) -> Cause:
    found = _suspects_of(outcome, _owner(at.name), "task", "data")
    return Cause(
        "what is built is drawn outside the keys",
        _place(outcome, at.name, found),
        f"{at.name} {how} after building, before any step, though the generators were seeded alike.{_said(found)} "
        "Initialise from the global generators, and from nothing that a process has for itself.",
    )


def _written(at: Event, first: Outcome, other: Outcome, rank: int) -> Cause:
    """Return the cause for a value that one rank wrote and that must be equal on all ranks."""
    ours, theirs = ({(step, hook) for step, hook, _ in each.written} for each in (first, other))
    alone = sorted(ours ^ theirs)
    who = alone[0][1] if alone else "what is not a hook of a callback or of the task"
    side = "rank 0" if alone and alone[0] in ours else f"rank {rank}"
    return Cause(
        "a hook acts on one rank alone",
        who,
        f"The ranks have another {at.what} {at.name} from step {at.step} on: it is written on {side} alone. Do it on "
        "every rank, alike.",
    )


# ---------------------------------------------------------------------- values of evaluations


def cause_of_values(wrong: Sequence[str], first: Outcome, other: Outcome) -> Cause:
    """Return the cause of different values in an evaluation."""
    name = wrong[0]
    logged = first.logged.get(name) or other.logged.get(name) or ""
    if logged.partition(" ")[0].endswith("_end"):
        return Cause(
            "a metric is averaged by hand",
            f"{name}, logged in {logged}",
            f"{', '.join(wrong)}: on two processes another value, because each process has seen only its own batches "
            "there. Log in the step, where each batch counts by its samples, or log a torchmetrics object.",
        )
    return Cause(
        "an evaluation depends on the number of processes",
        f"{name}, logged in {logged}" if logged else name,
        f"{', '.join(wrong)}: another value on two processes. Is something kept from one batch to the next?",
    )


# ---------------------------------------------------------------------- trainings


def cause_of(reference: Result, other: Result, at: Event | None, wrong: Sequence[str], *, exact: bool) -> Cause:
    """Return the cause of a difference between two trainings or two evaluations.

    Args:
        reference: The result that counts as correct.
        other: The result that differs.
        at: The first event that differs, or None if only values differ.
        wrong: Names of the values that differ, in order.
        exact: True if results must be bitwise identical: when run again, resumed or run with other workers.
    """
    ours, theirs = merged(reference.outcomes), merged(other.outcomes)
    if at is None:
        return cause_of_values(wrong, ours, theirs)
    if ours.moved or theirs.moved:
        return cause_of_moving(ours if ours.moved else theirs)
    if other.variant.world > 1 and (alone := cause_on_one_rank(other)):
        return alone
    if at.what == "built":
        return _built(at, ours, "is another one in another run")
    if at.what in ("order", "batch"):
        return _data(at, reference, other)
    if other.variant.joins:
        return _joined(ours, theirs)
    if at.what == "buffer" or (at.what in ("module", "input") and _is_norm(ours, at.name)):
        return _buffer(at, ours, other)
    if at.what in ("input", "module", "loss"):
        return _forward(at, ours, other, exact=exact)
    if at.what == "gradient":
        return Cause(
            "gradients differ, of equal losses",
            at.name,
            f"In step {at.step + 1} the gradient of {at.name} is another one though all losses are equal: an operation "
            "whose backward is not deterministic, a hook on gradients, or a backward of your own.",
        )
    writers = [hook for _, hook, name in (*ours.written, *theirs.written) if name == at.name]
    return Cause(
        "what is written beside the optimizer differs" if writers else f"the {at.what} differs, of equal gradients",
        writers[0] if writers else at.name,
        f"After step {at.step} the {at.what} {at.name} is another one though the gradients are equal.",
    )


def cause_of_moving(outcome: Outcome) -> Cause:
    """Return the cause for a validation that changes parameters or buffers."""
    hooks = [hook for _, hook, name in outcome.written if name in outcome.moved and "on_validation" in hook]
    norms = [name for name in outcome.training if "BatchNorm" in outcome.classes.get(name, "")]
    why = f" {norms[0]} ({outcome.classes[norms[0]]}) is in training mode in the validation." if norms else ""
    return Cause(
        "a validation changes what is trained",
        hooks[0] if hooks else (norms[0] if norms else outcome.moved[0]),
        f"{', '.join(outcome.moved[:3])} is another one after a validation.{why} Each process validates other batches, "
        f"so training depends on how many there are. Leave modules in eval mode there.",
    )


def _data(at: Event, reference: Result, other: Result) -> Cause:
    ours, theirs = merged(reference.outcomes), merged(other.outcomes)
    data, sampler = _suspects_of(ours, "dataset", "data"), _suspects_of(ours, "sampler", "batch sampler", "data")
    if changed := _changing(ours):
        return changed
    order = ours.probes.get("order", [])
    if at.what == "order" or (order and order[0] != order[-1]):
        return Cause(
            "a sampler draws outside the keys",
            _line(ours, "sampler", sampler) or _line(ours, "batch sampler", sampler),
            f"In step {at.step + 1} other samples were asked for.{_said(sampler)} Draw from torch's global generator, "
            "or keep the generator in an attribute: then Lumen keys it.",
        )
    samples, again = ours.probes.get("samples", [[], []]), theirs.probes.get("samples", [])
    differs_twice = bool(samples) and samples[0] != samples[-1]
    repeats = not again or again == samples or not other.variant.exact
    same = f"In step {at.step + 1} the samples of a batch are the same, their content is another"
    if data or (differs_twice and not repeats):
        return Cause(OUTSIDE, _line(ours, "dataset", data), f"{same}.{_said(data)} {_KEYED}")
    return Cause(
        "state is kept in a data set",
        _line(ours, "dataset", []),
        f"{same}: it depends on what this process has read before. Make a sample of its index alone; what __init__ "
        "computes may stay.",
    )


def _changing(ours: Outcome) -> Cause | None:
    """Return the cause for a dataset whose length changed during the run, or None."""
    lengths = [each for each in ours.probes.get("lengths", []) if each is not None]
    if len(set(lengths)) < 2:
        return None
    return Cause(
        "a data set changes while it runs",
        _line(ours, "dataset", []),
        f"Its length is {lengths[0]} when training begins and {lengths[-1]} later, so what an index means depends on "
        "when it is read. Make it ready in setup.",
    )


def _joined(ours: Outcome, theirs: Outcome) -> Cause:
    """Return the cause for a step that depends on the size of micro-batches."""
    norms = [name for name, kind in ours.classes.items() if "BatchNorm" in kind]
    if ours.draws:
        return Cause(
            "not comparable",
            _line(ours, "task", []),
            "The training step draws random numbers (dropout, noise), which are keyed by micro-batch: larger ones draw "
            "others. That is as promised: one global batch size and one micro-batch size.",
            "not shown",
        )
    if norms:
        return Cause(
            "BatchNorm sees other statistics in micro-batches of another size",
            norms[0],
            f"{norms[0]} ({ours.classes[norms[0]]}) takes mean and variance of a micro-batch. Use GroupNorm or "
            "LayerNorm where that matters.",
            "not promised",
        )
    if found := cause_of_parts(ours, theirs):
        return Cause("the loss is divided by the micro-batch's own count", _line(ours, "task", []), found)
    return Cause(
        "the loss couples samples",
        _line(ours, "task", []),
        "The gradient of a batch is no weighted mean of those of its halves: the loss compares samples with each "
        "other, as contrastive losses do.",
        "not promised",
    )


def _buffer(at: Event, ours: Outcome, other: Result) -> Cause:
    owner = at.name.rpartition(".")[0] if at.what == "buffer" else at.name
    if _is_norm(ours, at.name) and other.variant.world > 1:
        return Cause(
            "BatchNorm sees other statistics on each process",
            owner,
            f"{owner} ({ours.classes.get(owner)}): its running mean and variance come from the batches of one process. "
            "Use GroupNorm, or sync_batchnorm on CUDA.",
            "not promised",
        )
    return Cause(
        "a buffer differs",
        at.name,
        f"After step {at.step} the buffer {at.name} is another one though gradients are equal: it is written from what "
        "one process has seen, or keeps what is not saved.",
    )


def _forward(at: Event, ours: Outcome, other: Result, *, exact: bool) -> Cause:
    """Return the cause for a module, or code between modules, with different outputs for equal inputs."""
    name = at.name.partition("#")[0]
    owner = name if at.what == "module" else (name.rpartition(".")[0] if at.what == "input" else "")
    kind = ours.classes.get(owner, "the task")
    where = f"{owner or 'the task'} ({kind})"
    found = _suspects_of(ours, owner or "task")
    place = ", ".join(filter(None, [where, _line(ours, owner or "task", found)]))
    between = {"input": f" before it calls {name}", "loss": " in training_step, from equal outputs of modules"}
    first = f"In step {at.step + 1} {where} gives something else{between.get(at.what, '')}, of equal batches."
    if other.variant.fresh and not found:
        return Cause(
            "an operation is not deterministic",
            place,
            f"{first} It differs from run to run: threads that race, memory that is read before it is written, the "
            "order of a set, an algorithm of a device. Set deterministic: true to find an operation of torch.",
        )
    if found:
        of_sets = any(each.what == SETS for each in found)
        kind, advice = ("an operation is not deterministic", "Sort it.") if of_sets else (OUTSIDE, _KEYED)
        return Cause(kind, place, f"{first}{_said(found)} {advice}")
    if exact or other.variant.world > 1:
        return Cause(
            "state is kept in a module",
            place,
            f"{first} It keeps something between steps that is neither a parameter nor a buffer: each process has its "
            f"own, and no checkpoint has it. {_STATE}",
        )
    return Cause("a forward differs", place, first)


# ---------------------------------------------------------------------- places


def _is_norm(outcome: Outcome, name: str) -> bool:
    return any("BatchNorm" in outcome.classes.get(each, "") for each in (name, name.rpartition(".")[0]))


def _owner(name: str) -> str:
    """Return the name of the module that owns a parameter or buffer."""
    return name.removeprefix("buffer ").rpartition(".")[0]


def _suspects_of(outcome: Outcome, *names: str) -> list[Suspect]:
    return [each for name in names for each in suspects(outcome.lines.get(name))]


def _said(found: Sequence[Suspect]) -> str:
    return f" There is {'; '.join(str(each) for each in found[:3])}." if found else ""


def _line(outcome: Outcome, name: str, found: Sequence[Suspect]) -> str:
    """Return the line of the first suspect, or the first line of the class."""
    if found:
        return f"{found[0].file}:{found[0].line}"
    lines = outcome.lines.get(name)
    return "" if lines is None else f"{lines[0]}:{lines[1]}"


def _place(outcome: Outcome, name: str, found: Sequence[Suspect]) -> str:
    return ", ".join(filter(None, [name, _line(outcome, _owner(name) or "task", found)]))
