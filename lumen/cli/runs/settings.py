"""What a run was set to, and the numbers that it has come to, as its directory tells."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, final

import yaml

from lumen.checkpoint.listing import ShownRun
from lumen.cli.runs.find import local_of
from lumen.cli.yaml_text import load_yaml
from lumen.trainer.script_record import SCRIPT_FILE

_OF_EACH_RUN = {"trainer.name", "trainer.default_root_dir", "trainer.resume", "trainer.resume_parts"}
_TAIL_BYTES = 1 << 20


def settings_of(shown: ShownRun) -> dict[str, Any]:
    """The settings of a run by their names on the command line; empty if it has recorded none.

    Returns:
        Plain values: `model.lr`; a class by its name: `model`, `optimizer`.
    """
    local = local_of(shown)
    for path in [] if local is None else [local / "config.yaml", local / SCRIPT_FILE]:
        with suppress(OSError, yaml.YAMLError):
            found = load_yaml(path.read_text(encoding="utf-8"))
            return dict(_flat(found)) if isinstance(found, dict) else {}
    return {}


def _flat(node: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by their names, of a tree in which the arguments of a class are beside its name."""
    if isinstance(node, Mapping) and "class_path" in node:
        yield above, node["class_path"]
        node = node.get("init_args") or {}
    if isinstance(node, list) and any(isinstance(each, Mapping) for each in node):
        node = dict(enumerate(node))
    if not isinstance(node, Mapping):
        yield above, node
        return
    for key, value in node.items():
        name = f"{above}.{key}" if above else str(key)
        if name not in _OF_EACH_RUN:
            yield from _flat(value, name)


@final
class Reached(NamedTuple):
    """What a run has come to.

    Attributes:
        step: Optimizer steps; None: not known.
        epoch: Epochs completed, as far as is known; None: nothing is.
        metrics: The last value of each, by name.
    """

    step: int | None
    epoch: int | None
    metrics: dict[str, float]


def reached(shown: ShownRun) -> Reached:
    """What a run has come to: as its newest checkpoint and the end of its `metrics.csv` say."""
    info = shown.newest_info
    metrics = {str(name): value for name, value in dict(info.get("metrics") or {}).items() if _is_number(value)}
    found = Reached(info.get("step"), info.get("epoch"), metrics)
    local = local_of(shown)
    if local is None:
        return found
    try:
        last = _last_values(local / "metrics.csv")
    except (OSError, ValueError, csv.Error):  # it is being written, or is no such table
        return found
    step, epoch = int(last.pop("step", -1)), int(last.pop("epoch", -1))
    if step < max(0, found.step or 0):
        return found._replace(metrics={**last, **metrics})
    return Reached(step, max(epoch, found.epoch or 0), {**metrics, **last})


def _last_values(path: Path) -> dict[str, float]:
    """The last number in each column of a table, as far as its end is read."""
    with path.open("rb") as file:
        header = next(csv.reader([file.readline().decode()]), [])
        begins = max(file.tell(), file.seek(0, io.SEEK_END) - _TAIL_BYTES)
        file.seek(begins)
        lines = file.read().decode(errors="replace").splitlines()
    last: dict[str, float] = {}
    for row in csv.reader(line for line in lines if line.count(",") >= len(header) - 1):
        last |= {name: float(cell) for name, cell in zip(header, row, strict=False) if cell}
    return last


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
