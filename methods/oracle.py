"""The oracle: drafts the output itself, so acceptance is known and the harness can be calibrated.

No paper. Token i of the draft is the true one with probability ``accuracy``, independently, and a
wrong one otherwise; under greedy verification a draft of depth d then has the mean accepted length
1 + a + a² + … + a^d. At ``accuracy=1`` it is the ceiling for any drafter of that depth.
State kept: the reference output and the generator of the present turn.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

from specbench.arrays import IntArray
from specbench.config.schema import Positive, Share
from specbench.decoding.drafter import Drafter
from specbench.decoding.structs import NO_TOKENS, DecodeState, DraftContext, DraftTree, Needs


@dataclass(kw_only=True, eq=False)
class Oracle(Drafter):
    """Oracle: drafts the plain greedy answer itself, the ceiling of any chain of this depth.

    Attributes:
        depth: tokens of every draft (fewer where the output ends).
        accuracy: probability that a token is the true one.
    """

    name: str = "oracle"
    depth: Positive = 4
    accuracy: Share = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._vocab_size = 0
        self._seed = 0
        self._random = np.random.default_rng(0)
        self._reference: IntArray = NO_TOKENS

    @property
    def needs(self) -> Needs:
        # At temperature > 0 the target does not output the greedy tokens.
        return Needs(tokens_only=False, reference=True, max_nodes=self.depth, sampling=False)

    def setup(self, context: DraftContext) -> None:
        self._vocab_size = context.vocab_size
        self._seed = context.seed

    def reset(self) -> None:
        self._reference = NO_TOKENS

    def set_reference(self, output: IntArray) -> None:
        self._reference = np.asarray(output, dtype=np.int64)

    def begin(self, state: DecodeState) -> None:
        prompt = zlib.crc32(state.buffer[: state.n_prompt].tobytes())
        self._random = np.random.default_rng([self._seed, prompt])

    def propose(self, state: DecodeState) -> DraftTree:
        at = state.length - state.n_prompt
        draft = self._reference[at : at + self.depth].copy()
        if self.accuracy < 1.0:
            wrong = self._random.random(len(draft)) >= self.accuracy
            # A shift by 1 .. vocab_size - 1 never gives the true token.
            shift = self._random.integers(1, self._vocab_size, int(wrong.sum()))
            draft[wrong] = (draft[wrong] + shift) % self._vocab_size
        return DraftTree.chain(draft)
