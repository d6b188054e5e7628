"""Columns of the papers' tables, by their headings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from analysis.runs import acceptance
from analysis.runs.acceptance import draft_passes, draft_tokens, drafter_count
from analysis.runs.claims import Claim
from analysis.runs.comparisons import ComparedLabel, ComparedRuns
from analysis.runs.estimates import decoded_tokens, pooled_ratio, steps
from analysis.tabular.comparison_tables import claimed_cell, context_cells
from specbench.results.decision import OUTPUTS, case_cell, outputs_cell
from specbench.results.estimate import ABSENT, Cell, Estimate, Fact
from specbench.results.records import CaseRecord
from specbench.results.tasks import OVERALL

CONTEXT = "context"  # the columns of what a speedup stands on
SPEEDUP = "speedup [95 %]"
# By method, the knob of its store's size.
_STORES = {"ssd": "buffer_tokens", "rest": "store_tokens"}


def _devices(entry: ComparedLabel) -> str:
    """``1 of 2`` where two were configured and one did it."""
    used, configured = drafter_count("devices"), drafter_count("devices_asked")
    counted = [(used(record), configured(record)) for record in entry.records]
    counts = sorted({(int(n), int(of or n)) for n, of in counted if n is not None})
    return ", ".join(str(n) if n == of else f"{n} of {of}" for n, of in counts) or ABSENT


def _memory(entry: ComparedLabel) -> Fact:
    sizes = {part: size / 1e9 for part, size in entry.run.memory(entry.label).items()}
    words = " + ".join(f"{sizes[part]:.2f}" for part in ("target", "draft") if part in sizes)
    return Fact(words, {f"{part} memory, GB": sizes[part] for part in sizes})


def _ratio(
    top: Callable[[CaseRecord], float | None], bottom: Callable[[CaseRecord], float | None]
) -> Callable[[ComparedLabel], Estimate]:
    return lambda entry: pooled_ratio(entry.records, top, bottom, entry.run.seed)


_CELLS: Mapping[str, Callable[[ComparedLabel], Cell]] = {
    "model": lambda e: e.run.model,
    "data": lambda e: e.run.dataset,
    "method": lambda e: e.label,
    "setting": lambda e: e.label,
    "MAT [95 %]": lambda e: e.measured("mat"),
    "tokens/s [95 %]": lambda e: e.speed(),
    SPEEDUP: lambda e: e.measured("speedup"),
    "draft share of time [95 %]": acceptance.phase_share,
    "hit rate [95 %]": acceptance.hit_rate,
    "draft passes [95 %]": _ratio(draft_passes, decoded_tokens),
    "draft tokens [95 %]": _ratio(draft_tokens, decoded_tokens),
    "draft passes per target pass [95 %]": _ratio(draft_passes, steps),
    "draft token-passes per token [95 %]": _ratio(draft_tokens, decoded_tokens),
    "L_new of a target pass [95 %]": lambda e: replace(acceptance.rows_of_target_pass(e), digits=1),
    "L_new of a draft pass [95 %]": lambda e: replace(acceptance.rows_of_draft_pass(e), digits=1),
    "target Params × L_new": lambda e: acceptance.load_of_pass(
        acceptance.rows_of_target_pass(e), e.run.parameters()
    ),
    "draft Params × L_new": lambda e: acceptance.load_of_pass(
        acceptance.rows_of_draft_pass(e), e.run.parameters(e.label)
    ),
    "devices": _devices,
    "memory, GB": _memory,
    "cases": lambda e: case_cell(e.overall),
    OUTPUTS: lambda e: outputs_cell(e.overall),
    "verdict": lambda e: e.verdict(),
}


def cells(
    comparison: ComparedRuns,
    entry: ComparedLabel,
    headings: Sequence[str],
    others: Mapping[str, Cell] | None = None,
) -> dict[str, Cell]:
    """Return a row of a table; ``others`` are the cells of headings that are not here."""
    row: dict[str, Cell] = {}
    for heading in headings:
        if others and heading in others:
            row[heading] = others[heading]
        elif heading == CONTEXT:
            row |= context_cells(entry.overall)
        elif heading == "run":
            row[heading] = comparison.title
        elif heading.startswith("claimed"):
            row[heading] = cell_of_claim(entry.claim, heading)
        else:
            row[heading] = _CELLS[heading](entry)
    return row


def cell_of_claim(claim: Claim | None, heading: str) -> Cell:
    """Return a cell of ``claimed on``, ``claimed MAT``, ``claimed hit rate`` and the like."""
    if heading == "claimed on":
        return claim.place if claim else ABSENT
    return claimed_cell(claim, heading.removeprefix("claimed ").lower().replace(" ", "_"))


def task_cells(entry: ComparedLabel, task: str = OVERALL) -> dict[str, Cell]:
    """Return MAT and speedup on a task, and what the speedup stands on."""
    return {
        "MAT [95 %]": entry.measured("mat", task),
        SPEEDUP: entry.measured("speedup", task),
        **context_cells(entry.rows[task]),
    }


def knob_of(entry: ComparedLabel, name: str) -> object:
    """Return a knob's value; ``store`` is the method's knob of its store's size."""
    return entry.knobs.get(_STORES.get(entry.method, "") if name == "store" else name)


def setting_cell(entry: ComparedLabel, name: str) -> str:
    """Return ``label``, ``temperature`` or a knob of an entry; – where it has no such knob."""
    if name == "label":
        return entry.label
    value = f"{entry.run.temperature:g}" if name == "temperature" else knob_of(entry, name)
    return ABSENT if value is None else str(value)
