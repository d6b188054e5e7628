"""The place of one of transformers' decoding loops among the methods of a run."""

from __future__ import annotations

from dataclasses import dataclass

from specbench.decoding.drafter import Drafter
from specbench.decoding.structs import Needs

LOOPS = ("generate", "assisted", "prompt_lookup")


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
