"""A speedup of a search's case costs, with the interval that a live run should lie in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import stats

from runners.search.halving import Candidate
from specbench.results.estimate import Interval
from specbench.results.statistics.bootstrap import LEVEL, log_ratios, strata_of

# Relative error of a predicted speedup besides the choice of prompts, where a surface claims less:
# the root mean square over 18 settings that were also run (docs/measurements/cpu-epyc-2core.md).
LEAST_ERROR = 0.07


def predicted(
    one: Candidate, cases: Sequence[str], tasks: Mapping[str, str], error: float, seed: int = 0
) -> tuple[float, Interval | None]:
    """The speedup on the cases, and its 95 % interval; None of fewer than three cases.

    Args:
        tasks: of each case.
        error: relative error of the surface's passes; 0 where the costs were measured.
    """
    costs = [one.costs[case] for case in cases]
    above = np.array([[c.tokens / c.plain_tokens * c.plain_seconds] for c in costs])
    below = np.array([[c.seconds] for c in costs])
    value = one.speedup(cases)
    strata = strata_of([tasks[case] for case in cases])
    ratios = log_ratios(np.stack([above] * 2), np.stack([below] * 2), strata, seed)
    if ratios is None:
        return value, None
    t = float(stats.t.ppf((1 + LEVEL) / 2, ratios.freedom[0])) * float(ratios.errors[0])
    model = float(stats.norm.ppf((1 + LEVEL) / 2)) * max(error, LEAST_ERROR) if error else 0.0
    half = math.hypot(t, model)
    return value, (value * math.exp(-half), value * math.exp(half))
