"""Bars, lines, ranked intervals, dots, stacked bars: numbers and intervals in, picture out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, FixedLocator, MaxNLocator, NullLocator

from analysis.plots.style import (
    PLAIN_LINE,
    REFERENCE,
    Drawing,
    Keywords,
    Look,
    canvas,
    color_of,
    family_of,
    finish,
    looks,
    ratio_ticks,
    rows_down,
    unit_of,
)
from specbench.results.cells import Interval, NumberCell

_LETTERS = 86  # of names side by side, in all panels of a row
_DENSE = 24  # points of lines whose intervals are drawn thin
_FEW = 12  # dots whose intervals leave a picture readable
# An interval is drawn up to this multiple of its value: one of two prompts may reach hundreds
# of times its value, and would flatten everything.
_HEADROOM = 1.6
_COSTS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0)  # of a step, in steps of plain decoding
_GUIDE: Keywords = {"color": "#CCCCCC", "linewidth": 1.0, "zorder": 0}
_BARS: Keywords = {"elinewidth": 0.9, "capsize": 2, "ecolor": REFERENCE}  # intervals over bars
_WITHIN = 0.10  # relative distance from the diagonal that is shaded
# Parts of a whole, e.g. the phases of a step; a part is not a method.
_PARTS = ("#DDDDDD", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7", "#F0E442")
_ROOM = 0.04  # of the longest bar, from which a part has room for its number


@dataclass(frozen=True)
class Point:
    """A number at a position of the horizontal axis; ``y`` None leaves a gap.

    Attributes:
        hollow: whether the number does not differ significantly from plain decoding.
        across: the interval of ``x`` where that was measured, too.
    """

    x: float
    y: float | None
    interval: Interval | None = None
    hollow: bool = False
    across: Interval | None = None

    @classmethod
    def at(cls, x: float, estimate: NumberCell, hollow: bool = False) -> Point:
        few = estimate.few and estimate.compares  # of too few cases there is no speedup
        return cls(x, None if few else estimate.value, estimate.interval, hollow=hollow)


@dataclass(frozen=True)
class Series:
    """Points of one method.

    Attributes:
        name: in the legend, or left of the row.
        method: decides the color.
        points: in the order of the axis.
        claimed: a paper's claims for the same points, drawn as diamonds.
        joined: whether a line joins the points.
    """

    name: str
    method: str
    points: Sequence[Point]
    claimed: Sequence[Point] = ()
    joined: bool = True

    @property
    def drawn(self) -> list[tuple[float, float, Point]]:
        """Positions and heights of the points that have a number."""
        return [(point.x, point.y, point) for point in self.points if point.y is not None]


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        title: above it; "" for none.
        xlabel, ylabel: with units.
        ticks: names of the positions 0, 1, … if the horizontal axis has no numbers.
        even: whether to draw plain decoding as a line at 1.0.
        log: logarithmic horizontal axis.
        bottom: lower end of the vertical axis.
        top: largest upper end, e.g. 1 for a share.
        bars: bars instead of lines.
    """

    title: str
    xlabel: str
    ylabel: str
    series: Sequence[Series]
    ticks: Sequence[str] | None = None
    even: bool = False
    log: bool = False
    bottom: float | None = None
    top: float | None = None
    bars: bool = False

    @classmethod
    def for_metric(
        cls, key: str, timing: str, series: Sequence[Series], xlabel: str = "", **more: Any
    ) -> Panel:
        """Make the panel of a metric; ``speedup`` gets the line of plain decoding."""
        # A pass yields at least one token, so the axis of MAT begins at 1.
        bottom = 1.0 if key == "mat" else None
        top = {"draft_share": 1.0, "hit_rate": 1.02}.get(key)
        title, unit, even = more.pop("title", ""), unit_of(key, timing), key == "speedup"
        return cls(title, xlabel, unit, series, even=even, bottom=bottom, top=top, **more)


def bars(panels: Sequence[Panel], title: str, caption: str) -> Drawing:
    """Draw groups of bars at named positions, one panel below the other."""
    return curves([[replace(panel, bars=True)] for panel in panels], title, caption)


