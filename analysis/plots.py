"""Kinds of figure: numbers in, picture out.

Every function takes values with their 95 % intervals, draws both, and writes the caption below the
picture. What the numbers are is the caller's business, how they look is :mod:`analysis.style`'s.
"""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from analysis.style import HEATMAP, REFERENCE, bar_style, line_style, part_style

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from specbench.statistics import Interval

_CAPTION_INCHES_PER_LINE = 0.15
_CHARACTERS_PER_INCH = 18
TITLE, CAPTION = "title", "caption"  # ids of a figure's words, for a page that sets them itself
HEADROOM = 1.6  # height of a picture over its tallest bar, at most


@dataclass(frozen=True)
class Point:
    """A measured number at a place of the horizontal axis; ``y`` None leaves a gap."""

    x: float
    y: float | None
    interval: Interval | None = None


@dataclass(frozen=True)
class Series:
    """Points of one method.

    Attributes:
        name: in the legend.
        method: decides the colour.
        points: in the order of the axis.
        dashed: claimed by a paper, not measured here.
    """

    name: str
    method: str
    points: Sequence[Point]
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        title: above it; "" for none.
        xlabel, ylabel: with units.
        ticks: names of the places 0, 1, … where the horizontal axis has no numbers.
        reference: value and name of a line across, e.g. plain decoding.
        log: logarithmic horizontal axis with this base.
        bottom: where the vertical axis begins.
        top: where it ends at most, e.g. 1 for a share.
    """

    title: str
    xlabel: str
    ylabel: str
    series: Sequence[Series]
    ticks: Sequence[str] | None = None
    reference: tuple[float, str] | None = None
    log: float | None = None
    bottom: float | None = None
    top: float | None = None


@dataclass(frozen=True)
class Grid:
    """One heatmap.

    Attributes:
        values: ``[rows, columns]``; None where there is no number.
        intervals: of the same shape, or None where no cell has one.
        rows, columns: names along the axes.
    """

    title: str
    values: Sequence[Sequence[float | None]]
    rows: Sequence[str]
    columns: Sequence[str]
    intervals: Sequence[Sequence[Interval | None]] | None = None


def bars(panels: Sequence[Panel], title: str, caption: str) -> Figure:
    """Groups of bars at named places, one panel below the other."""
    sizes = [(len(panel.series), len(panel.ticks or ())) for panel in panels]
    inches = max(5.0, *(1.2 + 0.22 * series * places + 0.65 * places for series, places in sizes))
    figure = Figure(figsize=(inches, 2.8 * len(panels)), layout="constrained")
    all_axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    variants = _variants(panels)
    for axes, panel in zip(all_axes, panels, strict=True):
        _bars(axes, panel, variants)
    _finish(figure, title, caption, legend=_legend(all_axes))
    return figure


def _variants(panels: Iterable[Panel]) -> dict[tuple[str, str], int]:
    """A number for each name of a method, the same in all panels of a figure."""
    names: dict[str, list[str]] = {}
    for panel in panels:
        for series in panel.series:
            own = names.setdefault(series.method, [])
            if series.name not in own:
                own.append(series.name)
    return {(m, name): i for m, own in names.items() for i, name in enumerate(own)}


def _bars(axes: Axes, panel: Panel, variants: Mapping[tuple[str, str], int]) -> None:
    width = 0.8 / max(1, len(panel.series))
    for i, series in enumerate(panel.series):
        style = bar_style(series.method, variants[series.method, series.name])
        points = [point for point in series.points if point.y is not None]
        offset = (i - (len(panel.series) - 1) / 2) * width
        axes.bar(
            [point.x + offset for point in points], [point.y or 0.0 for point in points],
            0.9 * width, label=series.name, linewidth=0.5, yerr=_errors(points),
            error_kw={"elinewidth": 0.9, "capsize": 2}, **style,
        )  # fmt: skip
    # An interval of two prompts may reach hundreds of times its value: it runs out of the picture,
    # marked by an arrow, rather than flattening every bar.
    _limit_height(axes, panel)
    axes.set_xticks(range(len(panel.ticks or ())), panel.ticks or ())
    axes.tick_params(axis="x", length=0)
    _label(axes, panel)


def curves(panels: Sequence[Sequence[Panel]], title: str, caption: str) -> Figure:
    """Lines with error bars; ``panels`` is a table of them, rows first."""
    n_rows, n_columns = len(panels), max(len(row) for row in panels)
    size = (max(5.0, 3.1 * n_columns), 2.5 * n_rows)
    figure = Figure(figsize=size, layout="constrained")
    table = figure.subplots(n_rows, n_columns, squeeze=False)
    variants = _variants(panel for row in panels for panel in row)
    for row, line in zip(table, panels, strict=True):
        for axes in row[len(line) :]:
            axes.set_axis_off()
        for axes, panel in zip(row, line, strict=False):
            _curve(axes, panel, variants)
    drawn = [axes for row in table for axes in row]
    _finish(figure, title, caption, legend=_legend(drawn))
    return figure


def _curve(axes: Axes, panel: Panel, variants: Mapping[tuple[str, str], int]) -> None:
    for series in panel.series:
        variant = variants[series.method, series.name]
        style = line_style(series.method, variant, series.dashed)
        if panel.ticks is not None:
            style["linestyle"] = "none"  # between names there is nothing
        points = [point for point in series.points if point.y is not None]
        axes.errorbar(
            [point.x for point in points], [point.y or 0.0 for point in points],
            yerr=_errors(points), label=series.name, elinewidth=0.9, capsize=2, **style,
        )  # fmt: skip
    if panel.log is not None:
        axes.set_xscale("log", base=panel.log)
    elif all(float(p.x).is_integer() for series in panel.series for p in series.points):
        axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    if panel.ticks is not None:
        axes.set_xticks(range(len(panel.ticks)), panel.ticks)
        axes.set_xlim(-0.5, len(panel.ticks) - 0.5)
    _limit_height(axes, panel)
    _label(axes, panel)


def _errors(points: Sequence[Point]) -> Any:
    """Lengths below and above; a point without an interval has none."""
    if not points:
        return None
    pairs = [(p.y or 0.0, p.interval or (p.y or 0.0, p.y or 0.0)) for p in points]
    # Never negative, although a rounded interval may miss its value by a hair.
    return [
        [max(0.0, value - low) for value, (low, _) in pairs],
        [max(0.0, high - value) for value, (_, high) in pairs],
    ]


def _limit_height(axes: Axes, panel: Panel) -> None:
    values = [p.y for series in panel.series for p in series.points if p.y is not None]
    if not values:
        return
    top = HEADROOM * max(max(values), panel.reference[0] if panel.reference else 0.0)
    if panel.top is not None:
        top = min(top, panel.top)
    for container in axes.containers:
        lines = getattr(container, "lines", None) or getattr(container, "errorbar", None)
        lines = getattr(lines, "lines", lines)
        if not lines or not lines[2]:
            continue
        for segment in lines[2][0].get_segments():
            if segment[1][1] > top:
                axes.plot(segment[1][0], top * 0.985, marker="^", color=REFERENCE, markersize=4)
    bottom = 0.0 if panel.bottom is None else panel.bottom
    axes.set_ylim(bottom, max(min(axes.get_ylim()[1], top), bottom + 0.1))


def _label(axes: Axes, panel: Panel) -> None:
    axes.set_ylabel(panel.ylabel)
    axes.set_xlabel(panel.xlabel)
    if panel.title:
        axes.set_title(panel.title, loc="left", fontsize=9)
    if panel.reference is not None:
        value, name = panel.reference
        axes.axhline(value, color=REFERENCE, linewidth=0.8, linestyle="--")
        axes.annotate(
            name, (1.0, value), xycoords=("axes fraction", "data"), xytext=(4, 0),
            textcoords="offset points", va="center",
        )  # fmt: skip


def heatmaps(
    grids: Sequence[Grid], xlabel: str, ylabel: str, unit: str, title: str, caption: str
) -> Figure:
    """Grids of numbers on one colour scale; a cell's interval stands below its number."""
    numbers = [value for grid in grids for row in grid.values for value in row if value is not None]
    low, high = (min(numbers), max(numbers)) if numbers else (0.0, 1.0)
    high = high if high > low else low + 1.0
    n_rows, n_columns = max(len(g.rows) for g in grids), max(len(g.columns) for g in grids)
    size = (1.4 + len(grids) * (0.56 * n_columns + 0.5), max(2.2, 0.8 + 0.42 * n_rows))
    figure = Figure(figsize=size, layout="constrained")
    all_axes = figure.subplots(1, len(grids), squeeze=False)[0]
    image = None
    for axes, grid in zip(all_axes, grids, strict=True):
        cells = np.array(
            [[math.nan if value is None else value for value in row] for row in grid.values]
        )
        image = axes.imshow(cells, cmap=HEATMAP, vmin=low, vmax=high, aspect="auto")
        axes.grid(visible=False)
        axes.set_xticks(range(len(grid.columns)), grid.columns)
        axes.set_yticks(range(len(grid.rows)), grid.rows)
        axes.tick_params(length=0)
        axes.set_title(grid.title, loc="left", fontsize=9)
        axes.set_xlabel(xlabel)
        _write_cells(axes, grid, (low + high) / 2)
    all_axes[0].set_ylabel(ylabel)
    bar = figure.colorbar(image, ax=list(all_axes), fraction=0.03, pad=0.02)
    bar.set_label(unit, fontsize=8)
    bar.outline.set_visible(False)
    _finish(figure, title, caption)
    return figure


