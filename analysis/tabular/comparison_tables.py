"""Tables of runs: the first one and in full, by task, settings, pairs, engine and load."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from analysis.runs.captions import captions
from analysis.runs.claims import NOT_RUN, OTHER_MODEL, VERDICT_RULE, VERDICT_WORDS, Claim
from analysis.runs.comparisons import ComparedLabel, ComparedRuns, run_names
from analysis.runs.leaders import over_plain, standings, verdict_of
from analysis.tabular.table import ResultTable
from specbench.results.decision import (
    DECISION,
    DECISION_TEXT,
    END_TO_END,
    MAT,
    OUTPUTS,
    SPEEDUP,
    case_cell,
    case_words,
    decision_cells,
    outputs_cell,
    p_text,
    pair_text,
)
from specbench.results.estimate import ABSENT, FEWEST, INTERVAL, Cell, Estimate, Fact
from specbench.results.metrics import METRIC
from specbench.results.records import OWN_ENGINE
from specbench.results.statistics.latency import limits_of
from specbench.results.statistics.pairs import MARGIN, rank_labels
from specbench.results.statistics.served import load_rows, served_labels
from specbench.results.summary_schema import SummaryRow, interval, n_of, number
from specbench.results.tasks import HEADINGS, OVERALL

_PAIRS_TEXT = (
    "Ratio of speeds, by the table's estimator; above 1 the first is faster. Intervals against ar "
    "hold all together with 95 %. Against the fastest method the interval is over whichever method "
    "is truly the best of the others, since the same data picked it (multiple comparisons with the "
    "best, Hsu 1984). faster, slower: the interval excludes 1; tie: it lies within {margin:.0%}. "
    "p: corrected for the number of comparisons. detectable: smallest ratio shown with a power of "
    "80 %; cases needed: those that would show the measured ratio so."
)
# Of a table, by heading: what a row has there.
Columns: TypeAlias = Mapping[str, Callable[[ComparedLabel], str]]


def context_cells(row: SummaryRow) -> dict[str, Cell]:
    """What a speedup stands on: over plain decoding by either engine, and how fast that is."""
    few = n_of(row, "speedup") < FEWEST
    cells: dict[str, Cell] = {}
    for name in ("speedup_eager", "speedup_graph"):
        bounds = interval(row, name)
        cells[METRIC[name].column] = Estimate(number(row, name), bounds, few=few, compares=True)
    return {**cells, METRIC["bandwidth_share"].column: Estimate(row["bandwidth_share"])}


def comparison_table(*comparisons: ComparedRuns, not_run: bool = False) -> ResultTable:
    """Make the first table, and in full the wide one that papers use.

    A row per label, in short the six columns of :mod:`specbench.results.decision`, in full also a
    column per task and the claims. Several comparisons are told apart by leading columns.

    Args:
        comparisons: of one timing.
        not_run: whether rows of methods follow for which a paper has numbers and that were not run.
    """
    several = len(comparisons) > 1
    apart = {
        name: of
        for name, of in _APART.items()
        if len({of(c) for c in comparisons}) > 1 or (several and name in ("model", "data"))
    }
    rows: list[dict[str, Cell]] = []
    notes: list[str] = []
    for comparison in comparisons:
        where: dict[str, Cell] = {heading: of(comparison) for heading, of in apart.items()}
        stands, over = standings(comparison), over_plain(comparison)
        for entry in rows_once(comparison):
            key = entry.run.path, entry.label
            decision = decision_cells(
                entry.overall,
                stands.get(key),
                faster=over.get(key) == "faster",
                unit=comparison.unit,
            )
            name = {"method": _method(comparison, entry)}
            rows.append({**where, **name, **decision, **_further_cells(entry, comparison.tasks)})
            notes.append(entry.note(entry.label))
        # Per-task numbers of a claim would be taken for measured ones here.
        for claim in comparison.not_run if not_run else ():
            rows.append({**where, "method": claim.method, **_not_run_cells(claim)})
            notes.append(claim.note(claim.method))
    title = "Methods compared" if several else comparisons[0].title
    table = ResultTable.of(
        title + TITLE_TIMES[comparisons[0].timing],
        "\n".join([captions(comparisons), DECISION_TEXT]),
        rows,
        with_rule(notes),
        DECISION,
        len(apart),
    )
    verdicts = [(f"{c.title}: " if several else "", verdict_of(c)) for c in comparisons]
    return replace(table, head=[f"{title}{words}" for title, words in verdicts if words])


def _method(comparison: ComparedRuns, entry: ComparedLabel) -> str:
    """The label's name; plain decoding of one run stands for all."""
    return entry.label if entry.label == entry.run.baseline else comparison.name_of(entry)


