"""Plain autoregressive decoding: nothing is drafted. The baseline of every comparison.

State kept: none.
"""

from __future__ import annotations

from dataclasses import dataclass

from specbench.drafter import Drafter
from specbench.structs import Needs


@dataclass(kw_only=True, eq=False)
class Autoregressive(Drafter):
    """Drafts nothing, so every step commits the target's own token."""

    name: str = "ar"

    @property
    def needs(self) -> Needs:
        return Needs(max_nodes=0)
