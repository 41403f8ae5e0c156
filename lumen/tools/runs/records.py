"""Records of runs as plain data, which `lumen runs --json` prints and `lumen.runs` returns."""

from __future__ import annotations

import csv
import io
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, final

import yaml

from lumen.cli.yaml_text import load_yaml
from lumen.errors import ConfigError
from lumen.errors.arguments import suggest_names
from lumen.run.goodput import TimeSpent, goodput
from lumen.tools.runs.find import ListedCheckpoint, ShownRun, find_shown_runs
from lumen.tools.terminal import as_json_data
from lumen.trainer.script_record import SCRIPT_FILE

Record = dict[str, Any]
_COMPARISON = re.compile(r"^\s*(?P<name>.+?)\s*(?P<sign><=|>=|==|!=|=|<|>)\s*(?P<value>.*?)\s*$")
_ORDERS: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
_RUN_FIELDS, _TIME_FIELDS = ("name", "status", "step", "epoch"), ("wall_s", "lives", "spent_s")
ABSENT = object()


@final
class Condition(NamedTuple):
    """Comparison of a setting or metric with a value.

    Attributes:
        name: Full name of the setting or metric.
        sign: Comparison operator: `<`, `<=`, `>`, `>=`, `==` or `!=`.
        value: Plain data to compare with.
    """

    name: str
    sign: str
    value: Any

    def is_met_by(self, record: Record) -> bool:
        """Return True if a run meets the condition. A run without the setting or metric does not."""
        found = get_value(record, self.name)
        if found is ABSENT:
            return False
        if self.sign in ("==", "!="):
            is_named = is_class_path(found) and f".{found}".endswith(f".{self.value}")
            return (is_named or bool(as_comparable(found) == as_comparable(self.value))) == (self.sign == "==")
        return _is_number(found) and bool(_ORDERS[self.sign](found, self.value))


def select_records(records: Sequence[Record], where: Iterable[str] = (), sort: str | None = None) -> list[Record]:
    """Return the runs that meet all conditions, sorted.

    Args:
        records: Runs, as returned by `lumen.runs`.
        where: Conditions, such as `lr < 1e-3`, `optimizer == torch.optim.SGD` and `status = finished`.
        sort: The setting or metric to sort by, smallest first, or largest first with a `-` before the name. Runs with
            NaN or no value are last. Default: the order of `records`.

    Raises:
        ConfigError: A condition cannot be read, or its name is unknown or ambiguous.
    """
    conditions = [read_condition(text, records) for text in where]
    chosen = [record for record in records if all(each.is_met_by(record) for each in conditions)]
    if sort is None:
        return chosen
    descending = sort.startswith("-")
    name = find_full_name(sort.removeprefix("-"), records)
    return sorted(chosen, key=lambda record: _get_sort_key(get_value(record, name), descending=descending))


def read_condition(text: str, records: Sequence[Record]) -> Condition:
    """Parse a condition, whose name may be the last part of a full name.

    Raises:
        ConfigError: The text is not a condition, or its name is unknown or ambiguous.
    """
    found = _COMPARISON.match(text)
    if found is None:
        raise ConfigError(f"{text!r} is not a condition. Write NAME < VALUE, with one of < <= > >= == and !=.")
    value: Any = found["value"]
    with suppress(yaml.YAMLError):
        value = as_json_data(load_yaml(value))
    sign = "==" if found["sign"] == "=" else found["sign"]
    if sign in _ORDERS and not _is_number(value):
        raise ConfigError(f"{text!r}: only numbers can be ordered, found {found['value']!r}. Use == or !=.")
    return Condition(find_full_name(found["name"], records), sign, value)


def find_full_name(name: str, records: Sequence[Record]) -> str:
    """Return the full name of a setting, metric or field: `lr` is `model.lr` if no other name ends in `.lr`.

    Raises:
        ConfigError: The name is unknown or ambiguous.
    """
    names = {str(key): None for record in records for key in (*_RUN_FIELDS, *record["metrics"], *record["settings"])}
    if name in names or not records:
        return name
    close = [each for each in names if each.endswith(f".{name}")]
    if len(close) > 1:
        raise ConfigError(f"several settings are called {name}: {', '.join(close)}. Write the full name.")
    if not close:
        short = [key.rpartition(".")[2] for key in names]
        raise ConfigError(f"no run has a setting or a metric {name}.{suggest_names(name, [*names, *short])}")
    return close[0]


