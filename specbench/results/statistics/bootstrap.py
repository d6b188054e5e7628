"""Ratios over prompts and their 95 % intervals.

Intervals come from a bootstrap over prompts within categories, in the form that Rao and Wu (1988)
gave it for stratified samples: of a category's n prompts, n - 1 are drawn with replacement and
weighted by n / (n - 1). The spread over resamples gives a standard error of the logarithm, and the
interval is ``value * exp(±t * error)``, t being Student's with as many degrees of freedom as there
are prompts beyond one per category.

The usual percentile interval was tried first: with 2, 4 and 10 prompts in each of six categories
it covers the truth in 78, 85 and 91 % of simulated runs instead of 95, this one in 94, 91 and 93 %
(ratio of totals) and 95 % (geometric mean); at 80 a category both do (94 and 95 %). The
test suite repeats the simulation.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from scipy import stats

from specbench.arrays import FloatArray, IntArray
from specbench.results.estimate import Interval

LEVEL = 0.95
N_RESAMPLES = 10_000

# Resamples are drawn in blocks of at most this many weights (8 bytes each).
_BLOCK = 4_000_000


def ratio_of_totals(numerators: Iterable[float], denominators: Iterable[float]) -> float:
    """Sum of the numerators over the sum of the denominators; nan where that is 0 / 0."""
    above, below = math.fsum(numerators), math.fsum(denominators)
    if below == 0:
        return math.nan if above == 0 else math.inf
    return above / below


def geometric_mean(ratios: Sequence[float]) -> float:
    """The geometric mean of positive ratios; nan of none."""
    return math.exp(math.fsum(map(math.log, ratios)) / len(ratios)) if len(ratios) else math.nan


def strata_of(categories: Sequence[str]) -> IntArray:
    """Number of the stratum of each prompt ``[n]``, from 0.

    A category with a single prompt says nothing about its own spread. Such categories are put
    together; a last one that remains alone joins the smallest of the others. So every stratum has
    two prompts or more if there are two at all.
    """
    sizes = Counter(categories)
    lone = sorted(name for name, size in sizes.items() if size == 1)
    shared = sorted(name for name, size in sizes.items() if size > 1)
    number = {name: i for i, name in enumerate(shared)}
    if len(lone) == 1 and shared:
        smallest = min(shared, key=lambda name: (sizes[name], name))
        number[lone[0]] = number[smallest]
    else:
        number.update(dict.fromkeys(lone, len(shared)))
    return np.array([number[name] for name in categories], dtype=np.int64)


class Resamples:
    """Bootstrap weights over prompts; all statistics of one table row share them.

    Args:
        strata: ``[n]`` stratum of each prompt, see :func:`strata_of`.
        seed: of a generator of its own.
        n_resamples: how many.

    Attributes:
        degrees_of_freedom: prompts beyond one per stratum; 0 means no interval can be given.
    """

    def __init__(self, strata: IntArray, seed: int, n_resamples: int = N_RESAMPLES) -> None:
        self._members = [np.flatnonzero(strata == s) for s in np.unique(strata)]
        self.degrees_of_freedom = len(strata) - len(self._members)
        if any(len(members) < 2 for members in self._members):
            self.degrees_of_freedom = 0
        self._seed = seed
        self._n_resamples = n_resamples

    def totals(self, columns: FloatArray) -> FloatArray:
        """Weighted sums ``[n_resamples, k]`` of columns ``[n, k]``; the same weights at every call.

        Raises:
            ValueError: there are no degrees of freedom.
        """
        if not self.degrees_of_freedom:
            raise ValueError("a single prompt cannot be resampled")
        generator = np.random.default_rng(self._seed)
        totals = np.zeros((self._n_resamples, columns.shape[1]))
        for members in self._members:
            n = len(members)
            rows = max(1, _BLOCK // n)
            values = columns[members] * (n / (n - 1))
            for start in range(0, self._n_resamples, rows):
                count = min(rows, self._n_resamples - start)
                drawn = generator.integers(0, n, size=(count, n - 1))
                drawn += np.arange(count)[:, None] * n
                times = np.bincount(drawn.ravel(), minlength=count * n).reshape(count, n)
                totals[start : start + count] += times @ values
        return totals


def log_interval(
    value: float, resampled: FloatArray, degrees_of_freedom: int, level: float = LEVEL
) -> Interval | None:
    """The interval of a positive ratio from its values in each resample.

    None where the sample is too small to know anything.
    """
    if degrees_of_freedom < 1 or not (math.isfinite(value) and value > 0):
        return None
    if not (np.isfinite(resampled).all() and (resampled > 0).all()):
        return None
    error = float(np.log(resampled).std(ddof=1))
    half = float(stats.t.ppf((1 + level) / 2, degrees_of_freedom)) * error
    return value * math.exp(-half), value * math.exp(half)


def minimum_detectable_ratio(
    log_ratios: Sequence[float], strata: IntArray, level: float = LEVEL, power: float = 0.8
) -> float | None:
    """The smallest true speed ratio (above 1) that such a sample shows with the given power.

    Args:
        log_ratios: ``[n]`` logarithms of per-case ratios.
        strata: ``[n]`` stratum of each case.
        level: of the interval that must exclude 1.
        power: probability that it does.

    Returns:
        A ratio, for example 1.02 where differences below 2 % stay unseen; None for too few cases.
    """
    values = np.asarray(log_ratios, dtype=np.float64)
    variance = 0.0
    n_strata = 0
    for stratum in np.unique(strata):
        members = values[strata == stratum]
        if len(members) < 2:
            return None
        variance += len(members) * float(members.var(ddof=1))
        n_strata += 1
    degrees_of_freedom = len(values) - n_strata
    if degrees_of_freedom < 1:
        return None
    error = math.sqrt(variance) / len(values)
    quantiles = stats.t.ppf([(1 + level) / 2, power], degrees_of_freedom)
    return math.exp(float(quantiles.sum()) * error)
