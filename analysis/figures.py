"""Figures of runs: ``python -m analysis.figures RUNS...``; PNG for screens, SVG, PDF for papers.

Runs of an experiment become the figure of the paper that it stands for (:mod:`analysis.papers`).
Other runs that agree in model, data and hardware share figures. A sweep over one knob or two is
drawn along its knobs. Where there are other labels too, all are ranked, drawn prompt by prompt,
against MAT and, where they are few, as bars by task. Several settings of a method are drawn by
draft budget. A sweep over ``batch.size`` or ``server.concurrency`` has speedup by load; name one of
its runs for the figures of that run. Trained heads have their acceptance by position, and in
several sizes what a tree gains over a chain.

``--width column`` or ``page`` draws at the width of a paper's column or page. Words stand beside
each picture in a file of their own.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from analysis.papers import by_reproduction
from analysis.papers.claimed import claimed_words, task_panel
from analysis.plots.charts import bars
from analysis.plots.heads import acceptance_picture, rows_picture
from analysis.plots.layout import Drawing, save
from analysis.plots.loads import by_load, load_picture
from analysis.plots.overviews import budget_picture, overview_pictures
from analysis.plots.style import WIDTHS, styled
from analysis.plots.sweeps import own_sweeps, sweep_pictures
from analysis.runs.captions import caption
from analysis.runs.command import runs_parser, with_runs
from analysis.runs.comparisons import ComparedRuns, make_comparisons
from analysis.runs.leaders import wrong_words_of
from analysis.runs.load import Run

MOST = 12  # labels whose bars can be told apart
# Key of the bars by task, by what is added to their files' names.
FIGURES = {"speedup_by_task": "speedup", "mat": "mat"}
_TITLES = {"speedup": "Speedup by task", "mat": "Mean accepted tokens by task"}


def task_bars(comparison: ComparedRuns, key: str) -> Drawing | None:
    """Bars of ``speedup`` or ``mat`` per task and over the whole run; None without numbers."""
    panel = task_panel(comparison, key)
    if not panel.series:
        return None
    timed = key == "speedup"
    words = [
        _not_drawn(comparison),
        caption(comparison, timed, timed),
        claimed_words([comparison], key),
    ]
    title = f"{_TITLES[key]} ({comparison.printed_title})"
    return bars([panel], title, "\n".join(filter(None, words)))


def _not_drawn(comparison: ComparedRuns) -> str:
    """Whose outputs are wrong, so that pictures which show who is faster lack it."""
    found = wrong_words_of(comparison)
    return f"Not drawn: {' '.join(found)}" if found else ""


def figures_of(runs: Sequence[Run]) -> Iterator[tuple[str, Drawing]]:
    """All figures that the runs give, with the names of their files.

    Drawn one after the other, within :func:`analysis.plots.style.styled`.
    """
    drawn: Counter[str] = Counter()
    for stem, figure in _drawn(runs):
        drawn[stem] += 1
        yield (f"{stem}_{drawn[stem]}" if drawn[stem] > 1 else stem), figure


def _drawn(runs: Sequence[Run]) -> Iterator[tuple[str, Drawing]]:
    """The figures with names that several may have: of one model and data set, on two machines."""
    made, others = by_reproduction(runs)
    for reproduction, members in made:
        for part, picture in reproduction.figures(members):
            yield "_".join(filter(None, [reproduction.name, part])), picture
    comparisons = make_comparisons(others)
    crossed: set[int] = set()
    for found in by_load(comparisons):
        yield "load", load_picture(found)
        if found[-1].runs[0].batch > 1:
            crossed |= {id(each) for each in found}
    for comparison in comparisons:
        if id(comparison) in crossed:  # its own figures: those of one run's folder
            continue
        for name, figure in pictures_of(comparison):
            users = comparison.runs[0].concurrency
            load = f"_at_{users}" if users > 1 else ""
            yield f"{comparison.model}_{comparison.dataset}_{name}{load}", figure


def pictures_of(comparison: ComparedRuns) -> Iterator[tuple[str, Drawing]]:
    """The figures of runs of no experiment, with what is added to their files' names."""
    words = "\n".join(filter(None, [_not_drawn(comparison), caption(comparison)]))
    knobs, found = own_sweeps(comparison)
    yield from sweep_pictures(comparison, knobs, found)
    swept = {id(entry) for _, sweep in found for entry in sweep.entries.values()}
    if all(id(entry) in swept for entry in comparison.drafting):
        return
    if (drawn := budget_picture(comparison, words)) is not None:
        yield "budget", drawn
    yield from overview_pictures(comparison, words)
    for name, picture in (("acceptance", acceptance_picture), ("tree_rows", rows_picture)):
        if (drawn := picture(comparison, caption(comparison, False, False))) is not None:
            yield name, drawn
    for name, key in FIGURES.items() if len(comparison.ranked) <= MOST else ():
        if (drawn := task_bars(comparison, key)) is not None:
            yield name, drawn


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code (2: nothing to show, or a damaged file)."""
    return with_runs(parser().parse_args(arguments), draw)


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = runs_parser("figures", "Figures of runs, as PNG, SVG and PDF.")
    add = made.add_argument
    add("-o", "--output", type=Path, metavar="DIR", help="default: RUNS/figures")
    add("--width", choices=WIDTHS, help="of a paper's column or page; default: for a screen")
    add("--caption", action="store_true", help="title and caption in the pictures, not beside")
    return made


def draw(runs: Sequence[Run], options: argparse.Namespace) -> int:
    """Write the runs' figures where the options of :func:`parser` say."""
    folder = options.output or options.runs[0] / "figures"
    forms: list[str] = []
    with styled(options.width):
        for stem, figure in figures_of(runs):
            paths = save(figure, folder, stem, options.caption)
            if not forms:
                forms = [path.suffix.removeprefix(".") for path in paths]
                sys.stdout.write(f"figures in {folder}, each as {', '.join(forms)}:\n")
            sys.stdout.write(f"  {stem}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
