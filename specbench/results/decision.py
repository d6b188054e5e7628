"""The first table of everything: which method to take, in a sentence and six columns.

Made of rows of ``summary.json`` alone, for the end of a run and for all that :mod:`analysis` makes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from specbench.results.estimate import ABSENT, FEWEST, Cell, Estimate, Fact
from specbench.results.manifest import BASELINE
from specbench.results.metrics import METRIC, standing_word
from specbench.results.summary_schema import interval

if TYPE_CHECKING:
    from specbench.results.summary_schema import Pair, Standing, SummaryRow

# After the method's name; a number whose interval is not asked for stands without it.
MAT, SPEEDUP = METRIC["mat"].column, METRIC["speedup"].column
END_TO_END = METRIC["end_to_end_speedup"].column
AGAINST, OUTPUTS = "against the best", "outputs"
DECISION = ("MAT", SPEEDUP, "end-to-end", AGAINST, OUTPUTS)

# What concerns a reader most comes first.
_VERDICTS = {
    "bug": "BUG",
    "near_tie": "near tie",
    "differs": "differ",
    "equal": "equal",
    "not_audited": "not audited",
    "lossy": "lossy",
}

LEADERS_NAMED = 4

AGAINST_TEXT = (
    "best: all others are shown slower; highest: the fastest here, which not all others are shown "
    "slower than; undecided: the data cannot part it from the fastest; p: against the fastest "
    "method, even where ar is faster than it, corrected for the number of comparisons."
)
# Below the first table.
DECISION_TEXT = f"end-to-end: speedup with the prompt's pass in the time. {AGAINST_TEXT}"

# What a standing says of the label itself, for a color.
_LEADING = ("best", "highest", "undecided", "tie")


def decision_cells(
    row: SummaryRow, standing: Standing | None, *, faster: bool = False, unit: str = "cases"
) -> dict[str, Cell]:
    """The five cells after the name, the numbers with their intervals.

    Args:
        row: of the whole run.
        standing: against the fastest method; None where it is not known.
        faster: whether the method is shown faster than plain decoding, among all of the table.
        unit: what is resampled, of which there may be too few.
    """
    leads = faster and standing is not None and standing["verdict"] in _LEADING
    return {
        MAT: measured(row, "mat"),
        SPEEDUP: replace(measured(row, "speedup"), leads=leads),
        END_TO_END: measured(row, "end_to_end_speedup"),
        AGAINST: against_cell(standing, unit),
        OUTPUTS: outputs_cell(row),
    }


def measured(row: SummaryRow, key: str) -> Estimate:
    """A number with its interval; plain decoding's are 1 by definition, or of no interest."""
    value = cast("Mapping[str, float | None]", row).get(key)
    if BASELINE in (row["method"], row["label"]):
        return Estimate(value)
    cases = row["n_cases"] if key == "mat" else row["n_timed"]
    few, compares = cases < FEWEST, key.endswith("speedup")
    return Estimate(value, interval(row, key), few=few, compares=compares)


def against_cell(standing: Standing | None, unit: str = "cases") -> Cell:
    """``slower, p 0.012``."""
    if standing is None:
        return ABSENT
    words, p = standing_word(standing["verdict"], unit), standing["p"]
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


def case_words(row: SummaryRow) -> str:
    """``12``, or ``12 (9 timed)``: cases that MAT is about, and those that speeds are about."""
    n_cases, n_timed = row["n_cases"], row["n_timed"]
    if row["timing"] == "none" or n_timed == n_cases:
        return str(n_cases)
    return f"{n_cases} ({n_timed} timed)"


def cases_words(rows: Iterable[SummaryRow]) -> str:
    """``12 cases``; ``9 to 12 (11 timed) cases`` where the rows are not of as many."""
    by_number = sorted(rows, key=lambda row: row["n_timed"])
    counts = list(dict.fromkeys(map(case_words, by_number)))
    if counts == ["1"]:
        return "1 case"
    return f"{counts[0] if len(counts) == 1 else f'{counts[0]} to {counts[-1]}'} cases"


def pair_text(pair: Pair) -> str:
    """The verdict on a pair, and how many cases another one would take."""
    needed = pair.get("needed")
    word = standing_word(pair["verdict"])
    if pair["verdict"] == "too few":
        return f"{word} (at least {needed} needed)"
    if pair["verdict"] == "undecided" and needed:
        return f"{word} (about {needed:,} cases needed)"
    return word


def p_text(p: float) -> str:
    """A p value as text; of the smallest only that they are small."""
    return "<0.0001" if p < 1e-4 else f"{p:.4f}"


def listed(names: Sequence[str], most: int = LEADERS_NAMED) -> str:
    """Join names: ``a``, ``a and b``, ``a, b, c and 3 others``."""
    shown = list(names)
    if len(shown) > most:
        shown = [*shown[: most - 1], f"{len(shown) - most + 1} others"]
    return " and ".join(filter(None, [", ".join(shown[:-1]), *shown[-1:]]))


def leader_words(leaders: Sequence[str]) -> str:
    """``sam``; ``sam or pld`` where the data cannot tell; many are counted."""
    if len(leaders) <= LEADERS_NAMED:
        return " or ".join(leaders) or ABSENT
    return f"{leaders[0]} or one of {len(leaders) - 1} others"


def verdict_words(counts: Mapping[str, int]) -> str:
    """``3 near tie, 45 equal``: turns by verdict; kinds that did not occur are left out."""
    found = [f"{counts[kind]} {word}" for kind, word in _VERDICTS.items() if counts.get(kind)]
    return ", ".join(found) or "nothing audited"
