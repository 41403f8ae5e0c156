"""`python -m benchmarks.growth`: growth of costs with the size of a run, as exponents."""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.growing import CASES, Growth

HOME = Path(__file__).parent
BEGIN, END = "<!-- growth: written by `python -m benchmarks.growth` -->", "<!-- end of growth -->"
BY_HAND = "by hand"


def main() -> None:
    """Measure and print the requested cases, and write the README if requested."""
    arguments = parse()
    console = Console(width=None if sys.stdout.isatty() else 120)
    with tempfile.TemporaryDirectory() as folder:
        libraries = {"Lumen": HOME.parent}
        for commit in arguments.beside:
            libraries[f"Lumen {commit}"] = unpack(commit, Path(folder, commit))
        found = {}
        for name in arguments.cases or CASES:
            found[name] = measure(CASES[name], libraries, arguments.most)
            console.print(table(CASES[name], found[name]))
    if arguments.readme:
        write_readme(found, HOME / "README.md")


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"default: all of {', '.join(CASES)}")
    parser.add_argument(
        "--beside", nargs="+", default=[], metavar="COMMIT", help="also measure these commits of Lumen, in the same run"
    )
    parser.add_argument("--most", type=int, help="leave out larger sizes")
    parser.add_argument("--readme", action="store_true", help="write the figures into benchmarks/README.md too")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.cases if name not in CASES]:
        parser.error(f"no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    return arguments


def unpack(commit: str, folder: Path) -> Path:
    """Extract the library of a commit into a folder, and return the folder."""
    packed = subprocess.run(["git", "archive", commit, "lumen"], cwd=HOME.parent, capture_output=True, check=True)
    with tarfile.open(fileobj=BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def measure(case: Growth, libraries: Mapping[str, Path], most: int | None = None) -> dict[str, dict[int, float]]:
    """Return the smallest figure of several rounds, by system and size. Each figure has a new process and folder.

    Args:
        case: The case to measure.
        libraries: Folder of the package `lumen` of each system.
        most: Largest size to measure, or None for all.
    """
    systems = {**({BY_HAND: HOME.parent} if case.by_hand else {}), **libraries}
    sizes = [size for size in case.sizes if most is None or size <= most]
    found: dict[str, dict[int, float]] = {system: {} for system in systems}
    for size in sizes:
        for _ in range(case.rounds):
            for system, library in systems.items():
                value = measure_once(case, size, library, by_hand=system == BY_HAND)
                found[system][size] = min(value, found[system].get(size, math.inf))
    return found


def measure_once(case: Growth, size: int, library: Path, *, by_hand: bool) -> float:
    """Return one figure, from a new process that imports `lumen` from a folder and the benchmarks from here."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(library), str(HOME.parent)]), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }  # fmt: skip
    words = ["-m", "benchmarks.growing", case.name, str(size), *(["--by-hand"] if by_hand else [])]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
    if done.returncode:
        sys.exit(f"{case.name} of {size} failed:\n{done.stderr}")
    return float(done.stdout.splitlines()[-1])


def exponent(values: Mapping[int, float]) -> float:
    """Return the exponent of the growth between the last two sizes; 1 is linear."""
    (size, value), (larger, grown) = sorted(values.items())[-2:]
    return math.log(grown / value) / math.log(larger / size)


def rows(case: Growth, found: Mapping[str, Mapping[int, float]]) -> Iterator[list[str]]:
    """Yield name, figures and exponent of each system."""
    for system, values in found.items():
        power = f"{exponent(values):.2f}" if len(values) > 1 else ""
        yield [system, *(f"{value * case.factor:,.1f}" for value in values.values()), power]


def table(case: Growth, found: Mapping[str, Mapping[int, float]]) -> Table:
    """Return a table for the terminal."""
    shown = Table(title=f"{case.name}: {case.about} ({case.unit})", title_justify="left", title_style="bold")
    shown.add_column("system", no_wrap=True)
    for size in next(iter(found.values())):
        shown.add_column(f"{size:,}", justify="right")
    shown.add_column("exponent", justify="right")
    for row in rows(case, found):
        shown.add_row(*row)
    return shown


def markdown(found: Mapping[str, Mapping[str, Mapping[int, float]]]) -> str:
    """Return all cases as one table in Markdown."""
    lines = ["| case | system | figures at its sizes | exponent |", "|---|---|---|--:|"]
    for name, systems in found.items():
        case = CASES[name]
        for number, (system, *values, power) in enumerate(rows(case, systems)):
            sizes = " / ".join(f"{size:,}" for size in systems[system])
            heading = f"**{name}**: {case.about}, {sizes}" if number == 0 else ""
            lines.append(f"| {heading} | {system} | {' / '.join(values)} {case.unit} | {power} |")
    return "\n".join(lines)


def write_readme(found: Mapping[str, Mapping[str, Mapping[int, float]]], path: Path) -> None:
    """Write the figures between the markers of a README."""
    before, rest = path.read_text().split(BEGIN)
    _, after = rest.split(END)
    path.write_text(f"{before}{BEGIN}\n\n{markdown(found)}\n\n{END}{after}")


if __name__ == "__main__":
    main()
