"""Token Recycling (arXiv 2408.08696): Table 1, Figures 3 and 4."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from analysis.papers.reproduction import (
    MAT,
    SPEEDUP,
    Pictures,
    Reproduction,
    captions,
    claimed_comparisons,
    claimed_words,
    knob_column,
    label_column,
    task_panel,
)
from analysis.plots.charts import Panel, Point, Series, bars, curves
from analysis.plots.stacked_bars import stacked_bars
from analysis.runs.comparisons import ComparedLabel, Comparison
from analysis.runs.estimates import phase_s, pooled_ratio
from analysis.runs.load import Run
from analysis.tabular.comparison_tables import comparison_table, settings_table, task_table
from analysis.tabular.table import Cell, ResultTable
from specbench.results.estimate import Estimate

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
        figure = bars(
            [
                task_panel(comparison, "mat", MAT),
                replace(task_panel(comparison, "speedup", SPEEDUP), reference=(1.0, "ar")),
            ],
            f"Token Recycling, Table 1 ({comparison.title})",
            captions([comparison], claimed_words([comparison], "mat", "speedup")),
        )
        yield f"{comparison.model}_{comparison.dataset}", figure


def _figure3(runs: Sequence[Run]) -> list[ResultTable]:
    comparisons = claimed_comparisons(runs, PAPER, "figure3")
    columns = {
        "setting": label_column,
        "nodes": knob_column("breadth"),
        "levels": knob_column("depth"),
        "update": knob_column("update"),
    }
    title = "Token Recycling, Figure 3: the tree's breadth and depth, and the update rule"
    return [settings_table(title, comparisons, columns, _FIGURE3_TEXT)]


def _figure3_figure(runs: Sequence[Run]) -> Pictures:
    for comparison in claimed_comparisons(runs, PAPER, "figure3"):
        figure = curves(
            [_figure3_row(comparison, *row) for row in _FIGURE3_ROWS],
            f"Token Recycling, Figure 3 ({comparison.title})",
            captions([comparison], _FIGURE3_TEXT, speedup=False),
        )
        yield comparison.model, figure


_FIGURE3_ROWS: tuple[tuple[Callable[[ComparedLabel], Estimate], str], ...] = (
    (lambda entry: entry.measured("mat"), MAT),
    (lambda entry: entry.speed(), "tokens/s"),
)


def _figure3_row(
    comparison: Comparison, number: Callable[[ComparedLabel], Estimate], ylabel: str
) -> list[Panel]:
    entries = comparison.drafting
    sizes = [(entry, entry.knobs) for entry in entries]
    grown = [(e, int(k["breadth"]), int(k["depth"])) for e, k in sizes if k.get("breadth")]
    breadth = sorted(((nodes, e) for e, nodes, levels in grown if levels == 6), key=_first)
    depth = sorted(((levels, e) for e, nodes, levels in grown if nodes == 80), key=_first)
    rules = [(str(k["update"]), e) for e, k in sizes if not k.get("breadth")]

    bottom = 1.0 if ylabel == MAT else None

    def series(name: str, points: Sequence[Point]) -> list[Series]:
        return [Series(name, PAPER, points)]

    return [
        Panel(
            "(a) breadth, 6 levels", "nodes", ylabel,
            series("grown tree", [Point.at(nodes, number(entry)) for nodes, entry in breadth]),
            bottom=bottom,
        ),
        Panel(
            "(b) depth, 80 nodes", "levels", ylabel,
            series("grown tree", [Point.at(levels, number(entry)) for levels, entry in depth]),
            bottom=bottom,
        ),
        Panel(
            "(c) update rule", "", ylabel,
            [Series("template", PAPER, [Point.at(x, number(e)) for x, (_, e) in enumerate(rules)])],
            ticks=[name for name, _ in rules], bottom=bottom,
        ),
    ]  # fmt: skip


def _first(pair: tuple[int, ComparedLabel]) -> int:
    return pair[0]


def _phase_shares(entry: ComparedLabel) -> dict[str, Estimate]:
    timed = [record for record in entry.records if record.phase_s]

    def share(phase: str) -> Estimate:
        return pooled_ratio(
            timed,
            lambda r: phase_s(r, phase),
            lambda r: sum(phase_s(r, each) for each in _PHASES),
            entry.run.seed,
            at_most=1,
        )

    return {words: share(phase) for phase, words in _PHASES.items()}


def _figure4(runs: Sequence[Run]) -> list[ResultTable]:
    rows: list[dict[str, Cell]] = []
    for comparison in claimed_comparisons(runs, PAPER, "figure4"):
        for entry in comparison.entries:
            for part, share in _phase_shares(entry).items():
                # Most parts are below a hundredth.
                digits = replace(share, digits=4)
                rows.append(
                    {
                        "run": comparison.title,
                        "method": comparison.name_of(entry),
                        "part": part,
                        "share of the steps' time [95 %]": digits,
                        "cases": str(entry.overall["n_cases"]),
                    }
                )
    text = captions(claimed_comparisons(runs, PAPER, "figure4"), _FIGURE4_TEXT, speedup=False)
    return [ResultTable.of("Token Recycling, Figure 4: time of a step", text, rows)]


def _figure4_figure(runs: Sequence[Run]) -> Pictures:
    for comparison in claimed_comparisons(runs, PAPER, "figure4"):
        rows = {comparison.name_of(e): _phase_shares(e) for e in comparison.entries}
        figure = stacked_bars(
            rows,
            "share of the time of all steps",
            f"Token Recycling, Figure 4: where a step's time goes ({comparison.title})",
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
