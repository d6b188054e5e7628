"""The place of a server's own drafting among a run's methods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from specbench.decoding.drafter import Drafter, Scope
from specbench.decoding.structs import Needs


@dataclass(kw_only=True, eq=False)
class Speculation(Drafter):
    """Stands for ``server.speculation`` among the methods; it drafts nothing for ours.

    Attributes:
        server: the ``server`` group's keys, as they hold for this label.
    """

    server: Mapping[str, object] = field(default_factory=dict)
    state_scope: Scope = "turn"

    @property
    def needs(self) -> Needs:
        return Needs(tokens_only=False, max_nodes=1)
