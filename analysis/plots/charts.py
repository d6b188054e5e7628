"""Kinds of figure: numbers in, picture out.

Every function takes values with their 95 % intervals and draws both. What the numbers are is the
caller's business, how they look is :mod:`analysis.plots.style`'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, NullLocator

from analysis.plots.layout import (
    CLAIMED,
    LEADING,
    Drawing,
    canvas,
    finish,
    in_column,
    legend_of,
    print_width,
    ratio_ticks,
    with_cut,
)
from analysis.plots.style import (
    REFERENCE,
    Look,
    bar_style,
    claimed_style,
    leader_style,
    line_style,
    looks,
)
from specbench.results.estimate import Estimate, Interval

HEADROOM = 1.6  # height of a picture over its tallest bar, at most
_WIDEST = 9.4  # inches across, of a picture for a screen
_TALLEST = 8.6  # inches of a page of print
_ASIDE_TEXT = "Points of one place stand a little aside from each other."


@dataclass(frozen=True)
class Point:
    """A number at a place of the horizontal axis; ``y`` None leaves a gap.

    ``bound``: of a claim, whether it is but an ``upper`` bound ("up to") or a ``lower`` one.
    """

    x: float
    y: float | None
    interval: Interval | None = None
    bound: str = ""

    @classmethod
    def at(cls, x: float, estimate: Estimate) -> Point:
        return cls(x, estimate.value, estimate.interval)


@dataclass(frozen=True)
class Series:
    """Points of one method.

    Attributes:
        name: in the legend.
        method: decides the usual look.
        points: in the order of the axis.
        dashed: claimed by a paper, not measured here: in the color of what was measured.
        claimed: what a paper claims for the same, drawn as hollow markers on its bars.
        leaders: of a line, the places of its best point, then of those that may be as good.
    """

    name: str
    method: str
    points: Sequence[Point]
    dashed: bool = False
    claimed: Sequence[Point] = ()
    leaders: Sequence[float] = ()


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
    inches = max(
        1.2 + max(0.16 * len(panel.series) + 0.35, 0.072 * _longest(names)) * len(names)
        for panel in panels
        for names in [panel.ticks or ()]
    )
    figure = canvas(min(_WIDEST, max(5.0, inches)), (2.0 if print_width() else 2.5) * len(panels))
    all_axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    every = _looks(panels)
    for axes, panel in zip(all_axes, panels, strict=True):
        _bars(axes, panel, every)
        _limit_height([(axes, panel)])
    finish(figure, title, with_cut(caption, all_axes), legend=legend_of(all_axes))
    return figure


def _looks(panels: Iterable[Panel]) -> dict[tuple[str, str], Look]:
    """A look for each name of a method, the same in all panels of a figure."""
    every = [one for panel in panels for one in panel.series]
    measured = {one.method: (one.method, one.name) for one in reversed(every) if not one.dashed}
    # A paper's own numbers have the look of the first that was measured of the method.
    beside = {
        (one.method, one.name): measured.get(one.method, (one.method, one.name))
        for one in every
        if one.dashed
    }
    labels = {(one.method, one.name): (one.method, one.name) for one in every} | beside
    found = looks(labels.values())
    return {label: found[of] for label, of in labels.items()}


def _bars(axes: Axes, panel: Panel, every: Mapping[tuple[str, str], Look]) -> None:
    width = 0.8 / max(1, len(panel.series))
    for i, series in enumerate(panel.series):
        style = bar_style(every[series.method, series.name])
        points = [point for point in series.points if point.y is not None]
        offset = (i - (len(panel.series) - 1) / 2) * width
        axes.bar(
            [point.x + offset for point in points], [point.y or 0.0 for point in points],
            0.9 * width, label=series.name, linewidth=0.5, yerr=error_lengths(points),
            error_kw={"elinewidth": 0.8, "capsize": 1.5, "capthick": 0.8}, **style,
        )  # fmt: skip
        _claims(axes, series, offset)
    if panel.ticks is None:
        places = [point.x for series in panel.series for point in series.points] or [0.0]
        axes.set_xlim(min(places) - 0.5, max(places) + 0.5)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    else:
        _name_places(axes, panel.ticks)
    axes.tick_params(axis="x", length=0)
    _label(axes, panel)


def _longest(names: Sequence[str]) -> int:
    return max((len(line) for name in names for line in name.splitlines()), default=0)


def _name_places(axes: Axes, names: Sequence[str]) -> None:
    """Names of the places 0, 1, …, slanted where they would run into each other."""
    figure: Any = axes.figure
    columns = axes.get_gridspec().ncols
    inches = (figure.get_figwidth() / columns - 0.7) / max(1, len(names))
    axes.set_xticks(range(len(names)), names, fontsize="small")
    axes.set_xlim(-0.5, len(names) - 0.5)
    if _longest(names) * 0.0067 * mpl.rcParams["font.size"] > inches:
        flat = [name.replace("\n", ", ") for name in names]
        axes.set_xticks(range(len(names)), flat, rotation=32, ha="right", rotation_mode="anchor")


def _claims(axes: Axes, series: Series, offset: float) -> None:
    for point in series.claimed:
        if point.y is not None:
            style = claimed_style(point.bound)
            axes.plot([point.x + offset], [point.y], **style)
            axes.plot([], [], label=CLAIMED[point.bound], **style)


def curves(panels: Sequence[Sequence[Panel]], title: str, caption: str) -> Drawing:
    """Lines with error bars, or bars; ``panels`` is a table of them, rows first.

    Panels of a row that have the same unit on an axis have the same range there, too. A column of
    print has room for one panel only: there they stand below each other.
    """
    if in_column():
        panels = [[panel] for row in panels for panel in row]
    n_rows, n_columns = len(panels), max(len(row) for row in panels)
    height = min(1.9, _TALLEST / n_rows) if print_width() else 2.3
    figure = canvas(min(_WIDEST, max(4.6, 3.1 * n_columns)), height * n_rows)
    table = figure.subplots(n_rows, n_columns, squeeze=False)
    every = _looks(panel for row in panels for panel in row)
    aside = False
    for row, line in zip(table, panels, strict=True):
        for axes in row[len(line) :]:
            axes.set_axis_off()
        drawn = list(zip(row, line, strict=False))
        for axes, panel in drawn:
            if panel.bars:
                _bars(axes, panel, every)
            else:
                aside |= _curve(axes, panel, every)
        for unit in dict.fromkeys(panel.ylabel for panel in line):
            alike = [(axes, panel) for axes, panel in drawn if panel.ylabel == unit]
            _limit_height(alike)
            for axes, _ in alike[1:]:  # the left one's words are enough
                axes.set_ylabel("")
        for unit in dict.fromkeys(panel.xlabel for panel in line if panel.ticks is None):
            _same_width([axes for axes, panel in drawn if panel.xlabel == unit])
    all_axes = [axes for row in table for axes in row]
    words = with_cut(caption, all_axes)
    words = f"{words}\n{_ASIDE_TEXT}" if aside else words
    finish(figure, title, words, legend=legend_of(all_axes))
    return figure


def _same_width(all_axes: Sequence[Axes]) -> None:
    limits = [axes.get_xlim() for axes in all_axes]
    for axes in all_axes:
        axes.set_xlim(min(low for low, _ in limits), max(high for _, high in limits))


def _curve(axes: Axes, panel: Panel, every: Mapping[tuple[str, str], Look]) -> bool:
    """Draw a panel's lines, and say whether points were moved aside from each other."""
    places = sorted({point.x for series in panel.series for point in series.points}) or [0.0]
    # A little aside from each other, so that intervals at one place can be told apart.
    measured = [series for series in panel.series if not series.dashed]
    span = places[-1] - places[0] or 4.0
    aside = 0.007 * span if panel.log is None and len(measured) > 1 else 0.0
    for i, series in enumerate(panel.series):
        offset = 0.0 if series.dashed else aside * (i - (len(measured) - 1) / 2)
        style = line_style(every[series.method, series.name], series.dashed)
        if panel.ticks is not None:
            style["linestyle"] = "none"  # between names there is nothing
        points = [point for point in series.points if point.y is not None]
        axes.errorbar(
            [point.x + offset for point in points], [point.y or 0.0 for point in points],
            yerr=error_lengths(points), label=series.name, elinewidth=0.9, capsize=2, **style,
        )  # fmt: skip
        for rank, place in enumerate(series.leaders):
            found = next(point for point in points if point.x == place)
            look = leader_style(best=rank == 0)
            axes.plot([place + offset], [found.y or 0.0], **look)
            axes.plot([], [], label=LEADING[min(rank, 1)], **look | {"markersize": 6.5})
    if panel.log is not None:
        axes.set_xscale("log", base=panel.log)
        shown = places[:: math.ceil(len(places) / 8)]
        axes.set_xticks(shown, [_short(place, panel.log) for place in shown])
        axes.xaxis.set_minor_locator(NullLocator())
    elif all(float(place).is_integer() for place in places):
        axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
        if len(places) == 1:
            axes.set(xticks=places, xlim=(places[0] - 0.5, places[0] + 0.5))
    if panel.ticks is not None:
        _name_places(axes, panel.ticks)
    _label(axes, panel)
    return aside > 0


