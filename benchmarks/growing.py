"""Cases of `benchmarks.growth`: functions that run in a new process and an empty folder."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch

from benchmarks import growing_checkpoints as checkpoints, growing_records as records


@final
@dataclass(frozen=True)
class Growth:
    """Quantity that a run may have many of.

    Attributes:
        name: Name on the command line.
        about: Description of the measured value and the sizes.
        sizes: Sizes to measure, ascending.
        measure: Function that takes a size, and returns CPU seconds or bytes.
        by_hand: The same function for a plain program, or None.
        unit: Unit of the shown figures: `ms` or `MB`.
        rounds: Number of measurements, of which the smallest counts.
    """

    name: str
    about: str
    sizes: tuple[int, ...]
    measure: Callable[[int], float]
    by_hand: Callable[[int], float] | None = None
    unit: str = "ms"
    rounds: int = 2

    @property
    def factor(self) -> float:
        """Factor from a figure to its shown unit."""
        return {"ms": 1e3, "MB": 1e-6}[self.unit]


_TENSORS, _KEPT, _NAMES, _ROWS = (100, 1000, 10_000), (10, 100, 1000), (100, 1000, 3000), (10_000, 100_000, 1_000_000)
_CASES = [
    Growth("resume", "a resume to the first step, by parameters", _TENSORS, checkpoints.resume,
           checkpoints.resume_by_hand),
    Growth("save", "a save that training waits for, by parameters", _TENSORS, checkpoints.save_at_once,
           checkpoints.save_by_hand),
    Growth("save-beside", "what training waits for of a save beside it, by parameters", _TENSORS,
           checkpoints.save_beside, checkpoints.save_by_hand),
    Growth("kept", "a resume to the first step, by kept checkpoints of 300 parameters", _KEPT,
           checkpoints.resume_among),
    Growth("listing", "lumen runs, by kept checkpoints of 300 parameters", _KEPT, checkpoints.list_runs),
    Growth("chunks", "reading a manifest, by chunks of one tensor", (20, 200, 2000), checkpoints.open_chunks),
    Growth("names", "a step with its row in metrics.csv, by logged names", _NAMES, records.step_with_a_row,
           records.step_with_a_row_by_hand),
    Growth("new-names", "the first step of an epoch without a logger, by logged names", _NAMES,
           records.first_step_of_an_epoch),
    Growth("late-column", "a column that comes late, by rows of metrics.csv", _ROWS, records.late_column,
           records.late_column_by_hand),
    Growth("late-column-memory", "and Python's memory meanwhile", _ROWS[:2], records.memory_of_a_late_column,
           unit="MB"),
    Growth("cut-back-memory", "Python's memory while a resume cuts metrics.csv back, by its rows", _ROWS[:2],
           records.memory_of_cutting_back, unit="MB"),
    Growth("runs", "a fit of one step with a run directory, by runs of its name", _KEPT, records.fit_beside_runs),
    Growth("steps", "resident memory of a process, by steps of its run", (1000, 10_000, 100_000),
           records.memory_of_steps, unit="MB"),
]  # fmt: skip
CASES = {case.name: case for case in _CASES}


def main() -> None:
    """Measure one size of one case, and print the figure in the last line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growing", description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("size", type=int)
    parser.add_argument("--by-hand", action="store_true")
    arguments = parser.parse_args()
    case = CASES[arguments.case]
    torch.set_num_threads(1)
    measure = case.by_hand if arguments.by_hand else case.measure
    if measure is None:
        sys.exit(f"{case.name} has no program by hand")
    print(measure(arguments.size))


if __name__ == "__main__":
    main()
