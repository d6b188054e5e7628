"""Plain autoregressive decoding: nothing is drafted. The baseline of every comparison.

State kept: none.
"""

from __future__ import annotations

from dataclasses import dataclass

from specbench.decoding.drafter import Drafter
from specbench.decoding.structs import Needs


@dataclass(kw_only=True, eq=False)
class Autoregressive(Drafter):
    """Plain decoding, the baseline: drafts nothing.

    Attributes:
        eager: passes are launched one by one whatever the run's engine: the slow baseline of most
            published speedups, beside the fast one (``compare=[{method: ar, eager: true, label:
            ar_eager}]``).
    """

    name: str = "ar"
    eager: bool = False

    @property
    def needs(self) -> Needs:
        return Needs(max_nodes=0, eager=self.eager)
