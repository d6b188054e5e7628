"""Token Recycling (arXiv 2408.08696): Table 1, Figures 3 and 4."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from analysis.papers.reproduction import (
    Pictures,
    Reproduction,
    after,
    captions,
    claimed_comparisons,
    knob_column,
    label_column,
    settings_tables,
    task_figure,
)
from analysis.plots.charts import Panel, Point, Series, curves
from analysis.plots.stacked_bars import stacked_bars
from analysis.plots.sweeps import comparison_title, figure_name
from analysis.plots.units import MAT, speed_words
from analysis.runs.comparisons import ComparedLabel, Comparison
from analysis.runs.drafting import phase_share
from analysis.runs.load import Run
from analysis.tabular.comparison_tables import comparison_table, task_table
from analysis.tabular.table import ResultTable
from specbench.results.decision import case_cell
from specbench.results.estimate import Cell, Estimate
from specbench.results.manifest import BASELINE

PAPER = "token_recycling"
_FIGURE3_TEXT = (
    "The paper's curves have no numbers; it says that tokens/s falls beyond 80 nodes, that MAT "
    "hardly grows beyond 6 levels, and that the update rules differ little in MAT (Vicuna-7B, "
    "A100-80GB)."
)
_FIGURE4_TEXT = (
    "Share of the time of all steps (measure=phases: the clock looks into the steps, so no speed "
    "is taken from here). The paper: most of it is the forward pass, then verification; retrieving "
    "and updating take about the same; its bars have no numbers."
)
# The paper's words for the phases of a step, in its order.
_PHASES = {
    "draft": "retrieve draft",
    "verify": "forward pass",
    "accept": "verify",
    "cache": "update KV cache",
    "observe": "update matrix",
    "other": "other",
}


def _table1_comparisons(runs: Sequence[Run]) -> list[Comparison]:
    return claimed_comparisons(runs, PAPER, "table1", "table1_mbpp")


def _table1(runs: Sequence[Run]) -> list[ResultTable]:
    pages = []
    for comparison in _table1_comparisons(runs):
        pages.append(comparison_table(comparison))
        if len(comparison.tasks) > 1:
            title = f"Token Recycling, Table 1 by task ({comparison.title})"
            pages.append(task_table(comparison, title))
    return pages


def _table1_figure(runs: Sequence[Run]) -> Pictures:
    for comparison in _table1_comparisons(runs):
        figure = task_figure(comparison, "Token Recycling, Table 1")
        yield f"{comparison.model}_{comparison.dataset}", figure


_figure3 = settings_tables(
    "Token Recycling, Figure 3: the tree's breadth and depth, and the update rule",
    {
        "setting": label_column,
        "nodes": knob_column("breadth"),
        "levels": knob_column("depth"),
        "update": knob_column("update"),
    },
    PAPER,
    "figure3",
    text=_FIGURE3_TEXT,
)


def _figure3_figure(runs: Sequence[Run]) -> Pictures:
    for comparison in claimed_comparisons(runs, PAPER, "figure3"):
        speed = speed_words(comparison.timing)
        figure = curves(
            [
                _figure3_row(comparison, lambda entry: entry.measured("mat"), MAT),
                _figure3_row(comparison, lambda entry: entry.speed(), speed),
            ],
            after("Token Recycling, Figure 3", comparison_title(comparison)),
            captions([comparison], _FIGURE3_TEXT, speedup=False),
        )
        yield comparison.model, figure


def _figure3_row(
    comparison: Comparison, number: Callable[[ComparedLabel], Estimate], ylabel: str
) -> list[Panel]:
    grown = [entry for entry in comparison.drafting if entry.knobs.get("breadth")]
    rules = [entry for entry in comparison.drafting if not entry.knobs.get("breadth")]
    bottom = 1.0 if ylabel == MAT else None

    def of_trees(knob: str, other: str, fixed: int) -> list[Series]:
        sizes = [(int(e.knobs[knob]), e) for e in grown if int(e.knobs[other]) == fixed]
        points = [Point.at(size, number(e)) for size, e in sorted(sizes, key=lambda item: item[0])]
        return [Series("grown tree", PAPER, points)]

    by_nodes, by_levels = of_trees("breadth", "depth", 6), of_trees("depth", "breadth", 80)
    by_rule = [Series("template", PAPER, [Point.at(x, number(e)) for x, e in enumerate(rules)])]
    names = [str(entry.knobs["update"]) for entry in rules]
    return [
        Panel("(a) breadth, 6 levels", "nodes", ylabel, by_nodes, bottom=bottom),
        Panel("(b) depth, 80 nodes", "levels", ylabel, by_levels, bottom=bottom),
        Panel("(c) update rule", "update rule", ylabel, by_rule, names, bottom=bottom),
    ]


def _phase_shares(entry: ComparedLabel) -> dict[str, Estimate]:
    return {words: phase_share(entry, phase) for phase, words in _PHASES.items()}


def _drawn_shares(entry: ComparedLabel) -> dict[str, Estimate]:
    """Plain decoding drafts nothing: what its clock reads there is the clock itself."""
    skipped = {_PHASES[p] for p in ("draft", "observe")} if entry.method == BASELINE else set()
    return {part: share for part, share in _phase_shares(entry).items() if part not in skipped}


def _figure4(runs: Sequence[Run]) -> list[ResultTable]:
    comparisons = claimed_comparisons(runs, PAPER, "figure4")
    rows: list[dict[str, Cell]] = [
        {
            "run": comparison.title,
            "method": comparison.name_of(entry),
            "part": part,
            # Most parts are below a hundredth.
            "share of the steps' time [95 %]": replace(share, digits=4),
            "cases": case_cell(entry.overall),
        }
        for comparison in comparisons
        for entry in comparison.entries
        for part, share in _phase_shares(entry).items()
    ]
    text = captions(comparisons, _FIGURE4_TEXT, speedup=False)
    return [ResultTable.of("Token Recycling, Figure 4: time of a step", text, rows)]


def _figure4_figure(runs: Sequence[Run]) -> Pictures:
    for comparison in claimed_comparisons(runs, PAPER, "figure4"):
        rows = {figure_name(comparison, e): _drawn_shares(e) for e in comparison.entries}
        figure = stacked_bars(
            rows,
            "share of the time of all steps",
            after("Token Recycling, Figure 4", comparison_title(comparison)),
            captions([comparison], _FIGURE4_TEXT, speedup=False),
        )
        yield comparison.model, figure


REPRODUCTIONS = (
    Reproduction(
        "token_recycling_table1", "Token Recycling, Table 1", _table1, _table1_figure,
        also=("token_recycling_table1_shuffle", "token_recycling_table1_mbpp"),
    ),
    Reproduction(
        "token_recycling_figure3", "Token Recycling, Figure 3", _figure3, _figure3_figure
    ),
    Reproduction(
        "token_recycling_figure4", "Token Recycling, Figure 4", _figure4, _figure4_figure
    ),
)  # fmt: skip