def _write_cells(axes: Axes, grid: Grid, middle: float) -> None:
    for i, row in enumerate(grid.values):
        for j, value in enumerate(row):
            if value is None:
                axes.text(j, i, "–", ha="center", va="center", fontsize=7)
                continue
            colour = "white" if value < middle else "black"
            interval = grid.intervals[i][j] if grid.intervals is not None else None
            digits = 1 if value >= 10 else 2
            axes.text(
                j, i - (0.14 if interval else 0), f"{value:.{digits}f}", ha="center", va="center",
                fontsize=7.5, color=colour,
            )  # fmt: skip
            if interval:
                text = f"{interval[0]:.{digits}f}–{interval[1]:.{digits}f}"
                axes.text(j, i + 0.24, text, ha="center", va="center", fontsize=4.6, color=colour)


def stacks(
    rows: Mapping[str, Mapping[str, tuple[float, Interval | None]]],
    xlabel: str,
    title: str,
    caption: str,
    form: str = "{:.0%}",
) -> Figure:
    """Stacked horizontal bars: for each row its parts, in their order, with intervals.

    Args:
        rows: by name, the parts' lengths.
        xlabel: what a length is, with its unit.
        title: above.
        caption: below.
        form: of the number written into a part that has room for it.
    """
    figure = Figure(figsize=(7.0, 0.8 + 0.5 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    named = [(part, length) for row in rows.values() for part, (length, _) in row.items()]
    parts = list(dict.fromkeys(part for part, length in named if length > 0))
    longest = max((sum(v for v, _ in row.values()) for row in rows.values()), default=1.0)
    left = np.zeros(len(rows))
    for i, part in enumerate(parts):
        values = [row.get(part, (0.0, None)) for row in rows.values()]
        widths = np.array([value for value, _ in values])
        axes.barh(range(len(rows)), widths, left=left, label=part, height=0.6, **part_style(i))
        for place, (value, interval) in enumerate(values):
            if value > 0.04 * longest:
                # The interval belongs to the part's length, so it is drawn at the part's end.
                text = form.format(value)
                axes.text(
                    left[place] + value / 2, place, text, ha="center", va="center", fontsize=7,
                    bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "linewidth": 0},
                )  # fmt: skip
            if interval:
                end = left[place] + value
                axes.errorbar(
                    [end], [place + 0.36], xerr=[[value - interval[0]], [interval[1] - value]],
                    color=REFERENCE, elinewidth=0.9, capsize=2,
                )  # fmt: skip
        left = left + widths
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, 1.02 * longest)
    axes.set_xlabel(xlabel)
    _finish(figure, title, caption, legend=_legend([axes]))
    return figure


