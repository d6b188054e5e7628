"""A cost run in numbers and pictures, for copies of it elsewhere (:mod:`analysis.publish`).

A cost run has no records: what it measured is its surface, the times of passes over grids of rows
and cached tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from analysis.papers import REPRODUCTIONS
from analysis.plots.charts import Panel, Point, Series, curves

if TYPE_CHECKING:
    from collections.abc import Mapping

    from matplotlib.figure import Figure

    from analysis.runs.load import Run

PASS_COLUMNS = ("kind", "rows", "k", "w", "context", "median_ms")
# The grids of a surface and their axes, in the order of the samples' own.
_GRIDS = {"prefill": ("context",), "tree": ("rows", "context"), "batch": ("k", "w", "context")}
_SLOWDOWN = "ngrammys_figure1"  # its heatmaps are of any surface with batch passes
_TEXT = (
    "Medians of a target pass over a draft tree, root included, at so many cached tokens; random "
    "ids, verdict and copy to the host included."
)


def pass_rows(run: Run) -> list[list[Any]]:
    """Rows of ``PASS_COLUMNS``, one for every pass of the grids; None where it has no such axis."""
    rows: list[list[Any]] = []
    for kind, names in _GRIDS.items():
        grid = (run.surface or {}).get(kind)
        if grid is None:
            continue
        medians = np.median(np.asarray(grid["samples_s"], dtype=float), axis=-1)
        for place in np.ndindex(medians.shape):
            at = {name: grid["axes"][name][i] for name, i in zip(names, place, strict=True)}
            milliseconds = 1e3 * float(medians[place])
            rows.append([kind, *(at.get(name) for name in PASS_COLUMNS[1:-1]), milliseconds])
    return rows


def pass_metrics(run: Run) -> dict[str, float]:
    """Flat numbers: milliseconds of prompts and of trees, microseconds of drafting a step."""
    found: dict[str, float] = {}
    for kind, rows, _, _, context, milliseconds in pass_rows(run):
        if kind == "prefill":
            found[f"prefill_ms/{context}_tokens"] = milliseconds
        elif kind == "tree":
            found[f"tree_ms/{context}_tokens/{rows}_rows"] = milliseconds
    for row in (run.surface or {}).get("drafting") or ():
        if "step_us" in row:
            found[f"drafting_us/{row['label']}/{row['context']}_tokens"] = float(row["step_us"])
    return found


def caption(run: Run) -> str:
    """Model, hardware and code."""
    return f"{run.model} ({run.dtype}). Hardware: {run.hardware}. Code: {run.code}."


def figures(run: Run) -> dict[str, Figure]:
    """Tree passes over their rows, and batch passes over those of one token, where measured."""
    surface: Mapping[str, Any] = run.surface or {}
    drawn: dict[str, Figure] = {}
    if surface.get("tree"):
        points: dict[int, list[Point]] = {}
        for kind, rows, _, _, context, milliseconds in pass_rows(run):
            if kind == "tree":
                points.setdefault(context, []).append(Point(rows, milliseconds))
        lines = [Series(f"{c} cached tokens", "ar", line) for c, line in points.items()]
        panel = Panel("", "rows (root and draft nodes)", "time of a pass (ms)", lines)
        title = f"Cost of a pass ({run.model})"
        drawn["passes"] = curves([[panel]], title, f"{_TEXT}\n{caption(run)}")
    axes = (surface.get("batch") or {}).get("axes")
    if axes and 1 in axes["k"] and 0 in axes["w"]:
        (artifact,) = (each for each in REPRODUCTIONS if each.name == _SLOWDOWN)
        ((_, drawn["slowdown"]),) = artifact.figures([run])
    return drawn
