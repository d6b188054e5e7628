"""Names for the numpy arrays in signatures; docstrings give their shapes."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
BoolArray: TypeAlias = "np.ndarray[Any, np.dtype[np.bool_]]"
FloatArray: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"
IntArray: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
