"""Curves of a report, as bokeh figures that hold numbers only. Names are in the page, which escapes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple, final

import numpy as np
from bokeh import models
from bokeh.document import Document
from bokeh.embed import components
from bokeh.model import Model
from bokeh.models.annotations import Span
from bokeh.models.renderers import GlyphRenderer
from bokeh.plotting import figure

from lumen.tools.report.record import Numbers, RunContents, Series, ValueTable, thin_series

COLOURS = 8
DASHES = ("", "6 3", "2 2", "8 3 2 3")
_VARIANT = re.compile(r"^(?:train|val|valid|validation|test)(?:[_/-]|$)|(?:_step|_epoch)$")
_SCHEDULED = re.compile(r"(?:lr|learning_rate|momentum|weight_decay)\b")
_MAX_RATIO = 100  # Curves of one chart differ less in size: the smaller one would look like a line at 0.
_MAX_CHARTS, _MAX_MARKS = 40, 60
_MIN_POINTS, _MAX_POINTS = 40, 2000
_MAX_DOTS = 60  # A curve of few points also gets dots: a line through one point is invisible.
_FONT = "system-ui, sans-serif"


@final
class LegendEntry(NamedTuple):
    """Entry of a curve in the legend of its chart.

    Attributes:
        key: Key by which the page finds the curve's bokeh models.
        label: The name of the curve, or the names of equal curves.
        colour: Number of the curve's colour.
        dash: Lengths of the curve's dashes and gaps, or "" for a solid line.
        last: The last value of the curve.
        odd: Number of values that are not finite.
    """

    key: str
    label: str
    colour: int
    dash: str
    last: float
    odd: int


@final
@dataclass
class Chart:
    """Chart of one quantity over the steps, in training and evaluations of all runs.

    Attributes:
        key: Key by which the page finds the chart's bokeh models.
        title: The name of the quantity, or the full name if the chart shows one name.
        labels: The labels of the curves that a run can have.
        rows: By number of the run, its legend entry for each label, or None if the run has no such curve.
        div: HTML of the element in which bokeh draws the chart.
    """

    key: str
    title: str
    labels: list[str]
    rows: dict[int, list[LegendEntry | None]] = field(default_factory=dict)
    div: str = ""


@final
class Curves:
    """All curves of a report, in charts that share the x axis, its format and the marks of the runs.

    Args:
        records: The runs to draw in the same charts.
        max_points: Approximate limit of the points of all curves together.

    Attributes:
        metrics: Charts of logged values: losses first, learning rates last.
        names: Names of all logged values, in the order of the charts.
        system: Charts of speed and memory.
        left_out: Names that are not drawn because of the limit on charts.
        marks: Numbers of runs and the steps of their marks, by kind: "restarts", "checkpoints", "epochs".
        script: JavaScript with which bokeh draws the charts, or "" if there are none.
    """

    def __init__(self, records: Sequence[RunContents], max_points: int) -> None:
        self.metrics, self.system, self.left_out, self.script = list[Chart](), list[Chart](), list[str](), ""
        kinds = (self.metrics, attrgetter("metrics"), "m"), (self.system, attrgetter("system"), "s")
        groups = [(drawn, table, letter, _group_names([*map(table, records)])) for drawn, table, letter in kinds]
        self.names = [name for _, curves in groups[0][-1] for names in curves for name in names]
        count = sum(len(curves) for *_, group in groups for _, curves in group) * len(records)
        self._records, self._figures = records, dict[str, Model]()
        self._max_points = min(max(max_points // max(count, 1), _MIN_POINTS), _MAX_POINTS)  # points of one curve
        tables = [table for record in records for table in (record.metrics, record.system)]
        ends = [(each.steps[0], each.steps[-1]) for table in tables for each in table.series.values()]
        steps = [float(step) for end in ends for step in end]
        begin, end = min(steps, default=0.0), max(steps, default=1.0)
        margin = (end - begin) * 0.01 or 0.5
        self._range = models.Range1d(start=begin - margin, end=end + margin, name="steps")
        self._formats = models.NumeralTickFormatter(format="0,0")
        self.marks = {kind: sources for kind in _MARKS if (sources := self._list_sources(kind))}
        for drawn, table, letter, group in groups:
            for number, (title, curves) in enumerate(group):
                if len(self._figures) == _MAX_CHARTS:
                    self.left_out += chain.from_iterable(curves)
                else:
                    drawn.append(self._make_chart(f"{letter}{number}", title, curves, table))
        if self._figures:
            self._embed()

    def _embed(self) -> None:
        """Set the script of bokeh and the HTML elements of the charts."""
        document = Document()
        with document.models.freeze():  # Otherwise bokeh visits all models again for each figure.
            for each in self._figures.values():
                document.add_root(each)
        self.script, divs = components(self._figures, wrap_script=False)
        for chart in chain(self.metrics, self.system):
            chart.div = divs[chart.key]

    def _list_sources(self, kind: str) -> list[tuple[int, models.ColumnDataSource]]:
        found = ((number, _spread_steps(_MARKS[kind](record))) for number, record in enumerate(self._records))
        return [(number, models.ColumnDataSource({"x": _as_float32(steps)})) for number, steps in found if len(steps)]

    def _make_chart(
        self, key: str, title: str, curves: Sequence[Sequence[str]], table: Callable[[RunContents], ValueTable]
    ) -> Chart:
        """Draw the given curves of all runs into one figure."""
        drawn = self._figures[key] = self._make_figure(key)
        chart = Chart(key, title, [_join_names(names) for names in curves])
        for run, record in enumerate(self._records):
            row = list[LegendEntry | None]()
            for variant, (label, names) in enumerate(zip(chart.labels, curves, strict=True)):
                if (series := table(record).series.get(names[0])) is None:
                    row.append(None)
                    continue
                # A single run has a colour per curve. Several runs have a colour each, and dashes per curve.
                colour = (variant if len(self._records) == 1 else run) % COLOURS
                dash, odd = DASHES[(variant + variant // COLOURS) % len(DASHES)], ~series.finite
                entry = LegendEntry(f"{key}-{run}-{variant}", label, colour, dash,
                                    float(series.values[-1]), int(odd.sum()))  # fmt: skip
                row.append(entry)
                self._draw_series(drawn, entry.key, series, dash, np.unique(series.steps[odd]))
            if any(row):
                chart.rows[run] = row
        return chart

    def _make_figure(self, key: str) -> figure:
        drawn = figure(
            name=f"chart-{key}", x_range=self._range, y_range=models.Range1d(start=0, end=1), tools=[], height=230,
            toolbar_location=None, sizing_mode="stretch_width", background_fill_color=None, border_fill_color=None,
            outline_line_color=None, min_border=0, min_border_right=22, min_border_top=8,
        )  # fmt: skip
        drawn.add_tools(models.BoxZoomTool(dimensions="width"))
        wheel = models.WheelZoomTool(dimensions="width", modifiers={"shift": True})
        drawn.add_tools(wheel)
        drawn.toolbar.active_scroll = wheel
        drawn.toolbar.logo = None
        for axis in (drawn.xaxis[0], drawn.yaxis[0]):
            axis.major_label_text_font, axis.major_label_text_font_size = _FONT, "11px"
            axis.minor_tick_line_color, axis.major_tick_in, axis.major_tick_out = None, 0, 4
        drawn.xaxis[0].ticker = models.BasicTicker(min_interval=1, desired_num_ticks=5)
        drawn.xaxis[0].formatter = self._formats
        drawn.yaxis[0].ticker = models.BasicTicker(desired_num_ticks=5)
        drawn.xgrid[0].visible = False
        for kind, sources in self.marks.items():
            for run, source in sources:
                glyph = models.VSpan(x="x", line_dash="solid" if kind == "restarts" else "dotted", line_width=1)
                _add_glyph(drawn, source, glyph, f"mark-{kind}-{run}", level="underlay")
        drawn.add_layout(Span(dimension="height", name=f"cursor-{key}", visible=False, location=0, line_width=1))
        return drawn

    def _draw_series(self, drawn: figure, key: str, series: Series, dash: str, odd: Numbers) -> None:
        thinned = thin_series(series, self._max_points)
        source = models.ColumnDataSource({"x": _as_float32(thinned.steps), "y": thinned.values})
        dashes = [int(each) for each in dash.split()]
        if len(odd):
            marks = models.ColumnDataSource({"x": _as_float32(_spread_steps(odd))})
            _add_glyph(drawn, marks, models.VSpan(x="x", line_width=2, line_alpha=0.4), f"odd-{key}")
        if len(thinned.means):
            base = models.ColumnDataSource({"x": thinned.mean_steps, "y": thinned.means})
            _add_glyph(drawn, base, models.Line(), f"mean-{key}", visible=False)
        if len(thinned.steps) <= _MAX_DOTS:
            _add_glyph(drawn, source, models.Scatter(x="x", y="y", size=4, line_color=None), f"dots-{key}")
        for name, data, width in (("line", source, 1.3), ("smooth", models.ColumnDataSource({"x": [], "y": []}), 1.8)):
            glyph = models.Line(x="x", y="y", line_width=width, line_dash=dashes, line_join="round")
            _add_glyph(drawn, data, glyph, f"{name}-{key}")


def _add_glyph(drawn: figure, source: models.ColumnDataSource, glyph: Model, name: str, **settings: Any) -> None:
    """Add a glyph to a figure. The script of the page finds the glyph by its name."""
    drawn.renderers.append(GlyphRenderer(data_source=source, glyph=glyph, name=name, **settings))


def _group_names(tables: Sequence[ValueTable]) -> list[tuple[str, list[list[str]]]]:
    """Return title and curves of each chart: losses first, learning rates last. Equal curves are one, with all names.

    `loss` and `val_loss` are one quantity. So are `pinball/same` and `pinball/slow`, if few and of comparable size.
    """
    groups: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for table in tables for name in table.series):
        groups.setdefault(_find_quantity(name), []).append(name)
    charts = list[tuple[str, list[list[str]]]]()
    for quantity in sorted(groups, key=_rank_quantity):
        curves = _merge_equal_curves(tables, groups[quantity])
        parts = {quantity: curves}
        most = COLOURS if len(tables) == 1 else len(DASHES)
        if not _SCHEDULED.match(quantity) and (len(curves) > most or not _are_comparable(tables, curves)):
            parts = {}
            for names in curves:
                parts.setdefault(_strip_variant(names[0]), []).append(names)
        charts += [(title if part != [part[0][:1]] else part[0][0], part) for title, part in parts.items()]
    return charts


def _strip_variant(name: str) -> str:
    """Return a name without the words for training and evaluation: `mae/slow` of `val/mae/slow`."""
    return _VARIANT.sub("", name) or name


def _find_quantity(name: str) -> str:
    """Return the quantity of a name: `loss` of `val_loss` and of `student/loss`, `pinball` of `pinball/slow`."""
    parent, _, last = _strip_variant(name).rpartition("/")
    return last if not parent or "loss" in last or _SCHEDULED.fullmatch(last) else parent


def _rank_quantity(quantity: str) -> int:
    return 3 if _SCHEDULED.match(quantity) else 0 if quantity == "loss" else 1 if "loss" in quantity else 2


def _merge_equal_curves(tables: Sequence[ValueTable], names: Sequence[str]) -> list[list[str]]:
    """Return the names, with the names of curves that are equal in all runs together."""
    merged: dict[tuple[bytes, ...], list[str]] = {}
    for name in names:
        found = [table.series.get(name) for table in tables] if len(names) > 1 else []
        key = tuple(each.steps.tobytes() + each.values.tobytes() if each else b"" for each in found)
        merged.setdefault(key, []).append(name)
    return list(merged.values())


def _are_comparable(tables: Sequence[ValueTable], curves: Sequence[Sequence[str]]) -> bool:
    """Return True if the curves of one run can share a y axis, or are all of one quantity by their names."""
    if len({_strip_variant(names[0]) for names in curves}) == 1:
        return True
    for table in tables:
        found = [table.series[names[0]].finite_values for names in curves if names[0] in table.series]
        sizes = [size for each in found if (size := np.nanmax(np.abs(each), initial=0.0)) > 0]
        if max(sizes, default=0.0) > _MAX_RATIO * min(sizes, default=0.0):
            return False
    return True


def _join_names(names: Sequence[str]) -> str:
    """Return the names of equal curves as one label."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


_MARKS: dict[str, Callable[[RunContents], Iterable[int]]] = {
    "restarts": lambda record: record.restarts,
    "checkpoints": lambda record: [
        step for each in record.shown.committed if isinstance(step := each.info.get("step"), int)
    ],
    "epochs": lambda record: record.metrics.epochs.values(),
}


def _spread_steps(steps: Iterable[float]) -> Numbers:
    """Return the steps that a double holds exactly, thinned evenly to `_MAX_MARKS`."""
    found = np.array(sorted({float(step) for step in steps if abs(step) < 2**53}))
    return found[np.linspace(0, len(found) - 1, min(len(found), _MAX_MARKS)).astype(np.int64)]


def _as_float32(steps: Numbers) -> Any:
    """Return the steps as int32, which halves their size, if no value changes."""
    small = steps.astype(np.int32) if len(steps) and np.abs(steps).max() < 2**31 else steps
    return small if (small == steps).all() else steps
