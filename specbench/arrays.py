"""Names for the numpy arrays in signatures, whose docstrings give their shapes; sequences."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
BoolArray: TypeAlias = "np.ndarray[Any, np.dtype[np.bool_]]"
FloatArray: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"
IntArray: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


def first_difference(first: Sequence[object], second: Sequence[object]) -> int | None:
    """Return the first index at which two sequences differ; None where they are equal."""
    pairs = enumerate(zip_longest(first, second))
    return next((i for i, (a, b) in pairs if a != b), None)