def get_value(record: Record, name: str) -> Any:
    """Return a field, metric or setting of a run by its full name, or `ABSENT` if the run has none."""
    if name in _RUN_FIELDS:
        return ABSENT if record[name] is None else record[name]
    return record["metrics"].get(name, record["settings"].get(name, ABSENT))


def list_differing(records: Sequence[Record]) -> list[str]:
    """Return the settings with different values in the runs: `model` first, those of the trainer last.

    Settings that some runs lack, and settings that only choose what a run prints or records, do not count.
    """
    values: dict[str, set[Any]] = {}
    for record in records:
        for name, value in record["settings"].items():
            values.setdefault(name, set()).add(as_comparable(value))
    found = [name for name, kept in values.items() if len(kept) > 1 and not _RECORDING_SETTINGS.match(name)]
    return sorted(found, key=lambda name: (name != "model", name.startswith(("trainer.", "seed_everything"))))


def shorten_names(names: Sequence[str]) -> list[str]:
    """Return the shortest unique ending of each name. An ending does not begin with the number of a list's item."""
    endings = {name: [name.split(".", count)[-1] for count in reversed(range(name.count(".") + 1))] for name in names}
    counts = Counter(end for each in endings.values() for end in each)
    return [next((end for end in endings[name] if counts[end] == 1 and not end[0].isdigit()), name) for name in names]


