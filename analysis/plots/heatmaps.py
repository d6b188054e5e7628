"""Heatmaps: grids of numbers on one color scale."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from analysis.plots.layout import finish, ratio_ticks
from analysis.plots.style import HEATMAP
from specbench.results.estimate import Estimate

# Inches: narrow, so that three grids stand side by side as in the papers and are hardly reduced on
# a page; the interval's ends stand below each other.
_CELL = (0.36, 0.46)
_PAGE = 9.0  # inches across, beyond which grids stand below each other
_MANYFOLD = 5.0  # largest number over smallest from which colors go by ratios


@dataclass(frozen=True)
class HeatmapGrid:
    """One heatmap.

    Attributes:
        cells: ``[rows, columns]``.
        rows, columns: names along the axes.
    """

    title: str
    cells: Sequence[Sequence[Estimate]]
    rows: Sequence[str]
    columns: Sequence[str]

    @classmethod
    def of(
        cls, title: str, cells: Mapping[tuple[int, int], Estimate], downwards: bool = True
    ) -> HeatmapGrid:
        """Numbers by the values of two knobs (row, column), of which some may be missing."""
        rows = sorted({row for row, _ in cells}, reverse=not downwards)
        columns = sorted({column for _, column in cells})
        lines = [[cells.get((row, column), Estimate(None)) for column in columns] for row in rows]
        return cls(title, lines, [*map(str, rows)], [*map(str, columns)])

    @property
    def numbers(self) -> list[float]:
        return [cell.value for line in self.cells for cell in line if cell.value is not None]


def heatmaps(
    grids: Sequence[HeatmapGrid], xlabel: str, ylabel: str, unit: str, title: str, caption: str
) -> Figure:
    """Grids of numbers on one color scale; a cell's interval stands below its number.

    One beside the other where a page is wide enough, else one below the other.
    """
    numbers = [number for grid in grids for number in grid.numbers]
    low, high = (min(numbers), max(numbers)) if numbers else (0.0, 1.0)
    high = high if high > low else low + 1.0
    n_rows, n_columns = max(len(g.rows) for g in grids), max(len(g.columns) for g in grids)
    wide, high_one = _CELL[0] * n_columns + 0.4, max(2.2, 0.8 + _CELL[1] * n_rows)
    beside = len(grids) * wide <= _PAGE
    across = len(grids) if beside else 1
    figure = Figure(
        figsize=(1.4 + across * wide, high_one * (len(grids) // across)), layout="constrained"
    )
    all_axes = figure.subplots(len(grids) // across, across, squeeze=False).flatten()
    # Even steps of a ratio that grows manyfold would paint all but the last cells alike.
    manyfold = low > 0 and high > _MANYFOLD * low
    scale = LogNorm(low, high) if manyfold else Normalize(low, high)
    image = None
    for axes, grid in zip(all_axes, grids, strict=True):
        values = [[math.nan if c.value is None else c.value for c in line] for line in grid.cells]
        image = axes.imshow(np.array(values), cmap=HEATMAP, norm=scale, aspect="auto")
        axes.grid(visible=False)
        axes.set_xticks(range(len(grid.columns)), grid.columns)
        axes.set_yticks(range(len(grid.rows)), grid.rows)
        axes.tick_params(length=0)
        axes.set_title(grid.title, loc="left", fontsize=9)
        if beside or axes is all_axes[-1]:
            axes.set_xlabel(xlabel)
        if not beside or axes is all_axes[0]:
            axes.set_ylabel(ylabel)
        _write_cells(axes, grid, math.sqrt(low * high) if manyfold else (low + high) / 2)
    bar = figure.colorbar(image, ax=list(all_axes), fraction=0.03, pad=0.02)
    if manyfold:
        ratio_ticks(bar.ax.yaxis)
    bar.set_label(unit, fontsize=8)
    bar.outline.set_visible(False)
    finish(figure, title, caption)
    return figure


def _write_cells(axes: Axes, grid: HeatmapGrid, middle: float) -> None:
    for i, line in enumerate(grid.cells):
        for j, cell in enumerate(line):
            value, interval = cell.value, cell.interval
            if value is None:
                axes.text(j, i, "–", ha="center", va="center", fontsize=7)
                continue
            color = "white" if value < middle else "black"
            digits = 1 if value >= 10 else 2
            axes.text(
                j, i - (0.25 if interval else 0), f"{value:.{digits}f}", ha="center", va="center",
                fontsize=7.5, color=color,
            )  # fmt: skip
            if interval:
                text = "\n".join(f"{end:.{digits}f}" for end in interval)
                axes.text(
                    j, i + 0.19, text, ha="center", va="center", fontsize=6, color=color,
                    linespacing=1.0,
                )  # fmt: skip
