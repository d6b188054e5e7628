"""Figures of runs: ``python -m analysis.figures RUNS...``, as PNG and PDF.

Runs of an experiment become the figure of the paper that it stands for (:mod:`analysis.papers`).
Other runs with the same model, data and hardware share figures. A sweep over one or two knobs is
drawn along its knobs. If there are other labels too, all are ranked, drawn against MAT and,
if they are few, as bars by task. Several settings of a method are drawn by draft budget. A sweep
over ``batch.size`` or ``server.concurrency`` shows speedup by load; name one of its runs for the
figures of that run. For trained heads, acceptance by position is drawn.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from analysis.papers import by_reproduction
from analysis.papers.pictures import task_panel
from analysis.plots.charts import bars
from analysis.plots.pictures import (
    acceptance_picture,
    budget_picture,
    by_load,
    caption_of,
    finding,
    load_picture,
    overview_pictures,
    own_sweeps,
    sweep_pictures,
)
from analysis.plots.style import Drawing, save
from analysis.runs.cli import runs_parser, with_runs
from analysis.runs.comparisons import ComparedRuns, make_comparisons
from analysis.runs.leaders import leaders
from analysis.runs.load import Run

MOST = 12  # labels whose bars a reader can distinguish


def task_bars(comparison: ComparedRuns, key: str) -> Drawing | None:
    """Draw bars of ``speedup`` or ``mat`` by task and the whole run; None without numbers."""
    panel = task_panel(comparison, key)
    if not panel.series:
        return None
    title, n_tasks = finding(comparison), len(comparison.tasks)
    have_intervals = all(point.interval for series in panel.series for point in series.points)
    if key == "mat":
        first = leaders([e for e in comparison.ranked if e.overall["mat"] is not None], "mat")[0]
        mat = first.overall["mat"]
        title = f"{comparison.name_of(first)} has the highest MAT: {mat:.2f} tokens per target pass"
    elif have_intervals and len(panel.series) > 1 and n_tasks > 1:
        speedups_by_task = zip(*([p.y or 0.0 for p in s.points] for s in panel.series), strict=True)
        fastest = [speedups.index(max(speedups)) for speedups in speedups_by_task][:n_tasks]
        ((best, count),) = Counter(fastest).most_common(1)
        name = panel.series[best].name
        title = f"{name} has the highest speedup in {count} of {n_tasks} tasks"
    return bars([panel], title, caption_of(comparison))


def figures_of(runs: Sequence[Run]) -> Iterator[tuple[str, Drawing]]:
    """Draw all figures of the runs, with the names of their files."""
    drawn: Counter[str] = Counter()
    for stem, figure in _drawn(runs):
        drawn[stem] += 1
        yield (f"{stem}_{drawn[stem]}" if drawn[stem] > 1 else stem), figure


def _drawn(runs: Sequence[Run]) -> Iterator[tuple[str, Drawing]]:
    reproduced, others = by_reproduction(runs)
    for reproduction, members in reproduced:
        for part, picture in reproduction.figures(members):
            yield "_".join(filter(None, [reproduction.name, part])), picture
    comparisons = make_comparisons(others)
    batches: set[int] = set()
    for group in by_load(comparisons):
        yield "load", load_picture(group)
        if group[-1].runs[0].batch > 1:
            batches |= {id(comparison) for comparison in group}
    for comparison in comparisons:
        if id(comparison) in batches:  # drawn when its run is named alone
            continue
        for name, figure in pictures_of(comparison):
            users = comparison.runs[0].concurrency
            load = f"_at_{users}" if users > 1 else ""
            yield f"{comparison.model}_{comparison.dataset}_{name}{load}", figure


def pictures_of(comparison: ComparedRuns) -> Iterator[tuple[str, Drawing]]:
    """Draw the figures of runs that belong to no experiment, with their file names' suffixes."""
    knobs, swept = own_sweeps(comparison)
    yield from sweep_pictures(comparison, knobs, swept)
    in_sweeps = {id(entry) for sweep in swept for entry in sweep.entries.values()}
    if all(id(entry) in in_sweeps for entry in comparison.drafting):
        return
    if (drawn := budget_picture(comparison)) is not None:
        yield "budget", drawn
    if comparison.runs[0].concurrency > 1:  # one user's speed is not the result
        return
    yield from overview_pictures(comparison)
    if (drawn := acceptance_picture(comparison)) is not None:
        yield "acceptance", drawn
    for name, key in (("speedup_by_task", "speedup"), ("mat", "mat")):
        if len(comparison.ranked) > MOST:
            break
        if (drawn := task_bars(comparison, key)) is not None:
            yield name, drawn


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code (2: nothing to show, or a damaged file)."""
    parser = runs_parser("figures", "Figures of runs, as PNG and PDF.")
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="default: RUNS/figures")
    options = parser.parse_args(arguments)
    folder = options.output or options.runs[0] / "figures"
    return with_runs(options, lambda runs, _: draw(runs, folder))


def draw(runs: Sequence[Run], folder: Path) -> int:
    """Write the runs' figures and print their paths; return 0."""
    sys.stdout.write(f"figures in {folder}, each as png and pdf:\n")
    for stem, figure in figures_of(runs):
        save(figure, folder, stem)
        sys.stdout.write(f"  {stem}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
