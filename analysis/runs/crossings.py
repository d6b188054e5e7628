"""Runs that differ in their batch alone: at which batch does a method stop paying?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from analysis.runs.comparisons import ComparedLabel, ComparedRuns, conditions
from specbench.arrays import FloatArray


@dataclass(frozen=True)
class Crossing:
    """A method at several batches.

    Attributes:
        entries: by batch, the smallest first.
        batch: where its speedup over ``ar`` first falls to 1, between its points by the batch's
            logarithm; 0 where it is below 1 at the first, infinite where it never is.
        interval: where the ends of the speedups' intervals fall to 1, as if all points were off
            together, for they have the same questions; None where no point has an interval.
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
    speedups = [entry.measured("speedup") for entry in entries]
    rows = [(one.value, *(one.interval or (0.0, np.inf))) for one in speedups]  # without: anything
    batch, low, high = (float(at) for at in falls_to_one(places, np.array(rows, np.float64).T))
    known = any(one.interval is not None for one in speedups)
    return Crossing(entries, batch, (low, high) if known else None)


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
