"""The first table of everything: which method to take, in a sentence and six columns.

Made of rows of ``summary.json`` alone, for the end of a run and for all that :mod:`analysis` makes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from specbench.results.estimate import ABSENT, FEWEST, Cell, Estimate, Fact
from specbench.results.manifest import BASELINE
from specbench.results.metrics import standing_word
from specbench.results.summary_schema import interval
from specbench.results.wording import case_words, verdict_words

if TYPE_CHECKING:
    from specbench.results.summary_schema import Standing, SummaryRow

# After the method's name; a number whose interval is not asked for stands without it.
MAT, SPEEDUP, END_TO_END = "MAT [95 %]", "speedup [95 %]", "end-to-end [95 %]"
AGAINST, OUTPUTS = "against the best", "outputs"
DECISION = ("MAT", SPEEDUP, "end-to-end", AGAINST, OUTPUTS)

# What a standing says of the label itself, for a color.
_LEADING = ("best", "highest", "undecided", "tie")


def decision_cells(row: SummaryRow, standing: Standing | None) -> dict[str, Cell]:
    """The five cells after the name, the numbers with their intervals.

    Args:
        row: of the whole run.
        standing: against the fastest method; None where it is not known.
    """
    speedup = measured(row, "speedup")
    leads = standing is not None and standing["verdict"] in _LEADING
    faster = speedup.interval is not None and speedup.interval[0] > 1
    return {
        MAT: measured(row, "mat"),
        SPEEDUP: replace(speedup, leads=leads and faster),
        END_TO_END: measured(row, "end_to_end_speedup"),
        AGAINST: against_cell(standing),
        OUTPUTS: outputs_cell(row),
    }


def measured(row: SummaryRow, key: str) -> Estimate:
    """A number with its interval; plain decoding's are 1 by definition, or of no interest."""
    value = cast("Mapping[str, float | None]", row).get(key)
    if BASELINE in (row["method"], row["label"]):
        return Estimate(value)
    cases = row["n_cases"] if key == "mat" else row.get("n_timed", row["n_cases"])
    few, compares = cases < FEWEST, key.endswith("speedup")
    return Estimate(value, interval(row, key), few=few, compares=compares)


def against_cell(standing: Standing | None) -> Cell:
    """``slower, p 0.012``."""
    if standing is None:
        return ABSENT
    words, p = standing_word(standing["verdict"]), standing["p"]
    if standing["verdict"] == "too few":
        p = None
    text = words if p is None else f"{words}, p {'<0.001' if p < 5e-4 else f'{p:.3f}'}"
    return Fact(text, {AGAINST: standing["verdict"], f"p {AGAINST}": p})


def case_cell(row: SummaryRow) -> Fact:
    """Cases that MAT is about, and those that speeds are about."""
    return Fact(case_words(row), {"cases": row["n_cases"], "timed": row["n_timed"]})


def outputs_cell(row: SummaryRow) -> Cell:
    """Turns by verdict; of a label that nobody audited the caption says so."""
    counts = dict(row["lossless"])
    audited = any(counts[kind] for kind in counts if kind != "not_audited")
    return Fact(verdict_words(counts) if audited else ABSENT, counts)
