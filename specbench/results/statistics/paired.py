"""Two methods on the same cases: is one faster, or are they as fast as each other?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from specbench.arrays import FloatArray
from specbench.results.estimate import Interval

# Up to this many cases all 2^n sign patterns are tried; above, a sample of them.
_EXACT_CASES = 16
N_PERMUTATIONS = 9_999
_BLOCK = 4_000_000


def sign_flip_p(
    differences: Sequence[float], seed: int = 0, n_permutations: int = N_PERMUTATIONS
) -> float:
    """Two-sided p value of "the differences are symmetric about zero"; 1.0 without cases.

    Where two methods are equally fast, each case's difference could as well have had the other
    sign. The p value is the share of sign patterns whose mean is as far from zero as the measured
    one: of all patterns for up to 16 cases, else of a random sample that contains the measured
    pattern, ``(b + 1) / (m + 1)``. ``differences`` are per case, e.g. logarithms of speed ratios.
    """
    values = np.asarray(differences, dtype=np.float64)
    n = len(values)
    if n == 0:
        return 1.0
    # Patterns that differ only by the order of addition must compare as equal.
    bound = abs(float(values.sum())) - 1e-12 * float(np.abs(values).sum())
    if n <= _EXACT_CASES:
        patterns = (np.arange(2**n)[:, None] >> np.arange(n)) & 1
        return float((_abs_sums(patterns, values) >= bound).mean())
    generator = np.random.default_rng(seed)
    rows = max(1, _BLOCK // n)
    as_far = 0
    for start in range(0, n_permutations, rows):
        count = min(rows, n_permutations - start)
        patterns = generator.integers(0, 2, size=(count, n), dtype=np.int8)
        as_far += int((_abs_sums(patterns, values) >= bound).sum())
    return (as_far + 1) / (n_permutations + 1)


def _abs_sums(patterns: np.ndarray[Any, np.dtype[Any]], values: FloatArray) -> FloatArray:
    """Absolute sums of the values with the sign of those flipped where a pattern has a 1."""
    sums: FloatArray = np.abs(values.sum() - 2.0 * (patterns @ values))
    return sums


def holm(p_values: Sequence[float]) -> list[float]:
    """P values corrected for their number (Holm 1979), in the order given.

    Calling those below alpha significant keeps the probability of any false one below alpha.
    """
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def equivalence(interval: Interval | None, margin: float) -> str:
    """What an interval of a speed ratio says about two methods.

    Args:
        interval: of the speed of the first over that of the second.
        margin: what counts as no difference, e.g. 0.02: ratios from 1/1.02 to 1.02.

    Returns:
        ``tie``: the whole interval lies within the margin, whether or not it contains 1;
        ``faster`` or ``slower``: it excludes 1; ``undecided``: too wide to say.
    """
    if interval is None:
        return "undecided"
    low, high = math.log(interval[0]), math.log(interval[1])
    within = math.log1p(margin)
    if -within <= low and high <= within:
        return "tie"
    if low > 0:
        return "faster"
    if high < 0:
        return "slower"
    return "undecided"
