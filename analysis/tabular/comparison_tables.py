"""Tables of runs: the first one and in full, by task, settings, pairs, engine and load."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from analysis.runs.captions import captions
from analysis.runs.claims import NOT_RUN, OTHER_MODEL, VERDICT_RULES, Claim, estimate_of
from analysis.runs.comparisons import ComparedLabel, ComparedRuns, run_names
from analysis.runs.leaders import over_plain, standings, verdict_of
from analysis.tabular.table import ResultTable
from specbench.results.cells import ABSENT, INTERVAL, Cell, NumberCell, TextCell
from specbench.results.headline_table import (
    DECISION,
    DECISION_TEXT,
    END_TO_END,
    MAT,
    OUTPUTS,
    SPEEDUP,
    case_cell,
    case_count_text,
    decision_cells,
    outputs_cell,
    p_text,
    pair_text,
)
from specbench.results.metrics import METRIC
from specbench.results.records import OWN_ENGINE
from specbench.results.statistics.pairs import MARGIN, rank_labels
from specbench.results.statistics.served import limits_of, load_rows, served_labels
from specbench.results.summary_schema import SummaryRow
from specbench.results.tasks import HEADINGS, OVERALL

_PAIRS_TEXT = (
    "Ratio of speeds, by the table's estimator; above 1 the first is faster. Intervals against ar "
    "hold all together with 95 %. Against the fastest method the interval is over whichever method "
    "is truly the best of the others, since the same data picked it (multiple comparisons with the "
    "best, Hsu 1984). faster, slower: the interval excludes 1; tie: it lies within {margin:.0%}. "
    "p: corrected for the number of comparisons. detectable: smallest ratio shown with a power of "
    "80 %; cases needed: those that would show the measured ratio so."
)
_ENGINES_TEXT = (
    "Each engine's speedup and outputs are relative to its own plain decoding. tokens/s show what "
    "a user gets, not which method is better, because arithmetic and kernels differ."
)
_LOAD_TEXT = (
    "tokens/s: all users together. Change: relative to the same server without drafts; intervals "
    "are simultaneous over all drafts. P95: seconds until the full output."
)
# Suffix of a title, by the source of the times below it.
TITLE_TIMES = {"measured": "", "predicted": ": predicted times", "none": ": steps without times"}

# A row's text by heading.
Columns: TypeAlias = Mapping[str, Callable[[ComparedLabel], str]]
Row: TypeAlias = dict[str, Cell]


# --- cells ----------------------------------------------------------------------------------------


def context_cells(row: SummaryRow) -> Row:
    """Make the cells of speedups over either engine's plain decoding, and of its bandwidth."""
    return {
        METRIC["speedup_eager"].column: estimate_of(row, "speedup_eager"),
        METRIC["speedup_graph"].column: estimate_of(row, "speedup_graph"),
        METRIC["bandwidth_share"].column: NumberCell(row["bandwidth_share"]),
    }


def claimed_cell(claim: Claim | None, metric: str, task: str = OVERALL) -> NumberCell:
    """Make a cell of a claimed number with its qualifier."""
    value = claim.value(metric, task) if claim else None
    return NumberCell(value, claimed=True, qualifier=(claim and claim.qualifier) or "")


def claimed_cells(claim: Claim | None) -> Row:
    """Make the cells of a claim: its numbers, model and hardware."""
    return {
        "claimed speedup": claimed_cell(claim, "speedup"),
        "claimed MAT": claimed_cell(claim, "mat"),
        "claimed tokens/s": claimed_cell(claim, "tokens_per_s"),
        "claimed on": claim.claimed_on if claim else ABSENT,
    }


def with_rule(notes: Sequence[str]) -> list[str]:
    """Return each note once, followed by the rule of the verdicts if there are notes."""
    unique = [note for note in dict.fromkeys(notes) if note]
    return [*unique, *VERDICT_RULES] if unique else []


