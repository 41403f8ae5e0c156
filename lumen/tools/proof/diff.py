"""`lumen diff`: finds the first difference between two trainings."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

from lumen.cli.commands import CommandParser
from lumen.console import stderr, stdout
from lumen.data.nested import flatten_leaves
from lumen.errors import ConfigError
from lumen.tools.proof import DIFF
from lumen.tools.proof.difference import Difference, Fit, compare_trainings
from lumen.tools.proof.recorder import Recorder
from lumen.tools.proof.rerun import (
    RecordedValue,
    Rerun,
    compute_relative_difference,
    find_differing,
    find_parting,
    run_with_exit_code,
)
from lumen.tools.terminal import format_count, print_json

_DESCRIPTION = (
    "The command compares settings, versions, machines, logged values and checkpoints. Then it trains both runs again, "
    "from their newest equal checkpoint, and shows the first difference. It does not change the runs. Exit code: 0 if "
    "both are equal, 1 if they differ, 2 after an error."
)
#: Settings that change no number of a training.
_IGNORED_SETTINGS = {
    f"trainer.{name}" for name in (
        "name", "default_root_dir", "resume", "resume_parts", "logger", "enable_progress_bar", "enable_model_summary",
        "log_level", "log_format", "profiler", "max_restarts", "grace_s", "log_every_n_steps", "enable_checkpointing",
    )
}  # fmt: skip
_STEPS_OF_CONFIGS = 10
_MAX_VALUE_LENGTH = 72  # most characters of a printed value


@final
@dataclass
class Findings:
    """Differences between two runs or configs.

    Attributes:
        configuration: Settings that differ, by path, or None if the settings of a run are unknown.
        environment: Versions, machine and processes that differ. Such differences alone leave two runs equal.
        metrics: The first logged values that differ, or None if none differ.
        checkpoint: Step of the first common checkpoint with different parameters or optimizer state, or None.
        trained: First and last step of the training repeated for both, or None if nothing was trained.
        difference: The first difference between the repeated trainings, or None if they are equal.
        unlike_record: The first recorded value that the repeated training did not reproduce, by run.
        notes: More information, in sentences.
    """

    configuration: dict[str, tuple[Any, Any]] | None = None
    environment: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    metrics: tuple[RecordedValue, RecordedValue] | None = None
    checkpoint: int | None = None
    trained: tuple[int, int] | None = None
    difference: Difference | None = None
    unlike_record: dict[str, tuple[RecordedValue, RecordedValue]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def are_equal(self) -> bool:
        """True if no computed value and no setting that affects the computation differs."""
        found = self.configuration, self.metrics, self.checkpoint, self.difference
        return all(each in (None, {}) for each in found)


def options() -> CommandParser:
    """Return the parser of the command's options."""
    parser = CommandParser("diff", DIFF, "A B [--steps N] [--records] [--json]", _DESCRIPTION)
    parser.add_argument("a", metavar="A", help="The directory of a run, or a config file.")
    parser.add_argument("b", metavar="B", help="The run or the config to compare with A.")
    parser.add_argument("--steps", type=int, metavar="N", help="Largest number of steps to train again. "
                        "Default: up to the first record that differs; without such a record, and for configs, "
                        f"{_STEPS_OF_CONFIGS}.")  # fmt: skip
    parser.add_argument("--records", action="store_true", help="Compare only the records, without training.")
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    return parser


def run(words: list[str]) -> int:
    """Compare two runs or configs, print the differences, and return 0, 1 or 2."""
    args = options().read(words)
    if args.steps is not None and args.steps < 1:
        raise ConfigError(f"--steps: must be at least 1, found {args.steps}.")
    return run_with_exit_code(partial(_run_diff, args))


def _run_diff(args: Namespace) -> int:
    a, b = Rerun(args.a), Rerun(args.b)
    a.take_seed(b)
    b.take_seed(a)
    found = _compare_runs(a, b, args.steps, trains=not args.records)
    if args.json:
        difference = found.difference and {**vars(found.difference), "what": str(found.difference)}
        both = {"a": a.source, "b": b.source, "equal": found.are_equal}
        print_json(both | vars(found) | {"difference": difference})
    else:
        print(*_iterate_lines(a, b, found), sep="\n", file=stdout)
    return 0 if found.are_equal else 1


def _compare_runs(a: Rerun, b: Rerun, steps: int | None, *, trains: bool) -> Findings:
    found = Findings()
    ignored = _IGNORED_SETTINGS | a.filled | b.filled
    mine, other = ({key: value for key, value in flatten_leaves(each.config) if key not in ignored} for each in (a, b))
    found.configuration = find_differing(mine, other) if mine and other else None
    found.environment, found.metrics = a.compare_environment(b), find_parting(a.metrics, b.metrics)
    begin, found.checkpoint = a.find_common_checkpoints(b)
    ends = [each for each in (found.metrics and found.metrics[0].step, found.checkpoint) if each]
    if ends and begin >= min(ends):  # A value differs before an equal checkpoint: train from the beginning.
        begin = 0
    if steps is not None or not ends:
        ends.append(begin + (steps or _STEPS_OF_CONFIGS))
    has_records = bool(a.metrics.keys() & b.metrics.keys())
    if has_records and found.metrics is None and found.checkpoint is None:
        found.notes.append("All logged values and checkpoints that both runs have are equal.")
    elif trains:
        reasons = [each.refusal for each in (a, b) if each.refusal]
        if reasons:
            found.notes += [f"{reason}, so nothing was trained again." for reason in reasons]
        else:
            _train_both(a, b, begin, min(ends), found)
    return found


