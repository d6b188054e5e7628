"""At which number of texts decoded in lock-step a method stops paying, as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from analysis.runs.comparisons import ComparedRuns
from analysis.runs.crossings import over_batches
from analysis.tabular.table import ResultTable
from specbench.results.estimate import Cell
from specbench.results.fitted_table import INTERVAL

CAPTION = (
    "Speedup of all texts together over ar at the same batch. break-even: the batch at which it "
    "falls to 1, read off between batches by their logarithm, with the batches at which the "
    "ends of the speedups' 95 % intervals do; fewer than three groups have none."
)


def crossing_tables(comparisons: Sequence[ComparedRuns]) -> Iterator[ResultTable]:
    """A table for runs that differ in their batch alone."""
    for found, labels in over_batches(comparisons):
        rows: list[dict[str, Cell]] = []
        for label, crossing in labels.items():
            row: dict[str, Cell] = {"method": label, "break-even batch [95 %]": str(crossing)}
            for entry in crossing.entries:
                row[f"batch {entry.run.batch}{INTERVAL}"] = entry.measured("speedup")
            rows.append(row)
        first = found[0].runs[0]
        title = f"{first.model} on {first.dataset}: break-even batches"
        codes = sorted({run.code for comparison in found for run in comparison.runs})
        caption = f"{first.hardware}. {CAPTION} Code: {', '.join(codes)}."
        yield ResultTable.of(title, caption, rows, short=tuple(rows[0]))