def _further_cells(entry: ComparedLabel, tasks: Sequence[str] = ()) -> Row:
    row = entry.overall
    return {
        "cases": case_cell(row),
        METRIC["tokens_per_s"].column: entry.speed(),
        METRIC["geomean_speedup"].column: entry.measured("geomean_speedup"),
        **context_cells(row),
        **{
            f"{HEADINGS.get(task, task)} speedup [95 %]": entry.measured("speedup", task)
            for task in tasks
            if len(tasks) > 1
        },
        METRIC["joules_per_token"].column: NumberCell(row["joules_per_token"]),
        **claimed_cells(entry.claim),
        "verdict": entry.verdict(),
    }


def _not_run_cells(claim: Claim, why: str = NOT_RUN) -> Row:
    return {"cases": "0", **claimed_cells(claim), "verdict": why}


def _method(comparison: ComparedRuns, entry: ComparedLabel) -> str:
    """Return the label's name; plain decoding of one run represents all runs."""
    if entry.label == entry.run.baseline:
        return entry.label
    return comparison.name_of(entry) + entry.without_drafts


# --- rows -----------------------------------------------------------------------------------------


def natural(text: str) -> list[tuple[str, int]]:
    """Return a sorting key that puts ``vicuna7b`` before ``vicuna13b`` and 5 before 10."""
    return [(word, int(digits or 0)) for word, digits in re.findall(r"(\D*)(\d*)", text)]


def rows_once(comparison: ComparedRuns, columns: Columns | None = None) -> list[ComparedLabel]:
    """List the comparison's entries; the baseline, which every run of a sweep has, only once.

    Runs of one label are sorted by its settings; with ``columns``, the labels of
    several runs are sorted by these columns, below the baseline.
    """
    plain = [entry for entry in comparison.entries if entry.label == entry.run.baseline]
    once = [e for e in comparison.entries if e.label != e.run.baseline or e is plain[0]]
    labels = [entry.label for entry in once]
    once.sort(key=lambda e: (labels.index(e.label), natural(comparison.settings_of(e))))
    if columns is not None and len(comparison.runs) > 1:
        texts = columns.values()
        once.sort(key=lambda e: (e.label != e.run.baseline, [natural(get(e)) for get in texts]))
    return once


def _decoding(comparison: ComparedRuns) -> str:
    temperature = comparison.runs[0].temperature
    return "greedy" if temperature == 0 else f"temperature {temperature:g}"


# Columns that distinguish several comparisons in one table.
_DIFFERING: Mapping[str, Callable[[ComparedRuns], str]] = {
    "model": lambda comparison: comparison.model,
    "data": lambda comparison: comparison.dataset,
    "settings": lambda comparison: comparison.overrides,
    "dtype": lambda comparison: comparison.runs[0].dtype,
    "hardware": lambda comparison: comparison.runs[0].hardware,
    "decoding": _decoding,
    "speed": lambda comparison: comparison.estimator,
    "at once": lambda comparison: str(comparison.load),
}