def curves(panels: Sequence[Sequence[Panel]], title: str, caption: str) -> Drawing:
    """Draw lines with error bars, or bars; ``panels`` is a table of them, rows first.

    Panels of a row that have the same unit on an axis have the same range there, too.
    """
    figure = canvas(2.7 * len(panels))
    table = figure.subplots(len(panels), max(map(len, panels)), squeeze=False)
    all_series = [series for row in panels for panel in row for series in panel.series]
    by_label = looks((series.method, series.name) for series in all_series)
    for row_axes, row in zip(table, panels, strict=True):
        for axes in row_axes[len(row) :]:
            axes.set_axis_off()
        drawn = list(zip(row_axes, row, strict=False))
        for axes, panel in drawn:
            for i, series in enumerate(panel.series):
                draw = _draw_bars if panel.bars else _draw_line
                draw(axes, panel, i, by_label[series.method, series.name])
            _set_ticks(axes, panel, [p for p in row if p.xlabel == panel.xlabel])
            axes.set(xlabel=panel.xlabel, ylabel=panel.ylabel)
            axes.set_title(panel.title, loc="left", fontsize="medium")
            if panel.even:
                axes.axhline(1.0, **PLAIN_LINE)
        for unit in dict.fromkeys(panel.ylabel for panel in row):
            alike = [(axes, panel) for axes, panel in drawn if panel.ylabel == unit]
            _limit_heights(alike)
            for axes, _ in alike[1:]:  # the left panel's label is enough
                axes.set_ylabel("")
        for unit in dict.fromkeys(panel.xlabel for panel in row if panel.ticks is None):
            numbered = [axes for axes, panel in drawn if panel.xlabel == unit]
            ends = [end for axes in numbered for end in axes.get_xlim()]
            for axes in numbered:
                axes.set_xlim(min(ends), max(ends))
    return finish(figure, title, caption, _any_hollow(all_series))


def _any_hollow(series: Sequence[Series]) -> bool:
    return any(point.hollow for row in series for point in row.points)


def _draw_bars(axes: Axes, panel: Panel, number: int, look: Look) -> None:
    series = panel.series[number]
    width = 0.8 / len(panel.series)
    shift = (number - (len(panel.series) - 1) / 2) * width
    colors = [
        ("white", look.color) if p.hollow else (look.color, "white") for *_, p in series.drawn
    ]
    axes.bar(
        [x + shift for x, _, _ in series.drawn], [y for _, y, _ in series.drawn], 0.88 * width,
        label=series.name, color=[inside for inside, _ in colors],
        edgecolor=[edge for _, edge in colors], linewidth=0.8, hatch=look.hatch,
        yerr=_error_lengths([(y, point.interval) for _, y, point in series.drawn]),
        error_kw=_BARS | {"elinewidth": 0.8, "capsize": 1.5},
    )  # fmt: skip
    _draw_claims(axes, series, shift)


def _draw_line(axes: Axes, panel: Panel, number: int, look: Look) -> None:
    series = panel.series[number]
    dense = sum(len(other.points) for other in panel.series) > _DENSE
    caps = {"elinewidth": 0.4, "capsize": 0} if dense else {"elinewidth": 0.9, "capsize": 2}
    joined = series.joined and panel.ticks is None  # names have no order to follow
    style = look.dot() | {"markersize": 4.5, "linewidth": 1.4}
    style["linestyle"] = look.dashes if joined else "none"
    axes.errorbar(
        [x for x, _, _ in series.drawn], [y for _, y, _ in series.drawn], label=series.name,
        yerr=_error_lengths([(y, point.interval) for _, y, point in series.drawn]),
        **caps, **style,
    )  # fmt: skip
    hollow = [(x, y) for x, y, point in series.drawn if point.hollow]
    over = look.dot(hollow=True) | {"markersize": 4.5, "zorder": 3}
    axes.plot([x for x, _ in hollow], [y for _, y in hollow], **over)
    _draw_claims(axes, series)


def _draw_claims(axes: Axes, series: Series, shift: float = 0.0) -> None:
    axes.plot(
        [point.x + shift for point in series.claimed], [point.y for point in series.claimed],
        linestyle="none", marker="D", markersize=5, zorder=4, markerfacecolor="white",
        markeredgecolor=REFERENCE, markeredgewidth=1.3, label="claimed" if series.claimed else None,
    )  # fmt: skip


