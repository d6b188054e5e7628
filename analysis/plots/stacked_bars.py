"""Parts of a whole: stacked bars, and below them every part on a logarithmic axis.

Where one part is nearly all, the others are hardly seen in the bars; by ratios all can be read.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator

from analysis.plots.charts import Point, error_lengths
from analysis.plots.layout import Drawing, canvas, finish, legend_of, rows_down, with_cut
from analysis.plots.style import REFERENCE, Keywords, part_style, row_marker
from specbench.results.estimate import Estimate

Rows = Mapping[str, Mapping[str, Estimate]]

_NOTHING = Estimate(None)


def stacked_bars(
    rows: Rows, xlabel: str, title: str, caption: str, form: str = "{:.0%}"
) -> Drawing:
    """Stacked horizontal bars of parts by row, with intervals; below, each part on a log axis.

    ``form`` formats the number written into a part that has room for it.
    """
    named = [(part, cell.value or 0) for row in rows.values() for part, cell in row.items()]
    parts = list(dict.fromkeys(part for part, length in named if length > 0))
    heights = (0.8 + 0.5 * len(rows), 0.9 + 0.24 * len(parts))
    figure = canvas(7.0, sum(heights))
    above, below = figure.subplots(2, 1, height_ratios=heights)
    _stack(above, rows, parts, xlabel, form)
    _one_by_one(below, rows, parts, xlabel)
    finish(figure, title, with_cut(caption, (above, below)), legend=legend_of([above]))
    return figure


def _stack(axes: Axes, rows: Rows, parts: list[str], xlabel: str, form: str) -> None:
    longest = max((sum(c.value or 0 for c in row.values()) for row in rows.values()), default=1.0)
    left = np.zeros(len(rows))
    for i, part in enumerate(parts):
        cells = [row.get(part, _NOTHING) for row in rows.values()]
        widths = np.array([cell.value or 0.0 for cell in cells])
        axes.barh(range(len(rows)), widths, left=left, label=part, height=0.6, **part_style(i))
        for place, (value, cell) in enumerate(zip(widths, cells, strict=True)):
            if value > 0.04 * longest:
                box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "linewidth": 0}
                axes.text(
                    left[place] + value / 2, place, form.format(value), ha="center", va="center",
                    fontsize="small", bbox=box,
                )  # fmt: skip
            if cell.interval:
                # The interval belongs to the part's length, so it is drawn at the part's end.
                axes.errorbar([left[place] + value], [place + 0.36], **_error_bars(cell))
        left = left + widths
    rows_down(axes, list(rows))
    axes.set(xlim=(0, 1.02 * longest), xlabel=xlabel)


def _error_bars(cell: Estimate) -> Keywords:
    lengths = error_lengths([Point.at(0, cell)])
    return {"xerr": lengths, "color": REFERENCE, "elinewidth": 0.9, "capsize": 2}


def _one_by_one(axes: Axes, rows: Rows, parts: list[str], xlabel: str) -> None:
    aside = 0.5 / max(1, len(rows))
    for i, row in enumerate(rows.values()):
        offset = aside * (i - (len(rows) - 1) / 2)
        for place, part in enumerate(parts):
            cell = row.get(part, _NOTHING)
            if (cell.value or 0.0) > 0:
                axes.errorbar(
                    [cell.value], [place + offset], marker=row_marker(i), markersize=5,
                    markerfacecolor=part_style(place)["facecolor"], markeredgewidth=0.7,
                    **_error_bars(cell),
                )  # fmt: skip
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(base=10))
    axes.xaxis.set_major_formatter("{x:g}")
    rows_down(axes, parts)
    axes.set_xlabel(f"{xlabel} (log)")
    handles = [
        Line2D([], [], color=REFERENCE, marker=row_marker(i), linestyle="none", label=name)
        for i, name in enumerate(rows)
    ]
    axes.legend(handles=handles, fontsize="small", loc="lower right")
