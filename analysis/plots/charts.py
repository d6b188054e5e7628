"""Bars and lines: numbers with their 95 % intervals in, picture out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullLocator

from analysis.plots.layout import WIDTH, Drawing, canvas, finish, legend_of, ratio_ticks
from analysis.plots.style import HOLLOW, REFERENCE, Look, dot_style, looks
from specbench.results.estimate import Estimate, Interval
from specbench.results.metrics import standing_word

_ROUND = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0)  # on a log axis
_DENSE = 24  # points whose intervals are drawn thin
HEADROOM = 1.6  # height of a picture over its highest value, at most
_CLAIMED = {
    "": ("claimed", "D"),
    "upper": ("claimed at most", "v"),
    "lower": ("claimed at least", "^"),
}


@dataclass(frozen=True)
class Point:
    """A number at a place of the horizontal axis; ``y`` None leaves a gap.

    Attributes:
        bound: of a claim, whether it is but an ``upper`` bound ("up to") or a ``lower`` one.
        hollow: whether no difference from plain decoding is shown.
    """

    x: float
    y: float | None
    interval: Interval | None = None
    bound: str = ""
    hollow: bool = False

    @classmethod
    def at(cls, x: float, estimate: Estimate, hollow: bool = False) -> Point:
        few = estimate.few and estimate.compares  # of too few cases there is no speedup
        return cls(x, None if few else estimate.value, estimate.interval, hollow=hollow)


@dataclass(frozen=True)
class Series:
    """Points of one method.

    Attributes:
        name: in the legend.
        method: decides the color.
        points: in the order of the axis.
        dashed: claimed by a paper, not measured here: in the color of what was measured.
        claimed: what a paper claims for the same, drawn as diamonds on its bars.
        leaders: of a line, the places of its highest point, then of those that may be as high.
        joined: whether a line joins the points.
    """

    name: str
    method: str
    points: Sequence[Point]
    dashed: bool = False
    claimed: Sequence[Point] = ()
    leaders: Sequence[float] = ()
    joined: bool = True


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        title: above it; "" for none.
        xlabel, ylabel: with units.
        ticks: names of the places 0, 1, … where the horizontal axis has no numbers.
        reference: value and name of a line across, e.g. plain decoding.
        log: logarithmic horizontal axis with this base.
        ratios: logarithmic vertical axis, where some numbers are many times others.
        bottom: where the vertical axis begins.
        top: where it ends at most, e.g. 1 for a share.
        bars: bars instead of lines, in a table of panels too.
    """

    title: str
    xlabel: str
    ylabel: str
    series: Sequence[Series]
    ticks: Sequence[str] | None = None
    reference: tuple[float, str] | None = None
    log: float | None = None
    ratios: bool = False
    bottom: float | None = None
    top: float | None = None
    bars: bool = False


def bars(panels: Sequence[Panel], title: str, caption: str) -> Drawing:
    """Groups of bars at named places, one panel below the other."""
    figure = canvas(2.6 * len(panels))
    all_axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    every = _looks(panels)
    for axes, panel in zip(all_axes, panels, strict=True):
        _bars(axes, panel, every)
        _limit_height([(axes, replace(panel, bars=True))])
    finish(figure, title, caption, _legend(all_axes, panels))
    return figure


def curves(panels: Sequence[Sequence[Panel]], title: str, caption: str) -> Drawing:
    """Lines with error bars, or bars; ``panels`` is a table of them, rows first.

    Panels of a row that have the same unit on an axis have the same range there, too.
    """
    figure = canvas(2.7 * len(panels))
    table = figure.subplots(len(panels), max(len(row) for row in panels), squeeze=False)
    flat = [panel for row in panels for panel in row]
    every = _looks(flat)
    for line, row in zip(table, panels, strict=True):
        for axes in line[len(row) :]:
            axes.set_axis_off()
        drawn = list(zip(line, row, strict=False))
        for axes, panel in drawn:
            (_bars if panel.bars else _lines)(axes, panel, every)
        for unit in dict.fromkeys(panel.ylabel for panel in row):
            alike = [(axes, panel) for axes, panel in drawn if panel.ylabel == unit]
            _limit_height(alike)
            for axes, _ in alike[1:]:  # the left one's words are enough
                axes.set_ylabel("")
        for unit in dict.fromkeys(panel.xlabel for panel in row if panel.ticks is None):
            alike = [(axes, panel) for axes, panel in drawn if panel.xlabel == unit]
            limits = [axes.get_xlim() for axes, _ in alike]
            for axes, _ in alike:
                axes.set_xlim(min(low for low, _ in limits), max(high for _, high in limits))
    finish(figure, title, caption, _legend(table.flatten(), flat))
    return figure


