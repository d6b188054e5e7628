"""A cost run in numbers and pictures, for copies of it elsewhere (:mod:`analysis.publish`).

A cost run has no records: what it measured is its surface, the times of passes over grids of rows
and cached tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from analysis.plots.charts import Panel, Point, Series, curves
from analysis.plots.layout import Drawing
from analysis.plots.slowdowns import slowdown_caption, slowdown_heatmaps
from analysis.runs.load import Run

PASS_COLUMNS = ("kind", "rows", "k", "w", "context", "median_ms")
_TEXT = (
    "Medians of a target pass over a draft tree, root included, at so many cached tokens; random "
    "ids, verdict and copy to the host included."
)
_BATCH_TEXT = (
    "Time of a target pass over k rows of w + 1 tokens (a batch), relative to that of a single "
    "token."
)


def pass_rows(run: Run) -> list[list[str | float | None]]:
    """Rows of ``PASS_COLUMNS``, one for every pass of the grids; None where it has no such axis."""
    return [
        [kind, *(place.get(name) for name in PASS_COLUMNS[1:-1]), 1e3 * seconds]
        for kind, place, seconds in _medians(run)
    ]


def _medians(run: Run) -> Iterator[tuple[str, dict[str, int], float]]:
    """Of every pass its kind, its place on the grid by axis, and its median seconds."""
    for kind, times in run.surface.passes.items() if run.surface else ():
        medians = np.median(times.samples_s, axis=-1)
        for index, values in enumerate(itertools.product(*times.axes.values())):
            place = dict(zip(times.axes, values, strict=True))
            yield kind, place, float(medians.flat[index])


def pass_metrics(run: Run) -> dict[str, float]:
    """Flat numbers: milliseconds of prompts and of trees, microseconds of drafting a step."""
    found: dict[str, float] = {}
    for kind, at, seconds in _medians(run):
        if kind == "prefill":
            found[f"prefill_ms/{at['context']}_tokens"] = 1e3 * seconds
        elif kind == "tree":
            found[f"tree_ms/{at['context']}_tokens/{at['rows']}_rows"] = 1e3 * seconds
    drafting = run.surface.drafting_us if run.surface else {}
    for (label, context), microseconds in drafting.items():
        found[f"drafting_us/{label}/{context}_tokens"] = microseconds
    return found


def caption(run: Run) -> str:
    """Model, hardware and code."""
    return f"{run.model} ({run.dtype}). Hardware: {run.hardware}. Code: {run.code}."


def figures(run: Run) -> dict[str, Drawing]:
    """Tree passes over their rows, and batch passes over those of one token, where measured."""
    drawn: dict[str, Drawing] = {}
    points: dict[int, list[Point]] = {}
    for kind, at, seconds in _medians(run):
        if kind == "tree":
            points.setdefault(at["context"], []).append(Point(at["rows"], 1e3 * seconds))
    if points:
        lines = [Series(f"{c} cached tokens", "ar", line) for c, line in points.items()]
        panel = Panel("", "rows (root and draft nodes)", "time of a pass (ms)", lines)
        title = f"Cost of a pass ({run.model})"
        drawn["passes"] = curves([[panel]], title, f"{_TEXT}\n{caption(run)}")
    if run.surface is not None and run.surface.has_slowdowns:
        title = f"Cost of a batch pass ({run.model})"
        text = slowdown_caption(run, _BATCH_TEXT)
        drawn["slowdown"] = slowdown_heatmaps(run, title, text)
    return drawn
