"""Standings of the labels of a comparison, over all its runs."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from analysis.runs.comparisons import ComparedLabel, ComparedRuns
from analysis.runs.settings import setting_texts
from specbench.results.conditions import roofline_warnings
from specbench.results.statistics.bootstrap import LogRatios
from specbench.results.statistics.counted import WRONG, wrong_output_texts
from specbench.results.statistics.pairs import Ranking, rank_labels
from specbench.results.statistics.served import system_sentence
from specbench.results.statistics.summary import Sample, pool
from specbench.results.summary_schema import Standing, number

RunLabel: TypeAlias = tuple[Path, str]  # a run's folder, a label of it


def leaders(
    entries: Sequence[ComparedLabel], key: str, same_prompts: bool = False
) -> list[ComparedLabel]:
    """Return the entries that may be the best, the best first; none without a standing.

    Args:
        entries: of one comparison.
        key: ``speedup``, each over the baseline of its own run, or ``mat``.
        same_prompts: for settings of one method, whose predictions err alike: compare over their
            prompts alone, without the error of a prediction.
    """
    entries = [entry for entry in entries if entry.ranked]
    return [entries[i] for i in _ranking(entries, key, same_prompts).leaders] if entries else []


def _ranking(
    entries: Sequence[ComparedLabel], key: str = "speedup", same_prompts: bool = False
) -> Ranking:
    ratios = _log_ratios(entries, key)
    if ratios is not None and same_prompts:
        ratios = replace(ratios, predictions=None)
    return Ranking.compare(ratios, ratios, [number(entry.overall, key) or 0.0 for entry in entries])


def by_speedup(comparison: ComparedRuns) -> list[ComparedLabel]:
    """Return the methods that may have a standing and have a speedup, the fastest first."""
    timed = [entry for entry in comparison.ranked if entry.overall["speedup"] is not None]
    return sorted(timed, key=lambda entry: -(entry.overall["speedup"] or 0.0))


@functools.lru_cache(maxsize=64)
def _timed_ranking(comparison: ComparedRuns) -> tuple[list[ComparedLabel], Ranking]:
    """Rank the timed methods; table, sentence and sheet share the result."""
    timed = [entry for entry in comparison.ranked if entry.overall["speedup"] is not None]
    # The clock inside the steps costs time.
    entries = [entry for entry in timed if not entry.run.phases] or timed
    return entries, _ranking(entries) if entries else Ranking([], [], {})


def standings(comparison: ComparedRuns) -> dict[RunLabel, Standing]:
    """Return the standing of each label of each run against the fastest method of all runs.

    Over several runs the methods are compared by their speedups over their own plain decoding, and
    plain decoding's standing comes from the fastest method's run.
    """
    runs = comparison.runs
    wrong = {(run.path, label): WRONG for run in runs for label in run.wrong_outputs}
    entries, ranking = _timed_ranking(comparison)
    if not entries:  # without plain decoding, only labels of one run can be compared
        if len(runs) > 1:
            return wrong
        (run,) = runs
        ranked = rank_labels(run.records, run.labels, run.baseline, run.seed, comparison.estimator)
        return {(run.path, label): s for label, s in ranked.standings.items()} | wrong
    plain = entries[ranking.order[0]].run.baseline or ""
    of_methods, of_plain = ranking.standings(plain)
    standing_by_label = {(run.path, plain): of_plain for run in runs if of_plain}
    standing_by_label |= {(entries[i].run.path, entries[i].label): s for i, s in of_methods.items()}
    return standing_by_label | wrong


def over_plain(comparison: ComparedRuns) -> dict[RunLabel, str]:
    """Return each timed method's verdict against plain decoding; all hold together."""
    entries, ranking = _timed_ranking(comparison)
    labels = [(entry.run.path, entry.label) for entry in entries]
    return dict(zip(labels, ranking.plain_outcomes, strict=True))


