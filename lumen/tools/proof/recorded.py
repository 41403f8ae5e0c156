"""What a run has recorded of itself in its directory, read without changing anything there."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, NamedTuple, final

from lumen.checkpoint.format.manifest import read_head
from lumen.checkpoint.format.storage import as_place, is_dir
from lumen.data.nested import flat
from lumen.errors import ConfigError
from lumen.tools.runs.listing import list_checkpoints

_OF_NO_WEIGHT = ("command", "working_directory", "host", "slurm")  # says where a run was made, not what with


class Recorded(NamedTuple):
    """A value that a run has logged.

    Attributes:
        step: Updates completed when it was logged.
        name: The column of `metrics.csv`.
        text: The value, as it is written there.
    """

    step: int
    name: str
    text: str


@final
@dataclass
class RecordedRun:
    """The directory of a run.

    Attributes:
        path: Where the run has written.
        metrics: The text of each logged value by step and name, in the order of `metrics.csv`.
        environment: Versions, machine and processes, from `environment.json`.
        checkpoints: Whole checkpoints by their step.
    """

    path: Path
    metrics: dict[tuple[int, str], str]
    environment: dict[str, Any]
    checkpoints: dict[int, PurePath]

    @staticmethod
    def read(path: Path, folders: list[str] | None = None) -> RecordedRun:
        """Read what there is.

        Args:
            path: Directory of the run.
            folders: Where its checkpoints are, beside its own folder for them.

        Raises:
            ConfigError: It is no directory of a run.
        """
        metrics, environment = path / "metrics.csv", path / "environment.json"
        if not (metrics.exists() or environment.exists() or (path / "config.yaml").exists()):
            raise ConfigError(
                f"{path} is no run: there is neither a config.yaml nor a metrics.csv. Name its directory."
            )
        places = [as_place(each) for each in [str(path / "checkpoints"), *(folders or [])]]
        found = [each for place in places if is_dir(place) for each in list_checkpoints(place)]
        return RecordedRun(
            path,
            metrics_of(metrics),
            json.loads(environment.read_text()) if os.access(environment, os.R_OK) else {},  # it is its owner's
            {int(each.info["step"]): each.path for each in found if not (each.problem or each.kind)},
        )

    def before(self, step: int) -> tuple[int, PurePath | None]:
        """The newest checkpoint before a step is made, and how many updates it has; 0 and None: there is none."""
        steps = [each for each in self.checkpoints if each < step]
        return (max(steps), self.checkpoints[max(steps)]) if steps else (0, None)


def metrics_of(path: Path) -> dict[tuple[int, str], str]:
    """The values of a `metrics.csv` by step and name, as they are written; empty if there is no such file."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {
            (int(row["step"]), name): text
            for row in csv.DictReader(file)
            for name, text in row.items()
            if name not in ("step", "epoch") and text
        }


def first_metric(a: RecordedRun, b: RecordedRun) -> tuple[Recorded, Recorded] | None:
    """The first values that both runs have logged of one step and name, and that differ; None: there are none."""
    return parting(a.metrics, b.metrics)


def parting(a: Mapping[tuple[int, str], str], b: Mapping[tuple[int, str], str]) -> tuple[Recorded, Recorded] | None:
    """The first values of one step and name that differ in two records; None: there are none."""
    for step, name in sorted(a.keys() & b.keys(), key=lambda key: key[0]):
        mine, other = a[step, name], b[step, name]
        if mine != other:
            return Recorded(step, name, mine), Recorded(step, name, other)
    return None


def common_checkpoints(a: RecordedRun, b: RecordedRun) -> tuple[int, int | None]:
    """Steps of the last checkpoints in a row with equal parameters and optimizer state, and of the first that differ.

    Returns:
        The one, 0 if there is none; and the other, or None. Checkpoints are told apart by the bytes of their files, so
        those that other numbers of processes have written count as different.
    """
    equal = 0
    for step in sorted(a.checkpoints.keys() & b.checkpoints.keys()):
        if _files(a.checkpoints[step]) != _files(b.checkpoints[step]):
            return equal, step
        equal = step
    return equal, None


def _files(checkpoint: PurePath) -> dict[str, str]:
    files = read_head(checkpoint).files
    return {name: sha for name, (_, sha) in files.items() if name.startswith(("model/", "optimizer/"))}


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What two mappings hold under one name that is not equal; None where one has no such name."""
    return {key: (a.get(key), b.get(key)) for key in {**a, **b} if a.get(key) != b.get(key)}


def environments(a: RecordedRun, b: RecordedRun) -> dict[str, tuple[Any, Any]]:
    """What the machines, versions and processes of two runs differ in."""
    mine, other = (
        {k: v for k, v in flat(each.environment) if k.partition(".")[0] not in _OF_NO_WEIGHT} for each in (a, b)
    )
    return differing(mine, other) if mine and other else {}
