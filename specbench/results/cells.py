"""Cells of tables: a number with its interval, or text with the values in it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import pandas as pd

Interval: TypeAlias = tuple[float, float]

ABSENT = "–"
INTERVAL = " [95 %]"  # of a heading whose cells have intervals

# An interval of two cases reaches from nothing to hundreds of times the value.
FEWEST = 3
TOO_FEW = "too few cases"


def number(value: float | None, form: str) -> str:
    """Format a number; `ABSENT` where there is none."""
    return ABSENT if value is None else format(value, form)


@dataclass(frozen=True)
class NumberCell:
    """A number with its 95 % interval, as one cell."""

    value: float | None
    interval: Interval | None = None  # None where none can be given
    digits: int = 2  # after the point, in text; a program gets six significant digits
    few: bool = False  # fewer than `FEWEST` cases, hence no interval
    claimed: bool = False  # by a paper, which gives no interval
    qualifier: str = ""  # what the paper says before the number, as ``up to``
    leads: bool = False  # nothing in its column is shown to be better
    compares: bool = False  # a ratio of speeds, of which too few cases say nothing

    def __str__(self) -> str:
        if self.value is None:
            return ABSENT
        if self.few and self.compares:
            return TOO_FEW
        text = f"{self.qualifier} {self.value:.{self.digits}f}".lstrip()
        if self.interval is None:
            return f"{text} [{ABSENT}]" if self.few else text
        if self.degenerate:
            return f"{text} [=]"
        low, high = self.interval
        return f"{text} [{low:.{self.digits}f}, {high:.{self.digits}f}]"

    @property
    def without_interval(self) -> NumberCell:
        """The number without its interval."""
        return replace(self, interval=None, few=self.few and self.compares)

    @property
    def degenerate(self) -> bool:
        """True if the interval is narrower than a thousandth, which no few cases can give."""
        low, high = self.interval or (0.0, 1.0)
        return high - low <= 1e-3 * abs(high)


@dataclass(frozen=True)
class TextCell:
    """Text for a reader, of which a program gets the parts, by column."""

    text: str
    parts: Mapping[str, object] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return self.text


Cell: TypeAlias = "str | NumberCell | TextCell"


def numeric_columns(columns: pd.DataFrame | Mapping[str, Sequence[Cell]]) -> list[bool]:
    """Find the columns of a table that hold numbers, and so are right-aligned."""
    return [len(columns[name]) > 0 and all(map(_is_number, columns[name])) for name in columns]


def _is_number(cell: object) -> bool:
    if isinstance(cell, NumberCell) or cell == ABSENT:
        return True
    with contextlib.suppress(ValueError):
        float(str(cell))
        return True
    return False
