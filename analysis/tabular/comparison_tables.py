"""Tables of runs: the wide one by task, the long one, the one by settings, and pairs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from analysis.runs.claims import Claim
from analysis.runs.comparisons import ComparedLabel, Comparison, caption, run_names
from analysis.runs.verdicts import NOT_RUN, OTHER_MODEL, VERDICT_RULE, VERDICT_WORDS
from analysis.tabular.table import Cell, ResultTable
from specbench.results.estimate import ABSENT, FEWEST, Estimate
from specbench.results.statistics.pairs import DEFAULT_MARGIN, compare_pairs
from specbench.results.summary_schema import SummaryRow, n_of
from specbench.results.tasks import HEADINGS
from specbench.results.wording import PAIRS_TEXT, case_words, p_words, pair_words, verdict_words

# Of a table, by heading: what a row has there.
Columns: TypeAlias = Mapping[str, Callable[[ComparedLabel], str]]


def context_cells(row: SummaryRow) -> dict[str, Cell]:
    """What a speedup stands on: over plain decoding by either engine, and how fast that is."""
    few = n_of(row, "speedup") < FEWEST
    return {
        "over eager ar [95 %]": Estimate(row["speedup_eager"], row["speedup_eager_ci"], few=few),
        "over graph ar [95 %]": Estimate(row["speedup_graph"], row["speedup_graph_ci"], few=few),
        "bandwidth share": Estimate(row["bandwidth_share"]),
    }


def comparison_table(comparison: Comparison) -> ResultTable:
    """The wide form that papers use: a row per label, a column per task."""
    names = run_names(comparison.runs) if len(comparison.runs) > 1 else {}
    tasks = comparison.tasks if len(comparison.tasks) > 1 else []
    rows: list[dict[str, Cell]] = []
    for entry in comparison.entries:
        by_task = {HEADINGS.get(t, t): _number(entry.measured("speedup", t).value) for t in tasks}
        where = {"run": names[entry.run.path]} if names else {}
        rows.append({**where, "method": entry.label, **by_task, **_result_cells(entry, True)})
    # Per-task numbers of a claim would be taken for measured ones here.
    rows += [{"method": claim.method, **_not_run_cells(claim)} for claim in comparison.not_run]
    notes = [entry.note(entry.label) for entry in comparison.entries]
    notes += [claim.note(claim.method) for claim in comparison.not_run]
    return ResultTable.of(comparison.title, caption(comparison), rows, with_rule(notes))


def _result_cells(entry: ComparedLabel, geomean: bool = False) -> dict[str, Cell]:
    row = entry.overall
    return {
        "MAT [95 %]": entry.measured("mat"),
        "tokens/s [95 %]": entry.speed(),
        "speedup [95 %]": entry.measured("speedup"),
        **({"geo. mean [95 %]": entry.measured("geomean_speedup")} if geomean else {}),
        **context_cells(row),
        "cases": case_words(row),
        "lossless": verdict_words(row["lossless"]),
        **_all_claimed(entry.claim),
        "verdict": entry.verdict(),
    }


def _not_run_cells(claim: Claim, why: str = NOT_RUN) -> dict[str, Cell]:
    return {"cases": "0", **_all_claimed(claim), "verdict": why}


def task_table(comparison: Comparison, title: str) -> ResultTable:
    """The long form: a row per task and label, every number with its interval and claim."""

    def cells(task: str, entry: ComparedLabel) -> dict[str, Cell]:
        value = entry.claim.value("speedup", task) if entry.claim else None
        return {
            "data": task,
            "method": comparison.name_of(entry),
            "MAT [95 %]": entry.measured("mat", task),
            "speedup [95 %]": entry.measured("speedup", task),
            **context_cells(entry.rows[task]),
            "cases": case_words(entry.rows[task]),
            "claimed speedup": _number(value),
            "verdict": entry.verdict(task) if value is not None else "",
        }

    rows = [
        cells(task, entry)
        for task in comparison.tasks
        for entry in comparison.entries
        if task in entry.rows and entry.label != entry.run.baseline
    ]
    return ResultTable.of(title, "By task; claims and conditions as above.", rows)


_WHERE: Columns = {
    "model": lambda entry: entry.run.model,
    "data": lambda entry: entry.run.dataset,
}


def _apart(entries: Sequence[ComparedLabel], columns: Columns) -> Columns:
    """Further columns that tell rows apart.

    Model and data where there are several, and the run where the rest leaves two rows alike.
    """
    found = {heading: of for heading, of in _WHERE.items() if len({of(e) for e in entries}) > 1}
    known = [*found.values(), *columns.values()]
    if len({tuple(of(entry) for of in known) for entry in entries}) == len(entries):
        return found
    names = run_names(entry.run for entry in entries)
    return {"run": lambda entry: names[entry.run.path], **found}


def settings_table(
    title: str,
    comparisons: Sequence[Comparison],
    columns: Columns,
    text: str = "",
    beside: Sequence[Claim] = (),
) -> ResultTable:
    """A row per setting that was run, whatever run it stands in.

    Args:
        title: above the table.
        comparisons: of one kind; a comparison is one model on one data set.
        columns: heading and text of what sets the rows apart, e.g. a knob's value.
        text: what the caption says before the conditions.
        beside: claims about no data set of ours, which follow below for orientation.
    """
    entries = [entry for comparison in comparisons for entry in _in_order(comparison, columns)]
    apart = _apart(entries, columns)
    rows: list[dict[str, Cell]] = []
    for entry in entries:
        place = {heading: of(entry) for heading, of in {**apart, **columns}.items()}
        rows.append({**place, **_result_cells(entry)})
    notes = [entry.note(entry.label) for entry in entries]
    not_run = [(claim, NOT_RUN) for comparison in comparisons for claim in comparison.not_run]
    for claim, why in [*not_run, *((claim, OTHER_MODEL) for claim in beside)]:
        where = {"model": claim.model, "data": claim.dataset}
        variant = f" ({claim.setting})" if claim in beside and claim.setting else ""
        rows.append(
            {
                **{heading: where[heading] for heading in where if heading in apart},
                next(iter(columns)): f"{claim.method}{variant}",
                **_not_run_cells(claim, why),
            }
        )
        notes.append(claim.note(claim.method))
    conditions = "\n".join(caption(comparison) for comparison in comparisons)
    caption_text = "\n".join(filter(None, [text, conditions]))
    return ResultTable.of(title, caption_text, rows, with_rule(notes))


def with_rule(notes: Sequence[str]) -> list[str]:
    """Each note once, and below them, where there are claims, how verdicts are found."""
    shown = [note for note in dict.fromkeys(notes) if note]
    return [*shown, VERDICT_RULE, VERDICT_WORDS] if shown else []


def claimed_cells(claim: Claim | None) -> dict[str, Cell]:
    """What is claimed (speedup / MAT), and for which model on what."""
    return {
        "claimed speedup / MAT": _claimed(claim),
        "claimed on": claim.place if claim else ABSENT,
    }


def _all_claimed(claim: Claim | None) -> dict[str, Cell]:
    ratios, place = claimed_cells(claim).items()
    return dict([ratios, ("claimed tokens/s", _claimed_speed(claim)), place])


def _in_order(comparison: Comparison, columns: Columns) -> list[ComparedLabel]:
    """As a run has its labels; several runs by what sets them apart, the baseline first."""
    entries = rows_once(comparison)
    if len(comparison.runs) == 1:
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


def rows_once(comparison: Comparison) -> list[ComparedLabel]:
    """The comparison's entries; the baseline, which every run of a sweep has, only once."""
    plain = [entry for entry in comparison.entries if entry.label == entry.run.baseline]
    return [e for e in comparison.entries if e.label != e.run.baseline or e is plain[0]]


def pairs_table(comparison: Comparison) -> ResultTable | None:
    """The methods of each run against ar and the fastest; None where no run has two of them."""
    names = run_names(comparison.runs) if len(comparison.runs) > 1 else {}
    rows: list[dict[str, Cell]] = []
    for run in comparison.runs:
        pairs = compare_pairs(run.records, run.labels, run.baseline, run.seed, comparison.estimator)
        if len({pair["first"] for pair in pairs}) < 2:
            continue
        for pair in pairs:
            few = pair["verdict"] == "too few"
            rows.append(
                {
                    **({"run": names[run.path]} if names else {}),
                    "first": pair["first"],
                    "second": pair["second"],
                    "ratio [95 %]": Estimate(pair["ratio"], pair["ratio_ci"], 3, few),
                    "p": p_words(pair["p_holm"]),
                    "first is": pair_words(pair),
                    "detectable": Estimate(pair["detectable"], digits=3),
                    "cases": str(pair["n_cases"]),
                }
            )
    if not rows:
        return None
    text = PAIRS_TEXT.format(margin=DEFAULT_MARGIN)
    return ResultTable.of(f"{comparison.title}: pairs", text, rows)


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
