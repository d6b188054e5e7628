"""Cacheback (arXiv 2511.21699): Figures 3 and 4, Table 1."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from analysis.papers.reproduction import (
    MAT,
    SPEEDUP,
    Reproduction,
    captions,
    claimed_groups,
    claimed_in_cells,
    claimed_words,
    drafting,
    grid,
    has_numbers,
    knob,
    label,
    point,
    speedups,
    sweeps,
    task_label,
    task_panel,
)
from analysis.plots.charts import Panel, Series, bars, bars_and_radar
from analysis.plots.heatmaps import heatmaps
from analysis.runs.comparisons import name
from analysis.tabular.comparison_tables import comparison_table, settings_table, task_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from analysis.papers.reproduction import Pictures
    from analysis.runs.load import Run
    from analysis.tabular.table import ResultTable

PAPER = "cacheback"
_RADAR_TEXT = "The circle has no intervals; the table has those of the tasks."
_FIGURE4_TEXT = (
    "The paper prints no numbers for its cells; it says that speed is best at a leader of 1 and "
    "followers of about 3 tokens (Vicuna-7B, RTX 4090)."
)


def _table1(runs: Sequence[Run]) -> list[ResultTable]:
    groups = claimed_groups(runs, PAPER, "table1")
    columns = {"setting": label, "table": knob("table")}
    return [settings_table("Cacheback, Table 1: what each table brings", groups, columns)]


def _table1_figure(runs: Sequence[Run]) -> Pictures:
    for group in claimed_groups(runs, PAPER, "table1"):
        figure = bars(
            [
                task_panel(group, "mat", MAT),
                replace(task_panel(group, "speedup", SPEEDUP), reference=(1.0, "ar")),
            ],
            f"Cacheback, Table 1, by task ({group.title})",
            captions([group], claimed_words([group], "mat", "speedup")),
        )
        yield group.runs[0].model, figure


def _figure3(runs: Sequence[Run]) -> list[ResultTable]:
    # The paper's bars have no numbers; what its table says of Cacheback stands beside.
    groups = claimed_groups(runs, PAPER, "figure3", "table1")
    pages = []
    for group in groups:
        pages.append(comparison_table(group))
        pages.append(task_table(group, f"Cacheback, Figure 3 by task ({group.title})"))
    return pages


def _figure3_figure(runs: Sequence[Run]) -> Pictures:
    groups = claimed_groups(runs, PAPER, "figure3", "table1")
    panel = Panel(
        "",
        "",
        SPEEDUP,
        speedups(groups),
        [group.runs[0].model for group in groups],
        reference=(1.0, "ar"),
    )
    first = groups[0]
    around = [
        Series(
            name(first, entry),
            str(entry.overall["method"]),
            [point(x, entry, "speedup", task) for x, task in enumerate(first.tasks)],
        )
        for entry in drafting(first)
    ]
    spokes = [task_label(first, task) for task in first.tasks]
    title = f"Cacheback, Figure 3: by model, and by task for {first.runs[0].model}"
    text = captions(groups, claimed_words(groups, "speedup"), _RADAR_TEXT)
    yield "", bars_and_radar(panel, spokes, around, title, text)


def _figure4(runs: Sequence[Run]) -> list[ResultTable]:
    groups = claimed_groups(runs, PAPER, "table1")
    columns = {"leader (LL)": knob("leader_len"), "follower (FL)": knob("follower_len")}
    title = "Cacheback, Figure 4: leader length against follower length"
    return [settings_table(title, groups, columns, _FIGURE4_TEXT)]


_LENGTHS = ("leader_len", "follower_len")


def length_figures(runs: Sequence[Run]) -> Pictures:
    """Heatmaps of a sweep over leader and follower length: speedup and MAT of each model.

    One for each combination of the other settings (table, budget, merged branches, state).
    """
    for group in claimed_groups(runs, PAPER, "table1"):
        for sweep in sweeps(group, *_LENGTHS):
            for key, words in (("speedup", SPEEDUP), ("mat", "MAT (tokens per target pass)")):
                drawn = grid(sweep.titled(group.title), sweep.rows(), key)
                if has_numbers(drawn):
                    claimed = claimed_in_cells(sweep.entries.values(), key, *_LENGTHS)
                    figure = heatmaps(
                        [drawn], "follower length FL (tokens)", "leader length LL (tokens)", words,
                        f"Cacheback, Figure 4: {words}",
                        captions([group], _FIGURE4_TEXT, claimed, speedup=key == "speedup"),
                    )  # fmt: skip
                    yield f"{group.runs[0].model}_{key}", figure


ARTIFACTS = (
    Reproduction("cacheback_figure3", "Cacheback, Figure 3", _figure3, _figure3_figure),
    Reproduction("cacheback_figure4", "Cacheback, Figure 4", _figure4, length_figures),
    Reproduction("cacheback_table1", "Cacheback, Table 1", _table1, _table1_figure),
)
