"""Several methods at once: each against plain decoding, and each against the best of the others.

Interval and test are one thing: the same estimate, the same error and Student's t as everywhere
(:mod:`specbench.results.statistics.bootstrap`), at a level divided by the number of comparisons
that must hold together (Bonferroni). A verdict depends only on its interval.

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

from specbench.arrays import FloatArray
from specbench.results.cells import Interval
from specbench.results.statistics.bootstrap import LEVEL, N_RESAMPLES, LogRatios

POWER = 0.8


@dataclass(frozen=True)
class Against:
    """The comparison of one method's speed with another's."""

    log_ratio: float  # above 0 the first is faster
    low: float  # of the logarithm's interval
    high: float
    p: float  # of this comparison by itself
    p_family: float  # among the family
    detectable: float  # the smallest ratio above 1 that is shown with a power of 80 %
    needed: int | None  # cases like these that would show this ratio so; None: more would not do

    @property
    def interval(self) -> Interval:
        """Give the interval of the ratio."""
        return math.exp(self.low), math.exp(self.high)


def _against(
    ratios: LogRatios, m: int, i: int, interval: tuple[float, float], p_family: float
) -> Against:
    """Make the i-th of ``[k]`` comparisons, of which ``m`` must hold together."""
    reach = float(_critical(ratios, m)[i] + special.stdtrit(ratios.freedom[i], POWER))
    value = float(ratios.values[i])
    prompts, fixed = float(ratios.prompts[i, i]), float(ratios.fixed[i])
    left = (value / reach) ** 2 - fixed  # of the variance, for prompts
    return Against(
        value,
        *interval,
        float(_p_values(ratios)[i]),
        min(1.0, float(p_family)),
        math.exp(reach * float(ratios.errors[i])),
        math.ceil(ratios.n * prompts / left) if left > 0 else None,
    )


def _critical(ratios: LogRatios, m: int) -> FloatArray:
    t: FloatArray = special.stdtrit(ratios.freedom, 1 - (1 - LEVEL) / (2 * m))
    return t


def _p_values(ratios: LogRatios) -> FloatArray:
    values, errors = ratios.values, ratios.errors
    sure = np.where(values == 0, 0.0, np.inf)  # where nothing varies
    t = np.divide(np.abs(values), errors, out=sure, where=errors > 0)
    p: FloatArray = 2 * special.stdtr(ratios.freedom, -t)
    return p


def against(ratios: LogRatios) -> list[Against]:
    """Compare each of ``[k]`` ratios with a reference that was fixed beforehand."""
    m = len(ratios.values)
    halves = _critical(ratios, m) * ratios.errors
    ends = zip(ratios.values - halves, ratios.values + halves, strict=True)
    p = m * _p_values(ratios)
    return [_against(ratios, m, i, (float(a), float(b)), p[i]) for i, (a, b) in enumerate(ends)]


def against_best(speeds: LogRatios) -> dict[int, Against]:
    """Compare every one of ``[k]`` methods but the fastest with the best of the others.

    The ratio is over the one that was fastest here, the interval over whichever truly is the best.
    """
    k = len(speeds.values)
    top = int(np.argmax(speeds.values))
    compared = {}
    for i in range(k):
        if i == top:
            continue
        over = speeds.contrast(np.eye(k)[i] - np.delete(np.eye(k), i, axis=0))
        halves = _critical(over, k - 1) * over.errors
        p = np.where(over.values < 0, (k - 1) * _p_values(over), 1.0).min()
        interval = float((over.values - halves).min()), float((over.values + halves).min())
        compared[i] = _against(over, k - 1, int(over.values.argmin()), interval, p)
    return compared


@dataclass(frozen=True)
class Selection:
    """The excess of the fastest of k methods' number that comes from being picked by the data.

    Attributes:
        bias: expected excess of its ratio over the truth, as a part of the truth, were the
            estimates the truth (a parametric bootstrap of the maximum). They spread more than the
            truth does, so the excess is rather larger.
        if_equal: the same were all methods equally fast: the largest that it can be.
    """

    bias: float
    if_equal: float


def selection(ratios: LogRatios, n_resamples: int = N_RESAMPLES) -> Selection | None:
    """Estimate what the first of ``[k]`` ratios owes to being picked; None of a single one."""
    k = len(ratios.values)
    if k < 2:
        return None
    # A cost surface's error is the same for all methods, so it picks none.
    covariance = ratios.prompts + ratios.repeats
    variances, directions = np.linalg.eigh(covariance)
    normal = np.random.default_rng(0).normal(size=(n_resamples, k))
    errors = normal * np.sqrt(np.clip(variances, 0.0, None)) @ directions.T

    def excess(values: FloatArray) -> float:
        picked = np.argmax(values + errors, axis=1)
        return math.expm1(float(errors[np.arange(n_resamples), picked].mean()))

    return Selection(excess(ratios.values), excess(np.zeros(k)))