def verdict_of(comparison: ComparedRuns) -> str:
    """Summarise the comparison in one sentence, after one for each label with wrong outputs.

    "" if no method was timed and no output is wrong.
    """
    return "\n".join([*wrong_texts_of(comparison), sentence_of(comparison)]).strip()


def wrong_texts_of(comparison: ComparedRuns) -> list[str]:
    """Return a sentence for each label of each run whose outputs are wrong."""
    names = {(e.run.path, e.label): comparison.name_of(e) for e in comparison.drafting}
    sentences = []
    for run in comparison.runs:
        wrong = {names.get((run.path, x), x): w for x, w in run.wrong_outputs.items()}
        sentences += wrong_output_texts(wrong, run.baseline)
    return sentences


def sentence_of(comparison: ComparedRuns) -> str:
    """Name the fastest methods in one sentence; "" if no method was timed."""
    entries, ranking = _timed_ranking(comparison)
    if not entries:
        return ""
    if comparison.runs[0].concurrency > 1:  # what one user gains, others may lose
        return " ".join(
            system_sentence(run.records, run.labels, run.baseline, run.seed)
            for run in comparison.runs
        )
    for run in comparison.runs:
        rows = [r for e in comparison.entries if e.run is run for r in e.rows.values()]
        if refused := [w for w in roofline_warnings(run.manifest, rows) if w.code == "NO_HEADLINE"]:
            return refused[0].text
    names = [comparison.name_of(entry) for entry in entries]
    return ranking.sentence(names, comparison.timing, comparison.unit)


def _log_ratios(entries: Sequence[ComparedLabel], key: str) -> LogRatios | None:
    """Resample the entries' numbers together, over the cases that all runs have."""
    runs = {entry.run.path: entry.run for entry in entries}
    pooled = {path: pool(run.records, run.labels) for path, run in runs.items()}
    common = set.intersection(*({unit.name for unit in part.units} for part in pooled.values()))
    common_cases = [
        part.only([i for i, unit in enumerate(part.units) if unit.name in common])
        for part in pooled.values()
    ]
    # Repeats are compared if all runs have equally many.
    alike = len({part.totals.shape[0] for part in common_cases}) == 1
    totals = [part.totals if alike else part.totals[:1] for part in common_cases]
    names = [(path, label) for path, part in pooled.items() for label in part.labels]
    errors = [pooled[path].prediction_errors.get(label) for path, label in names]
    joined = replace(
        common_cases[0],
        labels=[str(i) for i in range(len(names))],
        totals=np.concatenate(totals, axis=2),
        prediction_errors={str(i): error for i, error in enumerate(errors) if error},
    )
    sample = Sample(joined, entries[0].overall["estimator"], entries[0].run.seed)
    ratios = sample.mats if key == "mat" else sample.speed.logs
    if ratios is None:
        return None
    contrasts = np.zeros((len(entries), len(names)))
    for row, entry in zip(contrasts, entries, strict=True):
        row[names.index((entry.run.path, entry.label))] = 1.0
        if key != "mat" and entry.run.baseline is not None:
            row[names.index((entry.run.path, entry.run.baseline))] = -1.0
    return _with_runs(entries, ratios.contrast(contrasts))


def _with_runs(entries: Sequence[ComparedLabel], ratios: LogRatios) -> LogRatios:
    """Add the spread between runs to the errors of the entries' ratios.

    It is known if labels were measured in several runs with the same settings: the variance of
    the logarithms among these, pooled over labels. Every entry is one run's, so every one has it;
    two labels of one run differ by less, and comparing them errs on the wide side.
    """
    settings = setting_texts([(entry.run, entry.label) for entry in entries])
    alike: dict[tuple[str, str], list[float]] = {}
    for entry, text, value in zip(entries, settings, ratios.values, strict=True):
        alike.setdefault((entry.label, text), []).append(float(value))
    squares = math.fsum(np.var(values) * len(values) for values in alike.values())
    freedom = len(entries) - len(alike)
    if not freedom or not squares:
        return ratios
    spread = squares / freedom * np.eye(len(entries))
    return replace(ratios, repeats=spread, repeats_freedom=freedom)
