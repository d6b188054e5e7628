"""Places among a run's methods for what drafts elsewhere: servers and transformers' loops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from specbench.decoding.drafter import Drafter
from specbench.decoding.structs import Needs

LOOPS = ("generate", "assisted", "prompt_lookup")


@dataclass(kw_only=True, eq=False)
class Speculation(Drafter):
    """Stands for ``server.speculation`` among the methods; it drafts nothing for ours.

    Attributes:
        server: the ``server`` group's keys, as they hold for this label.
    """

    server: Mapping[str, object] = field(default_factory=dict)
    state_scope: str = "turn"

    @property
    def needs(self) -> Needs:
        return Needs(tokens_only=False, max_nodes=1)


@dataclass(kw_only=True, eq=False)
class Peer(Drafter):
    """Stands for one of transformers' ``LOOPS`` among the methods; it drafts nothing for ours."""

    loop: str
    state_scope: str = "turn"

    @property
    def needs(self) -> Needs:
        # Assisted generation drafts greedily whatever the temperature, so that its ratio test is
        # given another distribution than the one that was drawn from.
        return Needs(tokens_only=False, max_nodes=1, sampling=False)
