"""Pictures of the results: ratios to the loop by hand, of all cases, and of a few cases for the README."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.cases import SYSTEMS
from benchmarks.ratios import Row
from benchmarks.report import all_rows, machine_lines

_COLOURS = {
    "lumen": "#c2410c", "lightning": "#6d28d9", "lightning-async": "#a78bfa", "accelerate": "#0f766e",
    "ignite": "#64748b", "hand-seeded": "#ca8a04", "hand-summed": "#ca8a04",
    "hand-fused": "#a16207", "hand-sliced": "#713f12",
}  # fmt: skip
_TICKS = (0.5, 0.7, 1, 1.5, 2, 3, 4, 6, 8)
_SHOWN = ("cpu_s", "wall_s", "first_s", "peak_mb", "calls")  # Ratios of a save's seconds mean little.


_FEW = {
    "tiny": "a step of 0.4 ms", "tiny-log1": "with one self.log", "tiny-log10": "with ten of them",
    "tiny-full": "with TensorBoard", "evaluation": "an evaluation",
}  # fmt: skip
_BARS = {"lumen": "#2f7de1", "lightning": "#a2a8b1"}
_QUIET, _LEFT, _ONE = "#7b8088", 172, 42  # a colour for light and dark pages; start of the bars, and length of ratio 1


def sketch(results: dict[str, Any], path: Path) -> None:
    """Draw the medians of Lumen and Lightning in a few cases as an SVG, unless a figure is missing."""
    found = {
        (row.case, row.system): row.quartiles[1] for _, _, rows in all_rows(results) for row in rows if not row.trouble
    }
    if not all((case, system) in found for case in _FEW for system in _BARS):
        return
    lines = []
    for case, label in _FEW.items():
        top = 38 * len(lines) + 14
        parts = [f'<text x="162" y="{top + 17}" text-anchor="end">{label}</text>']
        for number, (system, colour) in enumerate(_BARS.items()):
            median, y = round(found[case, system], 2), top + 15 * number
            length = _ONE * median
            parts += [
                f'<rect x="{_LEFT}" y="{y}" width="{length:.2f}" height="12" rx="2" fill="{colour}"/>'
                f'<text x="{_LEFT + length + 6:.1f}" y="{y + 10.5}" font-size="11">{median:.2f}</text>'
            ]
        lines.append("\n".join(parts))
    one = _LEFT + _ONE
    names = {
        "lumen": "Lumen",
        "lightning": f"Lightning {results['cases']['tiny']['peers']['lightning'].rpartition('.')[0]}",
    }
    squares = [
        f'<rect x="{x}" y="210" width="12" height="12" rx="2" fill="{_BARS[system]}"/>'
        f'<text x="{x + 18}" y="220">{name}</text>'
        for x, (system, name) in zip((282, 362), names.items(), strict=True)
    ]
    picture = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 520 236" width="520" font-family="system-ui, sans-serif" '
        f'font-size="13" fill="{_QUIET}">',
        "<title>CPU time of a step, as a multiple of the loop written by hand</title>",
        *lines,
        f'<line x1="{one}" x2="{one}" y1="6" y2="204" stroke="{_QUIET}" stroke-dasharray="3 3"/>',
        f'<text x="{one}" y="220" text-anchor="middle">1: by hand</text>',
        "".join(squares),
        "</svg>\n",
    ]
    path.write_text("\n".join(picture), encoding="utf-8")


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
    machines = machine_lines(results)
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
    axes.set_title("What a training library costs", loc="left", fontweight="bold", pad=8 + 11 * len(machines))
    where = "\n".join(machines)
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
