"""Parts of a whole: stacked bars."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from analysis.plots.charts import Point, error_lengths
from analysis.plots.layout import Drawing, canvas, finish, legend_of, rows_down
from analysis.plots.style import PARTS, REFERENCE
from specbench.results.estimate import Estimate

_SHOWN = 0.04  # of the longest bar, from which a part has room for its number


def stacked_bars(
    rows: Mapping[str, Mapping[str, Estimate]],
    xlabel: str,
    title: str,
    caption: str,
    form: str = "{:.0%}",
) -> Drawing:
    """Horizontal bars of parts by row, the interval of each part at its end.

    ``form`` formats the number written into a part that has room for it.
    """
    named = [(part, cell.value or 0) for row in rows.values() for part, cell in row.items()]
    parts = list(dict.fromkeys(part for part, length in named if length > 0))
    longest = max((sum(c.value or 0 for c in row.values()) for row in rows.values()), default=1.0)
    figure = canvas(0.8 + 0.42 * len(rows))
    axes = figure.subplots()
    left = np.zeros(len(rows))
    for i, part in enumerate(parts):
        cells = [row.get(part, Estimate(None)) for row in rows.values()]
        widths = np.array([cell.value or 0.0 for cell in cells])
        axes.barh(
            range(len(rows)), widths, left=left, label=part, height=0.6, linewidth=0.5,
            color=PARTS[i % len(PARTS)], edgecolor=REFERENCE,
        )  # fmt: skip
        for place, (start, cell) in enumerate(zip(left, cells, strict=True)):
            value = cell.value or 0.0
            if value > _SHOWN * longest:
                box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "linewidth": 0}
                axes.text(
                    start + value / 2, place, form.format(value), ha="center", va="center",
                    fontsize="small", bbox=box,
                )  # fmt: skip
            if cell.interval:
                axes.errorbar(
                    [start + value], [place + 0.36], xerr=error_lengths([Point.at(0, cell)]),
                    color=REFERENCE, elinewidth=0.9, capsize=2,
                )  # fmt: skip
        left = left + widths
    rows_down(axes, list(rows))
    axes.set(xlim=(0, 1.02 * longest), xlabel=xlabel)
    finish(figure, title, caption, legend_of([axes]))
    return figure
