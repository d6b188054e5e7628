"""What the axes of figures are called."""

from __future__ import annotations

MAT = "MAT, axis from 1\n(tokens per target pass)"
PLAIN = "plain decoding"  # of a line across, at 1.0

_MAT_ALONE = "MAT (tokens per target pass)"
_SPEEDUP = "speedup\n(ratio of tokens/s)"


def speedup_words(timing: str) -> str:
    """Of an axis; a picture without its caption must still say that it was not measured."""
    return f"predicted {_SPEEDUP}" if timing == "predicted" else _SPEEDUP


def speed_words(timing: str) -> str:
    """Of an axis of tokens/s."""
    return "tokens/s, predicted" if timing == "predicted" else "tokens/s"


def unit_of(key: str, timing: str) -> str:
    """Of a color scale, which is short: of ``mat`` or ``speedup``."""
    if key == "mat":
        return _MAT_ALONE
    return "predicted speedup" if timing == "predicted" else "speedup over plain decoding"