def comparison_table(*comparisons: ComparedRuns, not_run: bool = False) -> ResultTable:
    """Make the first table, and in full the wide one that papers use.

    A row per label; in short the columns of :mod:`specbench.results.headline_table`, in full also a
    column per task and the claims. Leading columns distinguish several comparisons.

    Args:
        comparisons: of one timing.
        not_run: whether to add rows of methods that a paper has numbers for but that were not run.
    """
    several = len(comparisons) > 1
    differing = {
        name: get
        for name, get in _DIFFERING.items()
        if len({get(c) for c in comparisons}) > 1 or (several and name in ("model", "data"))
    }
    rows: list[Row] = []
    notes: list[str] = []
    head = []
    for comparison in comparisons:
        where: Row = {heading: get(comparison) for heading, get in differing.items()}
        standing_by_label, outcome_over_ar = standings(comparison), over_plain(comparison)
        for entry in rows_once(comparison):
            key = entry.run.path, entry.label
            faster, unit = outcome_over_ar.get(key) == "faster", comparison.unit
            standing = standing_by_label.get(key)
            decision = decision_cells(entry.overall, standing, faster=faster, unit=unit)
            name = {"method": _method(comparison, entry)}
            rows.append({**where, **name, **decision, **_further_cells(entry, comparison.tasks)})
            notes.append(entry.note(entry.label))
        # A claim's numbers by task are left out: here they would look measured.
        for claim in comparison.not_run if not_run else ():
            rows.append({**where, "method": claim.method, **_not_run_cells(claim)})
            notes.append(claim.note(claim.method))
        if verdict := verdict_of(comparison):
            head.append(f"{comparison.title}: {verdict}" if several else verdict)
    title = "Methods compared" if several else comparisons[0].title
    text = "\n".join([captions(comparisons), DECISION_TEXT])
    title += TITLE_TIMES[comparisons[0].timing]
    notes, groups = with_rule(notes), len(differing)
    return ResultTable.from_rows(title, text, rows, notes, DECISION, groups, head)


def task_table(comparison: ComparedRuns, title: str) -> ResultTable:
    """Tabulate the long form: a row per task and label, each number with interval and claim."""
    rows: list[Row] = []
    for task in comparison.tasks:
        for entry in comparison.entries:
            if task not in entry.rows or entry.label == entry.run.baseline:
                continue
            row, claimed = entry.rows[task], claimed_cell(entry.claim, "speedup", task)
            rows.append(
                {
                    "data": task,
                    "n": TextCell(f"n = {case_count_text(row)}", case_cell(row).parts),
                    "method": comparison.name_of(entry),
                    MAT: entry.measured("mat", task),
                    SPEEDUP: entry.measured("speedup", task),
                    END_TO_END: entry.measured("end_to_end_speedup", task),
                    OUTPUTS: outputs_cell(row),
                    **context_cells(row),
                    "claimed speedup": claimed,
                    "verdict": entry.verdict(task) if claimed.value is not None else "",
                }
            )
    text = "By task, n cases each: speedups over ar; claims and conditions as above."
    return ResultTable.from_rows(title, text, rows, groups=2)


def settings_table(
    title: str,
    comparisons: Sequence[ComparedRuns],
    columns: Columns,
    text: str = "",
    other_claims: Sequence[Claim] = (),
) -> ResultTable:
    """Tabulate a row per setting, whichever run measured it.

    Several models or data sets get columns; so does the run if two rows were alike.

    Args:
        title: above the table.
        comparisons: of one kind; a comparison is one model on one data set.
        columns: heading and text of what distinguishes the rows, e.g. a knob's value.
        text: first line of the caption, before the conditions.
        other_claims: claims about other data sets, which follow below for orientation.
    """
    entries = [entry for comparison in comparisons for entry in rows_once(comparison, columns)]
    where: Columns = {"model": lambda e: e.run.model, "data": lambda e: e.run.dataset}
    differing = {name: get for name, get in where.items() if len({get(e) for e in entries}) > 1}
    headings: Columns = {**differing, **columns}
    if len({tuple(get(entry) for get in headings.values()) for entry in entries}) < len(entries):
        names = run_names(entry.run for entry in entries)
        headings = {"run": lambda entry: names[entry.run.path], **headings}
    rows: list[Row] = [
        {
            **{heading: get(entry) for heading, get in headings.items()},
            **decision_cells(entry.overall, None),
            **_further_cells(entry),
        }
        for entry in entries
    ]
    notes = [entry.note(entry.label) for entry in entries]
    not_run = [(claim, NOT_RUN) for comparison in comparisons for claim in comparison.not_run]
    for claim, why in [*not_run, *((claim, OTHER_MODEL) for claim in other_claims)]:
        claimed = {"model": claim.model, "data": claim.dataset}
        variant = f" ({claim.setting})" if claim in other_claims and claim.setting else ""
        leading = {heading: claimed[heading] for heading in differing}
        leading[next(iter(columns))] = f"{claim.method}{variant}"
        rows.append({**leading, **_not_run_cells(claim, why)})
        notes.append(claim.note(claim.method))
    # Claims first: a narrow terminal drops the last columns.
    short = [*headings, "MAT", SPEEDUP, "claimed speedup", "claimed MAT", "verdict"]
    short += ["end-to-end", OUTPUTS, "cases"]
    return ResultTable.from_rows(title, captions(comparisons, text), rows, with_rule(notes), short)


