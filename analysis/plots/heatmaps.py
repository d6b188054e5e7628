"""Heatmaps: grids of numbers on one color scale."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.patches import Rectangle
from matplotlib.patheffects import Normal, Stroke

from analysis.plots.style import WIDTH, Drawing, canvas, finish, ratio_ticks
from specbench.results.cells import NumberCell, number
from specbench.results.metrics import standing_word

CellKey: TypeAlias = "tuple[Any, ...]"  # names of a row and of a column

_AXES = 2.4  # inches for names, color bar and legend
_NARROW, _ROOMY = 0.32, 0.55  # inches of a cell: for its number, for its interval too
_MANYFOLD = 5.0  # largest number over smallest from which colors go by ratios
_RING = [Stroke(linewidth=3.4, foreground="white"), Normal()]


@dataclass(frozen=True)
class HeatmapGrid:
    """One heatmap.

    Attributes:
        cells: by row and column, of which some may be missing. Numbers are sorted along the axes,
            from the bottom and from the left; words keep their order.
        leaders: the highest cell, then those that do not differ significantly from it on the same
            prompts.
    """

    title: str
    cells: Mapping[CellKey, NumberCell]
    leaders: Sequence[CellKey] = ()

    @cached_property
    def axes(self) -> tuple[list[object], list[object]]:
        """Names of the rows and of the columns."""
        rows, columns = (dict.fromkeys(key[i] for key in self.cells) for i in range(2))
        return sorted(rows, key=_order), sorted(columns, key=_order)

    @property
    def numbers(self) -> list[float]:
        return [cell.value for cell in self.cells.values() if cell.value is not None]


def _order(name: object) -> tuple[bool, float]:
    """Sort numbers by value, then words in their order."""
    return (False, name) if isinstance(name, int | float) else (True, 0.0)


def heatmaps(
    grids: Sequence[HeatmapGrid],
    xlabel: str,
    ylabel: str,
    unit: str,
    title: str,
    caption: str,
    break_even: float | None = None,
) -> Drawing:
    """Draw grids of numbers on one color scale, side by side if there is room.

    A line parts the cells on either side of ``break_even``.
    """
    numbers = [number for grid in grids for number in grid.numbers] or [0.0]
    low, high = min(numbers), max(numbers)
    # Even steps of a ratio that grows manyfold would paint all but the last cells alike.
    manyfold = low > 0 and high > _MANYFOLD * low
    scale = (LogNorm if manyfold else Normalize)(low, high if high > low else low + 1.0)
    room = (WIDTH - _AXES) / max(len(grid.axes[1]) for grid in grids)
    across = max(1, min(len(grids), int(room / _NARROW)))
    down = math.ceil(len(grids) / across)
    title_lines = max(grid.title.count("\n") + bool(grid.title) for grid in grids)
    n_rows = max(len(grid.axes[0]) for grid in grids)
    figure = canvas(0.5 + down * (0.3 + 0.17 * title_lines + max(1.5, 0.34 * n_rows)))
    all_axes = figure.subplots(down, across, squeeze=False).flatten()
    for i_grid, (axes, grid) in enumerate(zip(all_axes, grids, strict=False)):
        rows, columns = grid.axes
        cells = [[grid.cells.get((row, column)) for column in columns] for row in rows]
        values = np.array([[cell and cell.value for cell in line] for line in cells], dtype=float)
        image = axes.imshow(values, cmap="cividis", norm=scale, aspect="auto", origin="lower")
        axes.grid(visible=False)
        axes.set_xticks(range(len(columns)), [str(name) for name in columns])
        axes.set_yticks(range(len(rows)), [str(name) for name in rows])
        axes.tick_params(length=0)
        axes.set_title(grid.title, loc="left", fontsize="medium")
        if i_grid + across >= len(grids):
            axes.set_xlabel(xlabel)
        if i_grid % across == 0:
            axes.set_ylabel(ylabel)
        for i, j in np.ndindex(values.shape):
            _write_cell(axes, (j, i), cells[i][j], scale, room / across >= _ROOMY)
        positions = [(columns.index(column), rows.index(row)) for row, column in grid.leaders]
        _mark_leaders(axes, positions)
        if break_even is not None:
            _part(axes, values, break_even)
    for axes in all_axes[len(grids) :]:
        axes.set_axis_off()
    bar = figure.colorbar(image, ax=list(all_axes), fraction=0.04, pad=0.02)
    bar.set_label(unit, fontsize="small")
    if manyfold:
        ratio_ticks(bar.ax.yaxis)
    return finish(figure, title, caption)


def _write_cell(
    axes: Axes, position: tuple[int, int], cell: NumberCell | None, scale: Normalize, roomy: bool
) -> None:
    cell = cell or NumberCell(None)
    interval = cell.interval if roomy else None
    style = {
        "xy": position, "textcoords": "offset points", "ha": "center", "va": "center",
        "color": "white" if cell.value and scale(cell.value) < 0.5 else "black",
    }  # fmt: skip
    form = ".1f" if (cell.value or 0.0) >= 10 else ".2f"
    text = number(cell.value, form)
    axes.annotate(text, xytext=(0, 3.5 if interval else 0), fontsize="small", **style)
    if interval:
        text = "–".join(format(end, form) for end in interval)
        axes.annotate(text, xytext=(0, -5.5), fontsize=5.5, **style)


def _mark_leaders(axes: Axes, positions: Sequence[tuple[int, int]]) -> None:
    """Frame the highest cell; put a dot in cells not significantly below it."""
    best, others = positions[:1], positions[1:]
    for x, y in best:
        name = standing_word("highest" if others else "best")
        frame = {"fill": False, "edgecolor": "black", "linewidth": 1.8, "path_effects": _RING}
        square = Rectangle((x - 0.47, y - 0.47), 0.94, 0.94, zorder=4, label=name, **frame)
        axes.add_patch(square)
    if others:
        axes.plot(
            [x + 0.36 for x, _ in others], [y + 0.34 for _, y in others], linestyle="none",
            marker="o", markersize=4.5, markerfacecolor="white", markeredgecolor="black",
            label=f"{standing_word('undecided')}: not significantly below it on the same prompts",
        )  # fmt: skip


def _part(axes: Axes, values: np.ndarray, level: float) -> None:
    """Draw a line along the edges between cells below the level and cells at or above it."""
    look = {"color": "black", "linewidth": 1.3, "linestyle": (0, (3, 1.5)), "path_effects": _RING}
    for down, across in ((0, 1), (1, 0)):
        first = values[: len(values) - down, : values.shape[1] - across]
        second = values[down:, across:]
        crossed = ((first >= level) != (second >= level)) & ~np.isnan(first + second)
        for i, j in np.argwhere(crossed):
            xs = [j + across / 2 + end * down / 2 for end in (-1, 1)]
            ys = [i + down / 2 + end * across / 2 for end in (-1, 1)]
            name = f"break-even ({level:g})"
            axes.plot(xs, ys, scalex=False, scaley=False, label=name, **look)
