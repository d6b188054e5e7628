"""What the notebooks share: where runs come from, and how a figure is shown.

``RUNS`` in the environment names run folders or folders of them (several separated like in
``PATH``; default ``results``), ``FIGURES`` the folder that figures are written to where there is no
notebook to show them in (default: none are written).
"""

from __future__ import annotations

import io
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

from analysis.plots.charts import Point, Series
from analysis.plots.layout import Drawing, save, write_words
from analysis.plots.style import RC
from analysis.plots.sweeps import figure_name
from analysis.runs.comparisons import ComparedLabel, Comparison
from analysis.runs.load import Run, usable_runs
from specbench.results.estimate import Estimate
from specbench.results.records import CaseRecord

MOST = 6  # lines or kinds of bars that can be told apart

matplotlib.rcParams.update(RC)
_shown: Counter[str] = Counter()


def runs(*experiments: str) -> list[Run]:
    """The complete runs below ``RUNS``: all, or those of some experiments."""
    paths = os.environ.get("RUNS", "results").split(os.pathsep)
    found, _ = usable_runs(paths)
    return [run for run in found if not experiments or run.experiment in experiments]


def by_experiment(*knobs: str) -> list[list[Run]]:
    """The runs in which a label has all of these knobs, those of each experiment together.

    Different experiments may have run the same cell of a heatmap.
    """
    found: dict[str | None, list[Run]] = {}
    for run in runs():
        if any(set(knobs) <= run.knobs(label).keys() for label in run.labels):
            found.setdefault(run.experiment, []).append(run)
    return list(found.values())


def readable(entries: Sequence[ComparedLabel]) -> tuple[Sequence[ComparedLabel], str]:
    """As many as one picture can show, and, where there are more, words that say so."""
    if len(entries) <= MOST:
        return entries, ""
    return entries[:MOST], f"Drawn: the first {MOST} of {len(entries)} labels."


def drawn(
    comparison: Comparison, numbers: Callable[[list[CaseRecord]], Iterable[tuple[float, Estimate]]]
) -> tuple[list[Series], str]:
    """A line for each readable label through its numbers, and words on those left out."""
    entries, left_out = readable(comparison.drafting)
    return [
        Series(
            figure_name(comparison, entry),
            entry.method,
            [Point.at(x, number) for x, number in numbers(entry.records)],
        )
        for entry in entries
    ], left_out


def show(figure: Drawing, name: str) -> None:
    """Show a figure in a notebook; as a plain file, write it below ``FIGURES``.

    A name that was used before gets a number.
    """
    _shown[name] += 1
    stem = name if _shown[name] == 1 else f"{name}_{_shown[name]}"
    if "ipykernel" in sys.modules:
        display: Any = __import__("IPython.display", fromlist=["display"])
        png = io.BytesIO()
        write_words(figure)
        figure.savefig(png, format="png", bbox_inches="tight")
        display.display(display.Image(png.getvalue()))
    elif os.environ.get("FIGURES"):
        for path in save(figure, Path(os.environ["FIGURES"]), stem):
            sys.stdout.write(f"{path}\n")
