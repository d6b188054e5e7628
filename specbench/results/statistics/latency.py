"""How long requests to servers took, and which of them were within limits.

Definitions:
    ttft: seconds from the request to the first token, as the client sees it.
    tpot: seconds for each token after those that came first.
    itl: seconds between two bursts: a step's accepted tokens arrive together and are one burst, so
        that drafting well makes bursts longer and not the time between them shorter.
    e2e: seconds from the request to the last token.
    P50, P95, P99: of all timed turns (itl: of all their gaps), linear between two of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from specbench.results.manifest import RunManifest
from specbench.results.records import CaseRecord

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds that a request may take to count as good; None: any."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def __bool__(self) -> bool:
        return self.ttft_s is not None or self.tpot_s is not None

    def met(self, record: CaseRecord) -> bool:
        first = self.ttft_s is None or record.prefill_s <= self.ttft_s
        tpot = _tpot(record)
        return first and (self.tpot_s is None or tpot is None or tpot <= self.tpot_s)

    def words(self) -> str:
        """``ttft 0.5 s, tpot 0.05 s``; empty without limits."""
        both = (("ttft", self.ttft_s), ("tpot", self.tpot_s))
        return ", ".join(f"{name} {value:g} s" for name, value in both if value is not None)


NO_LIMITS = Limits()


def limits_of(manifest: RunManifest) -> Limits:
    """Those of ``server.limit_ttft_s`` and ``server.limit_tpot_s``."""
    return Limits(*(manifest.setting("server", key) for key in ("limit_ttft_s", "limit_tpot_s")))


def latencies(records: Sequence[CaseRecord]) -> dict[str, dict[str, float]]:
    """Seconds by what is measured and by percentile (``p50``); what nobody measured is left out."""
    found: dict[str, list[float]] = {
        "ttft": [r.prefill_s for r in records],
        "tpot": [seconds for r in records if (seconds := _tpot(r)) is not None],
        "itl": [b - a for r in records if r.served for a, b in pairwise(r.served.bursts)],
        "e2e": [r.wall_s for r in records],
    }
    return {
        name: {
            f"p{q}": float(at)
            for q, at in zip(PERCENTILES, np.percentile(seconds, PERCENTILES), strict=True)
        }
        for name, seconds in found.items()
        if seconds
    }


def _tpot(record: CaseRecord) -> float | None:
    return record.decode_s / record.n_decoded if record.n_decoded else None
