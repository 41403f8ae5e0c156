"""Commands whose CPU time is measured from outside: imports and help."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from typing import Any

from benchmarks.cases import Case

_TORCH = ["-c", "import torch"]
_COMMANDS = {
    "import": {
        "hand": _TORCH,
        "again": _TORCH,
        "lumen": ["-c", "import torch; from lumen import Trainer, TaskModule, DataModule"],
        "lightning": ["-c", "import torch; from lightning import Trainer, LightningModule, LightningDataModule"],
        "accelerate": ["-c", "import torch; from accelerate import Accelerator"],
        "ignite": ["-c", "import torch; from ignite.engine import Engine, Events"],
    },
    "help": {
        "hand": _TORCH,
        "again": _TORCH,
        "lumen": ["-m", "lumen", "fit", "--help"],
        "lightning": ["-c", "from lightning.pytorch.cli import LightningCLI; LightningCLI()", "fit", "--help"],
    },
}


def run_command(case: Case, system: str) -> dict[str, Any] | str:
    """Run the command of a case once.

    Returns:
        `cpu_s`: one figure, the CPU seconds of the process; a text where it failed.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *_COMMANDS[case.kind][system]], capture_output=True, text=True, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["it failed"])[-1]
    return {"cpu_s": [after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime]}
