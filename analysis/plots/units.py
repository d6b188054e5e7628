"""What the axes of figures are called."""

from __future__ import annotations

MAT = "MAT (tokens per target pass;\naxis from 1)"
PLAIN = "plain decoding"  # of a line across, at 1.0

_MAT_ALONE = "MAT (tokens per target pass)"
_SPEEDUP = "speedup over plain decoding\n(ratio of tokens/s"


def speedup_words(timing: str) -> str:
    """Of an axis; a picture without its caption must still say that it was not measured."""
    return f"{_SPEEDUP}, predicted)" if timing == "predicted" else f"{_SPEEDUP})"


def speed_words(timing: str) -> str:
    """Of an axis of tokens/s."""
    return "tokens/s, predicted" if timing == "predicted" else "tokens/s"


def unit_of(key: str, timing: str) -> str:
    """Of a color scale, which is short: of ``mat`` or ``speedup``."""
    if key == "mat":
        return _MAT_ALONE
    return "predicted speedup" if timing == "predicted" else "speedup over plain decoding"
