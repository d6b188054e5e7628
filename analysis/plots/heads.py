"""Trained heads: acceptance by position in the draft, and what a tree gains over a chain."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from analysis.plots.charts import Panel, Point, Series, curves
from analysis.plots.layout import Drawing, shown
from analysis.plots.style import MAT, PLAIN, speedup_words
from analysis.plots.sweeps import figure_name
from analysis.runs.acceptance import by_depth, rows_of_target_pass, where_the_one_before
from analysis.runs.comparisons import ComparedLabel, ComparedRuns
from analysis.runs.surfaces import cost_of_pass, cost_on
from specbench.results.estimate import Estimate
from specbench.results.records import STEPS

_DEEPEST = 8  # position that is drawn
_FEWEST = 3  # sizes of a draft, from which a line is drawn
ACCEPTANCE_TEXT = (
    "Position 1 is the first drafted token. Left: of the steps with a draft, those that accepted "
    "it; right: of the steps that accepted the one before and drafted so deep."
)
_NO_DEPTHS_TEXT = (
    "The steps of a run here were not kept ({steps}): of it all steps count, and a draft that ends "
    "before a position looks like one that was rejected there."
)
_ROWS_TEXT = (
    "A chain and a tree at one place read as many rows in a target pass, the root included."
)
_PRICED_TEXT = (
    "Drafting free: MAT over what a pass of so many rows costs ({source}, {context} tokens cached)."
)
_WHOLE_TEXT = "The last picture has the time of drafting in it."


def of_heads(comparison: ComparedRuns) -> list[ComparedLabel]:
    """The labels that draft with trained heads, by themselves or as a part."""

    def has_head(knobs: Mapping[str, object]) -> bool:
        part = knobs.get("auxiliary")
        return "head" in knobs or (isinstance(part, Mapping) and has_head(part))

    return [entry for entry in comparison.drafting if has_head(entry.knobs)]


def acceptance_picture(comparison: ComparedRuns, caption: str) -> Drawing | None:
    """Share of steps that accept each position of the draft; None of runs without heads.

    Of heads that ran in several sizes the largest that all of them ran in, else the most rows.
    """
    sizes: dict[str, dict[int, ComparedLabel]] = {}
    for entry in of_heads(comparison):
        sizes.setdefault(entry.method, {}).setdefault(_rows(entry), entry)
    if not sizes:
        return None
    common = set.intersection(*map(set, sizes.values()))
    widest = {method: found[max(common & found.keys() or found)] for method, found in sizes.items()}

    def lines(shares: Callable[..., list[tuple[int, Estimate]]]) -> list[Series]:
        def numbers(entry: ComparedLabel) -> list[tuple[int, Estimate]]:
            return shares(entry.records, entry.run.seed, _DEEPEST, entry.run.depths)

        return [
            Series(
                figure_name(comparison, entry),
                method,
                [Point.at(x, y) for x, y in numbers(entry)],
            )
            for method, entry in widest.items()
        ]

    place = "position in the draft"
    panels = [
        Panel("steps with a draft", place, "share that accepts it", lines(by_depth), top=1.0),
        Panel(
            "after the one before", place, "share that accepts it", lines(where_the_one_before),
            top=1.0,
        ),
    ]  # fmt: skip
    title = f"Acceptance by position ({comparison.printed_title})"
    known = all(entry.run.depths for entry in widest.values())
    text = ACCEPTANCE_TEXT if known else f"{ACCEPTANCE_TEXT} {_NO_DEPTHS_TEXT.format(steps=STEPS)}"
    return curves([panels], title, f"{text}\n{caption}")


def is_chain(entry: ComparedLabel) -> bool:
    """Whether each level of the draft has a single node."""
    levels, top_k = entry.knobs.get("levels"), entry.knobs.get("top_k")
    return top_k == 1 or (levels is not None and set(levels) == {1})


def _rows(entry: ComparedLabel) -> int:
    """Rows of a whole draft with the root; passes at the end of an answer may read fewer."""
    total, levels = entry.knobs.get("total"), entry.knobs.get("levels")
    if total is not None:
        return int(total)
    return 1 + sum(levels) if levels else round(rows_of_target_pass(entry).value or 0.0)


def rows_picture(comparison: ComparedRuns, caption: str) -> Drawing | None:
    """MAT, predicted and measured speedup against rows of a pass; None without several sizes.

    A line for each head's chains and one for its trees.
    """
    sizes: dict[tuple[str, bool], list[tuple[int, ComparedLabel]]] = {}
    for entry in of_heads(comparison):
        if "auxiliary" not in entry.knobs:
            sizes.setdefault((entry.method, is_chain(entry)), []).append((_rows(entry), entry))
    if max((len({rows for rows, _ in found}) for found in sizes.values()), default=0) < _FEWEST:
        return None
    run = comparison.runs[0]
    cost, words = cost_of_pass(run.manifest)
    if not cost:
        cost, words = cost_on(run.processor, comparison.model, run.dtype)

    def lines(number: Callable[[float, ComparedLabel], Estimate]) -> list[Series]:
        found = [
            Series(
                f"{shown(method)}, {'chain' if chain else 'tree'}",
                method,
                [
                    Point.at(rows, number(rows, entry))
                    for rows, entry in sorted(members, key=lambda member: member[0])
                ],
            )
            for (method, chain), members in sorted(sizes.items())
        ]
        return [series for series in found if any(p.y is not None for p in series.points)]

    xlabel = "rows of a target pass"
    panels = [Panel("", xlabel, MAT, lines(lambda _, e: e.measured("mat")), log=2, bottom=1.0)]
    text = _ROWS_TEXT
    if cost:
        predicted = lines(lambda rows, entry: priced(entry.measured("mat"), rows, cost))
        unit = "predicted speedup,\ndrafting free"
        panels.append(Panel("", xlabel, unit, predicted, reference=(1.0, PLAIN), log=2))
        text = f"{text} {_PRICED_TEXT.format(**words)}"
    if comparison.timing != "none":
        speedups = lines(lambda _, entry: entry.measured("speedup"))
        unit = speedup_words(comparison.timing)
        panels.append(Panel("", xlabel, unit, speedups, reference=(1.0, PLAIN), log=2))
        text = f"{text} {_WHOLE_TEXT}"
    title = f"Chain against tree at equal rows ({comparison.printed_title})"
    return curves([panels], title, f"{text}\n{caption}")


def priced(mat: Estimate, rows: float, cost: Mapping[int, float]) -> Estimate:
    """MAT over the cost of a pass of so many rows; none beyond the rows that were timed."""
    known = list(cost)
    if mat.value is None or not known[0] <= rows <= known[-1]:
        return Estimate(None)
    price = _between(rows, known, list(cost.values()))
    interval = mat.interval and (mat.interval[0] / price, mat.interval[1] / price)
    return Estimate(mat.value / price, interval)


def _between(rows: float, known: Sequence[int], prices: Sequence[float]) -> float:
    """Straight between two sizes on logarithmic axes."""
    return float(np.exp(np.interp(np.log(rows), np.log(known), np.log(prices))))
