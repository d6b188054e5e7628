"""Which labels of a comparison may be the best, over all its runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from analysis.runs.comparisons import ComparedLabel, ComparedRuns
from analysis.runs.settings import setting_words
from specbench.results.decision import verdict_sentence
from specbench.results.statistics import pairs
from specbench.results.statistics.aggregate import pool
from specbench.results.statistics.bootstrap import LogRatios
from specbench.results.statistics.counted import WRONG, wrong_words
from specbench.results.statistics.multiple import Against, against, against_best
from specbench.results.statistics.served import system_verdict
from specbench.results.statistics.summary import Sample
from specbench.results.summary_schema import Standing, number

RunLabel: TypeAlias = tuple[Path, str]  # a run's folder, a label of it

TOO_FEW = Standing(verdict="too few", p=None)


def leaders(entries: Sequence[ComparedLabel], key: str) -> list[ComparedLabel]:
    """The entries that may have a standing and are not shown to be behind the best, which is first.

    Args:
        entries: of one comparison.
        key: ``speedup``, each over the baseline of its own run, or ``mat``.
    """
    entries = [entry for entry in entries if entry.ranked]
    if not entries:
        return []
    ratios = _log_ratios(entries, key)
    if ratios is None:  # too few cases to part any
        return sorted(entries, key=lambda entry: -(number(entry.overall, key) or 0.0))
    return [entries[i] for i in pairs.leaders(ratios)]


def leaders_of(comparison: ComparedRuns) -> list[ComparedLabel]:
    """The methods that may be the best, the best first; by MAT where nothing was timed."""
    if timed := _timed(comparison):
        return leaders(timed, "speedup")
    return leaders([e for e in comparison.drafting if e.overall["mat"] is not None], "mat")


def _timed(comparison: ComparedRuns) -> list[ComparedLabel]:
    timed = [e for e in comparison.ranked if e.overall["speedup"] is not None]
    # The clock inside the steps costs time.
    return [e for e in timed if not e.run.phases] or timed


def standings(comparison: ComparedRuns) -> dict[RunLabel, Standing]:
    """How each label of each run stands against the fastest method of them all.

    Over several runs the methods are compared by their speedups over their own plain decoding, and
    plain decoding's standing comes from the fastest method's run.
    """
    wrong = {(run.path, label): WRONG for run in comparison.runs for label in run.wrong_outputs}
    entries = _timed(comparison)
    if not entries:  # without plain decoding only labels of one run can be compared
        (run, *more) = comparison.runs
        how = (run.labels, run.baseline, run.seed, comparison.estimator)
        pairs_of_it = [] if more else pairs.compare_pairs(run.records, *how)
        return {(run.path, k): v for k, v in pairs.standings_of(pairs_of_it).items()} | wrong
    places = {f"{i}": (entry.run.path, entry.label) for i, entry in enumerate(entries)}
    ratios = _log_ratios(entries, "speedup")
    if ratios is None:
        top = max(range(len(entries)), key=lambda i: number(entries[i].overall, "speedup") or 0.0)
        others = {i: TOO_FEW for i in range(len(entries)) if i != top}
        over_plain = TOO_FEW
        behind = (number(entries[top].overall, "speedup") or 1.0) < 1
    else:
        top = int(np.argmax(ratios.values))
        others = {i: _standing(found) for i, found in against_best(ratios).items()}
        over_plain = _standing(against(ratios)[top])
        behind = ratios.values[top] < 0
    run = entries[top].run
    plain = run.baseline or ""
    found = pairs.standings(
        f"{top}",
        {f"{i}": standing for i, standing in others.items()},
        plain,
        over_plain,
        behind=bool(behind),
    )
    of_plain = {(each.path, plain): found[plain] for each in comparison.runs}
    return {**of_plain, **{place: found[name] for name, place in places.items()}, **wrong}


def verdict_of(comparison: ComparedRuns) -> str:
    """The comparison in one sentence, over all its runs, behind one for each wrong label.

    "" where nothing was timed so and no output is wrong.
    """
    return "\n".join([*wrong_words_of(comparison), _sentence(comparison)]).strip()


def wrong_words_of(comparison: ComparedRuns) -> list[str]:
    """A sentence for each label of each run whose outputs are wrong."""
    names = {(e.run.path, e.label): comparison.name_of(e) for e in comparison.drafting}
    return [
        words
        for run in comparison.runs
        for words in wrong_words(
            {names.get((run.path, label), label): w for label, w in run.wrong_outputs.items()},
            run.baseline,
        )
    ]


def _sentence(comparison: ComparedRuns) -> str:
    entries = [entry for entry in _timed(comparison) if entry.run.baseline is not None]
    if not entries:
        return ""
    if comparison.runs[0].concurrency > 1:  # what one user gains, others may lose
        return " ".join(
            system_verdict(run.records, run.labels, run.baseline, run.seed)
            for run in comparison.runs
        )
    shared = _log_ratios(entries, "speedup") is not None  # enough cases that all runs have
    return verdict_sentence(
        {comparison.name_of(e): e.overall["speedup_ci"] if shared else None for e in entries},
        [comparison.name_of(entry) for entry in leaders(entries, "speedup")],
        [comparison.name_of(entry) for entry in shown_faster(comparison)],
        comparison.timing,
    )


def shown_faster(comparison: ComparedRuns) -> list[ComparedLabel]:
    """The methods that are shown faster than plain decoding, over all its runs."""
    entries = [entry for entry in _timed(comparison) if entry.run.baseline is not None]
    ratios = _log_ratios(entries, "speedup") if entries else None
    if ratios is None:
        return []
    found = zip(entries, against(ratios), strict=True)
    return [entry for entry, over in found if pairs.verdict(over.interval) == "faster"]


def _standing(found: Against) -> Standing:
    return Standing(verdict=pairs.verdict(found.interval), p=found.p_family)


def _log_ratios(entries: Sequence[ComparedLabel], key: str) -> LogRatios | None:
    """The entries' numbers over the cases that all runs have; resampled together, case by case."""
    runs = {entry.run.path: entry.run for entry in entries}
    pooled = {path: pool(run.records, run.labels) for path, run in runs.items()}
    first = next(iter(pooled.values()))
    common = set.intersection(*(set(each.cases) for each in pooled.values()))
    chosen = {
        path: each.only([i for i, case in enumerate(each.cases) if case in common])
        for path, each in pooled.items()
    }
    # Repeats are compared where all runs have as many.
    alike = len({t.shape[0] for each in chosen.values() for t in each.totals.values()}) == 1
    totals = {
        (path, label): found if alike else found[:1]
        for path, each in chosen.items()
        for label, found in each.totals.items()
    }
    names = list(totals)
    joined = replace(
        first.only([i for i, case in enumerate(first.cases) if case in common]),
        totals={str(place): totals[name] for place, name in enumerate(names)},
        prediction_errors={
            str(place): error
            for place, (path, label) in enumerate(names)
            if (error := pooled[path].prediction_errors.get(label))
        },
    )
    sample = Sample(joined, entries[0].overall["estimator"], entries[0].run.seed)
    found = sample.mats if key == "mat" else sample.speeds
    if found is None:
        return None
    contrasts = np.zeros((len(entries), len(names)))
    for row, entry in zip(contrasts, entries, strict=True):
        row[names.index((entry.run.path, entry.label))] = 1.0
        if key != "mat" and entry.run.baseline is not None:
            row[names.index((entry.run.path, entry.run.baseline))] = -1.0
    return _with_runs(entries, found.of(contrasts))


def _with_runs(entries: Sequence[ComparedLabel], ratios: LogRatios) -> LogRatios:
    """The entries' ratios with the spread between runs in their errors.

    It is known where labels were measured in several runs with the same settings: the variance of
    the logarithms among these, pooled over labels. Every entry is one run's, so every one has it;
    two labels of one run differ by less, and comparing them errs on the wide side.
    """
    words = setting_words([(entry.run, entry.label) for entry in entries])
    alike: dict[tuple[str, str], list[float]] = {}
    for entry, said, value in zip(entries, words, ratios.values, strict=True):
        alike.setdefault((entry.label, said), []).append(float(value))
    squares = math.fsum(np.var(values) * len(values) for values in alike.values())
    freedom = len(entries) - len(alike)
    if not freedom or not squares:
        return ratios
    spread = squares / freedom * np.eye(len(entries))
    return replace(ratios, repeats=spread, repeats_freedom=freedom)