def _set_ticks(axes: Axes, panel: Panel, alike: Sequence[Panel]) -> None:
    """Name the positions of the horizontal axis; slant names that would overlap."""
    n_columns = axes.get_gridspec().ncols
    if panel.ticks is not None:
        widths = [max(map(len, name.splitlines() or [""])) for name in panel.ticks]
        slanted = n_columns * len(widths) * max(widths, default=0) > _LETTERS
        names = [name.replace("\n", ", ") if slanted else name for name in panel.ticks]
        slant = {"rotation": 32, "ha": "right", "rotation_mode": "anchor"} if slanted else {}
        axes.set_xticks(range(len(names)), names, fontsize="small", **slant)
        axes.set_xlim(-0.5, len(names) - 0.5)
        axes.tick_params(axis="x", length=0)
        return
    positions = sorted({point.x for point in _points(alike)}) or [1.0]
    if panel.log:
        axes.set_xscale("log", base=2)
        axes.set_xlim(positions[0] / 1.12, 1.12 * positions[-1])
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 5k, 2M
        axes.xaxis.set_minor_locator(NullLocator())
    if all(float(position).is_integer() for position in positions):
        most = 7 if panel.bars else max(3, 8 // n_columns)
        few = len(positions) <= most or panel.log
        ticks = FixedLocator(positions, most) if few else MaxNLocator(most, integer=True)
        axes.xaxis.set_major_locator(ticks)


def _points(panels: Sequence[Panel]) -> list[Point]:
    """List all points of the panels, claimed ones too."""
    lines = [line for panel in panels for line in panel.series]
    return [point for line in lines for point in (*line.points, *line.claimed)]


def _error_lengths(numbers: Sequence[tuple[float, Interval | None]]) -> Any:
    """Compute lengths ``[2, n]`` below and above for error bars; nan without an interval."""
    ends = [(value, *(interval or (math.nan, math.nan))) for value, interval in numbers]
    lengths = [(value - low, high - value) for value, low, high in ends]
    # Never negative, although a rounded interval may miss its value by a hair.
    return np.maximum(0.0, np.array(lengths).T) if lengths else None


def _span(points: Sequence[Point], even: bool) -> tuple[float, float]:
    """Return ends that hold all values, intervals up to `_HEADROOM`, and 1.0 where it is drawn."""
    ends = [(p.y, *(p.interval or (p.y, p.y))) for p in points if p.y is not None]
    lows = [max(low, y / _HEADROOM) for y, low, _ in ends]
    highs = [min(high, y * _HEADROOM) for y, _, high in ends]
    also = [1.0] if even or not ends else []
    return min(lows + also), max(highs + also)


def _limit_heights(drawn: Sequence[tuple[Axes, Panel]]) -> None:
    """Give axes of one unit the same heights."""
    panels = [panel for _, panel in drawn]
    low, high = _span(_points(panels), any(panel.even for panel in panels))
    top = min([1.05 * high, *(panel.top for panel in panels if panel.top is not None)])
    # Bars and shares begin at 0, since their length is what a reader compares.
    from_zero = any(panel.bars or panel.top is not None for panel in panels)
    for axes, panel in drawn:
        bottom = (0.0 if from_zero else 0.95 * low) if panel.bottom is None else panel.bottom
        end = max(top, bottom + 0.1)
        # Room for markers along a bottom that is not 0.
        axes.set_ylim(bottom - (0.03 * (end - bottom) if panel.bottom else 0.0), end)


def ranked(rows: Sequence[Series], unit: str, title: str, caption: str) -> Drawing:
    """Draw the ratio of each row's only point with its interval, in the order of the rows."""
    figure = canvas(0.6 + 0.2 * len(rows))
    axes = figure.subplots()
    for y, row in enumerate(rows):
        for _, value, point in row.drawn:
            lengths = _error_lengths([(value, point.interval)])
            style = Look(color_of(family_of(row.method))).dot(point.hollow)
            axes.errorbar([value], [y], xerr=lengths, elinewidth=1.4, **style)
    axes.axvline(1.0, **PLAIN_LINE)
    axes.set_xlabel(unit)
    rows_down(axes, [row.name for row in rows])
    low, high = _span([row.points[0] for row in rows], even=True)
    room = 0.04 * max(high - low, 0.1)
    axes.set_xlim(low - room, high + room)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=(1, 2, 2.5, 5, 10)))
    for family in dict.fromkeys(family_of(row.method) for row in rows):
        axes.scatter([], [], color=color_of(family), label=family)
    return finish(figure, title, caption, _any_hollow(rows))


