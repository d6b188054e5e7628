"""Several methods at once: each against plain decoding, and each against the best of them.

Both families give intervals that hold all together with 95 %, and verdicts that look at nothing but
the interval beside them. Interval and test are one thing: the same estimate, the same error and
Student's t as everywhere (:mod:`specbench.results.statistics.bootstrap`), at a level divided by the
number of comparisons that must hold together (Bonferroni). Drawing the largest of several t from
their measured correlations gives narrower intervals, and was tried: with 12 prompts and 4 methods
all four covered the truth in 91 % of simulated runs instead of 95.

- Against one reference that was fixed before (:func:`against`): m comparisons.
- Against the best (:func:`against_best`), which the same data picked: multiple comparisons with the
  best in the unconstrained form of Edwards and Hsu (1983, JASA 78, 965-971). Whichever of k methods
  is truly the best, its own k - 1 comparisons with the others hold together. Methods that these do
  not rule out may be the best, and an interval covers the comparison with any of them. So a method
  that came first by luck makes no other one slower.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats

from specbench.arrays import FloatArray
from specbench.results.estimate import Interval
from specbench.results.statistics.bootstrap import LEVEL, LogRatios

POWER = 0.8


@dataclass(frozen=True)
class Against:
    """How one method's speed stands to another's.

    Attributes:
        log_ratio: logarithm of the ratio; above 0 the first is faster.
        low, high: of its interval, which holds together with the others of the family.
        p: of this comparison by itself; ``p_family``: among the family.
        detectable: the smallest ratio above 1 that is shown with a power of 80 %.
        needed: cases like these that would show a ratio as far from 1 as this with that power; None
            where more cases would not do, because the two are alike or repeats differ too much.
    """

    log_ratio: float
    low: float
    high: float
    p: float
    p_family: float
    detectable: float
    needed: int | None

    @property
    def interval(self) -> Interval:
        """Of the ratio."""
        return math.exp(self.low), math.exp(self.high)


@dataclass(frozen=True)
class _Family:
    """Comparisons of which ``m`` must hold together; arrays ``[k]``."""

    ratios: LogRatios
    m: int

    @property
    def p(self) -> FloatArray:
        values, errors = self.ratios.values, self.ratios.errors
        sure = np.where(values == 0, 0.0, np.inf)  # where nothing varies
        t = np.divide(np.abs(values), errors, out=sure, where=errors > 0)
        p: FloatArray = 2 * stats.t.sf(t, self.ratios.freedom)
        return p

    def critical(self, level: float) -> FloatArray:
        found: FloatArray = stats.t.ppf(1 - (1 - level) / (2 * self.m), self.ratios.freedom)
        return found

    def halves(self, level: float) -> FloatArray:
        return self.critical(level) * self.ratios.errors

    def against(self, i: int, low: float, high: float, p_family: float, level: float) -> Against:
        """The i-th comparison with its interval."""
        reach = float(self.critical(level)[i] + stats.t.ppf(POWER, self.ratios.freedom[i]))
        value = float(self.ratios.values[i])
        prompts, repeats = (float(c[i, i]) for c in (self.ratios.prompts, self.ratios.repeats))
        left = (value / reach) ** 2 - repeats  # of the variance, for prompts
        return Against(
            value,
            low,
            high,
            float(self.p[i]),
            p_family,
            math.exp(reach * float(self.ratios.errors[i])),
            max(self.ratios.n, math.ceil(self.ratios.n * prompts / left)) if left > 0 else None,
        )


def against(ratios: LogRatios, level: float = LEVEL) -> list[Against]:
    """Comparisons with a reference that was fixed beforehand, one for each of the ratios."""
    m = len(ratios.values)
    family = _Family(ratios, m)
    low, high = ratios.values - family.halves(level), ratios.values + family.halves(level)
    p = np.minimum(1.0, m * family.p)
    return [family.against(i, float(low[i]), float(high[i]), float(p[i]), level) for i in range(m)]


def against_best(speeds: LogRatios, level: float = LEVEL) -> dict[int, Against]:
    """Every method but the fastest against the best one, which none can be faster than.

    The ratio is over the one that was fastest here, the interval over whichever truly is: it
    reaches 1 for every method that may be the best.

    Args:
        speeds: ``[k]`` logarithms of the methods' speeds.
        level: of all intervals together.
    """
    k = len(speeds.values)
    top = int(np.argmax(speeds.values))
    # All differences, the first over the last: values, halves of intervals, p values.
    first, last = np.divmod(np.arange(k * k), k)
    family = _Family(speeds.of(np.eye(k)[first] - np.eye(k)[last]), max(1, k - 1))
    values = family.ratios.values.reshape(k, k)
    halves = family.halves(level).reshape(k, k)
    # p of "the last one is not faster than the first".
    p = np.minimum(1.0, (k - 1) * family.p).reshape(k, k)
    p = np.where(values < 0, p, 1.0)
    best = p.min(axis=1)  # of "this one is the best"
    possible = np.flatnonzero((values + halves >= 0).all(axis=1))
    low = (values - halves)[:, possible].min(axis=1)
    high = np.minimum(0.0, (values + halves)[:, possible].max(axis=1))
    # Ruled out where each of the others is surely not the best, or surely faster.
    p_behind = np.minimum(best[None, :], p).max(axis=1)
    return {
        i: family.against(i * k + top, float(low[i]), float(high[i]), float(p_behind[i]), level)
        for i in range(k)
        if i != top
    }
