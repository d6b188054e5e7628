"""Which labels of a comparison may be the best, over all its runs."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from analysis.runs.comparisons import ComparedLabel, ComparedRuns
from analysis.runs.settings import setting_words
from specbench.results.statistics.bootstrap import LogRatios
from specbench.results.statistics.counted import WRONG, wrong_words
from specbench.results.statistics.pairs import Ranking, rank_labels
from specbench.results.statistics.served import system_verdict
from specbench.results.statistics.summary import Sample, pool
from specbench.results.summary_schema import Standing, number

RunLabel: TypeAlias = tuple[Path, str]  # a run's folder, a label of it


def leaders(
    entries: Sequence[ComparedLabel], key: str, same_prompts: bool = False
) -> list[ComparedLabel]:
    """The entries that may have a standing and are not shown to be behind the best, which is first.

    Args:
        entries: of one comparison.
        key: ``speedup``, each over the baseline of its own run, or ``mat``.
        same_prompts: of settings of one method, whose predictions miss alike: compared over their
            prompts alone, without the error of a prediction.
    """
    entries = [entry for entry in entries if entry.ranked]
    return [entries[i] for i in ranking(entries, key, same_prompts).leaders] if entries else []


def ranking(
    entries: Sequence[ComparedLabel], key: str = "speedup", same_prompts: bool = False
) -> Ranking:
    """Rank the entries of one comparison by MAT, or by speedup, each over its own run's ar."""
    ratios = _log_ratios(entries, key)
    if ratios is not None and same_prompts:
        ratios = replace(ratios, predictions=None)
    return Ranking.of(ratios, ratios, [number(entry.overall, key) or 0.0 for entry in entries])


def leaders_of(comparison: ComparedRuns) -> list[ComparedLabel]:
    """The methods that may be the best, the best first; by MAT where nothing was timed."""
    if timed := _timed(comparison):
        return leaders(timed, "speedup")
    return leaders([e for e in comparison.drafting if e.overall["mat"] is not None], "mat")


def _timed(comparison: ComparedRuns) -> list[ComparedLabel]:
    timed = [e for e in comparison.ranked if e.overall["speedup"] is not None]
    # The clock inside the steps costs time.
    return [e for e in timed if not e.run.phases] or timed


@functools.lru_cache(maxsize=64)
def _timed_ranking(comparison: ComparedRuns) -> Ranking:
    """The ranking of its timed methods, of which there is one: table, sentence and sheet ask it."""
    return ranking(_timed(comparison))


def by_speedup(comparison: ComparedRuns) -> list[ComparedLabel]:
    """The methods that may have a standing and have a speedup, the fastest first."""
    timed = [(e.overall["speedup"], e) for e in comparison.ranked]
    known = [(speedup, entry) for speedup, entry in timed if speedup is not None]
    return [entry for _, entry in sorted(known, key=lambda pair: -pair[0])]


def standings(comparison: ComparedRuns) -> dict[RunLabel, Standing]:
    """How each label of each run stands against the fastest method of them all.

    Over several runs the methods are compared by their speedups over their own plain decoding, and
    plain decoding's standing comes from the fastest method's run.
    """
    wrong = {(run.path, label): WRONG for run in comparison.runs for label in run.wrong_outputs}
    entries = _timed(comparison)
    if not entries:  # without plain decoding only labels of one run can be compared
        (run, *more) = comparison.runs
        if more:
            return wrong
        ranked = rank_labels(run.records, run.labels, run.baseline, run.seed, comparison.estimator)
        return {(run.path, label): found for label, found in ranked.standings.items()} | wrong
    ranked_entries = _timed_ranking(comparison)
    run = entries[ranked_entries.order[0]].run
    plain = run.baseline or ""
    found, of_plain = ranked_entries.standings(plain)
    of_entry = {(entries[i].run.path, entries[i].label): each for i, each in found.items()}
    return {(each.path, plain): of_plain for each in comparison.runs if of_plain} | of_entry | wrong


def verdict_of(comparison: ComparedRuns) -> str:
    """The comparison in one sentence, over all its runs, behind one for each wrong label.

    "" where nothing was timed so and no output is wrong.
    """
    return "\n".join([*wrong_words_of(comparison), sentence_of(comparison)]).strip()


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


def sentence_of(comparison: ComparedRuns) -> str:
    """Say in one sentence which methods are fastest; "" where nothing was timed so."""
    entries = _timed(comparison)
    if not entries:
        return ""
    if comparison.runs[0].concurrency > 1:  # what one user gains, others may lose
        return " ".join(
            system_verdict(run.records, run.labels, run.baseline, run.seed)
            for run in comparison.runs
        )
    names = [comparison.name_of(entry) for entry in entries]
    return _timed_ranking(comparison).sentence(names, comparison.timing)


def over_plain(comparison: ComparedRuns) -> dict[RunLabel, str]:
    """Of each timed method its verdict against plain decoding: all of them hold together."""
    entries = _timed(comparison)
    verdicts = _timed_ranking(comparison).plain_verdicts if entries else []
    return {
        (entry.run.path, entry.label): verdict
        for entry, verdict in zip(entries, verdicts, strict=True)
    }


def _log_ratios(entries: Sequence[ComparedLabel], key: str) -> LogRatios | None:
    """The entries' numbers over the cases that all runs have; resampled together, case by case."""
    runs = {entry.run.path: entry.run for entry in entries}
    pooled = {path: pool(run.records, run.labels) for path, run in runs.items()}
    common = set.intersection(*({unit.name for unit in each.units} for each in pooled.values()))
    chosen = {
        path: each.only([i for i, unit in enumerate(each.units) if unit.name in common])
        for path, each in pooled.items()
    }
    # Repeats are compared where all runs have as many.
    alike = len({each.totals.shape[0] for each in chosen.values()}) == 1
    totals = [each.totals if alike else each.totals[:1] for each in chosen.values()]
    names = [(path, label) for path, each in chosen.items() for label in each.labels]
    joined = replace(
        next(iter(chosen.values())),
        labels=[str(place) for place in range(len(names))],
        totals=np.concatenate(totals, axis=2),
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
