"""Tables of runs as sheets: the wide one by task, the one by settings, and pairs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from analysis.runs.claims import NOT_RUN, OTHER_MODEL, VERDICT_RULE, Claim
from analysis.runs.comparisons import (
    ComparedLabel,
    Comparison,
    caption,
    run_names,
)
from analysis.tabular.table import ResultTable
from specbench.results.estimate import ABSENT, FEWEST, Estimate
from specbench.results.statistics import compare_pairs
from specbench.results.wording import verdict_words

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from specbench.results.summary_schema import Pair, SummaryRow

_TASK_NAMES = {
    "mt_bench": "MT",
    "translation": "Trans",
    "summarization": "Sum",
    "qa": "QA",
    "math_reasoning": "Math",
    "rag": "RAG",
}


# What a speedup stands on: over plain decoding by either engine, and how fast plain decoding is.
FOOTING = ("over eager ar [95 %]", "over graph ar [95 %]", "bandwidth share")
# Headings of what :func:`_all_claimed` gives.
_CLAIMED = ("claimed speedup / MAT", "claimed tokens/s", "claimed on")


def footing_cells(row: SummaryRow) -> list[str | Estimate]:
    """The cells below ``FOOTING``, of a summary's row."""
    few = row["n_cases"] < FEWEST
    return [
        Estimate(row["speedup_eager"], row["speedup_eager_ci"], few=few),
        Estimate(row["speedup_graph"], row["speedup_graph_ci"], few=few),
        Estimate(row["bandwidth_share"]),
    ]


def sheet(group: Comparison) -> ResultTable:
    """The wide form that papers use: a row per label, a column per task."""
    several_runs = len(group.runs) > 1
    names = run_names(group.runs)
    tasks = group.tasks if len(group.tasks) > 1 else []
    headings = [
        *(["run"] if several_runs else []),
        "method",
        *(_TASK_NAMES.get(task, task) for task in tasks),
        "MAT [95 %]",
        "tokens/s [95 %]",
        "speedup [95 %]",
        "geo. mean [95 %]",
        *FOOTING,
        "cases",
        "lossless",
        *_CLAIMED,
        "verdict",
    ]
    rows: list[list[str | Estimate]] = []
    notes = []
    for entry in group.entries:
        row = entry.overall
        rows.append(
            [
                *([names[entry.run.path]] if several_runs else []),
                entry.label,
                *(_number(entry.rows[t]["speedup"] if t in entry.rows else None) for t in tasks),
                entry.measured("mat"),
                entry.speed(),
                entry.measured("speedup"),
                entry.measured("geomean_speedup"),
                *footing_cells(row),
                str(row["n_cases"]),
                verdict_words(row["lossless"]),
                *_all_claimed(entry.claim),
                entry.verdict(),
            ]
        )
        if entry.claim is not None:
            notes.append(f"{entry.label}: claimed by {entry.claim.describe()}.")
    for claim in group.not_run:
        by_task = [_number(claim.value("speedup", task)) for task in tasks]
        # Per-task numbers of a claim would be taken for measured ones here.
        blank = [ABSENT] * len(by_task)
        no_run = [ABSENT] if several_runs else []
        claimed = [*_all_claimed(claim), NOT_RUN]
        rows.append([*no_run, claim.method, *blank, *[ABSENT] * 7, "0", ABSENT, *claimed])
        notes.append(f"{claim.method}: claimed by {claim.describe()}.")
    return ResultTable(group.title, caption(group), headings, rows, with_rule(notes))


