"""Cacheback (arXiv 2511.21699): Figures 3 and 4, Table 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from analysis.papers.reproduction import (
    Pictures,
    Reproduction,
    after,
    captions,
    claimed_comparisons,
    claimed_words,
    heatmap_pictures,
    knob_column,
    label_column,
    settings_tables,
    speedups,
    task_figure,
    task_panel,
)
from analysis.plots.charts import Panel, bars
from analysis.plots.sweeps import comparison_title
from analysis.plots.units import PLAIN, speedup_words
from analysis.runs.load import Run
from analysis.tabular.comparison_tables import comparison_table, task_table
from analysis.tabular.table import ResultTable
from specbench.results.names import display_name

PAPER = "cacheback"
_LENGTHS = ("leader_len", "follower_len")
_AXES = {"leader_len": "leader length LL (tokens)", "follower_len": "follower length FL (tokens)"}
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
        yield comparison.model, task_figure(comparison, "Cacheback, Table 1")


def _figure3(runs: Sequence[Run]) -> list[ResultTable]:
    # The paper's bars have no numbers; its table has those of Cacheback, which are shown instead.
    pages = []
    for comparison in claimed_comparisons(runs, PAPER, "figure3", "table1"):
        pages.append(comparison_table(comparison))
        pages.append(task_table(comparison, f"Cacheback, Figure 3 by task ({comparison.title})"))
    return pages


def _figure3_figure(runs: Sequence[Run]) -> Pictures:
    comparisons = claimed_comparisons(runs, PAPER, "figure3", "table1")
    models = [display_name(comparison.model) for comparison in comparisons]
    unit = speedup_words(comparisons[0].timing)
    panels = [Panel("by model", "", unit, speedups(comparisons), models, reference=(1.0, PLAIN))]
    for comparison in comparisons:
        title = f"by task, {comparison_title(comparison)}"
        panels.append(replace(task_panel(comparison, "speedup"), title=title))
    text = captions(comparisons, claimed_words(comparisons, "speedup"))
    title = after("Cacheback, Figure 3", "by model and by task")
    yield "", bars(panels if len(models) > 1 else panels[1:], title, text)


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
    comparisons = claimed_comparisons(runs, PAPER, "table1")
    for key in ("speedup", "mat"):
        drawn = heatmap_pictures(
            comparisons, _LENGTHS, key, "Cacheback, Figure 4", _FIGURE4_TEXT, _AXES
        )
        for model, figure in drawn:
            yield f"{model}_{key}", figure


REPRODUCTIONS = (
    Reproduction("cacheback_figure3", "Cacheback, Figure 3", _figure3, _figure3_figure),
    Reproduction("cacheback_figure4", "Cacheback, Figure 4", _figure4, length_figures),
    Reproduction("cacheback_table1", "Cacheback, Table 1", _table1, _table1_figure),
)
