"""Runs that differ in their batch alone: at which batch does a method stop paying?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from analysis.runs.comparisons import ComparedLabel, ComparedRuns, conditions
from analysis.runs.estimates import unit_totals
from specbench.arrays import FloatArray
from specbench.results.estimate import FEWEST
from specbench.results.statistics.bootstrap import LEVEL, Resamples


@dataclass(frozen=True)
class Crossing:
    """A method at several batches.

    Attributes:
        entries: by batch, the smallest first.
        batch: where its speedup over ``ar`` first falls to 1, between its points by the batch's
            logarithm; 0 where it is below 1 at the first, infinite where it never is.
        interval: of ``batch``, from groups drawn again at each; None where no point has one.
    """

    entries: Sequence[ComparedLabel]
    batch: float
    interval: tuple[float, float] | None

    def shown(self, batch: float) -> str:
        """The break-even batch or a bound, in words."""
        if batch == 0:
            return f"below {self.entries[0].run.batch}"
        return f"{batch:.1f}" if np.isfinite(batch) else f"above {self.entries[-1].run.batch}"

    def __str__(self) -> str:
        if self.interval is None:
            return self.shown(self.batch)
        low, high = map(self.shown, self.interval)
        return f"{self.shown(self.batch)} [{low}, {high}]"


def over_batches(
    comparisons: Sequence[ComparedRuns],
) -> Iterator[tuple[list[ComparedRuns], dict[str, Crossing]]]:
    """Runs of two batches or more that share all else, with what becomes of each label."""
    groups: dict[tuple[object, ...], list[ComparedRuns]] = {}
    for comparison in comparisons:
        run = comparison.runs[0]
        # All conditions but the batch, which is the first.
        key = (run.model, run.dataset, comparison.estimator, *conditions(run)[1:])
        groups.setdefault(key, []).append(comparison)
    for found in groups.values():
        found.sort(key=lambda comparison: comparison.runs[0].batch)
        by_label: dict[str, list[ComparedLabel]] = {}
        for entry in (entry for comparison in found for entry in comparison.drafting):
            if entry.measured("speedup").value is not None:
                by_label.setdefault(entry.label, []).append(entry)
        made = {
            label: _crossing(entries)
            for label, entries in by_label.items()
            if len({entry.run.batch for entry in entries}) > 1
        }
        if made:
            yield found, made


def _crossing(entries: Sequence[ComparedLabel]) -> Crossing:
    places = np.log2([float(entry.run.batch) for entry in entries])
    every, drawn = [], []
    for entry in entries:
        totals = unit_totals(entry.run, entry.label)
        every.append(_speedups(totals.sum(axis=0)[None]))
        if len(totals) >= FEWEST:
            strata = np.zeros(len(totals), dtype=np.int64)
            seed = entry.run.seed + entry.run.batch  # other draws at another batch
            drawn.append(_speedups(Resamples(strata, seed).totals(totals)))
        else:
            drawn.append(every[-1])
    (batch,) = falls_to_one(places, np.stack(every, axis=1))
    if all(len(column) == 1 for column in drawn):
        return Crossing(entries, float(batch), None)
    found = falls_to_one(places, np.stack(np.broadcast_arrays(*drawn), axis=1))
    outside = (1 - LEVEL) / 2
    # No number between two draws: one of them may be infinite.
    ends = np.quantile(found, (outside, 1 - outside), method="nearest")
    return Crossing(entries, float(batch), (float(ends[0]), float(ends[1])))


def _speedups(totals: FloatArray) -> FloatArray:
    """``[n]`` of tokens and seconds of a label and of the baseline, ``[n, 4]``."""
    tokens, seconds, plain_tokens, plain_seconds = totals.T
    found: FloatArray = tokens / seconds * plain_seconds / plain_tokens
    return found


def falls_to_one(places: FloatArray, speedups: FloatArray) -> FloatArray:
    """``[n]`` batches at which rows of ``speedups [n, k]`` first fall to 1; see `Crossing.batch`.

    ``places [k]``: logarithms of the batches to base 2, ascending.
    """
    below = speedups < 1
    first = below.argmax(axis=1)
    after = np.maximum(first, 1)
    rows = np.arange(len(speedups))
    high, low = speedups[rows, after - 1], speedups[rows, after]
    share = (high - 1) / np.where(high > low, high - low, 1.0)
    batches = 2.0 ** (places[after - 1] + share * (places[after] - places[after - 1]))
    found: FloatArray = np.where(~below.any(axis=1), np.inf, np.where(first == 0, 0.0, batches))
    return found