def _train_both(a: Rerun, b: Rerun, begin: int, last: int, found: Findings) -> None:
    """Train both runs again, and compare them with each other and with their records."""
    print(f"training both again, steps {begin + 1} to {last} ...", file=stderr)
    logged: dict[str, dict[tuple[int, str], str]] = {}
    of_a, of_b = _make_fit(a, "A", begin, logged), _make_fit(b, "B", begin, logged)
    found.difference = compare_trainings(of_a, of_b, last, first=begin + 1)
    found.trained = begin + 1, last
    for name, each in (("A", a), ("B", b)):
        if parting := find_parting(each.metrics, logged[name]):
            found.unlike_record[name] = parting
        found.notes += [f"{name}: {note}." for note in each.notes]


def _make_fit(rerun: Rerun, name: str, begin: int, logged: dict[str, dict[tuple[int, str], str]]) -> Fit:
    checkpoint = rerun.checkpoints[begin] if begin else None

    def fit(recorder: Recorder) -> None:
        _, values = rerun.train([recorder], checkpoint)
        logged.setdefault(name, values)

    return fit


# ---------------------------------------------------------------------- showing


def _iterate_lines(a: Rerun, b: Rerun, found: Findings) -> Iterator[str]:
    yield f"A  {a.source}"
    yield f"B  {b.source}"
    yield ""
    yield from _iterate_table("configuration", found.configuration)
    if a.is_run and b.is_run:
        yield from _iterate_table("environment", found.environment)
        yield from _iterate_records(found)
    if found.trained is not None:
        yield from _iterate_trained(found, found.trained)
    yield from found.notes
    yield ""
    yield "A and B are equal." if found.are_equal else "A and B differ."


def _iterate_table(title: str, differ: Mapping[str, tuple[Any, Any]] | None) -> Iterator[str]:
    count = "not known" if differ is None else format_count(len(differ), "difference") if differ else "equal"
    yield f"{title:15}{count}"
    for key, (mine, other) in (differ or {}).items():
        yield f"  {key}"
        yield f"    A  {_shorten_value(mine)}"
        yield f"    B  {_shorten_value(other)}"


def _iterate_records(found: Findings) -> Iterator[str]:
    if found.metrics is None:
        yield "logged values  equal"
    else:
        mine, other = found.metrics
        size = compute_relative_difference(mine.text, other.text)
        by = f", relative difference {size:.3g}" if size is not None and math.isfinite(size) else ""
        yield f"logged values  differ from step {mine.step} on: {mine.name}{by}"
        yield f"    A  {mine.text}"
        yield f"    B  {other.text}"
    differ = "equal" if found.checkpoint is None else f"differ from step {found.checkpoint} on"
    yield f"checkpoints    {differ}"


def _iterate_trained(found: Findings, steps: tuple[int, int]) -> Iterator[str]:
    first, last = steps
    difference = found.difference
    yield f"trained again  steps {first} to {last if difference is None else difference.step}"
    if difference is None:
        yield "  both are bitwise identical"
        if found.metrics is not None or found.checkpoint is not None:
            names, unknown = ", ".join(found.environment), "the code, the data or the machine"
            yield (
                f"  the different records come from the environment: {names}"
                if names
                else f"  no setting explains the different records: the cause is {unknown}"
            )
    else:
        yield from _iterate_difference(difference)
    for name, (recorded, now) in found.unlike_record.items():
        yield f"  {name} does not reproduce its record from step {recorded.step} on: {recorded.name}"
        yield f"    then {recorded.text}"
        yield f"    now  {now.text}"


def _iterate_difference(difference: Difference) -> Iterator[str]:
    yield f"  first differs {difference}"
    yield f"    A  {_shorten_value(difference.a)}"
    yield f"    B  {_shorten_value(difference.b)}"
    if difference.operator is not None:
        yield f"    first operator with a different result: {difference.operator}"
    if difference.absolute is not None and difference.values is not None:
        mine, other = difference.values
        yield f"    largest difference {difference.absolute:.3g}, relative {difference.relative or 0:.3g}"
        yield f"    first element {difference.element}: A {mine!r}, B {other!r}"
    if difference.repeats is False:
        yield "    repeated, the value changed again: no seed or setting determines it"
    yield f"  computed in step {difference.step}:"
    for count in difference.counts:
        first = f", first {count.first}" if count.first else ""
        yield f"    {count.kind:25}" + (f"{count.differ} of {count.of} differ{first}" if count.differ else "equal")


def _shorten_value(value: Any) -> str:
    text = "-" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= _MAX_VALUE_LENGTH else f"{text[: _MAX_VALUE_LENGTH - 4]} ..."
