"""Causes of differences between two variants, found from the first difference."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple, final

from lumen.tools.proof.outcome import Event, Outcome, compare_outcomes, explain_parts, merge_outcomes
from lumen.tools.proof.outside_calls import OUTSIDE_CALLS, OutsideCall
from lumen.tools.proof.worker import VariantResult

_UNSEEDED = {
    "os.urandom", "os.getrandom", "os.getpid", "uuid.uuid1", "uuid.uuid4", "time.time", "time.time_ns",
    "time.monotonic", "time.perf_counter", "time.process_time", "datetime.now", "datetime.datetime.now",
    "random.SystemRandom", "SystemRandom", "torch.seed", "torch.initial_seed", "torch.Generator", "Generator",
}  # fmt: skip
_UNSEEDED_IF_BARE = {
    "default_rng", "np.random.default_rng", "numpy.random.default_rng", "random.Random", "Random",
    "np.random.RandomState", "numpy.random.RandomState", "np.random.seed", "random.seed", "np.random.SeedSequence",
}  # fmt: skip
SETS = "a set, whose order differs in each interpreter"


@final
class SuspectLine(NamedTuple):
    """Line of user code that may cause a difference.

    Attributes:
        file: Path of the file.
        line: Number of the line.
        function: The function that the line calls.
    """

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        """Return the function with file and line, for use in a sentence."""
        return f"{self.function}, {self.file}:{self.line}"


def find_suspects(lines: tuple[str, int, int] | None) -> list[SuspectLine]:
    """Return the distinct suspects between two lines of a file."""
    if lines is None:
        return []
    file, first, last = lines
    return [each for each in _find_all_suspects(file) if first <= each.line <= last]


@lru_cache(maxsize=64)
def _find_all_suspects(file: str) -> tuple[SuspectLine, ...]:
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ()
    return tuple(sorted({*_iterate_suspects(tree, file)}, key=lambda each: each.line))


def _iterate_suspects(tree: ast.AST, file: str) -> Iterator[SuspectLine]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            is_bare = not node.args and not node.keywords
            if name in _UNSEEDED or name.startswith("secrets.") or (name in _UNSEEDED_IF_BARE and is_bare):
                yield SuspectLine(file, node.lineno, f"{name}()")
        elif isinstance(node, ast.For | ast.comprehension) and _is_set(node.iter):
            yield SuspectLine(file, node.iter.lineno, SETS)


def _is_set(node: ast.expr) -> bool:
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("set", "frozenset")
    return isinstance(node, ast.Set | ast.SetComp) or called


Verdict = Literal["proven", "failed", "not promised", "not shown"]
UNSEEDED = "unseeded randomness"
COUPLES = "the loss couples samples"
_KEYED = "Draw from the global generators of torch, numpy or random, which Lumen seeds."
_STATE = "Store the state in a buffer (register_buffer), or by on_save_checkpoint and on_load_checkpoint."


@final
@dataclass
class DifferenceCause:
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


def explain_failure(result: VariantResult, reference: VariantResult | None = None) -> DifferenceCause:
    """Return the cause of a variant's failure, if possible from the computations before the error.

    Args:
        result: The result of the failed variant.
        reference: The result of the run to compare with, or None.
    """
    failure = result.failure or {}
    if (
        reference is not None
        and reference.outcomes
        and (changed := _explain_changing_length(merge_outcomes(reference.outcomes)))
    ):
        return changed
    if found := explain_single_rank(result):
        found.text += f" The run ended with: {failure['message'].splitlines()[0]}"
        return found
    end = "\n  ".join(failure["text"].strip().splitlines()[-6:])
    return DifferenceCause(failure["kind"], failure["place"], failure["message"] if failure["ours"] == "True" else end)


def explain_single_rank(result: VariantResult) -> DifferenceCause | None:
    """Return the cause of a difference between ranks of one variant, or None if the ranks agree."""
    if len(result.outcomes) < 2:
        return None
    first, others = result.outcomes[0], result.outcomes[1:]
    for rank, other in enumerate(others, 1):
        if (at := compare_outcomes(first, other, 0.0, ("built",)).at) is not None:
            return _explain_build(at, first, f"differs on rank {rank}")
        if (at := compare_outcomes(first, other, 0.0, ("gradient", "parameter")).at) is not None:
            return _explain_write(at, first, other, rank)
    return None


def _explain_build(at: Event, outcome: Outcome, verb: str) -> DifferenceCause:
    found = _find_module_suspects(outcome, _get_module_name(at.name), "task", "data")
    return DifferenceCause(
        "unseeded initialization",
        _format_place(outcome, at.name, found),
        f"{at.name} {verb} before the first step, although the generators had the same seed."
        f"{_format_suspects(found)} Initialize only from the global generators, and from no value that differs between "
        "processes.",
    )


def _explain_write(at: Event, first: Outcome, other: Outcome, rank: int) -> DifferenceCause:
    """Return the cause for a value that one rank wrote and that must be equal on all ranks."""
    ours, theirs = ({(step, hook) for step, hook, _ in each.written} for each in (first, other))
    alone = sorted(ours ^ theirs)
    who = alone[0][1] if alone else "code outside the hooks of callbacks and task"
    side = "rank 0" if alone and alone[0] in ours else f"rank {rank}"
    return DifferenceCause(
        "a hook acts on one rank only",
        who,
        f"The {at.kind} {at.name} differs between ranks from step {at.step} on: only {side} writes the value. Write "
        "the same value on every rank.",
    )


# ---------------------------------------------------------------------- values of evaluations


def explain_values(wrong: Sequence[str], first: Outcome, other: Outcome) -> DifferenceCause:
    """Return the cause of different values in an evaluation."""
    name = wrong[0]
    logged = first.logged.get(name) or other.logged.get(name) or ""
    if logged.partition(" ")[0].endswith("_end"):
        return DifferenceCause(
            "a metric is averaged by hand",
            f"{name}, logged in {logged}",
            f"{', '.join(wrong)}: different on two processes, because each process sees only its own batches there. "
            "Log in the step, where Lumen weights each batch by its samples, or log a torchmetrics object.",
        )
    return DifferenceCause(
        "an evaluation depends on the number of processes",
        f"{name}, logged in {logged}" if logged else name,
        f"{', '.join(wrong)}: different on two processes. Does the task keep state from one batch to the next?",
    )


# ---------------------------------------------------------------------- trainings


def explain_difference(
    reference: VariantResult, other: VariantResult, at: Event | None, wrong: Sequence[str], *, exact: bool
) -> DifferenceCause:
    """Return the cause of a difference between two trainings or two evaluations.

    Args:
        reference: The result that counts as correct.
        other: The result that differs.
        at: The first event that differs, or None if only values differ.
        wrong: Names of the values that differ, in order.
        exact: True if results must be bitwise identical: when run again, resumed or run with other workers.
    """
    ours, theirs = merge_outcomes(reference.outcomes), merge_outcomes(other.outcomes)
    if at is None:
        return explain_values(wrong, ours, theirs)
    if (ours.moved or theirs.moved) and not other.variant.fresh:
        return explain_validation_change(ours if ours.moved else theirs)
    if other.variant.world > 1 and (alone := explain_single_rank(other)):
        return alone
    if at.kind == "built":
        return _explain_build(at, ours, "differs in a second run")
    if other.variant.joins:
        return _explain_joined(ours, theirs)
    writers = [
        hook for _, hook, name in (*ours.written, *theirs.written)
        if name == at.name or (at.kind == "module" and _get_module_name(name) == at.name)
    ]  # fmt: skip
    if writers:
        when = f"After step {at.step} the {at.kind} {at.name} differs although the gradients are equal."
        if at.kind == "module":
            when = f"In step {at.step + 1} {at.name} computes different values, from an equal input."
        return DifferenceCause("a hook writes different values", writers[0], when)
    if calls := find_calls(other.outcome, at):
        return _explain_calls(at, ours, calls)
    if at.kind in ("order", "batch"):
        return _explain_data(at, ours, other)
    if at.kind == "buffer" or (at.kind in ("module", "input") and _is_norm(ours, at.name)):
        return _explain_buffer(at, ours, other)
    if at.kind in ("input", "module", "loss"):
        return _explain_forward(at, ours, other, exact=exact)
    if at.kind == "gradient":
        return DifferenceCause(
            "gradients differ at equal losses",
            at.name,
            f"In step {at.step + 1} the gradient of {at.name} differs although all losses are equal. Possible causes: "
            "a nondeterministic backward, a hook on gradients, or a custom backward.",
        )
    after = f"After step {at.step} the {at.kind} {at.name} differs although the gradients are equal"
    if other.variant.resume is not None:
        return DifferenceCause(
            "the update keeps state that is not saved",
            _format_line(ours, "optimizer", []) or at.name,
            f"{after}: the optimizer, its schedule or a hook keeps state that checkpoints lack. Keep the state in "
            "optimizer.state, in the state_dict of the schedule, or in a buffer.",
        )
    return DifferenceCause(f"the {at.kind} differs at equal gradients", at.name, f"{after}.")


def find_calls(outcome: Outcome, at: Event) -> list[OutsideCall]:
    """Return the calls for a value from outside, after the last equal event and before the first different one."""
    place = {event.key: number for number, event in enumerate(outcome.events)}
    end, keys = place.get(at.key, -1), [event.key for event in merge_outcomes([outcome]).events]
    if not outcome.calls or end < 0:
        return []
    # Losses are recorded after the update, and a module's input after its call.
    same, left_out = (at.micro, at.name) if at.kind == "module" else None, ("partial", "loss")
    earlier = [place[key] for key in keys[: keys.index(at.key)] if key[2] not in left_out and key[1::2] != same]
    begin = max((number for number in earlier if number < end), default=-1)
    found = [call for call in outcome.calls if begin < call[0] <= end]
    if not found and at.kind in ("order", "batch"):  # Workers read the data: see what the probe in this process called.
        found = [call for call in outcome.calls if call[0] == len(outcome.events)]
    ranks = [*OUTSIDE_CALLS]
    calls = [OutsideCall(*call[1:]) for call in sorted(found, key=lambda call: ranks.index(call[1]))]
    return [each for each in dict.fromkeys(calls) if _get_call_kind(each) == _get_call_kind(calls[0])]


_OUTSIDE = {
    **dict.fromkeys(("hash", "id"), ("a value depends on the interpreter", "In each interpreter hash() of a string and "
                    "id() differ. Use hashlib or zlib.crc32.")),
    "open": ("a file changes", "No random numbers are drawn there, so a file that the code reads has changed since the "
             "first run. Read files that no run writes."),
}  # fmt: skip


def _get_call_kind(call: OutsideCall) -> tuple[str, str]:
    return _OUTSIDE.get(call.builtin, (UNSEEDED, _KEYED))


def _explain_calls(at: Event, ours: Outcome, calls: list[OutsideCall]) -> DifferenceCause:
    kind, advice = _get_call_kind(calls[0])
    name = f"{at.name} ({ours.classes[at.name]})" if at.name in ours.classes else at.name
    what = {"order": "the order of samples", "batch": "a batch of the same samples", "loss": "the loss",
            "module": f"the output of {name}"}.get(at.kind, f"the {at.kind} of {name}")  # fmt: skip
    step = at.step + (at.kind not in ("parameter", "buffer", "optimizer"))
    lines = [SuspectLine(each.file, each.line, each.function) for each in calls]
    return DifferenceCause(
        "unseeded sampler" if (kind, at.kind) == (UNSEEDED, "order") else kind,
        f"{calls[0].file}:{calls[0].line}",
        f"In step {step} {what} differs in a second run.{_format_suspects(lines)} {advice}",
    )


def explain_validation_change(outcome: Outcome) -> DifferenceCause:
    """Return the cause for a validation that changes parameters or buffers."""
    hooks = [hook for _, hook, name in outcome.written if name in outcome.moved and "on_validation" in hook]
    norms = [name for name in outcome.training if "BatchNorm" in outcome.classes.get(name, "")]
    why = f" {norms[0]} ({outcome.classes[norms[0]]}) is in training mode in the validation." if norms else ""
    return DifferenceCause(
        "a validation changes the model",
        hooks[0] if hooks else (norms[0] if norms else outcome.moved[0]),
        f"{', '.join(outcome.moved[:3])} changed in a validation.{why} Each process validates different batches, so "
        "training depends on the number of processes. Keep modules in eval mode in validations.",
    )


def _explain_data(at: Event, ours: Outcome, other: VariantResult) -> DifferenceCause:
    data, sampler = (
        _find_module_suspects(ours, "dataset", "collate fn", "worker init fn", "data"),
        _find_module_suspects(ours, "sampler", "batch sampler", "data"),
    )
    if changed := _explain_changing_length(ours):
        return changed
    order = ours.probes.get("order", [])
    if at.kind == "order" or (order and order[0] != order[-1]):
        return DifferenceCause(
            "unseeded sampler",
            _format_line(ours, "sampler", sampler) or _format_line(ours, "batch sampler", sampler),
            f"In step {at.step + 1} the sampler drew different samples.{_format_suspects(sampler)} Draw from torch's "
            "global generator, or keep the generator in an attribute, so that Lumen seeds the generator.",
        )
    same = f"In step {at.step + 1} a batch has the same samples with different contents"
    if data:
        return DifferenceCause(
            UNSEEDED, _format_line(ours, "dataset", data), f"{same}.{_format_suspects(data)} {_KEYED}"
        )
    if other.variant.fresh:
        return DifferenceCause(
            "data differs from run to run",
            _format_line(ours, "dataset", []),
            f"{same}. Possible causes: a generator that Lumen does not seed, a file that changes, the order of a set.",
        )
    return DifferenceCause(
        "state is kept in a dataset",
        _format_line(ours, "dataset", []),
        f"{same}: the contents depend on earlier reads of this process, or on the worker. Compute a sample only from "
        "its index and from values of __init__.",
    )


def _explain_changing_length(ours: Outcome) -> DifferenceCause | None:
    """Return the cause for a dataset whose length changed during the run, or None."""
    lengths = [each for each in ours.probes.get("lengths", []) if each is not None]
    if len(set(lengths)) < 2:
        return None
    return DifferenceCause(
        "a dataset changes during the run",
        _format_line(ours, "dataset", []),
        f"The length of the dataset is {lengths[0]} when training begins and {lengths[-1]} later, so one index may "
        "mean several samples. Prepare the dataset in setup.",
    )


def _explain_joined(ours: Outcome, theirs: Outcome) -> DifferenceCause:
    """Return the cause for a step that depends on the size of micro-batches."""
    norms = [name for name, kind in ours.classes.items() if "BatchNorm" in kind]
    if ours.draws:
        return DifferenceCause(
            "not comparable",
            _format_line(ours, "task", []),
            "The training step draws random numbers (dropout, noise), which depend on the micro-batch: larger "
            "micro-batches draw different numbers. The promise is for one global batch size and one micro-batch size.",
            "not shown",
        )
    if norms:
        return DifferenceCause(
            "BatchNorm statistics depend on the micro-batch size",
            norms[0],
            f"{norms[0]} ({ours.classes[norms[0]]}) computes mean and variance of a micro-batch. Use GroupNorm "
            "or LayerNorm if the difference matters.",
            "not promised",
        )
    if found := explain_parts(ours, theirs):
        return DifferenceCause(
            "the loss is divided by the micro-batch's own count", _format_line(ours, "task", []), found
        )
    return DifferenceCause(
        COUPLES,
        _format_line(ours, "task", []),
        "The gradient of a batch is not a weighted mean of the gradients of its halves: the loss compares samples with "
        "each other, as contrastive losses do.",
        "not promised",
    )


def _explain_buffer(at: Event, ours: Outcome, other: VariantResult) -> DifferenceCause:
    owner = at.name.rpartition(".")[0] if at.kind == "buffer" else at.name
    if _is_norm(ours, at.name) and other.variant.world > 1:
        return DifferenceCause(
            "BatchNorm statistics differ between processes",
            owner,
            f"Running mean and variance of {owner} ({ours.classes.get(owner)}) come from the batches of one process. "
            "Use GroupNorm, or sync_batchnorm on CUDA.",
            "not promised",
        )
    return DifferenceCause(
        "a buffer differs",
        at.name,
        f"After step {at.step} the buffer {at.name} differs although gradients are equal. The buffer depends on the "
        "batches of one process, or on state that is not saved.",
    )


def _explain_forward(at: Event, ours: Outcome, other: VariantResult, *, exact: bool) -> DifferenceCause:
    """Return the cause for a module, or code between modules, with different outputs for equal inputs."""
    name = at.name.partition("#")[0]
    owner = name if at.kind == "module" else (name.rpartition(".")[0] if at.kind == "input" else "")
    kind = ours.classes.get(owner, "the task")
    where = f"{owner or 'the task'} ({kind})"
    found = _find_module_suspects(ours, owner or "task")
    place = ", ".join(filter(None, [where, _format_line(ours, owner or "task", found)]))
    part = {"input": f" before the call of {name}", "loss": " in training_step, after equal outputs of modules"}
    first = f"In step {at.step + 1} {where} computes different values{part.get(at.kind, '')}, from equal batches."
    if other.variant.fresh and not found:
        return DifferenceCause(
            "an operation is not deterministic",
            place,
            f"{first} The values differ from run to run. Possible causes: a race of threads, uninitialized memory, the "
            "order of a set, an algorithm of the device. Set deterministic: true to find an operation of torch.",
        )
    if found:
        is_set_order = any(each.function == SETS for each in found)
        kind, advice = ("an operation is not deterministic", "Sort the set.") if is_set_order else (UNSEEDED, _KEYED)
        return DifferenceCause(kind, place, f"{first}{_format_suspects(found)} {advice}")
    if exact or other.variant.world > 1:
        return DifferenceCause(
            "state is kept in a module",
            place,
            f"{first} The module keeps state between steps that is neither a parameter nor a buffer"
            f"{', or uses the rank' if other.variant.world > 1 else ''}. Processes differ, and checkpoints lack the "
            f"state. {_STATE}",
        )
    return DifferenceCause("a forward differs", place, first)


# ---------------------------------------------------------------------- places


def _is_norm(outcome: Outcome, name: str) -> bool:
    return any("BatchNorm" in outcome.classes.get(each, "") for each in (name, name.rpartition(".")[0]))


def _get_module_name(name: str) -> str:
    """Return the name of the module that owns a parameter or buffer."""
    return name.removeprefix("buffer ").rpartition(".")[0]


def _find_module_suspects(outcome: Outcome, *names: str) -> list[SuspectLine]:
    """Return the suspects in the code of some roles. If the run repeats, only a generator may be the cause."""
    found = [each for name in names for each in find_suspects(outcome.lines.get(name))]
    return [each for each in found if "Generator" in each.function or not outcome.repeats]


def _format_suspects(found: Sequence[SuspectLine]) -> str:
    return f" The code uses {'; '.join(str(each) for each in found[:3])}." if found else ""


def _format_line(outcome: Outcome, name: str, found: Sequence[SuspectLine]) -> str:
    """Return the line of the first suspect, or the first line of the class."""
    if found:
        return f"{found[0].file}:{found[0].line}"
    lines = outcome.lines.get(name)
    return "" if lines is None else f"{lines[0]}:{lines[1]}"


def _format_place(outcome: Outcome, name: str, found: Sequence[SuspectLine]) -> str:
    return ", ".join(filter(None, [name, _format_line(outcome, _get_module_name(name) or "task", found)]))