# Of a title, by where the times below it come from.
TITLE_TIMES = {"measured": "", "predicted": ": predicted times", "none": ": steps without times"}
# What tells several comparisons in one table apart.
_APART: Mapping[str, Callable[[ComparedRuns], str]] = {
    "model": lambda comparison: comparison.model,
    "data": lambda comparison: comparison.dataset,
    "settings": lambda comparison: comparison.told,
    "dtype": lambda comparison: comparison.runs[0].dtype,
    "hardware": lambda comparison: comparison.runs[0].hardware,
    "decoding": lambda comparison: _decoding(comparison.runs[0].temperature),
    "speed": lambda comparison: comparison.estimator,
    "at once": lambda comparison: str(comparison.load),
}


def _decoding(temperature: float) -> str:
    return "greedy" if temperature == 0 else f"temperature {temperature:g}"


def _further_cells(entry: ComparedLabel, tasks: Sequence[str] = ()) -> dict[str, Cell]:
    row = entry.overall
    by_task: dict[str, Cell] = {
        f"{HEADINGS.get(task, task)} speedup [95 %]": entry.measured("speedup", task)
        for task in tasks
        if len(tasks) > 1
    }
    return {
        "cases": case_cell(row),
        METRIC["tokens_per_s"].column: entry.speed(),
        METRIC["geomean_speedup"].column: entry.measured("geomean_speedup"),
        **context_cells(row),
        **by_task,
        METRIC["joules_per_token"].column: Estimate(row["joules_per_token"]),
        **claimed_cells(entry.claim),
        "verdict": entry.verdict(),
    }


def _not_run_cells(claim: Claim, why: str = NOT_RUN) -> dict[str, Cell]:
    return {"cases": "0", **claimed_cells(claim), "verdict": why}


def task_table(comparison: ComparedRuns, title: str) -> ResultTable:
    """The long form: a row per task and label, every number with its interval and claim."""

    def cells(task: str, entry: ComparedLabel) -> dict[str, Cell]:
        row = entry.rows[task]
        claimed = claimed_cell(entry.claim, "speedup", task)
        return {
            "data": task,
            "n": Fact(f"n = {case_words(row)}", case_cell(row).parts),
            "method": comparison.name_of(entry),
            MAT: entry.measured("mat", task),
            SPEEDUP: entry.measured("speedup", task),
            END_TO_END: entry.measured("end_to_end_speedup", task),
            OUTPUTS: outputs_cell(row),
            **context_cells(row),
            "claimed speedup": claimed,
            "verdict": entry.verdict(task) if claimed.value is not None else "",
        }

    rows = [
        cells(task, entry)
        for task in comparison.tasks
        for entry in comparison.entries
        if task in entry.rows and entry.label != entry.run.baseline
    ]
    text = "By task, n cases each: speedups over ar; claims and conditions as above."
    return ResultTable.of(title, text, rows, groups=2)


_CLAIMED = ("claimed speedup", "claimed MAT", "verdict")


def settings_table(
    title: str,
    comparisons: Sequence[ComparedRuns],
    columns: Columns,
    text: str = "",
    beside: Sequence[Claim] = (),
) -> ResultTable:
    """A row per setting that was run, whatever run it stands in.

    Model and data have columns where there are several; the run where two rows were alike.

    Args:
        title: above the table.
        comparisons: of one kind; a comparison is one model on one data set.
        columns: heading and text of what sets the rows apart, e.g. a knob's value.
        text: what the caption says before the conditions.
        beside: claims about no data set of ours, which follow below for orientation.
    """
    entries = [entry for comparison in comparisons for entry in rows_once(comparison, columns)]
    where: Columns = {"model": lambda e: e.run.model, "data": lambda e: e.run.dataset}
    apart = {heading: of for heading, of in where.items() if len({of(e) for e in entries}) > 1}
    shown: Columns = {**apart, **columns}
    if len({tuple(of(entry) for of in shown.values()) for entry in entries}) < len(entries):
        names = run_names(entry.run for entry in entries)
        shown = {"run": lambda entry: names[entry.run.path], **shown}
    rows: list[dict[str, Cell]] = [
        {
            **{heading: of(entry) for heading, of in shown.items()},
            **decision_cells(entry.overall, None),
            **_further_cells(entry),
        }
        for entry in entries
    ]
    notes = [entry.note(entry.label) for entry in entries]
    not_run = [(claim, NOT_RUN) for comparison in comparisons for claim in comparison.not_run]
    for claim, why in [*not_run, *((claim, OTHER_MODEL) for claim in beside)]:
        claimed = {"model": claim.model, "data": claim.dataset}
        variant = f" ({claim.setting})" if claim in beside and claim.setting else ""
        place = {heading: claimed[heading] for heading in apart}
        place[next(iter(columns))] = f"{claim.method}{variant}"
        rows.append({**place, **_not_run_cells(claim, why)})
        notes.append(claim.note(claim.method))
    # Claims before what a narrow terminal can do without.
    short = [*shown, "MAT", SPEEDUP, *_CLAIMED, "end-to-end", OUTPUTS, "cases"]
    return ResultTable.of(title, captions(comparisons, text), rows, with_rule(notes), short)


def with_rule(notes: Sequence[str]) -> list[str]:
    """Each note once, and below them, where there are claims, how verdicts are found."""
    shown = [note for note in dict.fromkeys(notes) if note]
    return [*shown, VERDICT_RULE, VERDICT_WORDS] if shown else []


