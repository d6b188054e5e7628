"""Heatmaps: grids of numbers on one color scale."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.patheffects import Normal, Stroke

from analysis.plots.layout import Drawing, canvas, finish, print_width, ratio_ticks
from analysis.plots.style import HEATMAP, REFERENCE
from analysis.runs.load import Run
from analysis.runs.sweeps import Value
from specbench.results.estimate import Estimate

# Inches of a cell: roomy ones have their interval below the number; narrow ones let three grids
# stand side by side, as in the papers.
_ROOMY, _NARROW, _HEIGHT = 0.56, 0.34, 0.36
_AXIS, _NUMBERS = 0.65, 0.35  # inches for the vertical axis of the first grid, and of the others
_BAR = 0.75  # inches for the color bar
_PAGE = 9.4  # inches across, beyond which grids stand below each other
_MANYFOLD = 5.0  # largest number over smallest from which colors go by ratios
INTERVALS_TEXT = "Small numbers: the 95 % interval."
MARKS_TEXT = (
    "Framed: the best cell; with a dot: cells that may be as good (multiple comparisons with the "
    "best)."
)


@dataclass(frozen=True)
class HeatmapGrid:
    """One heatmap.

    Attributes:
        cells: ``[rows, columns]``; the first row is drawn at the bottom.
        rows, columns: names along the axes.
        leaders: (row, column) of the best cell, then of those that the data cannot tell from it.
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
    """Grids of numbers on one color scale.

    One beside the other where a page is wide enough, else one below the other. The best cell is
    framed, those that may be as good have a dot, and a line parts the cells on either side of
    ``break_even``.
    """
    numbers = [number for grid in grids for number in grid.numbers]
    low, high = (min(numbers), max(numbers)) if numbers else (0.0, 1.0)
    high = high if high > low else low + 1.0
    across, cell = _arranged(grids)
    n_rows, n_columns = max(len(g.rows) for g in grids), max(len(g.columns) for g in grids)
    down = math.ceil(len(grids) / across)
    above = 0.2 * max(grid.title.count("\n") + 1 for grid in grids)
    height = down * (max(1.3, _HEIGHT * n_rows) + above + 0.25) + 0.35
    figure = canvas(_around(across) + across * cell * n_columns, height)
    axes_table = figure.subplots(down, across, squeeze=False)
    # Even steps of a ratio that grows manyfold would paint all but the last cells alike.
    manyfold = low > 0 and high > _MANYFOLD * low
    scale = LogNorm(low, high) if manyfold else Normalize(low, high)
    middle = math.sqrt(low * high) if manyfold else (low + high) / 2
    image = None
    legend: dict[str, Artist] = {}
    all_axes = list(axes_table.flatten())
    for place, (axes, grid) in enumerate(zip(all_axes, grids, strict=False)):
        values = [[math.nan if c.value is None else c.value for c in line] for line in grid.cells]
        image = axes.imshow(
            np.array(values), cmap=HEATMAP, norm=scale, aspect="auto", origin="lower"
        )
        axes.grid(visible=False)
        axes.set_xticks(range(len(grid.columns)), grid.columns)
        axes.set_yticks(range(len(grid.rows)), grid.rows)
        axes.tick_params(length=0)
        axes.set_title(grid.title, loc="left", fontsize="medium")
        if across == 1 and place + 1 == len(grids):
            axes.set_xlabel(xlabel)
        if place % across == 0:
            axes.set_ylabel(ylabel)
        _write_cells(axes, grid, middle, cell >= _ROOMY)
        legend |= _mark_leaders(axes, grid)
        if break_even is not None and low < break_even < high:
            legend |= _part(axes, np.array(values), break_even)
    if across > 1:  # once: below each of narrow grids the words would run into each other
        figure.supxlabel(xlabel, fontsize="medium")
    for axes in all_axes[len(grids) :]:
        axes.set_axis_off()
    bar = figure.colorbar(image, ax=all_axes, fraction=0.03, pad=0.02)
    bar.set_label(unit)
    if break_even is not None and low < break_even < high:
        bar.ax.axhline(break_even, color="white", linewidth=2.0)
        bar.ax.axhline(break_even, color=REFERENCE, linewidth=1.2, linestyle="--")
    if manyfold:
        ratio_ticks(bar.ax.yaxis)
    roomy = cell >= _ROOMY and any(c.interval for g in grids for line in g.cells for c in line)
    said = [INTERVALS_TEXT if roomy else "", MARKS_TEXT if any(g.leaders for g in grids) else ""]
    words = " ".join(filter(None, said))
    if len(legend) == 1:  # it needs its name too
        legend[""] = Patch(alpha=0)
    finish(figure, title, "\n".join(filter(None, [words, caption])), legend)
    return figure


