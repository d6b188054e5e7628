"""Figures of runs: ``python -m analysis.figures RUNS...``; PNG for screens, SVG for papers.

Runs of an experiment become the figure of the paper that it stands for (:mod:`analysis.papers`);
of other runs, those that agree in model, data and hardware share two bar charts.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from analysis.papers import by_reproduction
from analysis.papers.reproduction import claimed_words, task_panel
from analysis.plots.charts import bars
from analysis.plots.layout import save
from analysis.plots.style import RC
from analysis.runs.command import runs_parser, with_runs
from analysis.runs.comparisons import Comparison, caption, make_comparisons
from analysis.runs.load import Run


def speedup_by_task(comparison: Comparison) -> Figure | None:
    """Bars of speedup per task and over the whole run; None without a baseline."""
    return _task_bars(comparison, "speedup")


def mean_accepted_tokens(comparison: Comparison) -> Figure | None:
    """Bars of MAT per task and over the whole run."""
    return _task_bars(comparison, "mat")


def _task_bars(comparison: Comparison, key: str) -> Figure | None:
    panel = task_panel(comparison, key)
    if not panel.series:
        return None
    words = [caption(comparison, speedup=key == "speedup"), claimed_words([comparison], key)]
    return bars([panel], comparison.title, "\n".join(filter(None, words)))


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
    parser = runs_parser("figures", "Figures of runs, as PNG and SVG.")
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="default: RUNS/figures")
    return with_runs(parser.parse_args(arguments), _draw)


def _draw(runs: Sequence[Run], options: argparse.Namespace) -> int:
    folder = options.output or options.runs[0] / "figures"
    with matplotlib.rc_context(RC):
        for stem, figure in figures_of(runs):
            for path in save(figure, folder, stem):
                sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
