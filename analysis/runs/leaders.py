"""Which labels of a comparison may be the best, over all its runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from analysis.runs.comparisons import ComparedLabel
from specbench.results.statistics import pairs
from specbench.results.statistics.aggregate import pool
from specbench.results.statistics.bootstrap import LogRatios
from specbench.results.statistics.summary import Sample
from specbench.results.summary_schema import number


def leaders(entries: Sequence[ComparedLabel], key: str) -> list[ComparedLabel]:
    """The entries that are not shown to be behind the best, the best first.

    Args:
        entries: of one comparison.
        key: ``speedup``, each over the baseline of its own run, or ``mat``.
    """
    ratios = _log_ratios(entries, key)
    if ratios is None:  # too few cases to part any
        return sorted(entries, key=lambda entry: -(number(entry.overall, key) or 0.0))
    return [entries[i] for i in pairs.leaders(ratios)]


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
    return found.of(contrasts)