def _around(across: int) -> float:
    """Inches that so many grids side by side need beside their cells."""
    return _BAR + _AXIS + (across - 1) * _NUMBERS


def _arranged(grids: Sequence[HeatmapGrid]) -> tuple[int, float]:
    """Grids that stand side by side, and inches across a cell."""
    n_columns = max(len(grid.columns) for grid in grids)
    page = print_width() or _PAGE

    def cell(across: int) -> float:
        return (page - _around(across)) / (across * n_columns)

    across = next((n for n in range(len(grids), 1, -1) if cell(n) >= _NARROW), 1)
    if print_width():
        return across, cell(across)
    return across, _ROOMY if across == 1 or cell(across) >= _ROOMY else _NARROW


def _write_cells(axes: Axes, grid: HeatmapGrid, middle: float, roomy: bool) -> None:
    for i, line in enumerate(grid.cells):
        for j, cell in enumerate(line):
            value, interval = cell.value, cell.interval
            if value is None:
                axes.text(j, i, "–", ha="center", va="center", fontsize="small")
                continue
            color = "white" if value < middle else "black"
            digits = 1 if value >= 10 else 2
            beside = roomy and interval is not None
            axes.text(
                j, i + (0.12 if beside else 0), f"{value:.{digits}f}", ha="center", va="center",
                fontsize="small", color=color,
            )  # fmt: skip
            if beside and interval:
                text = "–".join(f"{end:.{digits}f}" for end in interval)
                axes.text(
                    j, i - 0.27, text, ha="center", va="center", fontsize="xx-small", color=color
                )


def _mark_leaders(axes: Axes, grid: HeatmapGrid) -> dict[str, Artist]:
    """Frame the best cell, and put a dot into those that may be as good."""
    if not grid.leaders:
        return {}
    ring = [Stroke(linewidth=3.6, foreground="white"), Normal()]
    (i, j), *others = grid.leaders
    axes.add_patch(
        Rectangle(
            (j - 0.47, i - 0.47), 0.94, 0.94, fill=False, edgecolor="black", linewidth=1.8,
            path_effects=ring, zorder=4,
        )
    )  # fmt: skip
    legend: dict[str, Artist] = {"best": Patch(facecolor="white", edgecolor="black", linewidth=1.8)}
    if others:
        dots = {
            "linestyle": "none", "marker": "o", "markersize": 4.5, "markerfacecolor": "white",
            "markeredgecolor": "black",
        }  # fmt: skip
        axes.plot([j + 0.36 for _, j in others], [i + 0.34 for i, _ in others], **dots)
        legend["may be as good"] = Line2D([], [], **dots)
    return legend


def _part(axes: Axes, values: np.ndarray, level: float) -> dict[str, Artist]:
    """A line along the edges between cells below the level and cells at or above it."""
    above, known = values >= level, ~np.isnan(values)
    lines = []
    for i, j in np.argwhere((above[:, 1:] != above[:, :-1]) & known[:, 1:] & known[:, :-1]):
        lines.append(((j + 0.5, j + 0.5), (i - 0.5, i + 0.5)))
    for i, j in np.argwhere((above[1:] != above[:-1]) & known[1:] & known[:-1]):
        lines.append(((j - 0.5, j + 0.5), (i + 0.5, i + 0.5)))
    look = {
        "color": "black", "linewidth": 1.3, "linestyle": (0, (3, 1.5)), "dash_capstyle": "butt",
        "path_effects": [Stroke(linewidth=2.8, foreground="white"), Normal()],
    }  # fmt: skip
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
    contexts = run.surface.passes["batch"].axes["context"]
    grids = [
        HeatmapGrid.of(f"context of {context} tokens", run.surface.slowdowns(context, run.seed))
        for context in contexts
    ]
    unit = "time over one token's"
    return heatmaps(grids, "w (draft tokens in a row)", "k (rows)", unit, title, caption)
