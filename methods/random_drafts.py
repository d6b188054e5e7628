"""Random trees of garbage: the adversarial drafter that losslessness is tested against.

No paper. A part of the tokens is copied from the text, so that some are accepted by chance, equal
siblings occur, and every path through verification and cache is walked. Draws depend on the seed,
the prompt and the turn's steps alone, not on the order of cases.
State kept: the generator of the present turn.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

from specbench.decoding.drafter import Drafter
from specbench.decoding.structs import DecodeState, DraftContext, DraftTree, Needs

_SHAPES = ("random", "chain", "wide")


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
    n_nodes: int = 16
    shape: str = "random"
    context_share: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_one_of("shape", _SHAPES)
        self._require(self.n_nodes >= 0, "n_nodes", "at least 0")
        self._require(0.0 <= self.context_share <= 1.0, "context_share", "between 0 and 1")
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
