"""Random trees of garbage: the adversarial drafter that losslessness is tested against.

No paper. A part of the tokens is copied from the text, so that some are accepted by chance, equal
siblings occur, and every path through verification and cache is walked. Draws depend on the seed,
the prompt and the turn's steps alone, not on the order of cases.
State kept: the generator of the present turn.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Literal

import numpy as np

from specbench.config.schema import Count, Share
from specbench.decoding.drafter import Drafter
from specbench.decoding.structs import DecodeState, DraftContext, DraftTree, Needs


@dataclass(kw_only=True, eq=False)
class RandomDrafts(Drafter):
    """Random drafts: garbage in random trees, the adversary in tests of losslessness.

    Attributes:
        n_nodes: nodes of every tree.
        shape: ``random`` (a parent drawn uniformly among earlier nodes and the root), ``chain``
            (one branch) or ``wide`` (all nodes are children of the root).
        context_share: probability that a token is copied from the text instead of drawn from the
            vocabulary.
    """

    name: str = "random_drafts"
    n_nodes: Count = 16
    shape: Literal["random", "chain", "wide"] = "random"
    context_share: Share = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        self._vocab_size = 0
        self._seed = 0
        self._random = np.random.default_rng(0)

    @property
    def needs(self) -> Needs:
        return Needs(max_nodes=self.n_nodes)

    def setup(self, context: DraftContext) -> None:
        self._vocab_size = context.vocab_size
        self._seed = context.seed

    def begin(self, state: DecodeState) -> None:
        prompt = zlib.crc32(state.buffer[: state.n_prompt].tobytes())
        self._random = np.random.default_rng([self._seed, prompt])

    def propose(self, state: DecodeState) -> DraftTree:
        if self.n_nodes == 0:
            return DraftTree.empty()
        draw = self._random
        tokens = draw.integers(0, self._vocab_size, self.n_nodes)
        copied = draw.random(self.n_nodes) < self.context_share
        positions = draw.integers(0, state.length, self.n_nodes)
        tokens[copied] = state.buffer[positions[copied]]
        if self.shape == "chain":
            return DraftTree.chain(tokens)
        if self.shape == "wide":
            parents = np.full(self.n_nodes, -1, dtype=np.int64)
        else:
            parents = draw.integers(-1, np.arange(self.n_nodes))
        return DraftTree(tokens, parents)