def claimed_cells(claim: Claim | None) -> dict[str, Cell]:
    """What is claimed, and for which model on what."""
    return {
        "claimed speedup": claimed_cell(claim, "speedup"),
        "claimed MAT": claimed_cell(claim, "mat"),
        "claimed tokens/s": claimed_cell(claim, "tokens_per_s"),
        "claimed on": claim.place if claim else ABSENT,
    }


def claimed_cell(claim: Claim | None, metric: str, task: str = OVERALL) -> Estimate:
    """A claimed number with its qualifier."""
    value = claim.value(metric, task) if claim else None
    return Estimate(value, claimed=True, qualifier=(claim and claim.qualifier) or "")


def natural(text: str) -> list[tuple[str, int]]:
    """Sorting key that puts ``vicuna7b`` before ``vicuna13b`` and 5 before 10."""
    return [(word, int(digits or 0)) for word, digits in re.findall(r"(\D*)(\d*)", text)]


def rows_once(comparison: ComparedRuns, columns: Columns | None = None) -> list[ComparedLabel]:
    """The comparison's entries; the baseline, which every run of a sweep has, only once.

    A label that several runs have is in the order of its settings; with ``columns``, the labels of
    several runs are in the order of what sets them apart, below the baseline.
    """
    plain = [entry for entry in comparison.entries if entry.label == entry.run.baseline]
    once = [e for e in comparison.entries if e.label != e.run.baseline or e is plain[0]]
    labels = [entry.label for entry in once]
    once.sort(key=lambda e: (labels.index(e.label), natural(comparison.words_of(e))))
    if columns is not None and len(comparison.runs) > 1:
        texts = columns.values()
        once.sort(key=lambda e: (e.label != e.run.baseline, [natural(of(e)) for of in texts]))
    return once


def pairs_table(comparison: ComparedRuns) -> ResultTable | None:
    """The methods of each run against ar and the fastest; None where no run has two of them."""
    names = {(e.run.path, e.label): comparison.name_of(e) for e in comparison.drafting}
    rows: list[dict[str, Cell]] = []
    for run in comparison.runs:
        how = (run.labels, run.baseline, run.seed, comparison.estimator)
        pairs = rank_labels(run.records, *how).pairs
        if len({pair["first"] for pair in pairs}) < 2:
            continue
        for pair in pairs:
            few = pair["verdict"] == "too few"
            rows.append(
                {
                    "first": names.get((run.path, pair["first"]), pair["first"]),
                    "second": names.get((run.path, pair["second"]), pair["second"]),
                    "ratio [95 %]": Estimate(pair["ratio"], pair["ratio_ci"], 3, few),
                    "p": Fact(p_text(pair["p_family"]), {"p": pair["p_family"]}),
                    "first is": Fact(pair_text(pair), {"first is": pair["verdict"]}),
                    "detectable": Estimate(pair["detectable"], digits=3),
                    "cases": str(pair["n_cases"]),
                }
            )
    if not rows:
        return None
    text = _PAIRS_TEXT.format(margin=MARGIN)
    return ResultTable.of(f"{comparison.title}: pairs", text, rows, short=[*rows[0]])


_ENGINES_TITLE = "Engines, each over its own plain decoding"
_ENGINES_TEXT = (
    "Each engine's speedup and outputs are against its own plain decoding. tokens/s say what a "
    "user gets, not which method is better: arithmetic and kernels differ."
)
_LOAD_TEXT = (
    "tokens/s: of all users together. Change: over the same server without a draft; its interval "
    "holds for all drafts together. P95: seconds until a whole answer."
)


def engine_table(comparisons: Sequence[ComparedRuns]) -> ResultTable | None:
    """Make a row per engine and label; None where all runs are of one engine."""
    shown = [c for c in comparisons if c.timing == "measured"]
    if len({c.runs[0].engine for c in shown}) < 2:
        return None
    # Our own engine's rows first, then by engine and load.
    shown.sort(key=lambda c: (c.runs[0].engine != OWN_ENGINE, c.runs[0].engine, c.load))
    rows: list[dict[str, Cell]] = [
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
        for comparison in shown
        for entry in comparison.entries
    ]
    short = [name.removesuffix(INTERVAL) if name == MAT else name for name in rows[0]]
    return ResultTable.of(_ENGINES_TITLE, _ENGINES_TEXT, rows, short=short)


def load_table(comparisons: Sequence[ComparedRuns]) -> ResultTable | None:
    """Make a row per load and way of drafting: whether to switch it on; None without a server."""
    rows = [
        row
        for comparison in sorted(comparisons, key=lambda c: c.load)
        for run in comparison.runs
        for row in load_rows(
            served_labels(run.records, run.labels, limits_of(run.manifest), run.baseline, run.seed)
        )
    ]
    if not rows:
        return None
    return ResultTable.of("At which load to draft", _LOAD_TEXT, rows, short=[*rows[0]])
