"""Heatmaps of what a batch pass costs, by its rows and their length."""

from __future__ import annotations

from analysis.plots.heatmaps import HeatmapGrid, heatmaps
from analysis.plots.layout import Drawing
from analysis.runs.load import Run


def slowdown_caption(run: Run, text: str) -> str:
    """Words of one's own, then model, hardware, number of passes and code."""
    assert run.surface is not None
    made_up = "SYNTHETIC RECORDS, not a measurement. " if run.synthetic else ""
    return (
        f"{made_up}{text} {run.model} ({run.dtype}), random ids. Hardware: {run.hardware}. Medians "
        f"of {run.surface.passes['batch'].repeats} passes; intervals: 95 %, bootstrap over passes. "
        f"Code: {run.code}."
    )


def slowdown_heatmaps(run: Run, title: str, caption: str) -> Drawing:
    """Time over that of one token: a heatmap for each number of cached tokens."""
    assert run.surface is not None
    contexts = run.surface.passes["batch"].axes["context"]
    grids = [
        HeatmapGrid.of(f"context of {context} tokens", run.surface.slowdowns(context, run.seed))
        for context in contexts
    ]
    unit = "time over that of one token"
    return heatmaps(grids, "w (draft tokens in a row)", "k (rows)", unit, title, caption)
