"""N-Grammys (arXiv 2411.03786), Figure 4: which rows win, at which rank, and who filled them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from analysis.papers.reproduction import (
    Pictures,
    Reproduction,
    by_model,
    captions,
    claimed_comparisons,
)
from analysis.plots.charts import Panel, Point, Series, curves
from analysis.runs.comparisons import ComparedLabel, Comparison
from analysis.runs.estimates import pooled_ratio
from analysis.runs.load import Run
from analysis.tabular.table import Cell, ResultTable
from specbench.results.estimate import Estimate
from specbench.results.records import CaseRecord

PAPER = "ngrammys"
_FIGURE4_TEXT = (
    "Rows come from the context first and are filled up from the model's bigrams. Top: draft "
    "tokens accepted from the winning row; middle: its rank among its source's rows; bottom: rows "
    "given to a source in a step. A value that occurs in too few questions has no interval. The "
    "paper's bars have no numbers."
)


def _share(
    entry: ComparedLabel, counts: Callable[[CaseRecord], Counter[Any]], wanted: Any
) -> Estimate:
    own = [record for record in entry.records if record.drafter]
    return pooled_ratio(
        own,
        lambda r: counts(r)[wanted],
        lambda r: sum(counts(r).values()),
        entry.run.seed,
        at_most=1,
    )


def _won(source: str, key: str) -> Callable[[CaseRecord], Counter[Any]]:
    """Values of a list with one entry per step, at the steps that a row of the source won."""

    def counts(record: CaseRecord) -> Counter[Any]:
        lists = record.drafter
        return Counter(
            value
            for value, won in zip(lists[key], lists["won_source"], strict=True)
            if won == source
        )

    return counts


def _given(source: str) -> Callable[[CaseRecord], Counter[Any]]:
    return lambda record: Counter(record.drafter[f"rows_{source}"])


_SOURCES = ("context", "bigram")
_PARTS: tuple[tuple[str, str, Callable[[str], Callable[[CaseRecord], Counter[Any]]]], ...] = (
    ("accepted draft tokens", "share of the source's wins", lambda s: _won(s, "accepted")),
    (
        "rank of the winning row (0 is first)",
        "share of the source's wins",
        lambda s: _won(s, "won_rank"),
    ),
    ("rows given to the source", "share of steps", _given),
)


def _distributions(entry: ComparedLabel) -> list[list[tuple[str, list[tuple[int, Estimate]]]]]:
    """For each part, each source's distribution: value and share."""
    own = [record for record in entry.records if record.drafter]
    parts = []
    for _, _, counts_of in _PARTS:
        sources = []
        for source in _SOURCES:
            counts = counts_of(source)
            total = sum((counts(record) for record in own), Counter[Any]())
            # Also the values that did not occur: their share is 0.
            support = range(min(total, default=0), max(total, default=-1) + 1)
            values = [(value, _share(entry, counts, value)) for value in support]
            sources.append((source, values))
        parts.append(sources)
    return parts


def _figure4(runs: Sequence[Run]) -> list[ResultTable]:
    rows: list[dict[str, Cell]] = []
    comparisons = claimed_comparisons(runs, PAPER, "table1")
    for comparison in comparisons:
        for entry in comparison.drafting:
            distributions = _distributions(entry)
            for (part, _, _), sources in zip(_PARTS, distributions, strict=True):
                for source, values in sources:
                    for value, share in values:
                        rows.append(
                            {
                                "run": comparison.title,
                                "part": part,
                                "source": source,
                                "value": str(value),
                                "share [95 %]": share,
                                "cases": str(entry.overall["n_cases"]),
                            }
                        )
    text = captions(comparisons, _FIGURE4_TEXT, speedup=False)
    return [ResultTable.of("N-Grammys, Figure 4: acceptance, rank, allocation", text, rows)]


def _series(source: str, values: Sequence[tuple[int, Estimate]]) -> Series:
    points = [Point.at(value, share) for value, share in values]
    return Series(source, f"{PAPER}/{source}", points)


def _figure4_figure(runs: Sequence[Run]) -> Pictures:
    for model, comparisons in by_model(claimed_comparisons(runs, PAPER, "table1")):
        found = [(comparison, entry) for comparison in comparisons for entry in comparison.drafting]
        columns = [_distributions(entry) for _, entry in found]
        panels = [
            [
                Panel(
                    _title(*found[j]) if i == 0 else "", words, unit,
                    [
                        _series(source, values) for source, values in column[i]
                    ],
                    top=1.0,
                    bars=True,
                )
                for j, column in enumerate(columns)
            ]
            for i, (words, unit, _) in enumerate(_PARTS)
        ]  # fmt: skip
        figure = curves(
            panels,
            f"N-Grammys, Figure 4 ({model})",
            captions(comparisons, _FIGURE4_TEXT, speedup=False),
        )
        yield model, figure


def _title(comparison: Comparison, entry: ComparedLabel) -> str:
    dataset = comparison.dataset
    return dataset if len(comparison.drafting) == 1 else f"{dataset}, {comparison.name_of(entry)}"


FIGURE4 = Reproduction("ngrammys_figure4", "N-Grammys, Figure 4", _figure4, _figure4_figure)
