"""Columns of the papers' tables, by their headings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from analysis.runs.acceptance import (
    draft_passes,
    draft_tokens,
    hit_rate,
    load_of_pass,
    phase_share,
    rows_of_draft_pass,
    rows_of_target_pass,
)
from analysis.runs.comparisons import ComparedLabel, ComparedRuns
from analysis.runs.estimates import decoded_tokens, pooled_ratio
from analysis.tabular.comparison_tables import claimed_cell, context_cells
from specbench.results.decision import OUTPUTS, case_cell, outputs_cell
from specbench.results.estimate import ABSENT, Cell
from specbench.results.tasks import OVERALL

CONTEXT = "context"  # the columns of what a speedup stands on
_CELLS: Mapping[str, Callable[[ComparedLabel], Cell]] = {
    "model": lambda e: e.run.model,
    "data": lambda e: e.run.dataset,
    "method": lambda e: e.label,
    "setting": lambda e: e.label,
    "MAT [95 %]": lambda e: e.measured("mat"),
    "tokens/s [95 %]": lambda e: e.speed(),
    "speedup [95 %]": lambda e: e.measured("speedup"),
    "draft share of time [95 %]": phase_share,
    "hit rate [95 %]": hit_rate,
    "draft passes [95 %]": lambda e: pooled_ratio(
        e.records, draft_passes, decoded_tokens, e.run.seed
    ),
    "draft tokens [95 %]": lambda e: pooled_ratio(
        e.records, draft_tokens, decoded_tokens, e.run.seed
    ),
    "target Params × L_new": lambda e: load_of_pass(rows_of_target_pass(e), e.run.parameters()),
    "draft Params × L_new": lambda e: load_of_pass(
        rows_of_draft_pass(e), e.run.parameters(e.label)
    ),
    "cases": lambda e: case_cell(e.overall),
    OUTPUTS: lambda e: outputs_cell(e.overall),
    "claimed speedup": lambda e: claimed_cell(e.claim, "speedup"),
    "claimed MAT": lambda e: claimed_cell(e.claim, "mat"),
    "claimed hit rate": lambda e: claimed_cell(e.claim, "hit_rate"),
    "claimed on": lambda e: e.claim.place if e.claim else ABSENT,
    "verdict": lambda e: e.verdict(),
}


def cells(
    comparison: ComparedRuns,
    entry: ComparedLabel,
    headings: Sequence[str],
    others: Mapping[str, Cell] | None = None,
) -> dict[str, Cell]:
    """A row of a table; ``others`` are the cells of headings that are not known here."""
    row: dict[str, Cell] = {}
    for heading in headings:
        if others and heading in others:
            row[heading] = others[heading]
        elif heading == CONTEXT:
            row |= context_cells(entry.overall)
        else:
            row[heading] = comparison.title if heading == "run" else _CELLS[heading](entry)
    return row


def task_cells(entry: ComparedLabel, task: str = OVERALL) -> dict[str, Cell]:
    """MAT and speedup on a task, and what the speedup stands on."""
    return {
        "MAT [95 %]": entry.measured("mat", task),
        "speedup [95 %]": entry.measured("speedup", task),
        **context_cells(entry.rows[task]),
    }
