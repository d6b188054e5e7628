"""All methods in one picture: ranked, prompt by prompt, against MAT, predicted and measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, NullLocator

from analysis.plots.charts import HEADROOM, Point, error_lengths
from analysis.plots.layout import (
    Drawing,
    canvas,
    finish,
    in_column,
    legend_of,
    ratio_ticks,
    rows_down,
    with_cut,
)
from analysis.plots.style import BAND, PLAIN, REFERENCE, Keywords, Look, dot_style, looks
from specbench.results.estimate import Estimate

_ROW = 0.24  # inches of a row
_COSTS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0)  # of a step, in steps of plain decoding
RANKED_TEXT = (
    "Band by band, best first. A band: methods that the data cannot tell from its first (multiple "
    "comparisons with the best, each band by itself)."
)
PROMPTS_TEXT = (
    "A dot is a prompt: its tokens/s over plain decoding's on it. The bar is the speedup over all "
    "of them with its 95 % interval."
)
COST_TEXT = (
    "Grey lines: what a step costs in steps of plain decoding, drafting included; a method moves "
    "along one as more of its tokens are accepted, and down as its steps take longer."
)
PRICE_TEXT = (
    "Right: the line is what a pass of so many rows costs in passes of 1 row ({source}, {context} "
    "tokens cached). A method's dot is its step at its mean rows, MAT / speedup; above the line: "
    "drafting."
)


@dataclass(frozen=True)
class Ranked:
    """A method's numbers over the whole of a run.

    Attributes:
        name: as shown; ``method`` decides the usual look.
        prompts: speedup on each prompt.
        rows: of a target pass, the mean.
    """

    name: str
    method: str
    speedup: Estimate
    mat: Estimate
    prompts: Sequence[float] = field(default=())
    rows: float | None = None


def ranked(
    rows: Sequence[Ranked], bands: Sequence[int], units: tuple[str, str], title: str, caption: str
) -> Drawing:
    """Speedups with intervals, best first, and MAT beside.

    Args:
        rows: in the order in which they are drawn.
        bands: how many rows belong to each group of undecided ones, from the top.
        units: of speedup and of MAT.
    """
    panels = 2 if in_column() else 1  # one below the other
    figure = canvas(7.0, panels * (0.75 + _ROW * len(rows)))
    shape = {"nrows": 2, "ncols": 1} if in_column() else {"ncols": 2, "width_ratios": (3, 2)}
    left, right = figure.subplots(**shape, sharey=True)
    top = -0.5
    for i, count in enumerate(bands):
        for axes in (left, right) if i % 2 == 0 else ():
            axes.axhspan(top, top + count, color=BAND, linewidth=0, zorder=0)
        top += count
    columns = ([row.speedup for row in rows], [row.mat for row in rows])
    every = _looks(rows)
    for axes, cells, unit in zip((left, right), columns, units, strict=True):
        for place, (look, cell) in enumerate(zip(every, cells, strict=True)):
            _dot(axes, place, look, cell)
        rows_down(axes, [row.name for row in rows])
        _limit(axes, cells)
        axes.set_xlabel(unit)
    band = (Patch(facecolor=BAND), Patch(facecolor="white", edgecolor=BAND))
    legend = {"each band: may be as fast as its first": band, PLAIN: left.axvline(1.0, **_PLAIN)}
    finish(figure, title, with_cut(f"{RANKED_TEXT}\n{caption}", (left, right)), legend)
    return figure


_PLAIN: Keywords = {"color": REFERENCE, "linewidth": 0.8, "linestyle": "--"}  # a line across


def _looks(rows: Sequence[Ranked]) -> list[Look]:
    found = looks((row.method, row.name) for row in rows)
    return [found[row.method, row.name] for row in rows]


def prompts(rows: Sequence[Ranked], unit: str, title: str, caption: str) -> Drawing:
    """Every prompt as a dot, a row for each method; the axis is logarithmic, as ratios are."""
    figure = canvas(7.0, 0.75 + 1.2 * _ROW * len(rows))
    axes = figure.subplots()
    values = [1.0, *(value for row in rows for value in row.prompts if value > 0)]
    for place, (row, look) in enumerate(zip(rows, _looks(rows), strict=True)):
        found = [value for value in row.prompts if value > 0]
        # Spread evenly over the row's height in an order that has no meaning.
        order = np.random.default_rng(len(found)).permutation(len(found))
        heights = place + 0.56 * ((order + 0.5) / max(1, len(found)) - 0.5)
        axes.plot(found, heights, **dot_style(look, faint=True))
        if row.speedup.value is not None:
            lengths = error_lengths([Point.at(0, row.speedup)])
            axes.errorbar([row.speedup.value], [place], xerr=lengths, **_BAR, elinewidth=1.0)
    rows_down(axes, [row.name for row in rows])
    axes.set(xscale="log", xlim=(min(values) / 1.08, 1.08 * max(values)))
    ratio_ticks(axes.xaxis)
    axes.set_xlabel(unit)
    legend = {
        "a prompt": Line2D([], [], **dot_style(Look(REFERENCE, "", "o"), faint=True)),
        "all prompts, 95 % interval": Line2D([], [], **_BAR),
        PLAIN: axes.axvline(1.0, **_PLAIN),
    }
    finish(figure, title, with_cut(f"{PROMPTS_TEXT}\n{caption}", [axes]), legend)
    return figure


_BAR: Keywords = {  # upright, as high as its row
    "linestyle": "none", "marker": "|", "markersize": 13, "markeredgewidth": 2.0, "color": "black",
}  # fmt: skip


def mat_against_speedup(
    rows: Sequence[Ranked],
    units: tuple[str, str],
    title: str,
    caption: str,
    price: Mapping[int, float],
) -> Drawing:
    """A dot per method at its MAT and speedup, over lines of equal cost of a step.

    Beside it, where that is known, steps over the price of their rows.

    Args:
        units: of speedup and of MAT.
        price: of a pass by its rows, in passes of one row; empty where it is not known.
    """
    below = in_column() and bool(price)
    figure = canvas(9.2 if price else 6.4, 8.0 if below else 4.2, keep_shape=True)
    shape = {"nrows": 2} if below else {"ncols": 2, "width_ratios": (3, 2)}
    left, *right = figure.subplots(**shape) if price else (figure.subplots(),)
    known = [row for row in rows if row.speedup.value and row.mat.value]
    _steps(left, known, units)
    for axes in right:
        _prices(axes, known, price)
    handles, names = left.get_legend_handles_labels()
    legend = dict(zip(names, handles, strict=True))
    legend |= {"cost of a step": Line2D([], [], **_COST), PLAIN: Line2D([], [], **_PLAIN)}
    if price:
        legend["price of rows"] = Line2D([], [], **_PRICE)
    finish(figure, title, with_cut(f"{COST_TEXT}\n{caption}", [left]), legend)
    return figure


def _steps(axes: Axes, known: Sequence[Ranked], units: tuple[str, str]) -> None:
    xs, ys = [row.mat.value or 1.0 for row in known], [row.speedup.value or 1.0 for row in known]
    right = _end([*xs, 1.5], [row.mat for row in known])
    top = _end([*ys, 1.2], [row.speedup for row in known])
    bottom = min(0.9, 0.92 * min([*ys, 1.0]))
    for cost in _COSTS:
        if right / cost < bottom:
            break
        axes.plot([1.0, right], [1.0 / cost, right / cost], **_COST)
        edge = (right, right / cost) if right / cost <= top else (top * cost, top)
        axes.annotate(
            f"{cost:g}×", edge, xytext=(3, 0) if edge[0] == right else (0, 2),
            textcoords="offset points", fontsize="small", color=REFERENCE,
            ha="left" if edge[0] == right else "center",
            va="center" if edge[0] == right else "bottom", annotation_clip=False,
        )  # fmt: skip
    for row, look, x, y in zip(known, _looks(known), xs, ys, strict=True):
        across, up = (error_lengths([Point.at(0, cell)]) for cell in (row.mat, row.speedup))
        style = dot_style(look)
        axes.errorbar([x], [y], xerr=across, yerr=up, elinewidth=0.5, label=row.name, **style)
    axes.axhline(1.0, **_PLAIN)
    axes.set(xlim=(1.0, right), ylim=(bottom, top), xlabel=units[1], ylabel=units[0])
    axes.grid(visible=False)


def _prices(axes: Axes, known: Sequence[Ranked], price: Mapping[int, float]) -> None:
    """Steps, in steps of plain decoding, at their rows, over the price of a pass."""
    highest = 1.0
    for row, look in zip(known, _looks(known), strict=True):
        if row.rows is not None:
            step = (row.mat.value or 1.0) / (row.speedup.value or 1.0)
            axes.plot([row.rows], [step], **dot_style(look))
            highest = max(highest, step)
    most = max((row.rows for row in known if row.rows is not None), default=1.0)
    # The line goes on to the first size beyond the dots.
    beyond = min((rows for rows in price if rows >= most), default=max(price))
    shown = {rows: value for rows, value in price.items() if rows <= beyond}
    axes.plot(list(shown), list(shown.values()), **_PRICE)
    axes.set(xscale="log", yscale="log", ylim=(0.93, 1.08 * max(highest, *shown.values())))
    axes.set_xticks(list(shown), [str(rows) for rows in shown])
    axes.xaxis.set_minor_locator(NullLocator())
    ratio_ticks(axes.yaxis)
    axes.set(xlabel="rows of a target pass (mean)", ylabel="cost of a step (of plain decoding: 1)")


_PRICE: Keywords = {"color": REFERENCE, "linewidth": 1.2, "marker": "_", "zorder": 1}
_COST: Keywords = {"color": BAND, "linewidth": 1.2, "zorder": 0}  # a line of equal cost of a step


def _end(values: Sequence[float], cells: Sequence[Estimate]) -> float:
    """Of an axis: room for all values, and for intervals unless they are very long."""
    ends = [cell.interval[1] for cell in cells if cell.interval]
    highest = max(values)
    return max(1.07 * highest, min(1.02 * max(ends, default=0.0), 1.25 * highest))


def _dot(axes: Axes, place: int, look: Look, cell: Estimate) -> None:
    if cell.value is not None:
        lengths = error_lengths([Point.at(0, cell)])
        style = dot_style(look)
        axes.errorbar([cell.value], [place], xerr=lengths, elinewidth=1.4, zorder=3, **style)


def _limit(axes: Axes, cells: Sequence[Estimate]) -> None:
    """Room for all values, and for intervals unless they are so long that they flatten the rest."""
    values = [1.0, *(cell.value for cell in cells if cell.value is not None)]
    ends = [end for cell in cells for end in cell.interval or ()]
    low = max(min(values + ends), min(values) / HEADROOM)
    high = min(max(values + ends), max(values) * HEADROOM)
    room = 0.04 * max(high - low, 0.1)
    axes.set_xlim(low - room, high + room)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=(1, 2, 2.5, 5, 10)))


_BAND = 0.10  # relative distance from the diagonal that is shaded
AGREEMENT_TEXT = (
    "A point is a label: its speedup as a replay predicts it over the speedup of the run that was "
    f"measured. On the line they are equal; shaded: within {_BAND:.0%}."
)


@dataclass(frozen=True)
class Agreement:
    """A label of both runs; ``name`` is what the legend calls it."""

    name: str
    method: str
    measured: Estimate
    predicted: float


def predicted_against_measured(rows: Sequence[Agreement], title: str, caption: str) -> Drawing:
    """Points around the diagonal, on logarithmic axes: distance from it is the relative error."""
    figure = canvas(4.8, 4.2, keep_shape=True)
    axes = figure.subplots()
    values = [v for row in rows for v in (row.measured.value, row.predicted) if v]
    low, high = min(values, default=1.0) / 1.15, 1.15 * max(values, default=1.0)
    ends = [low, high]
    edges = [[(1 + sign * _BAND) * end for end in ends] for sign in (-1, 1)]
    every = looks((row.method, row.name) for row in rows)
    for row in rows:
        if not row.measured.value:
            continue
        axes.errorbar(
            [row.measured.value], [row.predicted], label=row.name, elinewidth=0.5,
            xerr=error_lengths([Point.at(0, row.measured)]),
            **dot_style(every[row.method, row.name]),
        )  # fmt: skip
    near = axes.fill_between(ends, *edges, color=BAND, linewidth=0)
    (equal,) = axes.plot(ends, ends, color=REFERENCE, linewidth=0.8, zorder=1.5)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set(xlabel="measured speedup over plain decoding", ylabel="predicted speedup")
    for axis in (axes.xaxis, axes.yaxis):
        ratio_ticks(axis)
    legend = legend_of([axes]) | {"equal": equal, f"within {_BAND:.0%}": near}
    finish(figure, title, with_cut(f"{AGREEMENT_TEXT}\n{caption}", [axes]), legend)
    return figure


def predicted_beside_measured(
    rows: Sequence[tuple[str, str, Estimate, Estimate]], title: str, caption: str
) -> Drawing:
    """Speedups of the same rows in two panels of one scale: predicted, measured.

    ``rows``: name as shown, method, predicted and measured speedup.
    """
    stacked = in_column()  # one below the other
    figure = canvas(7.0, (2 if stacked else 1) * (0.9 + _ROW * len(rows)))
    panels = figure.subplots(
        **({"nrows": 2} if stacked else {"ncols": 2}), sharex=True, sharey=True
    )
    columns = ([row[2] for row in rows], [row[3] for row in rows])
    every = looks((method, method) for _, method, *_ in rows)  # a task's row is its method's
    for axes, cells, timing in zip(panels, columns, ("PREDICTED", "measured"), strict=True):
        for place, ((_, method, *_), cell) in enumerate(zip(rows, cells, strict=True)):
            _dot(axes, place, every[method, method], cell)
        axes.axvline(1.0, **_PLAIN)
        axes.set_xlabel(f"{timing} speedup")
        rows_down(axes, [row[0] for row in rows])
    _limit(panels[0], [*columns[0], *columns[1]])
    finish(figure, title, with_cut(f"The dashed line is plain decoding.\n{caption}", panels))
    return figure
