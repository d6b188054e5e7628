"""Figures of runs: ``python -m analysis.figures RUNS...``; PNG for screens, SVG for papers.

Runs of an experiment become the figure of the paper that it stands for (:mod:`analysis.papers`);
of other runs, those that agree in model, data and hardware share two bar charts.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from analysis.papers import by_reproduction
from analysis.papers.reproduction import MAT, SPEEDUP, claimed_words, task_panel
from analysis.plots.charts import bars
from analysis.plots.layout import save
from analysis.plots.style import RC
from analysis.runs.command import with_runs
from analysis.runs.comparisons import Comparison, caption, make_comparisons
from analysis.runs.load import Run

__all__ = ["FIGURES", "figures_of", "main", "mean_accepted_tokens", "save", "speedup_by_task"]


def speedup_by_task(comparison: Comparison) -> Figure | None:
    """Bars of speedup per task and over the whole run, with 95 % intervals.

    Returns:
        None where no label has a speedup (a run without a baseline).
    """
    panel = task_panel(comparison, "speedup", SPEEDUP)
    if not panel.series:
        return None
    text = _words(comparison, "speedup")
    return bars([replace(panel, reference=(1.0, "ar"))], comparison.title, text)


def _words(comparison: Comparison, key: str) -> str:
    """The conditions, and whose claims are drawn."""
    conditions = caption(comparison, speedup=key == "speedup")
    return "\n".join(filter(None, [conditions, claimed_words([comparison], key)]))


def mean_accepted_tokens(comparison: Comparison) -> Figure | None:
    """Bars of MAT per task and over the whole run, with 95 % intervals."""
    panel = task_panel(comparison, "mat", MAT)
    if not panel.series:
        return None
    text = _words(comparison, "mat")
    return bars([panel], comparison.title, text)


FIGURES = {"speedup_by_task": speedup_by_task, "mat": mean_accepted_tokens}


def figures_of(runs: Sequence[Run]) -> Iterator[tuple[str, Figure]]:
    """All figures that the runs give, with the names of their files.

    Drawn one after the other, within :data:`analysis.plots.style.RC`.
    """
    drawn: Counter[str] = Counter()
    for stem, figure in _drawn(runs):
        drawn[stem] += 1
        yield (f"{stem}_{drawn[stem]}" if drawn[stem] > 1 else stem), figure


def _drawn(runs: Sequence[Run]) -> Iterator[tuple[str, Figure]]:
    """The figures with names that several may have: of one model and data set, on two machines."""
    made, others = by_reproduction(runs)
    for reproduction, members in made:
        for part, picture in reproduction.figures(members):
            yield "_".join(filter(None, [reproduction.name, part])), picture
    for comparison in make_comparisons(others):
        for name, draw in FIGURES.items():
            figure = draw(comparison)
            if figure is not None:
                yield f"{comparison.model}_{comparison.dataset}_{name}", figure


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code (2: nothing to show, or a damaged file)."""
    options = _parser().parse_args(arguments)
    return with_runs(options, lambda runs: _draw(runs, options))


def _draw(runs: Sequence[Run], options: argparse.Namespace) -> int:
    folder = options.output or options.runs[0] / "figures"
    context: Any = matplotlib.rc_context(RC)
    with context:
        for stem, figure in figures_of(runs):
            for path in save(figure, folder, stem):
                sys.stdout.write(f"{path}\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m analysis.figures", description="Figures of runs, as PNG and SVG."
    )
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUNS", help="run folders, or folders of them")
    add("-o", "--output", type=Path, metavar="DIR", help="default: RUNS/figures")
    add("--incomplete", action="store_true", help="also show runs that have not reached their end")
    return parser


if __name__ == "__main__":
    sys.exit(main())