def _looks(panels: Iterable[Panel]) -> dict[tuple[str, str], Look]:
    """A look for each name of a method, the same in all panels of a figure."""
    every = [series for panel in panels for series in panel.series]
    found = looks((series.method, series.name) for series in every if not series.dashed)
    # A paper's own numbers have the look of what was measured of the method.
    measured = {method: look for (method, _), look in reversed(found.items())}
    rest = looks((series.method, series.name) for series in every)
    return {key: found.get(key) or measured.get(key[0], look) for key, look in rest.items()}


def _legend(all_axes: Sequence[Axes], panels: Iterable[Panel]) -> dict[str, Any]:
    legend = legend_of(all_axes)
    points = [p for panel in panels for series in panel.series for p in series.points]
    if any(point.hollow for point in points):
        legend[HOLLOW] = Line2D([], [], **dot_style(Look(REFERENCE), hollow=True))
    return legend


def _bars(axes: Axes, panel: Panel, every: Mapping[tuple[str, str], Look]) -> None:
    width = 0.8 / max(1, len(panel.series))
    for i, series in enumerate(panel.series):
        look = every[series.method, series.name]
        points = [point for point in series.points if point.y is not None]
        places = [point.x + (i - (len(panel.series) - 1) / 2) * width for point in points]
        axes.bar(
            places, [point.y or 0.0 for point in points], 0.88 * width, label=series.name,
            color=["white" if point.hollow else look.color for point in points], linewidth=0.8,
            edgecolor=look.color if any(p.hollow for p in points) else "white",
            hatch=look.hatch, yerr=error_lengths(points),
            error_kw={"elinewidth": 0.8, "capsize": 1.5, "ecolor": REFERENCE},
        )  # fmt: skip
        for point in series.claimed:
            name, marker = _CLAIMED[point.bound]
            place = point.x + (i - (len(panel.series) - 1) / 2) * width
            axes.plot(
                [place], [point.y], linestyle="none", marker=marker, markersize=5, zorder=4,
                markerfacecolor="white", markeredgecolor=REFERENCE, markeredgewidth=1.3,
                label=name,
            )  # fmt: skip
    if panel.ticks is None:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    else:
        _name_places(axes, panel.ticks)
    axes.tick_params(axis="x", length=0)
    _label(axes, panel)


