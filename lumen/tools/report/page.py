"""Page of a report. The content security policy lists the digests of its scripts, so that no other script runs."""

from __future__ import annotations

import base64
import hashlib
import math
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from bokeh.resources import Resources
from jinja2 import Environment, FunctionLoader, StrictUndefined

from lumen.errors import RunDirectoryError
from lumen.internals.masking import masked_words
from lumen.internals.whole_files import replaced
from lumen.tools.report.curves import Curves
from lumen.tools.report.record import Record, Series, differences, names_of, settings_in
from lumen.version import __version__

if TYPE_CHECKING:
    from lumen.tools.runs.find import ShownRun

MOST_BYTES = 3_000_000  # A mail can carry this size; bokeh's own code takes 1.3 MB.
_NUMBERS, _LOG_BYTES, _ROWS = 28_000, 120_000, 400


def write_report(runs: Sequence[ShownRun], output: Path) -> None:
    """Write a report of runs as one HTML file of less than 3 MB. The file appears complete or not at all.

    Args:
        runs: The runs, at least one, with local directories. Parts that a run lacks are left out.
        output: Path of the file. An existing file is replaced.

    Raises:
        RunDirectoryError: The file cannot be written.
    """
    text = render(runs)
    try:
        with replaced(output) as beside:
            beside.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise RunDirectoryError(
            f"{output} cannot be written: {error.strerror or error}. Choose another file with --output."
        ) from error


def render(runs: Sequence[ShownRun]) -> str:
    """Return the report as HTML. Logs, curves and tables are shortened until the page is small enough."""
    names = names_of([Path(run.path) for run in runs])
    for halvings in range(12):
        part = 0.5**halvings
        log_bytes = int(_LOG_BYTES * part / len(runs))
        records = [Record(run, name, log_bytes) for run, name in zip(runs, names, strict=True)]
        text = _page(records, Curves(records, int(_NUMBERS * part)), int(_ROWS * part) + 1)
        if len(text.encode(errors="replace")) < MOST_BYTES:
            break
    return text


def _page(records: Sequence[Record], curves: Curves, most_rows: int) -> str:
    environment = Environment(
        loader=FunctionLoader(_file), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"number": _number, "duration": _duration, "when": _when, "share": _share}
    drawing = Resources(mode="inline", components=["bokeh"], minified=True, log_level="fatal").js_raw
    scripts = [*drawing, curves.script, _file("page.js")] if curves.script else []
    values, made_of = _values(records), {each.name: map(settings_in, each.configs.values()) for each in records}
    return environment.get_template("page.html").render(
        version=__version__,
        made=datetime.now().astimezone(),
        records=records,
        curves=curves,
        style=_file("page.css"),
        scripts=scripts,
        policy=" ".join(map(_digest, scripts)) or "'none'",
        values=dict(islice(values.items(), most_rows)),
        values_left_out=max(0, len(values) - most_rows),
        differences=dict(islice(differences([record.settings for record in records]).items(), most_rows)),
        changes={name: dict(islice(differences([*each]).items(), most_rows)) for name, each in made_of.items()},
        environments=_environments(records),
    )


def _file(name: str) -> str:
    return (files("lumen.tools.report") / name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _values(records: Sequence[Record]) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """Return, by metric, the name of each run that logged it and its last, lowest and highest values."""
    found: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for record in records:
        for name, series in record.metrics.series.items():
            found.setdefault(name, []).append((record.name, _extremes(series)))
    return found


def _extremes(series: Series) -> dict[str, Any]:
    found = {"last": series.values[-1], "count": len(series.values), "odd": int((~series.finite).sum())}
    if series.finite.any():
        low, high = np.nanargmin(series.drawn), np.nanargmax(series.drawn)
        found |= {"low": series.values[low], "low_step": series.steps[low]}
        found |= {"high": series.values[high], "high_step": series.steps[high]}
    return found


def _environments(records: Sequence[Record]) -> dict[str, list[str]]:
    """Return the environments of the runs: by entry, the value in each run, or a dash."""
    told = [_entries(record.environment) for record in records]
    return {name: [each.get(name, "–") for each in told] for one in told for name in one}


def _entries(environment: Mapping[str, Any]) -> dict[str, str]:
    told = {str(name).replace("_", " "): value for name, value in islice(environment.items(), 40)}
    if isinstance(command := told.get("command"), list):
        told["command"] = shlex.join(masked_words(list(map(str, command))))
    return {name: _in_words(value) for name, value in told.items()}


def _in_words(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))[:1000] or "none"
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items())[:1000]
    return "none" if value is None else str(value)[:1000]


# ---------------------------------------------------------------------- how values are written


def _number(value: float, digits: int = 6) -> str:
    return f"{int(value):,}" if abs(value) < 1e15 and value == int(value) else f"{value:.{digits}g}"


def _share(value: float) -> str:
    return f"{value:.1%}".replace("%", " %")


def _duration(seconds: float) -> str:
    """Return a duration in words: `2 h 5 min`."""
    if not math.isfinite(seconds) or seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def _when(seconds: float | None) -> str:
    """Return a Unix time in seconds as local date and time."""
    return "" if seconds is None else f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M}"
