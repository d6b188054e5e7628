"""Cacheback (arXiv 2511.21699): Figures 3 and 4, Table 1."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.papers.reproduction import (
    SPEEDUP,
    Pictures,
    Reproduction,
    captions,
    claimed_comparisons,
    claimed_in_cells,
    claimed_words,
    knob_column,
    label_column,
    settings_tables,
    speedups,
    sweeps,
    task_figure,
    task_label,
)
from analysis.plots.charts import Panel, Point, Series, bars_and_radar
from analysis.plots.heatmaps import HeatmapGrid, heatmaps
from analysis.runs.load import Run
from analysis.tabular.comparison_tables import comparison_table, task_table
from analysis.tabular.table import ResultTable
from specbench.results.manifest import BASELINE

PAPER = "cacheback"
_LENGTHS = ("leader_len", "follower_len")
_RADAR_TEXT = "The circle has no intervals; the table has those of the tasks."
_FIGURE4_TEXT = (
    "The paper prints no numbers for its cells; it says that speed is best at a leader of 1 and "
    "followers of about 3 tokens (Vicuna-7B, RTX 4090)."
)


_table1 = settings_tables(
    "Cacheback, Table 1: what each table brings",
    {"setting": label_column, "table": knob_column("table")},
    PAPER,
    "table1",
)


def _table1_figure(runs: Sequence[Run]) -> Pictures:
    for comparison in claimed_comparisons(runs, PAPER, "table1"):
        yield comparison.model, task_figure(comparison, "Cacheback, Table 1, by task")


def _figure3(runs: Sequence[Run]) -> list[ResultTable]:
    # The paper's bars have no numbers; what its table says of Cacheback stands beside.
    pages = []
    for comparison in claimed_comparisons(runs, PAPER, "figure3", "table1"):
        pages.append(comparison_table(comparison))
        pages.append(task_table(comparison, f"Cacheback, Figure 3 by task ({comparison.title})"))
    return pages


def _figure3_figure(runs: Sequence[Run]) -> Pictures:
    comparisons = claimed_comparisons(runs, PAPER, "figure3", "table1")
    models = [comparison.model for comparison in comparisons]
    panel = Panel("", "", SPEEDUP, speedups(comparisons), models, reference=(1.0, BASELINE))
    first = comparisons[0]
    around = [
        Series(
            first.name_of(entry),
            entry.method,
            [Point.at(x, entry.measured("speedup", task)) for x, task in enumerate(first.tasks)],
        )
        for entry in first.drafting
    ]
    spokes = [task_label(first, task) for task in first.tasks]
    title = f"Cacheback, Figure 3: by model, and by task for {first.model}"
    text = captions(comparisons, claimed_words(comparisons, "speedup"), _RADAR_TEXT)
    yield "", bars_and_radar(panel, spokes, around, title, text)


_figure4 = settings_tables(
    "Cacheback, Figure 4: leader length against follower length",
    {"leader (LL)": knob_column("leader_len"), "follower (FL)": knob_column("follower_len")},
    PAPER,
    "table1",
    text=_FIGURE4_TEXT,
)


def length_figures(runs: Sequence[Run]) -> Pictures:
    """Heatmaps of a sweep over leader and follower length: speedup and MAT of each model.

    One for each combination of the other settings (table, budget, merged branches, state).
    """
    for comparison in claimed_comparisons(runs, PAPER, "table1"):
        for sweep in sweeps(comparison, *_LENGTHS):
            for key, words in (("speedup", SPEEDUP), ("mat", "MAT (tokens per target pass)")):
                drawn = HeatmapGrid.of(sweep.titled(comparison.title), sweep.estimates(key))
                if drawn.numbers:
                    claimed = claimed_in_cells(sweep.entries.values(), key, *_LENGTHS)
                    figure = heatmaps(
                        [drawn], "follower length FL (tokens)", "leader length LL (tokens)", words,
                        f"Cacheback, Figure 4: {words}",
                        captions([comparison], _FIGURE4_TEXT, claimed, speedup=key == "speedup"),
                    )  # fmt: skip
                    yield f"{comparison.model}_{key}", figure


REPRODUCTIONS = (
    Reproduction("cacheback_figure3", "Cacheback, Figure 3", _figure3, _figure3_figure),
    Reproduction("cacheback_figure4", "Cacheback, Figure 4", _figure4, length_figures),
    Reproduction("cacheback_table1", "Cacheback, Table 1", _table1, _table1_figure),
)
