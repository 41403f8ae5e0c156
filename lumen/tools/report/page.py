"""Page of a report. The content security policy lists the digests of its scripts, so that no other script runs."""

from __future__ import annotations

import base64
import hashlib
import math
import re
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
from lumen.internals.atomic_files import replace_file
from lumen.internals.masking import mask_words
from lumen.tools.report.curves import DASHES, Curves
from lumen.tools.report.record import (
    RunContents,
    Series,
    find_differences,
    make_names,
    parse_settings,
    shorten_names,
)
from lumen.version import __version__

if TYPE_CHECKING:
    from lumen.tools.runs.find import ShownRun

MAX_BYTES = 3_000_000  # small enough for a mail; bokeh's own code takes 1.3 MB
_MAX_POINTS, _LOG_BYTES, _ROWS = 28_000, 120_000, 400


def write_report(runs: Sequence[ShownRun], output: Path) -> None:
    """Write a report of runs as one HTML file of less than 3 MB. The file appears complete or not at all.

    Args:
        runs: The runs, at least one, with local directories. Parts that a run lacks are left out.
        output: Path of the file. An existing file is replaced.

    Raises:
        RunDirectoryError: The file cannot be written.
    """
    text = render_report(runs)
    try:
        with replace_file(output) as temporary:
            temporary.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise RunDirectoryError(
            f"{output} cannot be written: {error.strerror or error}. Choose another file with --output."
        ) from error


def render_report(runs: Sequence[ShownRun]) -> str:
    """Return the report as HTML. Logs, curves and tables are shortened until the page is small enough."""
    names = make_names([Path(run.path) for run in runs])
    labels = shorten_names(names)
    for halvings in range(12):
        part = 0.5**halvings
        log_bytes = int(_LOG_BYTES * part / len(runs))
        records = [RunContents(*each, log_bytes) for each in zip(runs, names, labels, strict=True)]
        text = _render_page(records, Curves(records, int(_MAX_POINTS * part)), int(_ROWS * part) + 1)
        if len(text.encode(errors="replace")) < MAX_BYTES:
            break
    return text


def _render_page(records: Sequence[RunContents], curves: Curves, max_rows: int) -> str:
    environment = Environment(
        loader=FunctionLoader(_read_asset),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": _format_number,
        "duration": _format_duration,
        "when": _format_time,
        "share": _format_share,
    }
    drawing = Resources(mode="inline", components=["bokeh"], minified=True, log_level="fatal").js_raw
    scripts = [*drawing, curves.script, _read_asset("page.js")] if curves.script else []
    values, configs = (
        _collect_values(records, curves.names),
        {each.name: map(parse_settings, each.configs.values()) for each in records},
    )
    return environment.get_template("page.html").render(
        version=__version__,
        made=datetime.now().astimezone(),
        records=records,
        curves=curves,
        dashes=DASHES,
        style=_read_asset("page.css"),
        scripts=scripts,
        policy=" ".join(map(_digest_script, scripts)) or "'none'",
        values=dict(islice(values.items(), max_rows)),
        values_left_out=max(0, len(values) - max_rows),
        differences=dict(islice(find_differences([record.settings for record in records]).items(), max_rows)),
        changes={name: dict(islice(find_differences([*each]).items(), max_rows)) for name, each in configs.items()},
        environments=_compare_environments(records),
    )


def _read_asset(name: str) -> str:
    return (files("lumen.tools.report") / name).read_text(encoding="utf-8")


def _digest_script(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _collect_values(
    records: Sequence[RunContents], names: Sequence[str]
) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """Return, by metric, the label of each run that logged it and its last, lowest and highest values."""
    return {
        name: [
            (record.label, _find_extremes(record.metrics.series[name]))
            for record in records
            if name in record.metrics.series
        ]
        for name in names
    }


def _find_extremes(series: Series) -> dict[str, Any]:
    found = {"last": series.values[-1], "count": len(series.values), "odd": int((~series.finite).sum())}
    if series.finite.any():
        low, high = np.nanargmin(series.finite_values), np.nanargmax(series.finite_values)
        found |= {"low": series.values[low], "low_step": series.steps[low]}
        found |= {"high": series.values[high], "high_step": series.steps[high]}
    return found


def _compare_environments(records: Sequence[RunContents]) -> dict[str, list[str]]:
    """Return the environments of the runs: by entry, the value in each run, or a dash; one value if all are equal."""
    rows = [_flatten_environment(record.environment) for record in records]
    found = {name: [each.get(name, "–") for each in rows] for row in rows for name in row}
    return {name: values if len(set(values)) > 1 else values[:1] for name, values in found.items()}


def _flatten_environment(environment: Mapping[str, Any]) -> dict[str, str]:
    entries = {str(name).replace("_", " "): value for name, value in islice(environment.items(), 40)}
    if isinstance(command := entries.get("command"), list):
        entries["command"] = shlex.join(mask_words(list(map(str, command))))
    return {name: _format_text(value) for name, value in entries.items()}


def _format_text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))[:1000] or "none"
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items())[:1000]
    return "none" if value is None else str(value)[:1000]


# ---------------------------------------------------------------------- how values are written


def _format_number(value: float, digits: int = 6) -> str:
    """Return a number as the script of the page writes it: `1,200.5`, `0.00125`, `9.5e-5`."""
    rounded = float(value) if float(value).is_integer() else float(f"{value:.{digits}g}")
    if abs(rounded) < 1e15 and rounded.is_integer():
        return f"{int(rounded):,}"
    return re.sub(r"e\+?(-?)0?", r"e\1", f"{rounded:,.{digits}g}")


def _format_share(value: float) -> str:
    return f"{value:.1%}".replace("%", " %")


def _format_duration(seconds: float) -> str:
    """Return a duration in words: `2 h 5 min`."""
    if not math.isfinite(seconds) or seconds < 60:
        return "< 0.001 s" if 0 < seconds < 0.001 else f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def _format_time(seconds: float | None) -> str:
    """Return a Unix time in seconds as local date and time."""
    return "" if seconds is None else f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M}"
