"""Figures of runs: ``python -m analysis.figures RUNS...``; PNG for screens, SVG for papers."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.figure import Figure

from analysis.groups import Entry, Group, caption, make_groups
from analysis.load import usable_runs
from analysis.style import RC, bar_style
from specbench.statistics import OVERALL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

_CAPTION_INCHES_PER_LINE = 0.15
_CHARACTERS_PER_INCH = 16
_HEADROOM = 1.6  # height of the picture over its tallest bar, at most


def speedup_by_task(group: Group) -> Figure | None:
    """Bars of speedup per task and over the whole run, with 95 % intervals.

    Returns:
        None where no label has a speedup (a run without a baseline).
    """
    entries = [entry for entry in group.entries if entry.label != entry.run.baseline]
    entries = [entry for entry in entries if entry.overall["speedup"] is not None]
    if not entries:
        return None
    tasks = [*(group.tasks if len(group.tasks) > 1 else []), OVERALL]
    figure = _bars(group, entries, tasks, "speedup", "speedup over ar (ratio of tokens/s)")
    axes = figure.axes[0]
    axes.axhline(1.0, color="#333333", linewidth=0.8, linestyle="--")
    axes.annotate(
        "ar", (1.0, 1.0), xycoords=("axes fraction", "data"), xytext=(4, 0),
        textcoords="offset points", va="center",
    )  # fmt: skip
    return figure


def mean_accepted_tokens(group: Group) -> Figure | None:
    """Bars of MAT per task and over the whole run, with 95 % intervals."""
    entries = [entry for entry in group.entries if entry.label != entry.run.baseline]
    entries = [entry for entry in entries if entry.overall["mat"] is not None]
    if not entries:
        return None
    tasks = [*(group.tasks if len(group.tasks) > 1 else []), OVERALL]
    figure = _bars(group, entries, tasks, "mat", "MAT (tokens per target pass; axis from 1)")
    # A pass always yields one token: what counts is the part above.
    figure.axes[0].set_ylim(bottom=1.0)
    return figure


FIGURES = {"speedup_by_task": speedup_by_task, "mat": mean_accepted_tokens}


def _bars(
    group: Group, entries: Sequence[Entry], tasks: Sequence[str], key: str, label: str
) -> Figure:
    width = 0.8 / len(entries)
    inches = max(5.0, 1.2 + 0.22 * len(entries) * len(tasks) + 0.65 * len(tasks))
    figure = Figure(figsize=(inches, 3.4))
    axes = figure.add_subplot()
    seen: Counter[str] = Counter()
    for i, entry in enumerate(entries):
        method = str(entry.overall["method"])
        style = bar_style(method, seen[method])
        seen[method] += 1
        places, heights, below, above = [], [], [], []
        for j, task in enumerate(tasks):
            row = entry.rows.get(task)
            if row is None or row[key] is None:
                continue
            low, high = row[f"{key}_ci"] or (row[key], row[key])
            places.append(j + (i - (len(entries) - 1) / 2) * width)
            heights.append(row[key])
            below.append(row[key] - low)
            above.append(high - row[key])
        axes.bar(
            places, heights, 0.9 * width, label=_name(group, entry), linewidth=0.5,
            yerr=[below, above], error_kw={"elinewidth": 0.9, "capsize": 2}, **style,
        )  # fmt: skip
    # An interval of two prompts may reach hundreds of times its value: it runs out of the picture,
    # marked by an arrow, rather than flattening every bar.
    tallest = max(r[key] for e in entries for t in tasks if (r := e.rows.get(t)) and r[key])
    top = _HEADROOM * tallest
    for bars in axes.containers:
        _mark_cut_intervals(axes, bars, top)
    reach = axes.get_ylim()[1]
    axes.set_ylim(0, min(reach, top))
    axes.set_xticks(range(len(tasks)), [_task_label(group, task) for task in tasks])
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel(label)
    axes.set_title(group.title, loc="left", fontsize=10)
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1.08), ncols=min(len(entries), max(2, int(inches)))
    )
    _write_below(figure, caption(group), inches)
    return figure


def _mark_cut_intervals(axes: Axes, bars: Any, top: float) -> None:
    """An arrow head at ``top`` over each bar whose interval reaches further."""
    errors = getattr(bars, "errorbar", None)
    if errors is None:
        return
    for segment in errors.lines[2][0].get_segments():
        if segment[1][1] > top:
            axes.plot(segment[1][0], top * 0.985, marker="^", color="#333333", markersize=4)


def _name(group: Group, entry: Entry) -> str:
    if len(group.runs) == 1:
        return entry.label
    return f"{entry.label} ({entry.run.path.name})"


def _task_label(group: Group, task: str) -> str:
    counts = {entry.rows[task]["n_cases"] for entry in group.entries if task in entry.rows}
    words = task.replace("_", " ")
    return f"{words}\nn = {min(counts)}" if len(counts) == 1 else words


def _write_below(figure: Figure, text: str, inches: float) -> None:
    lines = textwrap.wrap(text, int(inches * _CHARACTERS_PER_INCH))
    height = figure.get_size_inches()[1]
    figure.text(
        0.02, -(0.1 + _CAPTION_INCHES_PER_LINE * len(lines)) / height, "\n".join(lines),
        fontsize=7, va="bottom",
    )  # fmt: skip


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write a figure as PNG and SVG; the same figure gives the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for suffix, metadata in (("png", {"Software": None}), ("svg", {"Date": None})):
        paths.append(folder / f"{name}.{suffix}")
        figure.savefig(paths[-1], metadata=metadata)
    return paths


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code (2: nothing to show, or a damaged file)."""
    options = _parser().parse_args(arguments)
    try:
        runs, hidden = usable_runs(options.runs, options.incomplete)
    except Exception as error:
        # The project's own errors carry their exit code and a message meant for the user.
        code = getattr(error, "exit_code", None)
        if code is None:
            raise
        sys.stderr.write(f"error: {error}\n")
        return int(code)
    for run in hidden:
        sys.stderr.write(f"not shown, because incomplete: {run.path}\n")
    folder = options.output or options.runs[0] / "figures"
    drawn: Counter[str] = Counter()
    context: Any = matplotlib.rc_context(RC)
    with context:
        for group in make_groups(runs):
            for name, draw in FIGURES.items():
                figure = draw(group)
                if figure is None:
                    continue
                stem = f"{group.runs[0].model}_{group.runs[0].dataset}_{name}"
                drawn[stem] += 1
                if drawn[stem] > 1:
                    stem = f"{stem}_{drawn[stem]}"
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
