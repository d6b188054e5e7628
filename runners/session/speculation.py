"""The place of a server's way of drafting among the methods of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from specbench.decoding.drafter import Drafter
from specbench.decoding.structs import Needs


@dataclass(kw_only=True, eq=False)
class Speculation(Drafter):
    """Stands for ``server.speculation`` among the methods; it drafts nothing for ours.

    Attributes:
        server: the ``server`` group's keys, as they hold for this label.
    """

    server: dict[str, Any] = field(default_factory=dict)
    state_scope: str = "turn"

    @property
    def needs(self) -> Needs:
        return Needs(tokens_only=False, max_nodes=1)
