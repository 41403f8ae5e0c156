"""What was proven, with hashes of what each run computed; and what has changed since another such file."""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, final

import torch

from lumen.errors import ConfigError
from lumen.tools.proof.apart import merged
from lumen.tools.proof.outcome import Event
from lumen.tools.proof.prove import Proof
from lumen.tools.proof.worker import Result
from lumen.version import __version__

FORMAT = 1
_WITH_TENSORS = ("base", "one")
_SAME = (
    "lumen", "torch", "python", "machine", "device", "threads", "command", "seed", "steps", "precision", "accelerator",
)  # fmt: skip
_OF_PROCESSORS = {"model name": "", "cpu family": "family ", "model": "model ", "CPU implementer": "", "CPU part": ""}


@final
class Changes(NamedTuple):
    """What has changed from one certificate to another, each in a sentence.

    Attributes:
        conditions: What the numbers depend on: versions, the device, threads, the command.
        results: Verdicts, and of each run the first number that is another one.
    """

    conditions: list[str]
    results: list[str]


def certificate(proof: Proof, command: str) -> dict[str, Any]:
    """A proof as JSON can have it.

    Args:
        proof: All that was shown.
        command: The command line that it is of.
    """
    return {
        "format": FORMAT,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "lumen": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "device": _device(proof.size.accelerator),
        "command": command,
        "seed": proof.size.seed,
        "steps": proof.size.steps,
        "precision": proof.precision,
        "threads": proof.size.threads,
        "accelerator": proof.size.accelerator,
        "proven": proof.code == 0,
        "seconds": round(proof.seconds, 1),
        "notes": proof.notes,
        "rows": [_plain(asdict(row)) for row in proof.rows],
        "runs": {name: _run(result) for name, result in sorted(proof.results.items()) if result.outcomes},
    }


def _device(accelerator: str) -> str:
    """What has computed: bits are the same on the same, since others add in another order."""
    if accelerator == "cuda":
        return torch.cuda.get_device_name()
    found: dict[str, str] = {}
    with suppress(OSError):  # no system but Linux has it
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
        found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    parts = [f"{before}{found[key]}" for key, before in _OF_PROCESSORS.items() if key in found]
    return ", ".join([*(parts or [platform.processor()]), torch.backends.cpu.get_cpu_capability()])


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity."""
    largest = row["largest"]
    return row | {"largest": str(largest) if largest is not None and not math.isfinite(largest) else largest}


def _run(result: Result) -> dict[str, Any]:
    """What a run computed: its losses with all their bits, hashes of gradients and parameters after each step."""
    outcome = merged(result)
    losses = [(event.step + 1, event.micro, event.numbers[1].hex()) for event in outcome.of("loss")]
    steps: dict[int, dict[str, list[Event]]] = {}
    for event in outcome.of("gradient", "parameter", "buffer"):
        number = event.step + (event.what == "gradient")
        steps.setdefault(number, {}).setdefault(event.what, []).append(event)
    hashed = {
        number: {
            what: _tensors(events) if result.variant.name in _WITH_TENSORS else _together(events)
            for what, events in kinds.items()
        }
        for number, kinds in steps.items()
    }
    return {"losses": losses, "steps": hashed, "values": outcome.values}


def _tensors(events: list[Event]) -> dict[str, str]:
    return {event.name: event.digest for event in events}


def _together(events: list[Event]) -> str:
    return hashlib.sha256("".join(event.digest for event in events).encode()).hexdigest()[:16]


def read(path: Path) -> dict[str, Any]:
    """A certificate.

    Raises:
        ConfigError: The file is no certificate, or cannot be read.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--against {path}: cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ConfigError(f"--against {path}: no certificate of lumen verify. Give the file that it has written.")
    return found


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Changes:
    """What has changed from one certificate to another."""
    now = json.loads(json.dumps(now))
    return Changes([*_conditions(before, now)], [*_verdicts(before, now), *_numbers(before, now)])


def _conditions(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for name in _SAME:
        if name in before and before[name] != now.get(name):
            yield f"{name} was {before[name]} and is {now.get(name)}."


def _verdicts(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    old = {(row["promise"], row["what"]): row["verdict"] for row in before["rows"]}
    new = {(row["promise"], row["what"]): row["verdict"] for row in now["rows"]}
    for key in {**old, **new}:
        if old.get(key) != new.get(key):
            yield f"{key[1]}: was {old.get(key, 'not compared')} and is {new.get(key, 'not compared')}."


def _numbers(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted({*before["runs"]} & {*now["runs"]}):
        if first := _first(before["runs"][name], now["runs"][name]):
            yield f"the numbers of the run {name} have changed, first {first}."


def _first(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """The first of a run's numbers that is another one now."""
    for number in sorted({*old["steps"]} | {*new["steps"]}, key=int):
        there = ({(step, micro): text for step, micro, text in run["losses"]} for run in (old, new))
        losses, others = there
        for key in sorted({*losses} | {*others}):
            if key[0] == int(number) and losses.get(key) != others.get(key):
                was, is_now = (float.fromhex(each[key]) if key in each else None for each in (losses, others))
                return f"in step {number}: the loss of micro-batch {key[1]} was {was!r} and is {is_now!r}"
        steps = [run["steps"].get(number, {}) for run in (old, new)]
        for what in ("gradient", "parameter", "buffer"):
            was, is_now = (each.get(what) for each in steps)
            if was != is_now:
                names = [key for key in was if was[key] != is_now.get(key)] if _both(was, is_now) else []
                return f"in step {number}: the {what}{f' of {names[0]}' if names else 's'}"
    if old["values"] != new["values"]:
        names = [name for name in old["values"] if old["values"][name] != new["values"].get(name)]
        return f"in the evaluation: {', '.join(names[:3]) or 'another value'}"
    return None


def _both(one: Any, other: Any) -> bool:
    return isinstance(one, dict) and isinstance(other, dict)
