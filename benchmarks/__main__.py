"""`python -m benchmarks`: measure and report."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.cases import CASES, PEERS, SYSTEMS, Case
from benchmarks.commands import run_commands
from benchmarks.plot import draw, sketch
from benchmarks.report import print_case, write_readme
from benchmarks.rounds import installed, run_round

HOME = Path(__file__).parent
_PACKAGES = {"ignite": "pytorch-ignite"}


def main() -> None:
    """Measure the requested cases, and write the report after each case."""
    arguments = parse()
    console = Console(width=None if sys.stdout.isatty() else 120)
    if arguments.list:
        for case in CASES.values():
            console.print(f"{case.name:18} {case.about}", highlight=False)
        return
    arguments.output.mkdir(parents=True, exist_ok=True)
    file = arguments.output / "results.json"
    results = json.loads(file.read_text()) if file.exists() else {"cases": {}}
    if arguments.report:
        for name in results["cases"]:
            print_case(name, results, console)
    else:
        for name in arguments.cases or CASES:
            case = CASES[name]
            if case.device == "cuda" and not torch.cuda.is_available():
                console.print(f"{name}: not proven here: no CUDA device")
                continue
            results["cases"][name] = measure(case, arguments.systems, arguments.rounds)
            print_case(name, results, console)
            file.write_text(json.dumps(results) + "\n")
    if find_spec("matplotlib"):
        draw(results, arguments.output / "overhead.png")
    sketch(results, arguments.output / "cost.svg")
    if arguments.readme and results["cases"]:
        write_readme(results, HOME / "README.md")


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="default: all; see --list")
    parser.add_argument(
        "--rounds", type=int, default=3, help="how often each system's process is started (%(default)s)"
    )
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, help="default: all; the loop by hand always runs")
    parser.add_argument("--output", type=Path, default=HOME / "results", help="a directory (%(default)s)")
    parser.add_argument("--readme", action="store_true", help="write the figures into benchmarks/README.md too")
    parser.add_argument(
        "--report", action="store_true", help="measure nothing, and report the results in the directory"
    )
    parser.add_argument("--list", action="store_true", help="list the cases")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.cases if name not in CASES]:
        parser.error(f"no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    return arguments


def measure(case: Case, wanted: list[str] | None, rounds: int) -> dict[str, Any]:
    """Measure one case, and return its part of `results.json`."""
    systems = [system for system in case.systems if system in (wanted or case.systems) or system == "hand"]
    skipped = {system: "not installed" for system in systems if not installed(system)}
    able = [system for system in systems if system not in skipped]
    measured = {
        "date": time.strftime("%F"),
        "definition": case.definition,
        "machine": machine(case.device),
        "peers": {
            peer: metadata.version(_PACKAGES.get(peer, peer))
            for peer in PEERS
            if any(system.startswith(peer) for system in able)
        },
    }
    if commit := library_commit():
        measured["commit"] = commit
    samples = []
    for number in range(min(rounds, case.rounds)):
        if case.kind in ("import", "help"):
            order = able[number % len(able) :] + able[: number % len(able)]
            samples.append(run_commands(case, order))
        else:
            samples.append(run_round(case, able, start=number))
    return measured | {
        "turns": case.turns if case.takes_turns else 1,
        "systems": systems,
        "skipped": skipped,
        "rounds": samples,
    }


def machine(device: str = "cpu") -> dict[str, Any]:
    """Return this machine's processor and the measured accelerator."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(": ", 1)[1] for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "accelerator": torch.cuda.get_device_name() if device == "cuda" else "",
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def library_commit() -> str | None:
    """Return the commit that is checked out, with `+` if files differ, or None without a checkout."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=HOME.parent, capture_output=True, text=True, check=True).stdout

    try:
        changed = git("status", "--porcelain", "--", "lumen", "benchmarks/*.py")
        return git("rev-parse", "--short", "HEAD").strip() + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


if __name__ == "__main__":
    main()
