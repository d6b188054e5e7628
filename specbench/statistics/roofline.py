"""How near plain decoding comes to the memory's speed: the honesty of a speedup's baseline.

A one-token pass cannot end before all weights are read. A speedup over a baseline far above that
floor is partly the baseline's slowness: compiled engines reach 65-70 % of an A100's bandwidth
(gpt-fast's README), launched kernel by kernel a 7B model reaches a quarter to a third.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

SLOW_BASELINE = 0.5  # share of the bandwidth below which a table warns
ENGINES = ("eager", "graph")


@dataclass(frozen=True)
class Footing:
    """What the speedups of a run stand on.

    Attributes:
        plain: the label of plain decoding by engine, of those (``ENGINES``) that were run.
        floor_s: seconds to read the weights once at the speed of a copy; None where not known.
    """

    plain: Mapping[str, str] = field(default_factory=dict)
    floor_s: float | None = None

    def share(self, tokens_per_s: float | None) -> float | None:
        """Share of the bandwidth that plain decoding with this speed takes."""
        return self.floor_s * tokens_per_s if self.floor_s and tokens_per_s else None


def footing(manifest: Mapping[str, Any]) -> Footing:
    """Which plain decodings a run has, and the memory's speed, as far as its manifest says."""
    subject = manifest.get("surface") or manifest  # predicted times are of the surface's machine
    model: Mapping[str, Any] = subject.get("model") or {}
    engine = (model.get("passes") or {}).get("engine")
    if engine is None and str(model.get("device") or "").startswith("cpu"):
        engine = "eager"  # there has never been another one
    plain: dict[str, str] = {}
    labels = manifest.get("labels") or {}
    baseline = manifest.get("baseline")
    for label in sorted(labels, key=lambda label: label != baseline):
        entry = labels[label] or {}
        if label != baseline and entry.get("method") != "ar":
            continue
        by = "eager" if (entry.get("knobs") or {}).get("eager") else engine
        if by in ENGINES:
            plain.setdefault(by, label)
    size, speed = model.get("weight_bytes"), model.get("copy_bytes_per_s")
    return Footing(plain, float(size) / float(speed) if size and speed else None)


def share(model: Mapping[str, Any], tokens_per_s: float | None) -> float | None:
    """Share of the bandwidth that ``tokens_per_s`` of plain decoding takes.

    Args:
        model: the manifest's part about the model, with ``weight_bytes`` and ``copy_bytes_per_s``.
        tokens_per_s: of ``ar``; None gives None.
    """
    return footing({"model": model}).share(tokens_per_s)


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
