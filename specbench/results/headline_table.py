"""The first table of everything: which method to take, in a sentence and six columns.

Made of rows of ``summary.json`` alone, for the end of a run and for all that :mod:`analysis` makes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from specbench.results.cells import ABSENT, FEWEST, Cell, NumberCell, TextCell
from specbench.results.manifest import BASELINE
from specbench.results.metrics import METRIC, standing_word
from specbench.results.summary_schema import Pair, Standing, SummaryRow, interval, n_of

# The columns after the method's name.
MAT, SPEEDUP = METRIC["mat"].column, METRIC["speedup"].column
END_TO_END = METRIC["end_to_end_speedup"].column
AGAINST, OUTPUTS = "against the best", "outputs"
DECISION = ("MAT", SPEEDUP, "end-to-end", AGAINST, OUTPUTS)

# The most important first.
_OUTPUT_TEXTS = {
    "bug": "BUG",
    "near_tie": "near tie",
    "differs": "differ",
    "equal": "equal",
    "not_audited": "not audited",
    "lossy": "lossy",
}

LEADERS_NAMED = 4


AGAINST_TEXT = (
    "best: shown faster than all others; highest: the fastest here, but not shown faster than all "
    "others; undecided: the data cannot separate it from the fastest; p: against the fastest "
    "method, even if ar is faster, corrected for the number of comparisons."
)
# Below the first table.
DECISION_TEXT = f"end-to-end: speedup with the prompt's pass in the time. {AGAINST_TEXT}"

# What a standing says of the label itself, for a color.
_LEADING = ("best", "highest", "undecided", "tie")


def decision_cells(
    row: SummaryRow, standing: Standing | None, *, faster: bool = False, unit: str = "cases"
) -> dict[str, Cell]:
    """Make the five cells after the name, the numbers with their intervals.

    Args:
        row: of the whole run.
        standing: against the fastest method; None where it is not known.
        faster: whether the method is shown faster than plain decoding, among all of the table.
        unit: what is resampled, of which there may be too few.
    """
    leads = faster and standing is not None and standing["verdict"] in _LEADING
    return {
        MAT: metric_cell(row, "mat"),
        SPEEDUP: replace(metric_cell(row, "speedup"), leads=leads),
        END_TO_END: metric_cell(row, "end_to_end_speedup"),
        AGAINST: against_cell(standing, unit),
        OUTPUTS: outputs_cell(row),
    }


def metric_cell(row: SummaryRow, key: str) -> NumberCell:
    """Give a number with its interval; plain decoding's are 1 by definition, or of no interest."""
    if BASELINE in (row["method"], row["label"]):
        return NumberCell(row.get(key))
    few, compares = n_of(row, key) < FEWEST, key.endswith("speedup")
    return NumberCell(row.get(key), interval(row, key), few=few, compares=compares)


def against_cell(standing: Standing | None, unit: str = "cases") -> Cell:
    """Format a standing: ``slower, p 0.012``."""
    if standing is None:
        return ABSENT
    text, p = standing_word(standing["verdict"], unit), standing["p"]
    if p is not None:
        text += f", p {'<0.001' if p < 5e-4 else f'{p:.3f}'}"
    return TextCell(text, {AGAINST: standing["verdict"], f"p {AGAINST}": p})


def case_cell(row: SummaryRow) -> TextCell:
    """Count the cases that MAT is about, and those that speeds are about."""
    return TextCell(case_count_text(row), {"cases": row["n_cases"], "timed": row["n_timed"]})


def outputs_cell(row: SummaryRow) -> Cell:
    """Count turns by audit status; for an unaudited label the caption says so."""
    counts = dict(row["lossless"])
    audited = any(counts[kind] for kind in counts if kind != "not_audited")
    return TextCell(outputs_text(counts) if audited else ABSENT, counts)


def case_count_text(row: SummaryRow) -> str:
    """Format the cases of MAT, and those of speeds if fewer: ``12``, ``12 (9 timed)``."""
    n_cases, n_timed = row["n_cases"], row["n_timed"]
    timed = row["timing"] != "none" and n_timed != n_cases
    return f"{n_cases} ({n_timed} timed)" if timed else str(n_cases)


def cases_text(rows: Iterable[SummaryRow]) -> str:
    """Format ``12 cases``, or ``9 to 12 (11 timed) cases`` if the rows differ."""
    by_number = sorted(rows, key=lambda row: n_of(row, "speedup"))
    first, *more = dict.fromkeys(map(case_count_text, by_number))
    return f"{first}{f' to {more[-1]}' if more else ''} case{'' if first == '1' else 's'}"


def pair_text(pair: Pair) -> str:
    """Say the verdict on a pair, and how many cases another one would take."""
    needed, word = pair.get("needed"), standing_word(pair["verdict"])
    if pair["verdict"] == "too few":
        return f"{word} (at least {needed} needed)"
    if pair["verdict"] == "undecided" and needed:
        return f"{word} (about {needed:,} cases needed)"
    return word


def no_drafts_text(budget: str | None) -> str:
    """Say why a label drafts nothing, by where its draft length comes from."""
    return "tuned off" if budget == "tuned" else "no drafts"


def p_text(p: float) -> str:
    """Format a p value; the smallest as ``<0.0001``."""
    return "<0.0001" if p < 1e-4 else f"{p:.4f}"


def join_names(names: Sequence[str], most: int = LEADERS_NAMED) -> str:
    """Join names: ``a``, ``a and b``, ``a, b, c and 3 others``."""
    shown = list(names)
    if len(shown) > most:
        shown = [*shown[: most - 1], f"{len(shown) - most + 1} others"]
    return " and ".join(filter(None, [", ".join(shown[:-1]), *shown[-1:]]))


def leaders_text(leaders: Sequence[str]) -> str:
    """Format ``sam``, or ``sam or pld`` if undecided; many are counted."""
    if len(leaders) <= LEADERS_NAMED:
        return " or ".join(leaders) or ABSENT
    return f"{leaders[0]} or one of {len(leaders) - 1} others"


def outputs_text(counts: Mapping[str, int]) -> str:
    """Format turns by audit status: ``3 near tie, 45 equal``."""
    texts = [f"{counts[kind]} {word}" for kind, word in _OUTPUT_TEXTS.items() if counts.get(kind)]
    return ", ".join(texts) or "nothing audited"
