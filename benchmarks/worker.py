"""One measurement in a separate process: `python -m benchmarks.worker CASE SYSTEM` prints the sample as JSON."""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import resource
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import CASES, SYSTEMS, Case
from benchmarks.gaps import Gaps
from benchmarks.problem import Problem

MARKER = "BENCHMARK "
_MODULES = {
    "again": "hand", "hand-seeded": "hand", "hand-summed": "hand", "hand-fused": "hand", "hand-sliced": "hand",
    "lumen-own": "lumen", "lumen-at-once": "lumen", "lumen-exact": "lumen", "lightning-async": "lightning",
}  # fmt: skip


def measure(
    case: Case,
    system: str,
    directory: Path,
    take_turns: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Run a case with a system.

    Args:
        case: The case.
        system: A name in `SYSTEMS`.
        directory: An empty directory for output.
        take_turns: Function that is called between two turns, and returns when the next turn may begin.

    Returns:
        Lists of figures: `cpu_s` and `wall_s` of each turn, in seconds per batch; one figure of `first_s` and of
        `peak_mb`; if measured, one of `calls`, `gap_s`, `blocked_s` and `lost_s`. Values that must be equal for all
        systems: the final `loss`, exactly; `digest` of the parameters; `result` of an evaluation.
    """
    torch.set_num_threads(1)
    problem = Problem(case, system, directory)
    problem.take_turns = take_turns
    module = import_module(f"benchmarks.systems.{_MODULES.get(system, system)}")
    getattr(module, case.kind)(problem)
    if problem.final_loss is None or len(problem.cpu_s) != case.epochs * case.turns:
        raise RuntimeError(f"{system} made {problem.calls} batches of {case.name}, not {case.batches}")
    blocked, lost = problem.save_costs()
    profile = problem.profile
    return {
        "cpu_s": problem.cpu_s,
        "wall_s": problem.wall_s,
        "first_s": [problem.first_s],
        "peak_mb": [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024],
        "blocked_s": blocked,
        "lost_s": lost,
        "calls": [pstats.Stats(profile).total_calls / case.epoch] if isinstance(profile, cProfile.Profile) else [],
        "gap_s": [profile.seconds / case.epoch] if isinstance(profile, Gaps) else [],
        "loss": float(problem.final_loss).hex(),
        "digest": problem.digest(),
        "result": problem.result,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("--small", action="store_true", help="run a tiny version, for tests")
    parser.add_argument("--turns", action="store_true", help="wait for a line of stdin before each turn")
    arguments = parser.parse_args()
    case = CASES[arguments.case]
    with tempfile.TemporaryDirectory() as directory:
        sample = measure(
            case.small() if arguments.small else case,
            arguments.system,
            Path(directory),
            take_turns=_wait if arguments.turns else lambda: None,
        )
    _say(
        {
            name: [float(f"{each:.5g}") for each in value] if isinstance(value, list) else value
            for name, value in sample.items()
        }
    )


def _say(message: Any) -> None:
    print(f"\n{MARKER}{json.dumps(message)}", flush=True)


def _wait() -> None:
    _say(None)
    if not sys.stdin.readline():
        sys.exit("the parent process has ended")


if __name__ == "__main__":
    main()
