"""Heatmaps: grids of numbers on one color scale."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.patheffects import Normal, Stroke

from analysis.plots.layout import WIDTH, Drawing, canvas, finish, ratio_ticks
from analysis.plots.style import HEATMAP
from analysis.runs.load import Run
from analysis.runs.sweeps import Value
from specbench.results.estimate import Estimate, number
from specbench.results.metrics import standing_word

_AXES = 2.4  # inches for names, color bar and legend
_NARROW, _ROOMY = 0.32, 0.55  # inches of a cell: for its number, for its interval too
_MANYFOLD = 5.0  # largest number over smallest from which colors go by ratios
_RING = [Stroke(linewidth=3.4, foreground="white"), Normal()]


@dataclass(frozen=True)
class HeatmapGrid:
    """One heatmap.

    Attributes:
        cells: ``[rows, columns]``; the first row is drawn at the bottom.
        rows, columns: names along the axes.
        leaders: (row, column) of the highest cell, then of those that are not shown to differ from
            it on the same prompts.
    """

    title: str
    cells: Sequence[Sequence[Estimate]]
    rows: Sequence[str]
    columns: Sequence[str]
    leaders: Sequence[tuple[int, int]] = ()

    @classmethod
    def of(
        cls,
        title: str,
        cells: Mapping[tuple[Any, ...], Estimate],
        leaders: Iterable[tuple[Any, ...]] = (),
    ) -> HeatmapGrid:
        """Numbers by the values of two knobs (row, column), of which some may be missing."""
        rows = sorted({row for row, _ in cells}, key=_order)
        columns = sorted({column for _, column in cells}, key=_order)
        lines = [[cells.get((row, column), Estimate(None)) for column in columns] for row in rows]
        places = [(rows.index(row), columns.index(column)) for row, column in leaders]
        return cls(title, lines, [*map(str, rows)], [*map(str, columns)], places)

    @property
    def numbers(self) -> list[float]:
        return [cell.value for line in self.cells for cell in line if cell.value is not None]


def _order(value: Value) -> tuple[bool, float, str]:
    """Numbers in their order, then words."""
    return (True, 0.0, value) if isinstance(value, str) else (False, float(value), "")


def heatmaps(
    grids: Sequence[HeatmapGrid],
    xlabel: str,
    ylabel: str,
    unit: str,
    title: str,
    caption: str,
    break_even: float | None = None,
) -> Drawing:
    """Grids of numbers on one color scale, side by side where there is room.

    A line parts the cells on either side of ``break_even``.
    """
    numbers = [number for grid in grids for number in grid.numbers] or [0.0]
    low, high = min(numbers), max(numbers)
    high = high if high > low else low + 1.0
    # Even steps of a ratio that grows manyfold would paint all but the last cells alike.
    manyfold = low > 0 and high > _MANYFOLD * low
    scale = LogNorm(low, high) if manyfold else Normalize(low, high)
    n_columns = max(len(grid.columns) for grid in grids)
    room = (WIDTH - _AXES) / n_columns
    across = max(1, min(len(grids), int(room / _NARROW)))
    down = math.ceil(len(grids) / across)
    title_lines = max(grid.title.count("\n") + bool(grid.title) for grid in grids)
    n_rows = max(len(grid.rows) for grid in grids)
    figure = canvas(0.5 + down * (0.3 + 0.17 * title_lines + max(1.5, 0.34 * n_rows)))
    all_axes = figure.subplots(down, across, squeeze=False).flatten()
    parted = break_even is not None and low < break_even < high
    image, legend = None, dict[str, Any]()
    for place, (axes, grid) in enumerate(zip(all_axes, grids, strict=False)):
        numbers_of = [[math.nan if c.value is None else c.value for c in row] for row in grid.cells]
        values = np.array(numbers_of)
        image = axes.imshow(values, cmap=HEATMAP, norm=scale, aspect="auto", origin="lower")
        axes.grid(visible=False)
        axes.set_xticks(range(len(grid.columns)), grid.columns)
        axes.set_yticks(range(len(grid.rows)), grid.rows)
        axes.tick_params(length=0)
        axes.set_title(grid.title, loc="left", fontsize="medium")
        if place + across >= len(grids):
            axes.set_xlabel(xlabel)
        if place % across == 0:
            axes.set_ylabel(ylabel)
        _write_cells(axes, grid, scale, room / across >= _ROOMY)
        legend |= _mark_leaders(axes, grid)
        if parted:
            legend |= _part(axes, values, break_even or 0.0)
    for axes in all_axes[len(grids) :]:
        axes.set_axis_off()
    bar = figure.colorbar(image, ax=list(all_axes), fraction=0.04, pad=0.02)
    bar.set_label(unit, fontsize="small")
    if manyfold:
        ratio_ticks(bar.ax.yaxis)
    if len(legend) == 1:  # it needs its name too
        legend[""] = Patch(alpha=0)
    finish(figure, title, caption, legend)
    return figure


def _write_cells(axes: Axes, grid: HeatmapGrid, scale: Normalize, roomy: bool) -> None:
    for i, line in enumerate(grid.cells):
        for j, cell in enumerate(line):
            interval = cell.interval if roomy else None
            style = {
                "xy": (j, i), "textcoords": "offset points", "ha": "center", "va": "center",
                "color": "white" if cell.value and scale(cell.value) < 0.5 else "black",
            }  # fmt: skip
            digits = 1 if (cell.value or 0.0) >= 10 else 2
            text = number(cell.value, f".{digits}f")
            axes.annotate(text, xytext=(0, 3.5 if interval else 0), fontsize="small", **style)
            if interval:
                text = "–".join(f"{end:.{digits}f}" for end in interval)
                axes.annotate(text, xytext=(0, -5.5), fontsize=5.5, **style)


def _mark_leaders(axes: Axes, grid: HeatmapGrid) -> dict[str, Any]:
    """Frame the highest cell; a dot in those that are not shown to differ from it."""
    if not grid.leaders:
        return {}
    (i, j), *others = grid.leaders
    frame = {"fill": False, "edgecolor": "black", "linewidth": 1.8, "path_effects": _RING}
    axes.add_patch(Rectangle((j - 0.47, i - 0.47), 0.94, 0.94, zorder=4, **frame))
    handle = Patch(facecolor="white", edgecolor="black", linewidth=1.8)
    if not others:
        return {standing_word("best"): handle}
    dots = {
        "linestyle": "none", "marker": "o", "markersize": 4.5, "markerfacecolor": "white",
        "markeredgecolor": "black",
    }  # fmt: skip
    axes.plot([j + 0.36 for _, j in others], [i + 0.34 for i, _ in others], **dots)
    words = f"{standing_word('undecided')}: not shown below the highest on the same prompts"
    return {standing_word("highest"): handle, words: Line2D([], [], **dots)}


def _part(axes: Axes, values: np.ndarray, level: float) -> dict[str, Any]:
    """A line along the edges between cells below the level and cells at or above it."""
    above, known = values >= level, ~np.isnan(values)
    lines = [
        ((j + 0.5, j + 0.5), (i - 0.5, i + 0.5))
        for i, j in np.argwhere((above[:, 1:] != above[:, :-1]) & known[:, 1:] & known[:, :-1])
    ] + [
        ((j - 0.5, j + 0.5), (i + 0.5, i + 0.5))
        for i, j in np.argwhere((above[1:] != above[:-1]) & known[1:] & known[:-1])
    ]
    look = {"color": "black", "linewidth": 1.3, "linestyle": (0, (3, 1.5)), "path_effects": _RING}
    for xs, ys in lines:
        axes.plot(xs, ys, scalex=False, scaley=False, **look)
    return {f"break-even ({level:g})": Line2D([], [], **look)} if lines else {}


def slowdown_caption(run: Run, text: str) -> str:
    """Words of one's own, then model, hardware, number of passes and code."""
    assert run.surface is not None
    made_up = "SYNTHETIC RECORDS, not a measurement. " if run.synthetic else ""
    return (
        f"{made_up}{text} {run.model} ({run.dtype}), random ids. Hardware: {run.hardware}. Medians "
        f"of {run.surface.passes['batch'].repeats} passes; intervals: 95 %, bootstrap over passes. "
        f"Code: {run.code}."
    )


def slowdown_heatmaps(run: Run, title: str, caption: str) -> Drawing:
    """Time over one token's time: a heatmap for each number of cached tokens."""
    assert run.surface is not None
    grids = [
        HeatmapGrid.of(f"context of {context} tokens", run.surface.slowdowns(context, run.seed))
        for context in run.surface.passes["batch"].axes["context"]
    ]
    unit = "time over one token's"
    return heatmaps(grids, "w (draft tokens in a row)", "k (rows)", unit, title, caption)
