"""How near plain decoding comes to the memory's speed: the honesty of a speedup's baseline.

A one-token pass cannot end before all weights are read. A speedup over a baseline far above that
floor is partly the baseline's slowness: compiled engines reach 65-70 % of an A100's bandwidth
(gpt-fast's README), launched kernel by kernel a 7B model reaches a quarter to a third.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

SLOW_BASELINE = 0.5  # share of the bandwidth below which a table warns


def share(model: Mapping[str, Any], tokens_per_s: float | None) -> float | None:
    """Share of the bandwidth that ``tokens_per_s`` of plain decoding takes.

    Args:
        model: the manifest's part about the model, with ``weight_bytes`` and ``copy_bytes_per_s``.
        tokens_per_s: of ``ar``; None gives None.
    """
    size, speed = model.get("weight_bytes"), model.get("copy_bytes_per_s")
    if not (size and speed and tokens_per_s):
        return None
    return float(size) * tokens_per_s / float(speed)


def note(model: Mapping[str, Any], tokens_per_s: float | None) -> str | None:
    """A line for the table about its baseline, with a warning where that is slow."""
    reached = share(model, tokens_per_s)
    if reached is None:
        return None
    engine = (model.get("passes") or {}).get("engine", "eager")
    text = (
        f"ar ({engine} engine) reads its weights at {reached:.0%} of this machine's copy bandwidth "
        f"({float(model['copy_bytes_per_s']) / 1e9:.0f} GB/s)"
    )
    if reached < SLOW_BASELINE:
        text += (
            f": under {SLOW_BASELINE:.0%}, so a part of each speedup is the baseline's slowness, "
            "which a faster engine would not leave"
        )
    return text + "."