def pairs_table(comparison: ComparedRuns) -> ResultTable | None:
    """Compare the methods of each run with ar and the fastest; None if no run has two methods."""
    names = {(e.run.path, e.label): comparison.name_of(e) for e in comparison.drafting}
    rows: list[Row] = []
    for run in comparison.runs:
        settings = (run.labels, run.baseline, run.seed, comparison.estimator)
        pairs = rank_labels(run.records, *settings).pairs
        for pair in pairs if len({pair["first"] for pair in pairs}) > 1 else ():
            few = pair["verdict"] == "too few"
            rows.append(
                {
                    "first": names.get((run.path, pair["first"]), pair["first"]),
                    "second": names.get((run.path, pair["second"]), pair["second"]),
                    "ratio [95 %]": NumberCell(pair["ratio"], pair["ratio_ci"], 3, few),
                    "p": TextCell(p_text(pair["p_family"]), {"p": pair["p_family"]}),
                    "first is": TextCell(pair_text(pair), {"first is": pair["verdict"]}),
                    "detectable": NumberCell(pair["detectable"], digits=3),
                    "cases": str(pair["n_cases"]),
                }
            )
    return _in_one(f"{comparison.title}: pairs", _PAIRS_TEXT.format(margin=MARGIN), rows)


def engine_table(comparisons: Sequence[ComparedRuns]) -> ResultTable | None:
    """Make a row per engine and label; None if one engine made all runs."""
    measured = [c for c in comparisons if c.timing == "measured"]
    if len({c.runs[0].engine for c in measured}) < 2:
        return None
    # Our own engine's rows first, then by engine and load.
    measured.sort(key=lambda c: (c.runs[0].engine != OWN_ENGINE, c.runs[0].engine, c.load))
    rows: list[Row] = [
        {
            "engine": "this project" if entry.run.engine == OWN_ENGINE else entry.run.engine,
            "numerics": entry.run.dtype,
            "model and data": comparison.title,
            "at once": str(entry.run.concurrency),
            "method": _method(comparison, entry),
            MAT: entry.measured("mat"),
            SPEEDUP: entry.measured("speedup"),
            "tokens/s": entry.speed(),
            OUTPUTS: outputs_cell(entry.overall),
        }
        for comparison in measured
        for entry in comparison.entries
    ]
    return _in_one("Engines, each over its own plain decoding", _ENGINES_TEXT, rows)


def load_table(comparisons: Sequence[ComparedRuns]) -> ResultTable | None:
    """Make a row per load and drafter: whether to switch it on; None without a server."""
    rows = [
        row
        for comparison in sorted(comparisons, key=lambda c: c.load)
        for run in comparison.runs
        for row in load_rows(
            served_labels(run.records, run.labels, limits_of(run.manifest), run.baseline, run.seed)
        )
    ]
    return _in_one("At which load to draft", _LOAD_TEXT, rows)


def _in_one(title: str, text: str, rows: Sequence[Mapping[str, Cell]]) -> ResultTable | None:
    """Make a table of all columns, MAT without its interval; None without a row."""
    if not rows:
        return None
    short = [name.removesuffix(INTERVAL) if name == MAT else name for name in rows[0]]
    return ResultTable.from_rows(title, text, rows, short=short)
