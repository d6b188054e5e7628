"""Ranked intervals, and two numbers of each method against each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from analysis.plots.charts import HEADROOM, Point, error_lengths
from analysis.plots.layout import Drawing, canvas, finish, legend_of, ratio_ticks, rows_down
from analysis.plots.style import (
    BAND,
    HOLLOW,
    PLAIN,
    REFERENCE,
    Keywords,
    Look,
    color_of,
    dot_style,
    family_of,
    looks,
)
from specbench.results.estimate import Estimate

_COSTS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0)  # of a step, in steps of plain decoding
_BARS = 12  # dots whose intervals leave a picture readable
_PLAIN: Keywords = {"color": REFERENCE, "linewidth": 0.8, "linestyle": "--"}
_GUIDE: Keywords = {"color": "#CCCCCC", "linewidth": 1.0, "zorder": 0}


@dataclass(frozen=True)
class Row:
    """A method's numbers.

    Attributes:
        name: as shown; ``method`` decides the color.
        values: an estimate for each panel; of a dot its place across and its height.
        hollow: whether no difference from plain decoding is shown.
    """

    name: str
    method: str
    values: Sequence[Estimate]
    hollow: bool = False


def ranked(rows: Sequence[Row], units: Sequence[str], title: str, caption: str) -> Drawing:
    """Ratios with intervals in the order of the rows, a panel for each unit, on one scale."""
    figure = canvas(0.6 + 0.2 * len(rows))
    panels = figure.subplots(1, len(units), squeeze=False, sharex=True, sharey=True)[0]
    for number, (axes, unit) in enumerate(zip(panels, units, strict=True)):
        for place, row in enumerate(rows):
            cell = row.values[number]
            if cell.value is not None:
                style = dot_style(Look(color_of(family_of(row.method))), row.hollow)
                lengths = error_lengths([Point.at(0, cell)])
                axes.errorbar([cell.value], [place], xerr=lengths, elinewidth=1.4, **style)
        axes.axvline(1.0, **_PLAIN)
        axes.set_xlabel(unit)
    rows_down(panels[0], [row.name for row in rows])
    _limit(panels[0], [cell for row in rows for cell in row.values])
    for axes in panels[1:]:
        axes.grid(visible=True, axis="x")
        axes.grid(visible=False, axis="y")
    finish(figure, title, caption, _family_legend(rows))
    return figure


def _family_legend(rows: Iterable[Row]) -> dict[str, Any]:
    """What colors and marks stand for."""
    families = dict.fromkeys(family_of(row.method) for row in rows)
    legend: dict[str, Any] = {name: Patch(color=color_of(name)) for name in families}
    if any(row.hollow for row in rows):
        legend[HOLLOW] = Line2D([], [], **dot_style(Look(REFERENCE), hollow=True))
    return legend | {PLAIN: Line2D([], [], **_PLAIN)}


def _limit(axes: Axes, cells: Sequence[Estimate]) -> None:
    """Room for all values, and for intervals unless they are so long that they flatten the rest."""
    values = [1.0, *(cell.value for cell in cells if cell.value is not None)]
    ends = [end for cell in cells for end in cell.interval or ()]
    low = max(min(values + ends), min(values) / HEADROOM)
    high = min(max(values + ends), max(values) * HEADROOM)
    room = 0.04 * max(high - low, 0.1)
    axes.set_xlim(low - room, high + room)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=(1, 2, 2.5, 5, 10)))


def _dots(axes: Axes, rows: Sequence[Row]) -> None:
    """A dot for each method at its two numbers, with its intervals where they are few."""
    every = looks((row.method, row.name) for row in rows)
    few = len(rows) <= _BARS
    for row in rows:
        x, y = row.values
        axes.errorbar(
            [x.value], [y.value], xerr=error_lengths([Point.at(0, x)]) if few else None,
            yerr=error_lengths([Point.at(0, y)]) if few else None, label=row.name, elinewidth=0.4,
            **dot_style(every[row.method, row.name], row.hollow),
        )  # fmt: skip


def _with_marks(axes: Axes, rows: Sequence[Row], **lines: Keywords) -> dict[str, Any]:
    """The legend of :func:`_dots` and of lines by name."""
    legend = legend_of([axes])
    if any(row.hollow for row in rows):
        legend[HOLLOW] = Line2D([], [], **dot_style(Look(REFERENCE), hollow=True))
    return legend | {name.replace("_", " "): Line2D([], [], **own) for name, own in lines.items()}


def mat_against_speedup(
    rows: Sequence[Row], units: tuple[str, str], title: str, caption: str
) -> Drawing:
    """A dot for each method at its MAT and speedup, over lines of equal cost of a step.

    ``units``: of MAT and of speedup, as the rows have them.
    """
    known = [row for row in rows if all(cell.value for cell in row.values)]
    figure = canvas(4.2)
    axes = figure.subplots()
    right, top = (
        max(1.3, *(1.07 * (row.values[i].value or 0.0) for row in known)) for i in range(2)
    )
    bottom = 0.92 * min([1.0, *(row.values[1].value or 1.0 for row in known)])
    for cost in _COSTS:
        if right / cost < bottom:
            break
        axes.plot([1.0, right], [1.0 / cost, right / cost], **_GUIDE)
        edge = (right, right / cost) if right / cost <= top else (top * cost, top)
        axes.annotate(
            f"{cost:g}×", edge, xytext=(3, 0) if edge[0] == right else (0, 2),
            textcoords="offset points", fontsize="small", color=REFERENCE,
            ha="left" if edge[0] == right else "center",
            va="center" if edge[0] == right else "bottom", annotation_clip=False,
        )  # fmt: skip
    _dots(axes, known)
    axes.axhline(1.0, **_PLAIN)
    axes.set(
        xlim=(1.0 - 0.03 * (right - 1.0), right),
        ylim=(bottom, top),
        xlabel=units[0],
        ylabel=units[1],
    )
    axes.grid(visible=False)
    lines = {"a_step's_cost_in_passes_of_plain_decoding": _GUIDE, "plain_decoding": _PLAIN}
    finish(figure, title, caption, _with_marks(axes, known, **lines))
    return figure


_WITHIN = 0.10  # relative distance from the diagonal that is shaded


def predicted_against_measured(rows: Sequence[Row], title: str, caption: str) -> Drawing:
    """Measured speedups across, predicted ones up, on logarithmic axes: on the line they agree."""
    known = [row for row in rows if all(cell.value for cell in row.values)]
    values = [cell.value for row in known for cell in row.values if cell.value] or [1.0]
    ends = [min(values) / 1.15, 1.15 * max(values)]
    figure = canvas(4.2)
    axes = figure.subplots()
    edges = [[(1 + sign * _WITHIN) * end for end in ends] for sign in (-1, 1)]
    axes.fill_between(ends, *edges, color=BAND, linewidth=0, label=f"within {_WITHIN:.0%}")
    axes.plot(ends, ends, color=REFERENCE, linewidth=0.8, zorder=1.5, label="equal")
    _dots(axes, known)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set(xlabel="measured speedup over plain decoding", ylabel="predicted speedup")
    for axis in (axes.xaxis, axes.yaxis):
        ratio_ticks(axis)
    finish(figure, title, caption, legend_of([axes]))
    return figure
