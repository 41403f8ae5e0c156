"""Which runs are asked for, and in which order: `lr < 1e-3`, by their settings and their last metrics."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, final

import yaml

from lumen.cli.yaml_text import load_yaml
from lumen.errors import ConfigError
from lumen.errors.arguments import did_you_mean

Record = dict[str, Any]
_COMPARISON = re.compile(r"^\s*(?P<name>.+?)\s*(?P<sign><=|>=|==|!=|=|<|>)\s*(?P<value>.*?)\s*$")
_ORDERS: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
_OF_RUN = ("name", "status", "step", "epoch")
ABSENT = object()


@final
class Condition(NamedTuple):
    """A comparison that a run may meet.

    Attributes:
        name: Full name of the setting or metric.
        sign: One of `<`, `<=`, `>`, `>=`, `==` and `!=`.
        value: Plain data that it is compared with.
    """

    name: str
    sign: str
    value: Any

    def holds(self, record: Record) -> bool:
        """Whether a run meets it. One that has no such setting or metric does not."""
        found = value_of(record, self.name)
        if found is ABSENT:
            return False
        if self.sign in ("==", "!="):
            return bool(_comparable(found) == _comparable(self.value)) == (self.sign == "==")
        return _is_number(found) and bool(_ORDERS[self.sign](found, self.value))


def choose(records: Sequence[Record], where: Iterable[str] = (), sort: str | None = None) -> list[Record]:
    """The runs that meet all conditions, in an order.

    Args:
        records: Runs, as `lumen.runs` has them.
        where: Conditions, such as `lr < 1e-3`, `optimizer == torch.optim.SGD` and `status = finished`.
        sort: The setting or metric by which they are sorted, the smallest first; with a `-` before it the largest.
            Runs without it, or where it is NaN, are the last. Default: as they are.

    Raises:
        ConfigError: A condition cannot be read, or no run, or several things of one, have its name.
    """
    conditions = [read_condition(text, records) for text in where]
    chosen = [record for record in records if all(each.holds(record) for each in conditions)]
    if sort is None:
        return chosen
    down = sort.startswith("-")
    name = full_name(sort.removeprefix("-"), records)
    return sorted(chosen, key=lambda record: _rank(value_of(record, name), down=down))


def read_condition(text: str, records: Sequence[Record]) -> Condition:
    """A condition as it is written; its name may be the last part of a full one.

    Raises:
        ConfigError: It is none, or no run, or several things of one, have its name.
    """
    found = _COMPARISON.match(text)
    if found is None:
        raise ConfigError(f"{text!r} is no condition. Write NAME < VALUE, with one of < <= > >= == and !=.")
    try:
        value = load_yaml(found["value"])
    except yaml.YAMLError:
        value = found["value"]
    sign = "==" if found["sign"] == "=" else found["sign"]
    if sign in _ORDERS and not _is_number(value):
        raise ConfigError(f"{text!r}: only numbers are in an order, found {found['value']!r}. Use == or !=.")
    return Condition(full_name(found["name"], records), sign, value)


def full_name(name: str, records: Sequence[Record]) -> str:
    """The setting, the metric or the fact of a run that a name means: `lr` is `model.lr` if nothing else ends so.

    Raises:
        ConfigError: There is none, or there are several.
    """
    names = {key: None for record in records for key in names_of(record)}
    if name in names or not records:
        return name
    close = [each for each in names if each.endswith(f".{name}")]
    if len(close) > 1:
        raise ConfigError(f"several settings are called {name}: {', '.join(close)}. Write the name of one in full.")
    if not close:
        short = [key.rpartition(".")[2] for key in names]
        raise ConfigError(f"no run has a setting or a metric {name}.{did_you_mean(name, [*names, *short])}")
    return close[0]


def names_of(record: Record) -> list[str]:
    """The full names of all that runs are chosen by."""
    return [*_OF_RUN, *record["metrics"], *record["settings"]]


def value_of(record: Record, name: str) -> Any:
    """A fact of a run, a metric or a setting, by its full name; `ABSENT` if it has none."""
    if name in _OF_RUN:
        return record[name]
    return record["metrics"].get(name, record["settings"].get(name, ABSENT))


def differing(records: Sequence[Record]) -> list[str]:
    """The settings for which runs have different values; one that only some have is none for that."""
    values: dict[str, list[Any]] = {}
    for record in records:
        for name, value in record["settings"].items():
            kept = values.setdefault(name, [value])
            if all(_comparable(value) != _comparable(each) for each in kept):
                kept.append(value)
    return [name for name, kept in values.items() if len(kept) > 1]


def short_names(names: Sequence[str]) -> list[str]:
    """For each name the least of its last parts that tells it from the others."""
    return [next(filter(lambda end: _ends(names, end) == 1, _endings(name)), name) for name in names]


def _ends(names: Sequence[str], end: str) -> int:
    return sum(f".{name}".endswith(f".{end}") for name in names)


def _endings(name: str) -> Iterable[str]:
    parts = name.split(".")
    return (".".join(parts[first:]) for first in reversed(range(len(parts))))


def _rank(value: Any, *, down: bool) -> tuple[Any, ...]:
    """What sorts numbers before text, and what is not there behind all."""
    value = math.nan if value is ABSENT or value is None else value
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):  # as records have them, for JSON
        value = float(value)
    if not _is_number(value):
        return (1, str(value))
    return (2, "") if math.isnan(value) else (0, -value if down else value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _comparable(value: Any) -> Any:
    """Plain data in which true is not 1, and which can be told apart from any other."""
    return value if _is_number(value) else (type(value), repr(value))
