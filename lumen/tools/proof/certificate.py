"""Certificates: verdicts and hashes of what each run computed, and the changes since an earlier certificate."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from lumen.errors import ConfigError
from lumen.tools.proof.outcome import Event, merge_outcomes
from lumen.tools.proof.prove import Prover
from lumen.tools.proof.worker import VariantResult
from lumen.tools.terminal import as_json_data
from lumen.version import __version__

FORMAT = 1
_WITH_TENSORS = ("base", "one")
_CONDITIONS = (
    "lumen", "torch", "python", "machine", "device", "threads", "command", "seed", "steps", "precision", "accelerator",
)  # fmt: skip
_CPU_MODEL_PATTERN = {
    "model name": "",
    "cpu family": "family ",
    "model": "model ",
    "CPU implementer": "",
    "CPU part": "",
}


def make_certificate(proof: Prover, command: str) -> dict[str, Any]:
    """Return a proof as JSON-compatible data.

    Args:
        proof: The completed proof.
        command: The command line of the proof.
    """
    certificate = {
        "format": FORMAT,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "lumen": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "device": _get_device_name(proof.size.accelerator),
        "command": command,
        **{name: getattr(proof.size, name) for name in ("seed", "steps", "threads", "accelerator")},
        "precision": proof.precision,
        "proven": proof.code == 0,
        "seconds": round(proof.seconds, 1),
        "notes": proof.notes,
        "rows": [asdict(row) | {"verdict": row.verdict} for row in proof.rows],
        "runs": {name: _describe_run(result) for name, result in sorted(proof.results.items()) if result.outcomes},
    }
    return {name: as_json_data(value) for name, value in certificate.items()}


def _get_device_name(accelerator: str) -> str:
    """Return the name of the device. Only equal devices sum in the same order, with bitwise identical results."""
    if accelerator == "cuda":
        return torch.cuda.get_device_name()
    found: dict[str, str] = {}
    with suppress(OSError):  # exists only on Linux
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
        found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    parts = [f"{before}{found[key]}" for key, before in _CPU_MODEL_PATTERN.items() if key in found]
    return ", ".join([*(parts or [platform.processor()]), torch.backends.cpu.get_cpu_capability()])


def _describe_run(result: VariantResult) -> dict[str, Any]:
    """Return the exact losses of a run, and hashes of gradients and parameters after each step."""
    outcome = merge_outcomes(result.outcomes)
    losses = [(event.step + 1, event.micro, event.numbers[1].hex()) for event in outcome.iterate_events("loss")]
    steps: dict[int, dict[str, list[Event]]] = {}
    for event in outcome.iterate_events("gradient", "parameter", "buffer"):
        number = event.step + (event.kind == "gradient")
        steps.setdefault(number, {}).setdefault(event.kind, []).append(event)
    hashed = {
        step: {kind: _hash_events(events, result) for kind, events in each.items()} for step, each in steps.items()
    }
    return {"losses": losses, "steps": hashed, "values": outcome.values}


def _hash_events(events: list[Event], result: VariantResult) -> dict[str, str] | str:
    if result.variant.name in _WITH_TENSORS:
        return {event.name: event.digest for event in events}
    return hashlib.sha256("".join(event.digest for event in events).encode()).hexdigest()[:16]


def read_certificate(path: Path) -> dict[str, Any]:
    """Read a certificate.

    Raises:
        ConfigError: The file is not a certificate, or cannot be read.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--against {path}: cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ConfigError(f"--against {path}: not a certificate. Give a file that lumen verify has written.")
    return found


def describe_changed_conditions(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the changes of versions, device, threads and command, as sentences."""
    differ = (name for name in _CONDITIONS if name in before and before[name] != now.get(name))
    return [f"{name} was {before[name]} and is {now.get(name)}." for name in differ]


def iterate_changed_results(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield the changed verdicts, and the first changed number of each run, as sentences."""
    old, new = ({(row["promise"], row["what"]): row["verdict"] for row in each["rows"]} for each in (before, now))
    for key in {**old, **new}:
        if old.get(key) != new.get(key):
            yield f"{key[1]}: was {old.get(key, 'not compared')} and is {new.get(key, 'not compared')}."
    for name in sorted({*before["runs"]} & {*now["runs"]}):
        if first := _find_first_change(before["runs"][name], now["runs"][name]):
            yield f"the numbers of the run {name} have changed, first {first}."


def _find_first_change(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Return a description of the first number of a run that changed, or None."""
    for number in sorted({*old["steps"]} | {*new["steps"]}, key=int):
        losses, new_losses = ({(step, micro): text for step, micro, text in run["losses"]} for run in (old, new))
        for key in sorted({*losses} | {*new_losses}):
            if key[0] == int(number) and losses.get(key) != new_losses.get(key):
                was, is_now = (float.fromhex(each[key]) if key in each else None for each in (losses, new_losses))
                return f"in step {number}: the loss of micro-batch {key[1]} was {was!r} and is {is_now!r}"
        for kind in ("gradient", "parameter", "buffer"):
            was, is_now = (run["steps"].get(number, {}).get(kind) for run in (old, new))
            if was != is_now:
                both = isinstance(was, dict) and isinstance(is_now, dict)
                names = [key for key in was if was[key] != is_now.get(key)] if both else []
                return f"in step {number}: the {kind}{f' of {names[0]}' if names else 's'}"
    if old["values"] != new["values"]:
        names = [name for name in old["values"] if old["values"][name] != new["values"].get(name)]
        return f"in the evaluation: {', '.join(names[:3]) or 'a different value'}"
    return None
