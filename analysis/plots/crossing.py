"""Speedup by the number of texts that are decoded in lock-step: where does drafting stop paying?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from analysis.plots.charts import Panel, Point, Series, curves
from analysis.plots.layout import Drawing, shown
from analysis.runs.comparisons import ComparedLabel, ComparedRuns, conditions
from specbench.results.manifest import BASELINE
from specbench.results.names import display_name

_TEXT = (
    "Speedup of all texts together over ar at the same batch. Texts are decoded in lock-step; one "
    "that ended is not replaced. Bars: 95 %, over prompts at batch 1 and over groups of prompts "
    "above."
)


def crossing_pictures(comparisons: Sequence[ComparedRuns]) -> Iterator[tuple[str, Drawing]]:
    """A figure for runs that differ in their batch alone, with the name of its file."""
    groups: dict[tuple[object, ...], list[ComparedRuns]] = {}
    for comparison in comparisons:
        run = comparison.runs[0]
        # All conditions but the batch, which is the first.
        key = (run.model, run.dataset, comparison.estimator, *conditions(run)[1:])
        groups.setdefault(key, []).append(comparison)
    for found in groups.values():
        if len({comparison.runs[0].batch for comparison in found}) > 1:
            yield "batch_crossing", _picture(found)


def _picture(comparisons: Sequence[ComparedRuns]) -> Drawing:
    by_label: dict[str, list[ComparedLabel]] = {}
    for comparison in sorted(comparisons, key=lambda c: c.runs[0].batch):
        for entry in comparison.drafting:
            by_label.setdefault(entry.label, []).append(entry)
    series = [
        Series(
            shown(label),
            entries[0].method,
            [Point.at(entry.run.batch, entry.measured("speedup")) for entry in entries],
        )
        for label, entries in by_label.items()
    ]
    panel = Panel(
        "",
        "texts decoded at once",
        "speedup over ar",
        series,
        reference=(1.0, shown(BASELINE)),
        log=2.0,
        bottom=0.0,
    )
    first = comparisons[0].runs[0]
    title = f"Batches: {display_name(first.model)} on {display_name(first.dataset)}"
    crossings = "; ".join(
        f"{label} {words}" for label, entries in by_label.items() if (words := _crossing(entries))
    )
    text = [f"{first.hardware}.", _TEXT, f"Breaks even at batch: {crossings}." if crossings else ""]
    return curves([[panel]], title, " ".join(filter(None, text)))


def _crossing(entries: Sequence[ComparedLabel]) -> str:
    """Where a label's speedup falls to 1, read off between its points; "" of a single point."""
    known = [(e.run.batch, e.measured("speedup").value) for e in entries]
    points = [(math.log2(batch), value) for batch, value in known if value is not None]
    if len(points) < 2:
        return ""
    if points[0][1] < 1:
        return f"below {2 ** points[0][0]:.0f}"
    for (x, y), (x_next, y_next) in pairwise(points):
        if y >= 1 > y_next:
            return f"{2 ** (x + (y - 1) / (y - y_next) * (x_next - x)):.1f}"
    return f"above {2 ** points[-1][0]:.0f}"
