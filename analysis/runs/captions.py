"""What belongs below tables and figures: model, data, conditions, losslessness, warnings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from analysis.runs.comparisons import ComparedLabel, ComparedRuns
from analysis.runs.load import Run
from specbench.results.statistics import roofline
from specbench.results.statistics.aggregate import LEFT_OUT_SHARE
from specbench.results.statistics.disturbed import disturbance_text
from specbench.results.summary_schema import n_of, number
from specbench.results.tasks import OVERALL
from specbench.results.wording import (
    SPEEDUPS,
    TIMES,
    batch_words,
    budget_words,
    build_words,
    cases_words,
    engine_words,
    fallback_words,
    interval_words,
    prediction_words,
    rounding_words,
    template_words,
    users_words,
    verdict_words,
)


def caption(comparison: ComparedRuns, speedup: bool = True, times: bool = True) -> str:
    """Model, data, state, hardware, number of cases, verdict on losslessness, code.

    Speedups are explained where the table or figure shows some, and so are times.
    """
    return captions_once([comparison], speedup, times)[0]


def captions_once(
    comparisons: Iterable[ComparedRuns], speedup: bool = True, times: bool = True
) -> list[str]:
    """A caption for each comparison, and a last line of what holds for all."""
    each = [_sentences(comparison, speedup, times) for comparison in comparisons]
    if len(each) < 2:
        return [" ".join(sentences) for sentences in each]
    shared = [said for said in each[0] if all(said in other for other in each)]
    own = [" ".join(said for said in one if said not in shared) for one in each]
    return [*own, " ".join(["All:", *shared])] if shared else own


def decoding_words(run: Run) -> str:
    """``greedy``, or at which temperature."""
    return "greedy" if run.temperature == 0 else f"temperature {run.temperature:g}"


def _conditions(run: Run) -> list[str]:
    """Number format, decoding, and how prompts are written where that was recorded."""
    return list(filter(None, [run.dtype, decoding_words(run), template_words(run.manifest)]))


def _sentences(comparison: ComparedRuns, speedup: bool = True, times: bool = True) -> list[str]:
    first = comparison.runs[0]
    made_up = "SYNTHETIC RECORDS, not a measurement. " if first.synthetic else ""
    hidden = first.timing == "predicted" and not times
    made_up += "Steps of a replay. " if hidden else TIMES[first.timing]
    if first.imported:
        made_up += f"IMPORTED from {first.imported}'s files: not run here, no tokens to audit. "
    cases = cases_words(entry.overall for entry in comparison.entries)
    repeats = sorted({1 + max(record.repeat for record in run.records) for run in comparison.runs})
    limit = first.max_new_tokens
    dropped = _lost(comparison, "n_dropped")
    noisy = _lost(comparison, "n_disturbed") if times else 0
    speed = SPEEDUPS[comparison.estimator]
    others = (entry for entry in comparison.entries if entry.label != entry.run.baseline)
    lossless = verdict_words(verdict_totals(others), counted=False)
    fallbacks = [word for run in comparison.runs for word in fallback_words(run.records)]
    moved = [word for run in comparison.runs for word in rounding_words(run.manifest.model)]
    prices = [roofline.price_words(run.manifest) for run in comparison.runs]
    elsewhere = engine_words(record for run in comparison.runs for record in run.records)
    return [
        f"{made_up}{first.model} ({', '.join(_conditions(first))}) on {first.dataset}"
        + (f", {comparison.told}: " if comparison.told else ": ")
        + cases
        + (f" of at most {limit} new tokens a turn" if limit else "")
        + (f", {' or '.join(map(str, repeats))} repeats" if repeats != [1] else "")
        + (f", {dropped} dropped because one label failed" if dropped else "")
        + (f", {noisy}{_of_runs(comparison)} with a disturbed turn " if noisy else "")
        + (_how_counted(comparison) if noisy else "")
        + ".",
        *filter(None, [disturbed_text(comparison) if times else ""]),
        f"Hardware: {first.hardware}.",
        *(
            [
                " ".join(filter(None, [elsewhere, build_words(first.manifest)])),
                f"{users_words(first.concurrency)} Outputs: {lossless}.",
            ]
            if elsewhere
            else [f"State kept per {_scopes(comparison)}.", f"Lossless: {lossless}."]
        ),
        *([f"{speed}."] if speedup and first.timing != "none" else []),
        *(
            f"LEFT OUT: {label}. {why}"
            for run in comparison.runs
            for label, why in run.left_out.items()
        ),
        *filter(None, [compared_budgets(comparison)]),
        *filter(None, [batch_words(record for run in comparison.runs for record in run.records)]),
        interval_words(repeats[-1], _counts(comparison, times), groups=first.batch > 1),
        *filter(None, [_predictions(comparison, times)]),
        *(slow_baseline_words(comparison) if times else []),
        *(dict.fromkeys(filter(None, prices)) if times else []),
        *(dict.fromkeys(fallbacks) if times else []),
        *dict.fromkeys(moved),
        f"Code: {', '.join(sorted({run.code for run in comparison.runs}))}.",
    ]


def compared_budgets(comparison: ComparedRuns) -> str:
    """Where the settings of its labels come from; "" where no run recorded that."""
    budgets: dict[str, str | None] = {}
    for entry in comparison.entries:
        info = entry.run.manifest.labels.get(entry.label)
        budgets[comparison.name_of(entry)] = None if info is None else info.budget
    names = {comparison.name_of(entry): entry.records for entry in comparison.entries}
    return budget_words(budgets, names)


def _predictions(comparison: ComparedRuns, times: bool) -> str:
    return prediction_words(r for run in comparison.runs for r in run.records) if times else ""


def _counts(comparison: ComparedRuns, times: bool) -> list[int]:
    key = "speedup" if times and comparison.runs[0].timing != "none" else "mat"
    return [n_of(row, key) for entry in comparison.entries for row in entry.rows.values()]


def slow_baseline_words(comparison: ComparedRuns) -> list[str]:
    """Warnings about baselines.

    One is under half the memory's speed, or faster than any read measured, or its passes take
    longer than those of more rows.
    """
    shares: dict[tuple[str, str | None], list[tuple[str, float]]] = {}
    for entry in comparison.entries:
        if entry.label == entry.run.baseline:
            found = [(task, row["bandwidth_share"]) for task, row in entry.rows.items()]
            context = roofline.baseline_context(entry.run.manifest)
            of_kind = shares.setdefault((context.by, context.weights), [])
            of_kind.extend((task, s) for task, s in found if s is not None)
    warnings = []
    for (by, weights), of_tasks in shares.items():
        reached = [share for task, share in of_tasks if task == OVERALL]
        highest = max((share for _, share in of_tasks), default=0.0)
        warnings += roofline.warnings(reached, highest, by, weights)
    prices = (roofline.price_warning(run.manifest) for run in comparison.runs)
    return [*warnings, *dict.fromkeys(filter(None, prices))]


def _lost(comparison: ComparedRuns, kind: str) -> int:
    """Cases lost over all runs; all labels of a run lose the same ones."""
    by_run = {entry.run.path: number(entry.overall, kind) or 0 for entry in comparison.entries}
    return int(sum(by_run.values()))


def _of_runs(comparison: ComparedRuns) -> str:
    """What cases over all runs are counted out of, where there are several runs."""
    if len(comparison.runs) == 1:
        return ""
    cases = {str(entry.run.path): int(entry.overall["n_cases"]) for entry in comparison.entries}
    return f" of {sum(cases.values())} in {len(cases)} runs"


def _how_counted(comparison: ComparedRuns) -> str:
    """What became of disturbed cases, by :mod:`specbench.results.statistics.summary`."""
    if any(entry.overall["disturbed_counted"] for entry in comparison.entries):
        return f"timed all the same where they are over {LEFT_OUT_SHARE:.0%} of a run's cases"
    return "not timed"


def disturbed_text(comparison: ComparedRuns) -> str:
    """Say how many turns of the runs were disturbed; empty where none was."""
    by_run = {entry.run.path: entry.disturbed for entry in comparison.entries}
    return disturbance_text(by_run.values())


def _scopes(comparison: ComparedRuns) -> str:
    by_scope: dict[str, list[str]] = {}
    for entry in comparison.entries:
        if entry.label == entry.run.baseline:
            continue
        labels = by_scope.setdefault(str(entry.overall["state_scope"]), [])
        if entry.label not in labels:
            labels.append(entry.label)
    parts = [f"{scope} ({', '.join(labels)})" for scope, labels in sorted(by_scope.items())]
    return "; ".join(parts) or "nothing but ar was run"


def verdict_totals(entries: Iterable[ComparedLabel]) -> Counter[str]:
    """Turns by verdict, over several labels."""
    totals = Counter[str]()
    for entry in entries:
        totals.update(entry.overall["lossless"])
    return totals
