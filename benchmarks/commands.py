"""Commands whose start is measured: imports and help."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.cases import Case
from benchmarks.rounds import environments

_IMPORTS = {
    "lumen": "from lumen import Trainer, TaskModule, DataModule",
    "lightning": "from lightning import Trainer, LightningModule, LightningDataModule",
    "accelerate": "from accelerate import Accelerator",
    "ignite": "from ignite.engine import Engine, Events",
}
_IMPORT = """
import gc, time
{before}
gc.collect()  # Otherwise earlier objects might be collected during the measured import.
begin_s = time.process_time()
{measured}
print(time.process_time() - begin_s)
"""
_HELP = {
    "lumen": ["-m", "lumen", "fit", "--help"],
    "lightning": ["-c", "from lightning.pytorch.cli import LightningCLI; LightningCLI()", "fit", "--help"],
}


def run_commands(case: Case, systems: Sequence[str], starts: int = 5) -> dict[str, dict[str, Any] | str]:
    """Run a case for every system, in turns.

    Args:
        case: `import` or `help`.
        systems: The systems, with the one by hand.
        starts: Number of starts of each system, of which the best counts, after one start that warms up the caches.

    Returns:
        For each system `cpu_s`, a list of one figure, or the error as a text. The figure of `help` is for the process.
        The figure of `import` is for the import after torch, plus the import of torch.
    """
    seconds = _import_s if case.kind == "import" else _help_s
    found: dict[str, list[float]] = {system: [] for system in systems}
    failed: dict[str, str] = {}
    for number in range(starts + 1):
        for system in (*systems[number % len(systems) :], *systems[: number % len(systems)]):
            if system not in failed:
                try:
                    found[system].append(seconds(system))
                except subprocess.CalledProcessError as failure:
                    failed[system] = (failure.stderr.strip().splitlines() or ["it failed"])[-1]
    best = {system: min(found[system][1:]) for system in systems if system not in failed}
    torch_s = best.get("hand", 0.0) if case.kind == "import" else 0.0
    added = {system: {"cpu_s": [best[system] + (torch_s if system in _IMPORTS else 0.0)]} for system in best}
    return added | failed


def _import_s(system: str) -> float:
    """Return the CPU seconds of an import, measured in its process."""
    before, measured = ("import torch", _IMPORTS[system]) if system in _IMPORTS else ("", "import torch")
    return float(_run("-c", _IMPORT.format(before=before, measured=measured)))


def _help_s(system: str) -> float:
    """Return the CPU seconds of a process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    _run(*_HELP.get(system, ["-c", "import torch"]))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _run(*words: str) -> str:
    """Run a command of this Python, and return its output."""
    command = [sys.executable, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environments(1)[0]).stdout
