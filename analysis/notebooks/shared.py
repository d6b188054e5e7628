"""What the notebooks share: where runs come from, and how a figure or a table is shown.

``RUNS`` in the environment names run folders or folders of them (several separated like in
``PATH``; default ``results``), ``FIGURES`` the folder that figures are written to where there is no
notebook to show them in (default: none are written). Relative folders are looked for where the
notebook is executed, then in the project.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import matplotlib
import pandas as pd

from analysis.plots.charts import Point, Series
from analysis.plots.layout import Drawing, save, write_words
from analysis.plots.style import RC
from analysis.plots.sweeps import figure_name
from analysis.runs.comparisons import ComparedLabel, ComparedRuns
from analysis.runs.load import Run, usable_runs
from analysis.tabular.records_sheet import records_sheet
from specbench.errors import SpecBenchError
from specbench.paths import PROJECT
from specbench.results.estimate import Estimate
from specbench.results.tasks import OVERALL

MOST = 6  # lines or kinds of bars that can be told apart

matplotlib.rcParams.update(RC)
_shown: Counter[str] = Counter()


def runs(
    needs: str = "a finished run",
    command: str = "python run.py 'compare=[pld]'",
    where: Callable[[Run], bool] = lambda run: True,
) -> list[Run]:
    """The complete runs below ``RUNS`` that a notebook can show.

    Where there is none, a line says what the notebook ``needs`` and which ``command`` makes it. So
    does a folder that cannot be read; a plain file then exits with 2.
    """
    names = os.environ.get("RUNS", "results").split(os.pathsep)
    paths = [Path(n) if Path(n).exists() else PROJECT / n for n in names]
    try:
        usable = [run for run in usable_runs(paths)[0] if where(run)]
    except SpecBenchError as error:
        sys.stderr.write(f"error: RUNS: {error}\n")
        if not _in_notebook():
            raise SystemExit(error.exit_code) from None
        return []
    if not usable:
        places = ", ".join(map(str, paths))
        sys.stdout.write(
            f"Nothing to show: no run below {places} has {needs}. Make one: {command}\n"
        )
    return usable


def _in_notebook() -> bool:
    return "ipykernel" in sys.modules


def drawn(
    comparison: ComparedRuns,
    numbers: Callable[[ComparedLabel], Iterable[tuple[float, Estimate]]],
) -> tuple[list[Series], str]:
    """A line through the numbers of as many labels as a picture can show, and words on the rest."""
    entries = comparison.drafting
    lines = [
        Series(
            figure_name(comparison, entry),
            entry.method,
            [Point.at(x, number) for x, number in numbers(entry)],
        )
        for entry in entries[:MOST]
    ]
    left_out = f"Drawn: the first {MOST} of {len(entries)} labels." if len(entries) > MOST else ""
    return lines, left_out


def numbers(comparisons: Sequence[ComparedRuns], *columns: str) -> pd.DataFrame:
    """These columns of every label over the whole of its run, as in ``analysis.tables --csv``.

    What is empty for all labels is left out.
    """
    if not comparisons:
        return pd.DataFrame()
    sheet = records_sheet(comparisons)
    sheet = sheet[sheet["task"] == OVERALL]
    names = ["model", "dataset", "label", *(name for name in columns if name in sheet)]
    return sheet[names].dropna(axis="columns", how="all").reset_index(drop=True)


def points(series: Sequence[Series], across: str) -> pd.DataFrame:
    """What is drawn of each label, a column each; ``across`` names the horizontal axis."""
    lines = {line.name: {point.x: point.y for point in line.points} for line in series}
    return pd.DataFrame(lines).sort_index().rename_axis(across).reset_index()


def table(frame: pd.DataFrame, title: str) -> None:
    """Show a data frame: in a notebook as it shows them, as a plain file in plain text."""
    if frame.empty:
        return
    frame = frame.round(3)
    if _in_notebook():
        _display(frame.style.hide(axis="index").format(precision=3, na_rep="–").set_caption(title))
    else:
        sys.stdout.write(f"{title}\n{frame.to_string(index=False, na_rep='–')}\n\n")


def show(figure: Drawing, name: str) -> None:
    """Show a figure in a notebook; as a plain file, write it below ``FIGURES``.

    A name that was used before gets a number.
    """
    _shown[name] += 1
    stem = name if _shown[name] == 1 else f"{name}_{_shown[name]}"
    if _in_notebook():
        png = io.BytesIO()
        write_words(figure)
        figure.savefig(png, format="png", bbox_inches="tight")
        _display(importlib.import_module("IPython.display").Image(png.getvalue()))
    elif os.environ.get("FIGURES"):
        for path in save(figure, Path(os.environ["FIGURES"]), stem):
            sys.stdout.write(f"{path}\n")


def _display(shown: object) -> None:
    # Only where there is a notebook: the project does not depend on IPython.
    importlib.import_module("IPython.display").display(shown)
