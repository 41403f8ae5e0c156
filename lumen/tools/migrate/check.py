"""`lumen migrate --check`: compares the first steps of a project with Lightning and of the migrated project."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, final

from lumen.console import stderr, stdout
from lumen.errors import ConfigError
from lumen.tools.migrate.child import LIGHTNING, LUMEN, VARIABLE
from lumen.tools.migrate.project import FOREIGN_FOLDERS
from lumen.tools.proof.outcome import Event, compute_distance, compute_relative_difference
from lumen.tools.proof.recorder import KINDS

_START = "import sys\nsys.path.append({!r})\nfrom lumen.tools.migrate.child import install\ninstall()\n"
_OFFLINE = {"WANDB_MODE": "offline", "NEPTUNE_MODE": "offline", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
_LINKED_BYTES, _MOST_BYTES = 1 << 24, 1 << 31
_SHOWN_LINES = 15
_EXACT = ("random", "setting", "batch")


class _CannotCompareError(Exception):
    """Reason why two projects cannot be compared, in a sentence."""


def check_project(arguments: Namespace, commands: Sequence[list[str]], edit: Callable[[Path], list[str]]) -> int:
    """Run both projects, print the comparison, and return 0 (equal), 1 (different) or 2 (cannot be compared).

    Args:
        arguments: The options of `lumen migrate`.
        commands: The command that trains, and a different command for the migrated project, if any.
        edit: Function that migrates a project in place, and returns the places to check by hand.
    """
    path = Path(arguments.path).expanduser().resolve()
    original = Path(arguments.original or path).expanduser().resolve()
    if not commands or not commands[0]:
        raise ConfigError(
            "--check needs the command that trains the project. Write it after `--`: "
            "`lumen migrate . --check -- python train.py`."
        )
    if not (path.is_dir() and original.is_dir()):
        raise ConfigError(f"--check needs the directory of a project, found {path if original.is_dir() else original}.")
    with TemporaryDirectory(prefix="lumen-check-", ignore_cleanup_errors=True) as name:
        folder = Path(name).resolve()
        (folder / "sitecustomize.py").write_text(_START.format(str(Path(__file__).parents[3])))
        notes: list[str] = []
        try:
            first = _record_training(LIGHTNING, commands[0], original, folder, arguments)
            copy = _copy_project(path, folder / LUMEN)
            notes = edit(copy)
            second = _record_training(LUMEN, commands[-1], path, folder, arguments, copy)
        except _CannotCompareError as reason:
            if notes:
                print("To check by hand:", *notes, sep="\n", file=stderr)
            print(f"cannot compare: {reason}", file=stdout)
            return 2
    comparison = Comparison(first, second)
    print(*comparison.describe(), sep="\n", file=stdout)
    return int(comparison.difference is not None)


def _copy_project(source: Path, to: Path) -> Path:
    """Copy a project without its environments, repository and runs. Large files and links become links."""
    left = _MOST_BYTES
    for folder, folders, files in os.walk(source):
        target = to / Path(folder).relative_to(source)
        target.mkdir(parents=True)
        links = [each for each in folders if Path(folder, each).is_symlink()]
        ours = (each for each in folders if each not in (*links, ".git", *FOREIGN_FOLDERS))
        folders[:] = [each for each in ours if not Path(folder, each, "pyvenv.cfg").exists()]
        for each in (*links, *files):
            file = Path(folder, each)
            if not file.exists():
                continue
            if file.is_symlink() or file.stat().st_size > _LINKED_BYTES:
                (target / each).symlink_to(file.resolve())
            elif file.is_file():
                left -= file.stat().st_size
                shutil.copy2(file, target / each)
            if left < 0:
                raise _CannotCompareError(f"{source} has more than 2 GB of small files. Move the data elsewhere.")
    return to


def _record_training(
    library: str, command: list[str], source: Path, folder: Path, arguments: Namespace, copy: Path | None = None
) -> dict[str, Any]:
    """Run the command in a copy of the project, and return the record of its training."""
    print(f"training {arguments.steps} steps with {library} ...", file=stderr)
    copy = copy or _copy_project(source, folder / library)
    cwd = Path.cwd()
    settings = {"library": library, "first": LIGHTNING, "steps": arguments.steps, "source": str(source),
                "copy": str(copy), "folder": str(folder)}  # fmt: skip
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    words = [sys.executable if command[0] in ("python", "python3") else command[0], *command[1:]]
    answer, log = folder / f"{library}.json", folder / f"{library}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            words, cwd=copy / cwd.relative_to(source) if cwd.is_relative_to(source) else copy,
            env=os.environ | _OFFLINE | {VARIABLE: json.dumps(settings), "PYTHONPATH": path, "PATH": programs},
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            end_s = time.monotonic() + arguments.time_limit
            while process.poll() is None and not answer.exists() and time.monotonic() < end_s:
                time.sleep(0.1)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.poll()
            process.wait()
    found = json.loads(answer.read_text()) if answer.exists() else {}
    if "record" in found:
        return dict(found["record"])
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    print(*lines[-_SHOWN_LINES:], sep="\n", file=stderr)
    ended = f"the command for {library} ended with exit code {code}: {lines[-1] if lines else 'it printed nothing'}"
    if "problem" in found:
        ended = found["problem"] if library in found["problem"] else f"the training with {library} failed: {found['problem']}"
    elif code is None:
        ended = f"{library} did not train {arguments.steps} steps in {arguments.time_limit:g} s. See --steps and --time-limit."
    elif code == 0:
        ended = f"the command calls no fit of {library}'s Trainer."
    raise _CannotCompareError(ended)


@final
class Comparison:
    """Comparison of two records of `StepObserver`.

    Args:
        first: The record of the training with Lightning.
        second: The record of the training with Lumen.

    Attributes:
        difference: The first difference and its cause, without a full stop, or None if all losses are equal.
    """

    def __init__(self, first: dict[str, Any], second: dict[str, Any]) -> None:
        self._facts = first["facts"], second["facts"]
        self._events = [[Event(*each[:5], tuple(each[5])) for each in record["events"]] for record in (first, second)]
        precision = self._facts[0]["settings"]["precision"]
        self._tolerance = 1e-2 if "16" in precision else 1e-10 if "64" in precision else 1e-5
        self._losses = [*zip(*(each["losses"] for each in self._facts), strict=False)]
        self._largest = max((compute_relative_difference(a[1], b[1]) for a, b in self._losses), default=0.0)
        self.difference = self._find_difference()

    def describe(self) -> Iterator[str]:
        """Yield the lines of the report."""
        mine, other = self._facts
        yield "made equal     one process; the random numbers of each training step"
        given = Counter("batches" if each == "batch" else "initial weights" for each in other["given"])
        if given["batches"]:
            yield (
                f"               the batches: Lumen got Lightning's ({mine['sampler']}), since its order and random "
                "transforms come from the seed and the epoch"
            )
        if given["initial weights"]:
            yield "               the initial weights: Lumen got Lightning's, since no common seed decides them"
        if self._misses_last_window():
            yield "not reached    the last window of an epoch, where accumulation may differ. Increase --steps."
        for library, facts in zip((LIGHTNING, LUMEN), self._facts, strict=True):
            if facts.get("unvalidated"):
                yield f"not validated  {library}: {facts['unvalidated']}"
        names = mine["validation"].keys() ^ other["validation"].keys()
        if names and mine["validation"] and other["validation"]:
            yield f"not in both    the validation's values {', '.join(sorted(names))}"
        count = f"{len(self._losses)} of {max(len(each['losses']) for each in self._facts)} losses"
        if self.difference is not None:
            yield f"differ {self.difference}"
        elif self._largest:
            yield f"equal: {count} are equal up to rounding (relative difference {self._largest:.1g})"
        else:
            validated = f", and {len(mine['validation'].keys() & other['validation'].keys())} values of a validation"
            yield f"equal: {count} are bitwise identical" + validated * bool(mine["validation"])

    def _find_difference(self) -> str | None:
        mine, other = self._facts
        if not self._losses:
            return "from step 1: no losses to compare, since training_step returned none"
        at = next((a[0] for a, b in self._losses if compute_relative_difference(a[1], b[1]) > self._tolerance), None)
        windows = [Counter(step for step, _ in each["batches"]) for each in self._facts]
        for step in sorted(windows[0].keys() & windows[1].keys())[:-1]:
            if windows[0][step] != windows[1][step]:
                return (
                    f"from step {step + 1}: accumulation: this step has {windows[0][step]} batches with Lightning, "
                    f"{windows[1][step]} with Lumen"
                )
        if at is not None:
            return f"from step {at + 1}: {self._explain()}"
        if len(mine["losses"]) != len(other["losses"]):
            return f"in length: Lightning trained on {len(mine['batches'])} batches, Lumen on {len(other['batches'])}"
        for name, value in mine["validation"].items():
            now = other["validation"].get(name, value)
            if compute_relative_difference(value, now) > self._tolerance:
                return f"in the validation: {name} is {value!r} with Lightning, {now!r} with Lumen"
        return None

    def _explain(self) -> str:
        """Return the first recorded value that differs, and the cause if it is known."""
        known = {event.key: event for event in self._events[0]}
        for event in self._events[1]:
            before = known.get(event.key)
            if before is None or before.digest == event.digest:
                continue
            if event.kind in _EXACT or compute_distance(before, event) > self._tolerance:
                where = f"{KINDS[event.kind].format(event.name)} in step {event.step + 1}"
                cause = self._find_cause(event, before)
                return f"{cause}. First different value: {where}" if cause else where
        return "a value that was not recorded"

    def _find_cause(self, event: Event, before: Event) -> str | None:
        mine, other = self._facts
        if event.kind == "batch":
            sizes = [facts["batches"][event.micro][1] for facts in self._facts]
            return f"data: the batch has {sizes[0]} samples with Lightning, {sizes[1]} with Lumen" if sizes[0] != sizes[1] else "data"
        if event.kind in ("input", "output", "loss"):
            modes = [set(facts["evaluated"][event.micro]) for facts in self._facts]
            if differ := sorted(modes[0] ^ modes[1]):
                library = LIGHTNING if differ[0] in modes[0] else LUMEN
                return f"modes: {differ[0] or 'the task'} is in evaluation mode with {library} only"
            dtypes = [facts["dtypes"].get(event.name.split("#")[0]) for facts in self._facts]
            if dtypes[0] != dtypes[1]:
                return f"precision: {dtypes[0]} with Lightning, {dtypes[1]} with Lumen"
            return None
        if event.kind == "random":
            return "random numbers: the training step draws other numbers"
        if event.kind == "setting":
            return f"schedule: {before.numbers[0]:.6g} with Lightning, {event.numbers[0]:.6g} with Lumen"
        if event.kind == "gradient":
            return self._explain_gradient(event.step)
        if event.kind == "parameter" and mine["optimizer"] != other["optimizer"]:
            return f"optimizer: {mine['optimizer']} with Lightning, {other['optimizer']} with Lumen"
        return None

    def _explain_gradient(self, step: int) -> str | None:
        sizes = [size for each, size in self._facts[0]["batches"] if each == step]
        settings = [facts["settings"] for facts in self._facts]
        accumulate = settings[0]["accumulate_grad_batches"]
        if len(sizes) != int(accumulate):
            return (
                f"last window: Lightning divides the sum of {len(sizes)} losses by accumulate_grad_batches={accumulate}, "
                "Lumen averages over the samples"
            )
        if len(set(sizes)) > 1:
            return (
                "accumulation: Lightning averages the means of the batches, Lumen averages over the samples "
                f"(batches of {', '.join(map(str, sizes))})"
            )
        for name in ("gradient_clip_val", "gradient_clip_algorithm", "precision"):
            values = [each[name] for each in settings]
            if values[0] != values[1] and name != "precision":
                return f"clipping: {name} is {values[0]} with Lightning, {values[1]} with Lumen"
        return None

    def _misses_last_window(self) -> bool:
        windows = Counter(step for step, _ in self._facts[0]["batches"])
        return max(windows.values()) > 1 and len(set([*windows.values()][:-1])) <= 1 and self.difference is None
