"""Tables over many comparisons: the fastest method of each, claims, losslessness, engines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from analysis.runs.claims import VERDICT_RULE, VERDICT_WORDS
from analysis.runs.comparisons import ComparedLabel, ComparedRuns
from analysis.runs.leaders import leaders_of, standings
from analysis.tabular.comparison_tables import TITLE_TIMES, claimed_cell, context_cells
from analysis.tabular.table import ResultTable
from specbench.results.decision import MAT, OUTPUTS, SPEEDUP, decision_cells, outputs_cell
from specbench.results.estimate import ABSENT, Cell
from specbench.results.records import DIFFERS, OWN_ENGINE, VERDICTS
from specbench.results.wording import leader_words

_LEADERS_TEXT = (
    "A row for each model and data set, with the numbers of its first method. After “or”: methods "
    "that the data cannot tell from it."
)


def titled(title: str, comparisons: Sequence[ComparedRuns]) -> str:
    """The title of a table over comparisons of one timing."""
    return title + TITLE_TIMES[comparisons[0].timing if comparisons else "measured"]


def leaders_table(comparisons: Sequence[ComparedRuns], places: Sequence[str]) -> ResultTable:
    """A row per comparison: its fastest method, and where its numbers stand.

    Args:
        comparisons: of one timing; each has a method that drafts.
        places: of each, the section that shows more of it.
    """
    untimed = bool(comparisons) and comparisons[0].timing == "none"
    heading = "highest MAT" if untimed else "fastest"
    rows: list[dict[str, Cell]] = []
    for comparison, place in zip(comparisons, places, strict=True):
        found = leaders_of(comparison)
        first = found[0]
        standing = standings(comparison).get((first.run.path, first.label))
        rows.append(
            {
                "model and data": comparison.printed_title,
                heading: leader_words([comparison.name_of(entry) for entry in found]),
                **decision_cells(first.overall, standing),
                "more in": place,
            }
        )
    made = ResultTable.of(titled("Methods", comparisons), _LEADERS_TEXT, rows)
    return made.only([heading, "MAT", SPEEDUP, "end-to-end", OUTPUTS, "more in"]).in_full()


def claims_table(comparisons: Sequence[ComparedRuns]) -> ResultTable:
    """Every label for which something is claimed, beside what was measured, or what predicted."""
    rows: list[dict[str, Cell]] = []
    for comparison in comparisons:
        for entry in comparison.drafting:
            claim = entry.claim
            if claim is None:
                continue
            rows.append(
                {
                    "model and data": comparison.printed_title,
                    "method": comparison.name_of(entry),
                    "MAT [95 %]": entry.measured("mat"),
                    "claimed MAT": claimed_cell(claim, "mat"),
                    "speedup [95 %]": entry.measured("speedup"),
                    "claimed speedup": claimed_cell(claim, "speedup"),
                    "verdict": entry.verdict(),
                    **context_cells(entry.overall),
                    "counted as there": entry.judged() or ABSENT,
                    "claimed for": f"{claim.model} on {claim.dataset}, {claim.hardware}",
                    "source": f"{claim.title.partition(':')[0]}, {claim.source}",
                }
            )
    title = titled("Claimed and measured", comparisons)
    return ResultTable.of(title, f"{VERDICT_RULE}\n{VERDICT_WORDS}", rows, groups=1)


def lossless_table(comparisons: Iterable[ComparedRuns]) -> ResultTable:
    """Turns of every label by verdict."""
    comparisons = list(comparisons)
    found = {kind for c in comparisons for e in c.drafting for kind in e.overall["lossless"]}
    kinds = [*VERDICTS, *({DIFFERS} & found), "lossy"]
    rows: list[dict[str, Cell]] = [
        {
            "model and data": comparison.printed_title,
            "method": comparison.name_of(entry),
            **{
                kind.replace("_", " "): str(entry.overall["lossless"].get(kind, 0))
                for kind in kinds
            },
        }
        for comparison in comparisons
        for entry in comparison.drafting
    ]
    text = (
        "Turns. Equal: the tokens of plain decoding. Near tie: other tokens, but each is within "
        "the number format's tolerance of the likeliest one. Bug: anything else. Not audited: "
        "sampling, or a run without plain decoding. Lossy: the verifier does not aim at plain "
        "decoding's distribution."
    )
    return ResultTable.of("Losslessness", text, rows, groups=1)


_OWN = "this project"
_ENGINES_TEXT = (
    "Each engine's speedup is over its own plain decoding, and its outputs are compared with its "
    "own. Arithmetic and kernels differ from engine to engine: tokens/s say what a user gets, not "
    "which method is better, and no output of one engine is compared with another's."
)


def engine_table(comparisons: Sequence[ComparedRuns]) -> ResultTable | None:
    """A row per engine and label; None where all runs are of one engine."""
    shown = [c for c in comparisons if c.timing == "measured"]
    if len({c.runs[0].engine for c in shown}) < 2:
        return None
    # Our own engine's rows first, then by engine and load.
    shown.sort(key=lambda c: (c.runs[0].engine != OWN_ENGINE, c.runs[0].engine, _load(c)))
    rows = [_engine_row(comparison, entry) for comparison in shown for entry in comparison.entries]
    return ResultTable.of(
        "Engines, each over its own plain decoding",
        _ENGINES_TEXT,
        rows,
        short=[name.removesuffix(" [95 %]") if name == MAT else name for name in rows[0]],
    )


def _load(comparison: ComparedRuns) -> int:
    return comparison.runs[0].concurrency


def _engine_row(comparison: ComparedRuns, entry: ComparedLabel) -> dict[str, Cell]:
    run = entry.run
    return {
        "engine": _OWN if run.engine == OWN_ENGINE else run.engine,
        "numerics": run.dtype,
        "model and data": comparison.title,
        "at once": str(_load(comparison)),
        "method": entry.label if entry.label == run.baseline else comparison.name_of(entry),
        MAT: entry.measured("mat"),
        SPEEDUP: entry.measured("speedup"),
        "tokens/s": entry.speed(),
        "outputs": outputs_cell(entry.overall),
    }
