"""The picture of results: ratios to the loop by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.cases import SYSTEMS
from benchmarks.ratios import Row
from benchmarks.report import all_rows, machine_lines

_COLOURS = {
    "lumen": "#c2410c", "lightning": "#6d28d9", "lightning-async": "#a78bfa", "accelerate": "#0f766e",
    "ignite": "#64748b", "hand-fused": "#a16207", "hand-sliced": "#713f12",
}  # fmt: skip
_TICKS = (0.5, 0.7, 1, 1.5, 2, 3, 4, 6, 8)
_SHOWN = ("cpu_s", "wall_s", "first_s", "peak_mb", "calls")  # a save's seconds are no ratio to look at


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw a line per case and a dot per system: the median, its quartiles as a bar, the A/A control as a band."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

    found = [(case, rows) for case, measure, rows in all_rows(results) if measure in _SHOWN]
    cases = [(case, rows) for case, rows in found if not all(row.trouble for row in rows)]
    if not cases:
        return
    figure, axes = plt.subplots(figsize=(10, 1.6 + 0.48 * len(cases)), layout="constrained")
    axes.axvline(1.0, color="#111827", linewidth=1)
    seen: dict[str, Any] = {}
    for line, (_, rows) in enumerate(cases):
        shown = [row for row in rows if row.trouble is None and row.system in _COLOURS]
        for row in rows:
            if row.system == "again" and row.trouble is None:
                low, _, high = row.quartiles
                band = axes.barh(line, high - low, left=low, height=0.86, color="#d1d5db", zorder=0)
                seen.setdefault(SYSTEMS["again"] + ", quartiles", band)
        for number, row in enumerate(shown):
            seen.setdefault(SYSTEMS[row.system], _dot(axes, row, line + 0.13 * (number - (len(shown) - 1) / 2)))
        if line % 2:
            axes.axhspan(line - 0.5, line + 0.5, color="#f9fafb", zorder=-1)
    axes.set_yticks(range(len(cases)), [case.name for case, _ in cases])
    axes.set_ylim(len(cases) - 0.5, -0.5)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(_TICKS))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.grid(axis="x", color="#e5e7eb", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.set_xlabel("ratio to the loop by hand of the same run (log scale; left is better)")
    axes.set_title("What a training library costs", loc="left", fontweight="bold", pad=20)
    where = "\n".join(machine_lines(results))
    axes.text(0, 1, where, transform=axes.transAxes, va="bottom", fontsize=7.5, color="#6b7280")
    order = [name for name in (*SYSTEMS.values(), SYSTEMS["again"] + ", quartiles") if name in seen]
    figure.legend([seen[name] for name in order], order, loc="outside lower left", ncols=4, frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _dot(axes: Any, row: Row, y: float) -> Any:
    low, median, high = row.quartiles
    colour, own = _COLOURS[row.system], row.system == "lumen"
    axes.plot([low, high], [y, y], color=colour, linewidth=1.6, alpha=0.55, solid_capstyle="round", zorder=2)
    (dot,) = axes.plot(
        median, y, "D" if own else "o", color=colour, markersize=6.5 if own else 5, zorder=4 if own else 3,
        linestyle="none",
    )  # fmt: skip
    return dot
