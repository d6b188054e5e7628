"""Predicted speedups against measured ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from analysis.plots.layout import Drawing, canvas, finish, legend_of, ratio_ticks
from analysis.plots.style import BAND, REFERENCE, dot_style
from specbench.results.estimate import Estimate

_BAND = 0.10  # relative distance from the diagonal that is shaded
AGREEMENT_TEXT = (
    "A point is a label: its speedup as a replay predicts it over that of the run that was "
    f"measured. On the line they are equal; shaded: within {_BAND:.0%}."
)


@dataclass(frozen=True)
class Agreement:
    """A label of both runs; ``name`` is the legend's, that of its method."""

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
    axes.fill_between(ends, *edges, color=BAND, linewidth=0)
    axes.plot(ends, ends, color=REFERENCE, linewidth=0.8)
    for row in rows:
        value = row.measured.value
        if not value:
            continue
        if row.measured.interval:
            axes.plot(
                row.measured.interval, [row.predicted] * 2, linewidth=0.5,
                color=dot_style(row.method)["color"],
            )  # fmt: skip
        axes.plot([value], [row.predicted], label=row.name, **dot_style(row.method))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    for axis in (axes.xaxis, axes.yaxis):
        ratio_ticks(axis)
    axes.set_xlabel("measured speedup over plain decoding")
    axes.set_ylabel("predicted speedup")
    finish(figure, title, f"{AGREEMENT_TEXT}\n{caption}", legend_of([axes]))
    return figure