def bars_and_radar(
    panel: Panel, spokes: Sequence[str], around: Sequence[Series], title: str, caption: str
) -> Figure:
    """Bars on the left and, on the right, the values of each series around a circle of spokes."""
    wide = 0.6 * len(panel.series) * len(panel.ticks or ()) ** 0.5
    figure = Figure(figsize=(max(8.5, 5.0 + wide), 3.8), layout="constrained")
    variants = _variants([panel])
    left = figure.add_subplot(1, 2, 1)
    _bars(left, panel, variants)
    axes: Any = figure.add_subplot(1, 2, 2, projection="polar")
    angles = np.linspace(0, 2 * np.pi, len(spokes), endpoint=False)
    for series in around:
        style = line_style(series.method, variants[series.method, series.name], series.dashed)
        values = [math.nan if point.y is None else point.y for point in series.points]
        axes.plot([*angles, angles[0]], [*values, values[0]], label=series.name, **style)
    axes.set_xticks(angles, spokes)
    axes.tick_params(axis="x", pad=8)
    axes.set_rlabel_position(100)
    axes.set_ylim(bottom=0)
    axes.grid(visible=True)
    axes.legend(fontsize=6.5, loc="upper left", bbox_to_anchor=(1.08, 1.05))
    _finish(figure, title, caption, legend=_legend([left]))
    return figure


# --- what all kinds share -------------------------------------------------------------------------


def _legend(all_axes: Sequence[Axes]) -> dict[str, Any]:
    """Handles by name, each once."""
    handles: dict[str, Any] = {}
    for axes in all_axes:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
    return handles


def _finish(
    figure: Figure, title: str, caption: str, legend: Mapping[str, Any] | None = None
) -> None:
    """Title and legend above, caption below; ``savefig.bbox=tight`` keeps them in the picture."""
    inches, height = figure.get_size_inches()
    top = 1.0 + 0.02 / height
    if legend and len(legend) > 1:
        columns = max(2, min(len(legend), int(inches / 1.25)))
        lines = math.ceil(len(legend) / columns)
        figure.legend(
            legend.values(), legend.keys(), loc="lower left", bbox_to_anchor=(0.02, top),
            ncols=columns, fontsize=8,
        )  # fmt: skip
        top += (0.1 + 0.19 * lines) / height
    figure.text(0.02, top + 0.06 / height, title, fontsize=10, va="bottom", gid=TITLE)
    lines_below = [
        line
        for part in caption.splitlines()
        for line in textwrap.wrap(part, int(inches * _CHARACTERS_PER_INCH))
    ]
    below = 0.1 + _CAPTION_INCHES_PER_LINE * len(lines_below)
    words = "\n".join(lines_below)
    figure.text(0.02, -below / height, words, fontsize=7, va="bottom", gid=CAPTION)


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write a figure as PNG and SVG; the same figure gives the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for suffix, metadata in (("png", {"Software": None}), ("svg", {"Date": None})):
        paths.append(folder / f"{name}.{suffix}")
        figure.savefig(paths[-1], metadata=metadata)
    return paths
