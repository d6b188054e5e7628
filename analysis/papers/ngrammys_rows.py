"""N-Grammys (arXiv 2411.03786), Figure 4: which rows win, at which rank, and who filled them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from analysis.papers.reproduction import (
    Pictures,
    Reproduction,
    after,
    by_model,
    captions,
    claimed_comparisons,
)
from analysis.plots.charts import Panel, Point, Series, curves
from analysis.plots.sweeps import figure_name
from analysis.runs.comparisons import ComparedLabel, Comparison
from analysis.runs.estimates import pooled_ratio
from analysis.runs.load import Run
from analysis.tabular.table import ResultTable
from specbench.results.decision import case_cell
from specbench.results.estimate import Cell, Estimate
from specbench.results.names import display_name
from specbench.results.records import CaseRecord

PAPER = "ngrammys"
_FIGURE4_TEXT = (
    "Rows come from the context first and are filled up from the model's bigrams. Top: draft "
    "tokens accepted from the winning row; middle: its rank among its source's rows; bottom: rows "
    "given to a source in a step. A value that occurs in too few questions has no interval. The "
    "paper's bars have no numbers."
)


def _won(record: CaseRecord, source: str, key: str) -> Counter[int]:
    """Values of a list with one entry per step, at the steps that a row of the source won."""
    steps = zip(record.drafter[key], record.drafter["won_source"], strict=True)
    return Counter(value for value, won in steps if won == source)


_SOURCES = ("context", "bigram")
# Of each part its unit, and what a turn counted for a source.
_PARTS: dict[str, tuple[str, Callable[[CaseRecord, str], Counter[int]]]] = {
    "accepted draft tokens": (
        "share of the source's wins",
        lambda record, source: _won(record, source, "accepted"),
    ),
    "rank of the winning row (0 is first)": (
        "share of the source's wins",
        lambda record, source: _won(record, source, "won_rank"),
    ),
    "rows given to the source": (
        "share of steps",
        lambda record, source: Counter(record.drafter[f"rows_{source}"]),
    ),
}


def _distribution(entry: ComparedLabel, part: str, source: str) -> list[tuple[int, Estimate]]:
    """Every value up to the largest, also those that did not occur, and its share."""
    counted = _PARTS[part][1]
    own = [record for record in entry.records if record.drafter]

    def share(value: int) -> Estimate:
        return pooled_ratio(
            own,
            lambda r: counted(r, source)[value],
            lambda r: counted(r, source).total(),
            entry.run.seed,
            at_most=1,
        )

    total = sum((counted(record, source) for record in own), Counter[int]())
    support = range(min(total, default=0), max(total, default=-1) + 1)
    return [(value, share(value)) for value in support]


def _figure4(runs: Sequence[Run]) -> list[ResultTable]:
    comparisons = claimed_comparisons(runs, PAPER, "table1")
    rows: list[dict[str, Cell]] = [
        {
            "run": comparison.title,
            "part": part,
            "source": source,
            "value": str(value),
            "share [95 %]": share,
            "cases": case_cell(entry.overall),
        }
        for comparison in comparisons
        for entry in comparison.drafting
        for part in _PARTS
        for source in _SOURCES
        for value, share in _distribution(entry, part, source)
    ]
    text = captions(comparisons, _FIGURE4_TEXT, speedup=False)
    return [ResultTable.of("N-Grammys, Figure 4: acceptance, rank, allocation", text, rows)]


def _figure4_figure(runs: Sequence[Run]) -> Pictures:
    for model, comparisons in by_model(claimed_comparisons(runs, PAPER, "table1")):
        found = [(comparison, entry) for comparison in comparisons for entry in comparison.drafting]
        panels = [[_panel(entry, part) for _, entry in found] for part in _PARTS]
        panels[0] = [
            replace(panel, title=_title(*drawn))
            for panel, drawn in zip(panels[0], found, strict=True)
        ]
        text = captions(comparisons, _FIGURE4_TEXT, speedup=False)
        yield model, curves(panels, after("N-Grammys, Figure 4", display_name(model)), text)


def _panel(entry: ComparedLabel, part: str) -> Panel:
    series = [
        Series(
            source,
            f"{PAPER}/{source}",
            [Point.at(value, share) for value, share in _distribution(entry, part, source)],
        )
        for source in _SOURCES
    ]
    return Panel("", part, _PARTS[part][0], series, top=1.0, bars=True)


def _title(comparison: Comparison, entry: ComparedLabel) -> str:
    dataset = display_name(comparison.dataset)
    several = len(comparison.drafting) > 1
    return f"{dataset}, {figure_name(comparison, entry)}" if several else dataset


FIGURE4 = Reproduction("ngrammys_figure4", "N-Grammys, Figure 4", _figure4, _figure4_figure)