def _get_sort_key(value: Any, *, descending: bool) -> tuple[Any, ...]:
    """Return a sort key that puts numbers before text and missing values last."""
    value = math.nan if value is ABSENT or value is None else value
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):  # Records hold these as text, for JSON.
        value = float(value)
    if not _is_number(value):
        return (1, str(value))
    return (2, "") if math.isnan(value) else (0, -value if descending else value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_class_path(value: Any) -> bool:
    """Return True if a value looks like the full name of a class: `models.gpt.GPT`."""
    return isinstance(value, str) and re.fullmatch(r"(?:[^\W\d]\w*\.)+[A-Z]\w*", value) is not None


def as_comparable(value: Any) -> Any:
    """Return a hashable key for a value, in which True differs from 1."""
    return value if _is_number(value) else (type(value), repr(value))


_IGNORED_SETTINGS = {"trainer.name", "trainer.default_root_dir", "trainer.resume", "trainer.resume_parts"}
_RECORDING_SETTINGS = re.compile(
    r"trainer\.(enable_progress_bar|enable_model_summary|log_level|log_format|log_every_n_steps|logger|profiler)\b"
)
_TAIL_BYTES = 1 << 20


def read_settings(shown: ShownRun) -> dict[str, Any]:
    """Return the settings of a run by their names on the command line; empty if the run recorded none.

    Returns:
        Plain values, such as `model.lr`. A class, such as `model` or `optimizer`, is given by its name, and an item of
        a list by its class: `trainer.callbacks` is a list of names, and `trainer.callbacks.EMA.decay` a setting.
    """
    local = shown.local_path
    for path in [] if local is None else [local / "config.yaml", local / SCRIPT_FILE]:
        with suppress(OSError, yaml.YAMLError):
            found = load_yaml(path.read_text(encoding="utf-8"))
            return dict(_flatten_settings(found)) if isinstance(found, dict) else {}
    return {}


def _flatten_settings(node: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings of a config by name. The arguments of a class are in `init_args` next to `class_path`."""
    if isinstance(node, Mapping) and "class_path" in node:
        yield above, node["class_path"]
        node = node.get("init_args") or {}
    if isinstance(node, list) and any(isinstance(each, Mapping) for each in node):
        node = _name_items(node)
        if not any(name.isdigit() for name in node):
            yield above, [*node]
    if not isinstance(node, Mapping):
        yield above, node
        return
    for key, value in node.items():
        name = f"{above}.{key}" if above else str(key)
        if name not in _IGNORED_SETTINGS:
            yield from _flatten_settings(value, name)


def _name_items(items: Sequence[Any]) -> dict[str, Any]:
    """Return the items of a list by the names of their classes, or by their numbers: `EMA`, `EMA-2`, `2`."""
    named: dict[str, Any] = {}
    for number, item in enumerate(items):
        path = item.get("class_path") if isinstance(item, Mapping) else item
        name = str(path).rpartition(".")[2] if is_class_path(path) else str(number)
        named[f"{name}-{number + 1}" if name in named else name] = item
    return named


def read_progress(shown: ShownRun) -> dict[str, Any]:
    """Return the `step`, the `epoch` and the last `metrics` by the newest checkpoint and the end of `metrics.csv`."""
    info, local = shown.newest_info, shown.local_path
    metrics = {str(name): value for name, value in dict(info.get("metrics") or {}).items() if _is_number(value)}
    last: dict[str, float] = {}
    with suppress(OSError, ValueError, csv.Error):  # The file is being written, or is not such a table.
        last = {} if local is None else _read_last_values(local / "metrics.csv")
    step, epoch = int(last.pop("step", -1)), int(last.pop("epoch", -1))
    if step < max(0, info.get("step") or 0):
        return {"step": info.get("step"), "epoch": info.get("epoch"), "metrics": as_json_data({**last, **metrics})}
    return {"step": step, "epoch": max(epoch, info.get("epoch") or 0), "metrics": as_json_data({**metrics, **last})}


def _read_last_values(path: Path) -> dict[str, float]:
    """Return the last number in each column of a CSV file, within its last `_TAIL_BYTES`."""
    with path.open("rb") as file:
        header = next(csv.reader([file.readline().decode()]), [])
        start = max(file.tell(), file.seek(0, io.SEEK_END) - _TAIL_BYTES)
        file.seek(start)
        lines = file.read().decode(errors="replace").splitlines()
    last: dict[str, float] = {}
    for row in csv.reader(line for line in lines if line.count(",") >= len(header) - 1):
        last |= {name: float(cell) for name, cell in zip(header, row, strict=False) if cell}
    return last


def runs(
    directory: str | Path = "runs", where: str | Iterable[str] = (), sort: str | None = None, *, verify: bool = False
) -> list[dict[str, Any]]:
    """Return runs as plain data: settings, status, metrics and checkpoints of each run.

    Reading changes no file and disturbs no job. `pandas.json_normalize(lumen.runs())` makes a data frame.

    Args:
        directory: Directory or URL of the runs, or of one run.
        where: Conditions that a run must meet, such as `"lr < 1e-3"` or `["status = finished", "val_loss < 2"]`.
        sort: The setting or metric to sort by, smallest first. `"-val_acc"` sorts by `val_acc`, largest first.
        verify: True to read every byte of the checkpoints, otherwise only manifests and file sizes.

    Returns:
        A dictionary for each run: `path`, `name`, `status` (running, finished, stopped, failed or unknown), `error`,
        `step`, `epoch` (completed epochs, if known); `settings` by their names on the command line, as `model.lr`,
        with classes by name; `metrics`, the last value of each; `monitor`, the metric that compares its checkpoints;
        `checkpoints`, each with `path`, `step`, `epoch`, `metrics`, `best`, `valid` and more; `host`, `pid` and
        `started` of the job that holds the run; `goodput`.

    Raises:
        ConfigError: The directory does not exist, or no run has the name in a condition or in `sort`.
    """
    records = [make_record(each) for each in find_shown_runs(directory, verify=verify)]
    return select_records(records, [where] if isinstance(where, str) else where, sort)


def make_record(shown: ShownRun) -> dict[str, Any]:
    """Return a run as plain data."""
    holder = shown.holder or {}
    checkpoints = [
        {
            "name": each.path.name,
            "path": str(each.path),
            "step": each.info.get("step"),
            "epoch": each.info.get("epoch"),
            "saved": format_time(each, "seconds"),
            "bytes": each.size_bytes,
            "metrics": as_json_data(shown.get_metrics(each)),
            "monitor": each.info.get("monitor"),
            "best": shown.is_best(each),
            "valid": each.problem is None,
            "problem": each.problem,
        }
        for each in shown.committed
    ]
    spent = read_time_spent(shown)
    return {
        "path": str(shown.path),
        "name": shown.path.name,
        "status": shown.status,
        **read_progress(shown),
        "settings": as_json_data(read_settings(shown)),
        **{key: holder.get(key) for key in ("host", "pid", "started")},
        "error": shown.error,
        "monitor": shown.newest_info.get("monitor"),
        "goodput": spent and {"share": spent.goodput, **{key: getattr(spent, key) for key in _TIME_FIELDS}},
        "problem": shown.problem,
        "checkpoints": checkpoints,
        "temporary": [each.path.name for each in shown.checkpoints if each.kind == "tmp"],
    }


def read_time_spent(shown: ShownRun) -> TimeSpent | None:
    """Return the time of a run by activity, or None if unknown."""
    local = shown.local_path
    with suppress(OSError):
        return None if local is None else goodput(local)
    return None


def format_time(checkpoint: ListedCheckpoint, precision: str) -> str:
    """Return the local time when a checkpoint was completed, or "" if unknown."""
    if checkpoint.committed_s is None:
        return ""
    return datetime.fromtimestamp(checkpoint.committed_s).astimezone().isoformat(timespec=precision)
