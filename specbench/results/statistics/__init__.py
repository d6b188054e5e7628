"""From records to the numbers of a table; numpy and scipy only, no torch.

The unit is the case (prompt): its turns and repeats are pooled before anything else, so they never
count as independent.

- :mod:`specbench.results.statistics.bootstrap`: ratios with intervals.
- :mod:`specbench.results.statistics.paired`: is one method faster than another, or as fast?
- :mod:`specbench.results.statistics.summary`: rows of ``summary.json`` and pairwise comparisons.
- :mod:`specbench.results.statistics.run_summary`: the whole of ``summary.json``.
"""

from specbench.results.statistics.aggregate import noisy_blocks, untimed_blocks
from specbench.results.statistics.bootstrap import (
    Interval,
    Resamples,
    geometric_mean,
    log_interval,
    minimum_detectable_ratio,
    ratio_of_totals,
    strata_of,
)
from specbench.results.statistics.paired import equivalence, holm, sign_flip_p
from specbench.results.statistics.run_summary import exit_code, run_summary
from specbench.results.statistics.summary import (
    ESTIMATORS,
    OVERALL,
    compare_pairs,
    summarise,
    task_order,
)

__all__ = [
    "ESTIMATORS",
    "OVERALL",
    "Interval",
    "Resamples",
    "compare_pairs",
    "equivalence",
    "exit_code",
    "geometric_mean",
    "holm",
    "log_interval",
    "minimum_detectable_ratio",
    "noisy_blocks",
    "ratio_of_totals",
    "run_summary",
    "sign_flip_p",
    "strata_of",
    "summarise",
    "task_order",
    "untimed_blocks",
]