def task_sheet(group: Comparison, title: str) -> ResultTable:
    """The long form: a row per task and label, every number with its interval and claim."""
    headings = [
        "data", "method", "MAT [95 %]", "speedup [95 %]", *FOOTING, "cases", "claimed speedup",
        "verdict",
    ]  # fmt: skip
    rows: list[list[str | Estimate]] = []
    for task in group.tasks:
        for entry in group.entries:
            row = entry.rows.get(task)
            if row is None or entry.label == entry.run.baseline:
                continue
            value = entry.claim.value("speedup", task) if entry.claim else None
            rows.append(
                [
                    task,
                    group.name_of(entry),
                    entry.measured("mat", task),
                    entry.measured("speedup", task),
                    *footing_cells(row),
                    str(row["n_cases"]),
                    _number(value),
                    entry.verdict(task) if value is not None else "",
                ]
            )
    return ResultTable(title, "By task; claims and conditions as above.", headings, rows, [])


def _model(entry: ComparedLabel) -> str:
    return entry.run.model


def _dataset(entry: ComparedLabel) -> str:
    return entry.run.dataset


_WHERE: Mapping[str, Callable[[ComparedLabel], str]] = {"model": _model, "data": _dataset}


def _apart(
    entries: Sequence[ComparedLabel], columns: Mapping[str, Callable[[ComparedLabel], str]]
) -> dict[str, Callable[[ComparedLabel], str]]:
    """Further columns that tell rows apart.

    Model and data where there are several, and the run where the rest leaves two rows alike.
    """
    found = {heading: of for heading, of in _WHERE.items() if len({of(e) for e in entries}) > 1}
    known = [*found.values(), *columns.values()]
    if len({tuple(of(entry) for of in known) for entry in entries}) == len(entries):
        return found
    names = run_names(entry.run for entry in entries)
    return {"run": lambda entry: names[entry.run.path], **found}


def settings_sheet(
    title: str,
    groups: Sequence[Comparison],
    columns: Mapping[str, Callable[[ComparedLabel], str]],
    text: str = "",
    beside: Sequence[Claim] = (),
) -> ResultTable:
    """A row per setting that was run, whatever run it stands in.

    Args:
        title: above the table.
        groups: of one kind; a group is one model on one data set.
        columns: heading and text of what sets the rows apart, e.g. a knob's value.
        text: what the caption says before the conditions.
        beside: claims about no data set of ours, which follow below for orientation.
    """
    entries = [entry for group in groups for entry in _in_order(group, columns)]
    apart = _apart(entries, columns)
    headings = [
        *apart, *columns, "MAT [95 %]", "tokens/s [95 %]", "speedup [95 %]", *FOOTING,
        "cases", "lossless", *_CLAIMED, "verdict",
    ]  # fmt: skip
    rows: list[list[str | Estimate]] = []
    notes = []
    for entry in entries:
        row, claim = entry.overall, entry.claim
        rows.append(
            [
                *(of(entry) for of in apart.values()),
                *(of(entry) for of in columns.values()),
                entry.measured("mat"),
                entry.speed(),
                entry.measured("speedup"),
                *footing_cells(row),
                str(row["n_cases"]),
                verdict_words(row["lossless"]),
                *_all_claimed(claim),
                entry.verdict(),
            ]
        )
        if claim is not None:
            notes.append(f"{entry.label}: claimed by {claim.describe()}.")
    not_run = [(claim, NOT_RUN) for group in groups for claim in group.not_run]
    for claim, why in [*not_run, *((claim, OTHER_MODEL) for claim in beside)]:
        where = {"run": ABSENT, "model": claim.model, "data": claim.dataset}
        variant = f" ({claim.setting})" if claim in beside and claim.setting else ""
        rows.append(
            [
                *(where[heading] for heading in apart),
                f"{claim.method}{variant}",
                *[ABSENT] * (len(columns) - 1),
                *[ABSENT] * 6,
                "0",
                ABSENT,
                *_all_claimed(claim),
                why,
            ]
        )
        notes.append(f"{claim.method}: claimed by {claim.describe()}.")
    conditions = "\n".join(caption(group) for group in groups)
    caption_text = "\n".join(filter(None, [text, conditions]))
    return ResultTable(title, caption_text, headings, rows, with_rule(notes))


