"""Speedup against the draft budget, with what a pass of that size costs behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.ticker import NullLocator, ScalarFormatter

from analysis.plots.layout import Drawing, canvas, finish, legend_of
from analysis.plots.style import BAND, PLAIN, REFERENCE, line_style
from specbench.results.estimate import Estimate

BUDGET_TEXT = (
    "Each point is a setting, at the mean number of tokens that a target pass reads with it: the "
    "last committed one and its draft."
)
COST_TEXT = (
    "Grey, right axis: time of a target pass of so many tokens over that of one, {context} tokens "
    "cached ({source}). A longer draft pays while speedup grows faster than this."
)


@dataclass(frozen=True)
class BudgetPoint:
    """One setting of a method: tokens that a target pass reads, and the speedup."""

    tokens: float
    speedup: Estimate


def speedup_by_budget(
    methods: Mapping[tuple[str, str], Sequence[BudgetPoint]],
    cost: Mapping[int, float],
    unit: str,
    title: str,
    caption: str,
) -> Drawing:
    """A line per method through its settings; both axes of tokens are logarithmic.

    Args:
        methods: by name as shown and method.
        cost: of a pass by its tokens, in passes of one token; empty where it is not known.
    """
    figure = canvas(6.4, 3.6, keep_shape=True)
    axes = figure.subplots()
    tokens = [point.tokens for points in methods.values() for point in points]
    low, high = 0.93 * min(tokens), 1.08 * max(tokens)
    if cost:
        behind = axes.twinx()
        behind.fill_between(list(cost), list(cost.values()), 1.0, color=BAND, linewidth=0)
        behind.set_ylabel("time of a pass\n(of one token: 1)")
        inside = [value for rows, value in cost.items() if rows <= high]
        behind.set_ylim(1.0, 1.25 * max([*inside, 1.2]))
        behind.spines["right"].set_visible(True)
        behind.grid(visible=False)
        # The lines in front of the area, which is on the second pair of axes.
        axes.set_zorder(behind.get_zorder() + 1)
        axes.patch.set_visible(False)
    for (name, method), points in methods.items():
        found = sorted(
            (point for point in points if point.speedup.value is not None),
            key=lambda point: point.tokens,
        )
        values = [point.speedup.value or 0.0 for point in found]
        ends = [
            point.speedup.interval or (value, value)
            for point, value in zip(found, values, strict=True)
        ]
        errors = [
            [max(0.0, value - low) for value, (low, _) in zip(values, ends, strict=True)],
            [max(0.0, high - value) for value, (_, high) in zip(values, ends, strict=True)],
        ]
        axes.errorbar(
            [point.tokens for point in found], values, yerr=errors, label=name, elinewidth=0.5,
            **line_style(method),
        )  # fmt: skip
    axes.axhline(1.0, color=REFERENCE, linewidth=0.8, linestyle="--", label=PLAIN)
    axes.set_xscale("log", base=2)
    axes.set_xlim(low, high)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("tokens of a target pass (mean)")
    axes.set_ylabel(unit)
    finish(figure, title, f"{BUDGET_TEXT}\n{caption}", legend_of([axes]))
    return figure
