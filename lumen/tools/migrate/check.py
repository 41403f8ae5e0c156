"""`lumen migrate --check`: compares the first steps of a project with Lightning and of the migrated project."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lumen.console import stderr, stdout
from lumen.errors import ConfigError
from lumen.tools.migrate.child import LIGHTNING, LUMEN, VARIABLE
from lumen.tools.migrate.project import FOREIGN_FOLDERS
from lumen.tools.proof.outcome import Event, compute_distance, compute_relative_difference
from lumen.tools.proof.recorder import KINDS
from lumen.tools.terminal import format_count

_START = "import sys\nsys.path.append({!r})\nfrom lumen.tools.migrate.child import install\ninstall()\n"
_OFFLINE = {"WANDB_MODE": "offline", "NEPTUNE_MODE": "offline", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
_LINKED_BYTES, _MOST_BYTES = 1 << 24, 1 << 31
_IGNORED = (".git", *FOREIGN_FOLDERS)
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
    if arguments.steps < 1:
        raise ConfigError(f"--steps: must be at least 1, found {arguments.steps}.")
    if not (path.is_dir() and original.is_dir()):
        raise ConfigError(f"--check needs the directory of a project, found {path if original.is_dir() else original}.")
    with TemporaryDirectory(prefix="lumen-check-", ignore_cleanup_errors=True) as name:
        folder = Path(name).resolve()
        (folder / "sitecustomize.py").write_text(_START.format(str(Path(__file__).parents[3])))
        notes: list[str] = []
        try:
            copies = _copy_project(original, folder / LIGHTNING), _copy_project(path, folder / LUMEN)
            first = _record_training(LIGHTNING, commands[0], original, copies[0], folder, arguments)
            notes = edit(copies[1])
            second = _record_training(LUMEN, commands[-1], path, copies[1], folder, arguments)
        except (_CannotCompareError, OSError) as reason:
            if notes:
                print("To check by hand:", *notes, sep="\n", file=stderr)
            print(f"cannot compare: {reason}", file=stdout)
            return 2
    lines, are_equal = compare_records(first, second)
    print(*lines, sep="\n", file=stdout)
    return int(not are_equal)


def _copy_project(source: Path, to: Path) -> Path:
    """Copy a project without its environments, repository and runs. Large files and linked directories become links."""
    left = _MOST_BYTES

    def copy(file: str, target: str) -> None:
        nonlocal left
        size = os.path.getsize(file)
        left -= min(size, _LINKED_BYTES)
        if left < 0:
            raise _CannotCompareError(f"{source} has more than 2 GB of files. Move the data elsewhere.")
        if size > _LINKED_BYTES:
            os.symlink(os.path.realpath(file), target)
        else:
            shutil.copy2(file, target)
            os.chmod(target, os.stat(target).st_mode | stat.S_IWUSR)

    def list_ignored(folder: str, names: list[str]) -> list[str]:
        target, paths = to / Path(folder).relative_to(source), [Path(folder, name) for name in names]
        target.mkdir(parents=True, exist_ok=True)
        links = [each for each in paths if each.is_symlink() and each.is_dir()]
        for each in links:
            (target / each.name).symlink_to(each.resolve())
        special = {each for each in paths if not (each.is_file() or each.is_dir()) or (each / "pyvenv.cfg").exists()}
        return [each.name for each in paths if each in {*links, *special} or each.name in _IGNORED]

    shutil.copytree(source, to, copy_function=copy, ignore=list_ignored, dirs_exist_ok=True)
    return to


def _record_training(
    library: str, command: list[str], source: Path, copy: Path, folder: Path, arguments: Namespace
) -> dict[str, Any]:
    """Run the command in a copy of the project, and return the record of its training."""
    print(f"training {arguments.steps} steps with {library} ...", file=stderr)
    cwd, answer, log = Path.cwd(), folder / f"{library}.json", folder / f"{library}.log"
    settings = {"library": library, "steps": arguments.steps, "source": str(source), "copy": str(copy),
                "folder": str(folder)}  # fmt: skip
    paths = {"PYTHONPATH": str(folder), "PATH": str(Path(sys.executable).parent)}
    paths = {name: os.pathsep.join(filter(None, [path, os.environ.get(name)])) for name, path in paths.items()}
    program = sys.executable if command[0] in ("python", "python3") else command[0]
    cwd = copy / cwd.relative_to(source) if cwd.is_relative_to(source) else copy
    if shutil.which(program, path=paths["PATH"]) is None and not (cwd / program).exists():
        raise _CannotCompareError(f"there is no program {program}.")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [program, *command[1:]], cwd=cwd,
            env=os.environ | _OFFLINE | paths | {VARIABLE: json.dumps(settings)},
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        end_s = time.monotonic() + arguments.time_limit
        try:
            while (code := process.poll()) is None and not answer.exists() and time.monotonic() < end_s:
                time.sleep(0.1)
        finally:
            with suppress(ProcessLookupError):  # Workers and further commands of a script end too.
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    found = json.loads(answer.read_text()) if answer.exists() else {}
    if "record" in found:
        return dict(found["record"])
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    print(*lines[-_SHOWN_LINES:], sep="\n", end="\n" if lines else "", file=stderr)
    if "problem" in found:
        raise _CannotCompareError(found["problem"])
    if code is None:
        limits = f"{arguments.steps} steps in {arguments.time_limit:g} s"
        raise _CannotCompareError(f"{library} did not train {limits}. See --steps and --time-limit.")
    if code:
        error = next((line for line in lines[-1:] if ": " in line), f"exit code {code}")
        raise _CannotCompareError(f"the command for {library} failed: {error}")
    raise _CannotCompareError(f"the command does not call fit of {library}'s Trainer.")


def compare_records(first: dict[str, Any], second: dict[str, Any]) -> tuple[list[str], bool]:
    """Return the lines of the report, and True if all losses and validation values are equal.

    Args:
        first: The record of the training with Lightning.
        second: The record of the training with Lumen.
    """
    mine, other = first["facts"], second["facts"]
    lines = ["made equal     one process; the random numbers of each step; the numbers after seed_everything"]
    if "batch" in other["given"]:
        lines.append("               the batches, since Lumen draws their order from the seed and the epoch")
    if weights := sorted({*other["given"]} - {"batch"}):
        lines.append(f"               {format_count(len(weights), 'initial weight')}, such as {weights[0]}")
    for library, facts in zip((LIGHTNING, LUMEN), (mine, other), strict=True):
        if facts["unvalidated"] and (mine["validation"] or other["validation"]):
            lines.append(f"not validated  {library}: {facts['unvalidated']}")
    names = sorted(mine["validation"].keys() ^ other["validation"].keys())
    if names and mine["validation"] and other["validation"]:
        lines.append(f"not compared   {', '.join(names)}: logged in only one of the validations")
    if mine["settings"]["accumulate_grad_batches"] != "1" and not mine["epochs"]:
        lines.append("not reached    the end of an epoch, where accumulation may differ. Increase --steps.")
    difference = _find_difference(first, second)
    count = f"{len(mine['losses'])} of {len(mine['losses'])} losses"
    same = "bitwise identical" if mine["losses"] == other["losses"] else "equal up to rounding"
    values = format_count(len(mine["validation"].keys() & other["validation"].keys()), "validation value")
    verdict = f"differ {difference}" if difference else f"equal: {count} {same}, {values}"
    return [*lines, verdict], difference is None


def _find_difference(first: dict[str, Any], second: dict[str, Any]) -> str | None:
    """Return the first difference and its cause."""
    mine, other = first["facts"], second["facts"]
    precision = mine["settings"]["precision"]
    tolerance = 1e-2 if "16" in precision else 1e-10 if "64" in precision else 1e-5
    windows = [_count_batches(facts) for facts in (mine, other)]
    for step, counts in enumerate([*zip(*windows, strict=False)][:-1]):
        if counts[0] != counts[1]:
            times = [facts["settings"]["accumulate_grad_batches"] for facts in (mine, other)]
            name = "skipped updates" if times[0] == times[1] else "accumulation"
            cause = f"{name}: {counts[0]} batches with Lightning, {counts[1]} with Lumen"
            return f"from step {step + 1}: {_compare_dtypes(mine, other) or cause}"
    for (step, value), (_, now) in zip(mine["losses"], other["losses"], strict=False):
        if compute_relative_difference(value, now) > tolerance:
            return f"from step {step + 1}: {_find_cause(first, second, tolerance)}"
    if not mine["losses"] or len(mine["losses"]) != len(other["losses"]):
        return f"in length: {len(mine['losses'])} losses with Lightning, {len(other['losses'])} with Lumen"
    for name, value in mine["validation"].items():
        if compute_relative_difference(value, now := other["validation"].get(name, value)) > tolerance:
            return f"in the validation: {name} is {value!r} with Lightning, {now!r} with Lumen"
    return None


def _find_cause(first: dict[str, Any], second: dict[str, Any], tolerance: float) -> str:
    """Return the first recorded value that differs, after the cause if it is known."""
    mine, other = first["facts"], second["facts"]
    known = {event.key: event for event in (Event(*each) for each in first["events"])}
    for event in (Event(*each) for each in second["events"]):
        before = known.get(event.key, event)
        if before.digest == event.digest:
            continue
        if event.kind not in _EXACT and compute_distance(before, event) <= tolerance:
            continue
        cause = _compare_dtypes(mine, other)
        sizes = [facts["sizes"][event.micro][1] for facts in (mine, other)]
        if event.kind == "batch" and sizes[0] != sizes[1]:
            cause = f"data: a batch of {sizes[0]} samples with Lightning, {sizes[1]} with Lumen"
        elif event.kind == "setting":
            cause = f"schedule: {before.numbers[0]:.6g} with Lightning, {event.numbers[0]:.6g} with Lumen"
        elif event.kind == "gradient":
            cause = _explain_gradient(mine, other, event.step) or cause
        place = f"{KINDS[event.kind].format(event.name)}, in step {event.step + 1}"
        return f"{cause}\n  first different value: {place}" if cause else place
    return "the loss, which no recorded value explains"


def _explain_gradient(mine: dict[str, Any], other: dict[str, Any], step: int) -> str | None:
    sizes = [size for each, size in mine["sizes"] if each == step]
    settings, others, causes = mine["settings"], other["settings"], list[str]()
    if len({*sizes}) > 1:
        shown = ", ".join(map(str, sizes))
        causes.append(f"accumulation: Lightning averages batch means, Lumen samples (sizes {shown})")
    if str(len(sizes)) != (times := settings["accumulate_grad_batches"]):
        causes.append(f"last window: Lightning divides the sum of {format_count(len(sizes), 'batch mean')} by {times}")
    causes += [f"{name}: {settings[name]} with Lightning, {others[name]} with Lumen" for name in settings
               if name != "precision" and settings[name] != others[name]]  # fmt: skip
    return "\n  ".join(causes) or None


def _compare_dtypes(mine: dict[str, Any], other: dict[str, Any]) -> str | None:
    for name, dtype in mine["dtypes"].items():
        if dtype != (now := other["dtypes"].get(name, dtype)):
            return f"precision: the output of {name} is {dtype} with Lightning, {now} with Lumen"
    return None


def _count_batches(facts: dict[str, Any]) -> list[int]:
    return [len([*group]) for _, group in groupby(facts["sizes"], itemgetter(0))]