def with_rule(notes: Sequence[str]) -> list[str]:
    """Each note once, and below them, where there are claims, how verdicts are found."""
    return [*dict.fromkeys(notes), VERDICT_RULE] if notes else []


def claimed_cells(claim: Claim | None) -> list[str]:
    """What is claimed (speedup / MAT), and for which model on what."""
    return [_claimed(claim), f"{claim.model}, {claim.hardware}" if claim else ABSENT]


def _all_claimed(claim: Claim | None) -> list[str]:
    ratios, place = claimed_cells(claim)
    return [ratios, _claimed_speed(claim), place]


def _in_order(
    group: Comparison, columns: Mapping[str, Callable[[ComparedLabel], str]]
) -> list[ComparedLabel]:
    """As a run has its labels; several runs by what sets them apart, the baseline first."""
    entries = rows_once(group)
    if len(group.runs) == 1:
        return entries

    def key(entry: ComparedLabel) -> tuple[bool, list[list[tuple[str, int]]]]:
        return (
            entry.label != entry.run.baseline,
            [natural(of(entry)) for of in columns.values()],
        )

    return sorted(entries, key=key)


def natural(text: str) -> list[tuple[str, int]]:
    """Sorting key that puts ``vicuna7b`` before ``vicuna13b`` and 5 before 10."""
    return [(word, int(digits or 0)) for word, digits in re.findall(r"(\D*)(\d*)", text)]


def rows_once(group: Comparison) -> list[ComparedLabel]:
    """The group's entries; the baseline, which every run of a sweep has, only once."""
    seen = False
    entries = []
    for entry in group.entries:
        if entry.label == entry.run.baseline:
            if seen:
                continue
            seen = True
        entries.append(entry)
    return entries


def pairs_sheet(group: Comparison) -> ResultTable | None:
    """Every label of a run against every other; None where no run has two."""
    rows: list[list[str | Estimate]] = []
    names = run_names(group.runs)
    for run in group.runs:
        for pair in compare_pairs(run.records, run.labels, seed=run.seed):
            rows.append(
                [
                    *([names[run.path]] if len(group.runs) > 1 else []),
                    pair["first"],
                    pair["second"],
                    _ratio(pair),
                    f"{pair['p']:.4f}",
                    f"{pair['p_holm']:.4f}",
                    pair["verdict"],
                    Estimate(pair["detectable"], digits=3),
                    str(pair["n_cases"]),
                ]
            )
    if not rows:
        return None
    margin = f"{pair['margin']:.0%}"
    text = (
        "Geometric mean over cases of the first's decode speed over the second's. p: two-sided "
        "sign-flip permutation test; Holm: corrected for the run's number of pairs. tie: the 95 % "
        f"interval lies within {margin}. detectable: smallest ratio shown with a power of 80 %."
    )
    headings = [
        "first",
        "second",
        "ratio [95 %]",
        "p",
        "p (Holm)",
        "first is",
        "detectable",
        "cases",
    ]
    if len(group.runs) > 1:
        headings.insert(0, "run")
    return ResultTable(f"{group.title}: pairs", text, headings, rows, [])


def _ratio(pair: Pair) -> Estimate:
    few = pair["n_cases"] < FEWEST
    return Estimate(pair["ratio"], None if few else pair["ratio_ci"], 3, few)


def _number(value: float | None, digits: int = 2) -> str:
    return ABSENT if value is None else f"{value:.{digits}f}"


def _claimed(claim: Claim | None) -> str:
    if claim is None:
        return ABSENT
    numbers = [claim.value("speedup"), claim.value("mat")]
    words = f"{claim.qualifier} " if claim.qualifier and any(numbers) else ""
    return f"{words}{_number(numbers[0])} / {_number(numbers[1])}"


def _claimed_speed(claim: Claim | None) -> str:
    speed = claim.value("tokens_per_s") if claim else None
    if claim is None or speed is None:
        return ABSENT
    return f"{claim.qualifier} {speed:.2f}" if claim.qualifier else f"{speed:.2f}"
