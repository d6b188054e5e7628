"""A speedup of a search's case costs, with the interval that a live run should lie in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import stats

from runners.search.halving import Candidate, CaseCost
from specbench.arrays import FloatArray
from specbench.results.estimate import Interval
from specbench.results.statistics.bootstrap import LEVEL, LogRatios, log_ratios, strata_of


def predicted(
    one: Candidate, cases: Sequence[str], tasks: Mapping[str, str], error: float, seed: int = 0
) -> tuple[float, Interval | None]:
    """The speedup on the cases, and its 95 % interval; None of fewer than three cases.

    Args:
        tasks: of each case.
        error: relative error of the prediction (`PredictionError.within`); 0 where the costs were
            measured.
    """
    value = one.speedup(cases)
    ratios = _ratios([[one.costs[case] for case in cases]], cases, tasks, seed)
    if ratios is None:
        return value, None
    t = float(stats.t.ppf((1 + LEVEL) / 2, ratios.freedom[0])) * float(ratios.errors[0])
    half = math.hypot(t, float(stats.norm.ppf((1 + LEVEL) / 2)) * error)
    return value, (value * math.exp(-half), value * math.exp(half))


def error_noise(
    guess: Candidate, live: Candidate, cases: Sequence[str], tasks: Mapping[str, str], seed: int = 0
) -> float | None:
    """Standard error of the logarithm of a predicted over a live speedup on the same cases.

    It is of the choice of cases and the clock's noise on them. None of fewer than three cases.
    """
    costs = [[one.costs[case] for case in cases] for one in (guess, live)]
    ratios = _ratios(costs, cases, tasks, seed)
    return None if ratios is None else float(ratios.of(np.array([[1.0, -1.0]])).errors[0])


def _ratios(
    costs: Sequence[Sequence[CaseCost]], cases: Sequence[str], tasks: Mapping[str, str], seed: int
) -> LogRatios | None:
    """The logarithms of speedups, of each one's costs by case."""

    def twice(values: Sequence[Sequence[float]]) -> FloatArray:
        return np.stack([np.array(values).T] * 2)  # over all repeats, and in the only one

    above = twice([[c.tokens / c.plain_tokens * c.plain_seconds for c in own] for own in costs])
    below = twice([[c.seconds for c in own] for own in costs])
    return log_ratios(above, below, strata_of([tasks[case] for case in cases]), seed)