def _lines(axes: Axes, panel: Panel, every: Mapping[tuple[str, str], Look]) -> None:
    places = sorted({point.x for series in panel.series for point in series.points}) or [0.0]
    dense = sum(len(series.points) for series in panel.series) > _DENSE
    caps = {"elinewidth": 0.4, "capsize": 0} if dense else {"elinewidth": 0.9, "capsize": 2}
    for series in panel.series:
        look = every[series.method, series.name]
        points = [point for point in series.points if point.y is not None]
        joined = series.joined and panel.ticks is None  # between names there is nothing
        style = dot_style(look, hollow=series.dashed) | {"markersize": 4.5, "linewidth": 1.4}
        style["linestyle"] = (":" if series.dashed else look.dashes) if joined else "none"
        axes.errorbar(
            [point.x for point in points], [point.y for point in points],
            yerr=error_lengths(points), label=series.name, **caps, **style,
        )  # fmt: skip
        hollow = [point for point in points if point.hollow]
        axes.plot(
            [point.x for point in hollow], [point.y for point in hollow], zorder=3,
            **dot_style(look, hollow=True) | {"markersize": 4.5},
        )  # fmt: skip
        heights = {point.x: point.y for point in points}
        for rank, place in enumerate(series.leaders):
            alone = len(series.leaders) == 1
            axes.plot(
                [place], [heights[place]], linestyle="none", marker="o", markerfacecolor="none",
                markersize=9, markeredgewidth=1.3, zorder=1.5,
                markeredgecolor="#999999" if rank else "black",
                label=standing_word("undecided" if rank else "best" if alone else "highest"),
            )  # fmt: skip
    if panel.log is not None:
        axes.set_xscale("log", base=panel.log)
        shown = places[:: math.ceil(len(places) / 7)]
        if not all(float(place).is_integer() for place in places):
            shown = [n for n in _ROUND if places[0] <= n <= places[-1]]
        axes.set_xlim(places[0] / 1.12, 1.12 * places[-1])
        axes.set_xticks(shown, [_short(place) for place in shown])
        axes.xaxis.set_minor_locator(NullLocator())
    elif panel.ticks is not None:
        _name_places(axes, panel.ticks)
    elif all(float(place).is_integer() for place in places):
        nbins = max(3, 8 // axes.get_gridspec().ncols)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=nbins, integer=True))
        if len(places) <= nbins:
            axes.set_xticks(places)
        if len(places) == 1:
            axes.set(xticks=places, xlim=(places[0] - 0.5, places[0] + 0.5))
    _label(axes, panel)


def _name_places(axes: Axes, names: Sequence[str]) -> None:
    """Names of the places 0, 1, …, slanted where they would run into each other."""
    axes.set_xticks(range(len(names)), names, fontsize="small")
    axes.set_xlim(-0.5, len(names) - 0.5)
    longest = max((len(line) for name in names for line in name.splitlines()), default=0)
    inches = (WIDTH - 2.4) / axes.get_gridspec().ncols / max(1, len(names))
    if longest * 0.0062 * mpl.rcParams["font.size"] > inches:
        flat = [name.replace("\n", ", ") for name in names]
        axes.set_xticks(range(len(names)), flat, rotation=32, ha="right", rotation_mode="anchor")


def _short(place: float) -> str:
    """A number as 5k or 2M."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if place >= size:
            return f"{place / size:.3g}{letter}"
    return f"{place:g}"


def error_lengths(points: Sequence[Point]) -> Any:
    """Lengths ``[2, n]`` below and above, for error bars; nan of a point without an interval."""
    if not points:
        return None
    pairs = [(p.y or 0.0, p.interval or (math.nan, math.nan)) for p in points]
    lengths = [(value - low, high - value) for value, (low, high) in pairs]
    # Never negative, although a rounded interval may miss its value by a hair.
    return np.maximum(0.0, np.array(lengths).T)


def _limit_height(drawn: Sequence[tuple[Axes, Panel]]) -> None:
    """Give the axes one height.

    An interval of two prompts may reach hundreds of times its value: it runs out of the picture,
    rather than flattening everything.
    """
    panels = [panel for _, panel in drawn]
    points = [p for panel in panels for s in panel.series for p in (*s.points, *s.claimed)]
    values = [p.y for p in points if p.y is not None]
    if not values:
        return
    references = [panel.reference[0] for panel in panels if panel.reference]
    spread = [(p.y, p.interval) for p in points if p.y is not None and p.interval]
    lows = [max(low, y / HEADROOM) for y, (low, _) in spread]
    highs = [min(high, y * HEADROOM) for y, (_, high) in spread]
    top = 1.05 * max(values + references + highs)
    top = min([top] + [panel.top for panel in panels if panel.top is not None])
    # Bars and shares begin at 0, whose length or part of a whole is what is seen.
    from_zero = any(panel.bars or panel.top is not None for panel in panels)
    lowest = 0.0 if from_zero else 0.95 * min(values + references + lows)
    for axes, panel in drawn:
        if panel.ratios and min(values) > 0:
            axes.set_yscale("log")
            axes.set_ylim(0.85 * min(values), 1.1 * top)
            ratio_ticks(axes.yaxis)
        else:
            bottom = lowest if panel.bottom is None else panel.bottom
            end = max(top, bottom + 0.1)
            # Room for markers along a bottom that is not 0.
            axes.set_ylim(bottom - (0.03 * (end - bottom) if panel.bottom else 0.0), end)


def _label(axes: Axes, panel: Panel) -> None:
    axes.set(xlabel=panel.xlabel, ylabel=panel.ylabel)
    axes.set_title(panel.title, loc="left", fontsize="medium")
    if panel.reference is not None:
        value, name = panel.reference
        axes.axhline(value, color=REFERENCE, linewidth=0.8, linestyle="--", label=name)