def _short(place: float, base: float) -> str:
    """A power of the base as one, other numbers as 5k or 2M."""
    power = math.log(place, base)
    if abs(power - round(power)) < 1e-9 and place >= 100:
        return f"${base:g}^{{{round(power)}}}$"
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if place >= size:
            return f"{place / size:.3g}{letter}"
    return f"{place:g}"


def error_lengths(points: Sequence[Point]) -> Any:
    """Lengths below and above, for error bars; a point without an interval has none."""
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
    series = [one for panel in panels for one in panel.series]
    values = [p.y for one in series for p in (*one.points, *one.claimed) if p.y is not None]
    if not values:
        return
    references = [panel.reference[0] for panel in panels if panel.reference]
    top = min([HEADROOM * max(values + references)] + [p.top for p in panels if p.top is not None])
    bottom = min(panel.bottom or 0.0 for panel in panels)
    ratios = any(panel.ratios for panel in panels) and min(values) > 0
    if ratios:
        bottom = min([low for s in series for p in s.points for low in _lows(p)] + values) / 1.15
    highest = max(axes.get_ylim()[1] for axes, _ in drawn)
    for axes, _ in drawn:
        if ratios:
            axes.set_yscale("log")
            axes.set_ylim(bottom, max(min(highest, top), 1.2 * max(values)))
            ratio_ticks(axes.yaxis)
            continue
        end = max(min(highest, top), bottom + 0.1)
        # Room for the markers of a line that runs along the bottom, where that is not 0.
        room = 0.03 * (end - bottom) if bottom and bottom in values else 0.0
        axes.set_ylim(bottom - room, end)


def _lows(point: Point) -> list[float]:
    """The interval's lower end, unless it is so low that it would flatten everything."""
    if point.y is None or point.interval is None:
        return []
    return [point.interval[0]] if point.interval[0] > point.y / HEADROOM else []


def _label(axes: Axes, panel: Panel) -> None:
    axes.set_ylabel(panel.ylabel)
    axes.set_xlabel(panel.xlabel)
    if panel.title:
        axes.set_title(panel.title, loc="left", fontsize="medium")
    if panel.reference is not None:
        value, name = panel.reference
        axes.axhline(value, color=REFERENCE, linewidth=0.8, linestyle="--", label=name)
