"""Helpers of the notebooks: find the runs, show a figure or a table.

``RUNS`` in the environment names run folders or folders of them (several separated like in
``PATH``; default ``results``), ``FIGURES`` the folder that figures are written to. Relative folders
are looked up in the working directory, then in the project.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.frame import records_sheet
from analysis.plots.charts import Point, Series
from analysis.plots.style import Drawing, save
from analysis.runs.captions import caption
from analysis.runs.comparisons import ComparedLabel, ComparedRuns
from analysis.runs.load import Run, usable_runs
from specbench.errors import SpecBenchError
from specbench.paths import PROJECT
from specbench.results.cells import NumberCell
from specbench.results.tasks import OVERALL

MOST = 6  # lines or kinds of bars that a reader can distinguish

_IN_NOTEBOOK = "ipykernel" in sys.modules  # the project does not depend on it
_stems: Counter[str] = Counter()


def runs(
    needs: str = "a finished run",
    command: str = "python run.py 'compare=[pld]'",
    where: Callable[[Run], bool] = lambda run: True,
) -> list[Run]:
    """Return the complete runs below ``RUNS`` that a notebook can show.

    Without such a run, a line says what the notebook ``needs`` and which ``command`` makes it.

    Raises:
        SystemExit: a folder cannot be read; stderr says why.
    """
    names = os.environ.get("RUNS", "results").split(os.pathsep)
    paths = [Path(n) if Path(n).exists() else PROJECT / n for n in names]
    try:
        usable = [run for run in usable_runs(paths)[0] if where(run)]
    except SpecBenchError as error:
        sys.stderr.write(f"error: RUNS: {error}\n")
        raise SystemExit(error.exit_code) from None
    if not usable:
        folders = ", ".join(map(str, paths))
        sys.stdout.write(
            f"Nothing to show: no run below {folders} has {needs}. Make one: {command}\n"
        )
    return usable


def lines(
    comparison: ComparedRuns,
    numbers: Callable[[ComparedLabel], Iterable[tuple[float, NumberCell]]],
) -> list[Series]:
    """Return a line through the numbers of as many labels as a picture can show.

    A label without a number has none, so a run without counted steps has no lines.
    """
    drawn = [
        Series(comparison.name_of(e), e.method, [Point.at(x, number) for x, number in numbers(e)])
        for e in comparison.drafting[:MOST]
    ]
    return [line for line in drawn if line.drawn]


def caption_of(comparison: ComparedRuns) -> str:
    """Return a comparison's caption, with the number of labels that `lines` draws."""
    count = len(comparison.drafting)
    left_out = f"Drawn: the first {MOST} of {count} labels.\n" if count > MOST else ""
    return left_out + caption(comparison)


def numbers(comparisons: Sequence[ComparedRuns], *columns: str) -> pd.DataFrame:
    """Return these columns of every label over its run, as in ``analysis.tables --csv``.

    Labels include their differing settings; columns that are empty for all labels are left out.
    """
    if not comparisons:
        return pd.DataFrame()
    frame = records_sheet(comparisons)
    frame["label"] = [
        e.label if e.label == e.run.baseline else c.name_of(e)
        for c in comparisons
        for e in c.entries
        for _ in e.rows
    ]
    selected = ["model", "dataset", "label", *(name for name in columns if name in frame)]
    overall = frame.loc[frame["task"] == OVERALL, selected]
    return overall.dropna(axis="columns", how="all").reset_index(drop=True)


def table(frame: pd.DataFrame, title: str) -> None:
    """Show a data frame, as HTML in a notebook or as plain text."""
    if frame.empty:
        return
    if _IN_NOTEBOOK:
        style = frame.style.hide(axis="index").format(precision=3, na_rep="–")
        _display().display(style.set_caption(title))
    else:
        sys.stdout.write(f"{title}\n{frame.round(3).to_string(index=False, na_rep='–')}\n\n")


def show(figure: Drawing, stem: str) -> None:
    """Show a figure in a notebook, as the figures command draws it, and write it into ``FIGURES``.

    A name that was used before gets a number.
    """
    _stems[stem] += 1
    stem = stem if _stems[stem] == 1 else f"{stem}_{_stems[stem]}"
    with tempfile.TemporaryDirectory() as folder:
        paths = save(figure, Path(os.environ.get("FIGURES") or folder), stem)
        if _IN_NOTEBOOK:
            _display().display(_display().Image(filename=str(paths[0])))
    if os.environ.get("FIGURES"):
        sys.stdout.write("".join(f"{path}\n" for path in paths))


def _display() -> Any:
    return importlib.import_module("IPython.display")
