"""Several methods at once: each against plain decoding, and each against the best of the others.

Interval and test are one thing: the same estimate, the same error and Student's t as everywhere
(:mod:`specbench.results.statistics.bootstrap`), at a level divided by the number of comparisons
that must hold together (Bonferroni). A verdict looks at nothing but the interval beside it.

- Against one reference that was fixed before (:func:`against`): all m intervals hold together with
  95 %.
- Against the best (:func:`against_best`), which the same data picked: multiple comparisons with the
  best (Hsu 1981, Annals of Statistics 9, 1026-1034; 1984, same, 12, 1136-1144). A method's interval
  is about its speed over the best of the others, whichever that is: its k - 1 comparisons with them
  hold together with 95 %. Only the best method can be called slower wrongly, so with 95 % none is,
  although the one that was fastest here may owe that to luck.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import special

from specbench.arrays import FloatArray, IntArray
from specbench.results.estimate import Interval
from specbench.results.statistics.bootstrap import LEVEL, N_RESAMPLES, LogRatios

POWER = 0.8


@dataclass(frozen=True)
class Against:
    """How one method's speed stands to another's.

    Attributes:
        log_ratio: logarithm of the ratio; above 0 the first is faster.
        low, high: of its interval.
        p: of this comparison by itself; ``p_family``: among the family.
        detectable: the smallest ratio above 1 that is shown with a power of 80 %.
        needed: cases like these that would show a ratio as far from 1 as this with that power; None
            where more cases alone would not do.
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
        p: FloatArray = 2 * special.stdtr(self.ratios.freedom, -t)
        return p

    @property
    def critical(self) -> FloatArray:
        found: FloatArray = special.stdtrit(self.ratios.freedom, 1 - (1 - LEVEL) / (2 * self.m))
        return found

    @property
    def halves(self) -> FloatArray:
        return self.critical * self.ratios.errors

    def against(self, i: int, low: float, high: float, p_family: float) -> Against:
        """The i-th comparison with its interval."""
        reach = float(self.critical[i] + special.stdtrit(self.ratios.freedom[i], POWER))
        value = float(self.ratios.values[i])
        prompts, fixed = float(self.ratios.prompts[i, i]), float(self.ratios.fixed[i])
        left = (value / reach) ** 2 - fixed  # of the variance, for prompts
        return Against(
            value,
            low,
            high,
            float(self.p[i]),
            p_family,
            math.exp(reach * float(self.ratios.errors[i])),
            math.ceil(self.ratios.n * prompts / left) if left > 0 else None,
        )


def against(ratios: LogRatios) -> list[Against]:
    """Comparisons with a reference that was fixed beforehand, one for each of the ratios."""
    m = len(ratios.values)
    family = _Family(ratios, m)
    low, high = ratios.values - family.halves, ratios.values + family.halves
    p = np.minimum(1.0, m * family.p)
    return [family.against(i, float(low[i]), float(high[i]), float(p[i])) for i in range(m)]


def against_best(speeds: LogRatios) -> dict[int, Against]:
    """Every one of ``[k]`` methods but the fastest against the best of the others.

    The ratio is over the one that was fastest here, the interval over whichever truly is the best.
    """
    everyone = np.arange(len(speeds.values))
    top = int(np.argmax(speeds.values))
    return {i: over_best(speeds, i, np.delete(everyone, i)) for i in everyone.tolist() if i != top}


def over_best(speeds: LogRatios, i: int, others: IntArray) -> Against:
    """One of ``[k]`` methods against the best of some others.

    The ratio is over the one that was fastest here, the interval over whichever truly is the best.
    """
    k, m = len(speeds.values), len(others)
    family = _Family(speeds.of(np.eye(k)[i] - np.eye(k)[others]), m)
    values, halves = family.ratios.values, family.halves
    p = np.where(values < 0, m * family.p, 1.0).min()
    low, high = float((values - halves).min()), float((values + halves).min())
    return family.against(int(values.argmin()), low, high, min(1.0, float(p)))


@dataclass(frozen=True)
class Selection:
    """How much too high the number of the fastest of k methods is, because the data picked it.

    Attributes:
        bias: expected excess of its ratio over the truth, as a part of the truth, were the
            estimates the truth (a parametric bootstrap of the maximum). They are further apart than
            the truth is, so the excess is rather larger.
        if_equal: the same were all methods equally fast: the largest that it can be.
    """

    bias: float
    if_equal: float


def selection(ratios: LogRatios, n_resamples: int = N_RESAMPLES) -> Selection | None:
    """Estimate what the first of ``[k]`` ratios owes to being picked; None of a single one."""
    k = len(ratios.values)
    if k < 2:
        return None
    # A cost surface's error is all methods' alike, so that it picks none.
    covariance = ratios.prompts + ratios.repeats
    variances, directions = np.linalg.eigh(covariance)
    normal = np.random.default_rng(0).normal(size=(n_resamples, k))
    errors = normal * np.sqrt(np.clip(variances, 0.0, None)) @ directions.T

    def excess(values: FloatArray) -> float:
        picked = np.argmax(values + errors, axis=1)
        return math.expm1(float(errors[np.arange(n_resamples), picked].mean()))

    return Selection(excess(ratios.values), excess(np.zeros(k)))