def mat_against_speedup(
    rows: Sequence[Series], units: tuple[str, str], title: str, caption: str
) -> Drawing:
    """Draw each row's only point, MAT across and speedup up, over lines of equal cost of a step."""
    figure = canvas(4.2)
    axes = figure.subplots()
    dots = _draw_dots(axes, rows)
    right, top = (max(1.3, *(1.07 * dot[i] for dot in dots)) for i in range(2))
    bottom = 0.92 * min(1.0, *(speedup for _, speedup in dots))
    for cost in _COSTS:
        end = min(right, top * cost)
        if end / cost < bottom:
            break
        name = "a step's cost in passes of plain decoding" if cost == _COSTS[0] else None
        axes.plot([1.0, end], [1.0 / cost, end / cost], label=name, **_GUIDE)
        axes.annotate(
            f"{cost:g}×", (end, end / cost), xytext=(3, 1), textcoords="offset points",
            fontsize="small", color=REFERENCE, annotation_clip=False,
        )  # fmt: skip
    axes.axhline(1.0, **PLAIN_LINE)
    axes.set(xlim=(1.0 - 0.03 * (right - 1.0), right), ylim=(bottom, top))
    axes.set(xlabel=units[0], ylabel=units[1])
    axes.grid(visible=False)
    return finish(figure, title, caption, _any_hollow(rows))


def predicted_against_measured(rows: Sequence[Series], title: str, caption: str) -> Drawing:
    """Draw measured speedups across, predicted ones up, on log axes: on the line they agree."""
    figure = canvas(4.2)
    axes = figure.subplots()
    values = [value for dot in _draw_dots(axes, rows) for value in dot]
    ends = [min(values) / 1.15, 1.15 * max(values)]
    edges = [[(1 + sign * _WITHIN) * end for end in ends] for sign in (-1, 1)]
    axes.fill_between(ends, *edges, color="#E4E4E4", linewidth=0, label=f"within {_WITHIN:.0%}")
    axes.plot(ends, ends, color=REFERENCE, linewidth=0.8, zorder=1.5, label="equal")
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set(xlabel="measured speedup over plain decoding", ylabel="predicted speedup")
    for axis in (axes.xaxis, axes.yaxis):
        ratio_ticks(axis)
    return finish(figure, title, caption)


def _draw_dots(axes: Axes, rows: Sequence[Series]) -> list[tuple[float, float]]:
    """Draw a dot for each row, with intervals if there are few rows; return the positions."""
    by_label = looks((row.method, row.name) for row in rows)
    dots = [(row, *dot) for row in rows for dot in row.drawn]
    for row, x, y, point in dots:
        ends = {"xerr": (x, point.across), "yerr": (y, point.interval)}
        few = {key: _error_lengths([end]) for key, end in ends.items() if len(rows) <= _FEW}
        look = by_label[row.method, row.name].dot(point.hollow)
        axes.errorbar([x], [y], **few, label=row.name, elinewidth=0.4, **look)
    return [(x, y) for _, x, y, _ in dots]


def stacked_bars(
    rows: Mapping[str, Mapping[str, NumberCell]],
    xlabel: str,
    title: str,
    caption: str,
    form: str = "{:.0%}",
) -> Drawing:
    """Draw horizontal bars of parts by row, the interval of each part at its end.

    ``form`` formats the number written into a part that has room for it.
    """
    parts = dict.fromkeys(part for row in rows.values() for part in row if row[part].value)
    longest = max((sum(c.value or 0 for c in row.values()) for row in rows.values()), default=1.0)
    figure = canvas(0.8 + 0.42 * len(rows))
    axes = figure.subplots()
    left = np.zeros(len(rows))
    for part, color in zip(parts, _PARTS, strict=False):
        cells = [row.get(part, NumberCell(None)) for row in rows.values()]
        widths = np.array([cell.value or 0.0 for cell in cells])
        drawn = axes.barh(
            range(len(rows)), widths, left=left, label=part, height=0.6, linewidth=0.5, color=color,
            edgecolor=REFERENCE, error_kw=_BARS,
            xerr=_error_lengths([(cell.value or 0.0, cell.interval) for cell in cells]),
        )  # fmt: skip
        texts = [form.format(width) if width > _ROOM * longest else "" for width in widths]
        axes.bar_label(drawn, texts, label_type="center", fontsize="small")
        left = left + widths
    rows_down(axes, list(rows))
    axes.set(xlim=(0, 1.02 * longest), xlabel=xlabel)
    return finish(figure, title, caption)
