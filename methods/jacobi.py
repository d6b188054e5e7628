"""Jacobi decoding: a block of guesses that every pass refreshes from itself.

Paper: "Accelerating Transformer Inference for Translation via Parallel Decoding", ACL 2023,
    arXiv 2305.10427 (its blocks of fixed size, GS-Jacobi).
Reference code studied: teelinsan/parallel-decoding a2b2539 (``src/ipi/decoders/gs_jacobi.py``).
Method: the pass over root and block predicts every position from the old guesses to its left. The
    guesses that the target confirms are committed; its predictions for the others are the next
    guesses. A block is iterated until all of it is committed, with the token after it; then the
    next begins with new guesses. ``block: moving``, which is ours, refills the end of the block at
    every step, so that it moves along with the text. This is the floor for methods that reuse the
    target's output: a token is seldom right before its left context is.
Where ours differs, and why:
    - Confirmed guesses are committed at once; the reference commits a block as a whole, when a pass
      changes none of its guesses. That is the same pass.
    - The reference, which translates, starts a block with padding tokens, which decoder-only models
      often lack. ``fill`` chooses the new guesses; the default draws them from the prompt, as
      Lookahead does.
    - Eight guesses are our choice (the reference's blocks: two, and the token before them); 4, 8
      and 16 are usual.
    - The reference knows the output's length in advance and cuts its last block there.
    - At a temperature the block still holds the target's likeliest tokens, so it is independent of
      the random numbers that will verify it.
Example: the block is "x y z", and the target predicts x, q, r, s for its positions and the next: x
    and the target's q are committed, and the next block is r.
State kept: the block, for a turn, so the state scope has no effect. Draws depend on ``seed`` and
    the prompt, not on the order of cases.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Literal

import numpy as np

from specbench.arrays import IntArray
from specbench.config.schema import Positive
from specbench.decoding.drafter import Drafter
from specbench.decoding.structs import DecodeState, DraftContext, DraftTree, Needs, StepOutcome


@dataclass(kw_only=True, eq=False)
class Jacobi(Drafter):
    """Jacobi decoding: the target refreshes a block of its own guesses at every pass.

    Attributes:
        block_len: guesses per step.
        block: ``fixed``, iterated until all of it is committed, or ``moving`` with the text.
        fill: source of new guesses: drawn from ``prompt`` or ``vocabulary``, or ``last`` (repeats
            the token before).
    """

    name: str = "jacobi"
    version: int = 2
    block_len: Positive = 8
    block: Literal["fixed", "moving"] = "fixed"
    fill: Literal["prompt", "vocabulary", "last"] = "prompt"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._seed = 0
        self._vocab_size = 1
        self._random = np.random.default_rng(0)
        self._block: IntArray = np.empty(0, dtype=np.int64)
        self._tree = DraftTree.empty()

    @property
    def needs(self) -> Needs:
        return Needs(tokens_only=False, max_nodes=self.block_len)

    def setup(self, context: DraftContext) -> None:
        self._seed = context.seed
        self._vocab_size = context.vocab_size

    def begin(self, state: DecodeState) -> None:
        prompt = zlib.crc32(state.buffer[: state.n_prompt].tobytes())
        self._random = np.random.default_rng([self._seed, prompt])
        self._block = self._filled(state, self._block[:0])

    def propose(self, state: DecodeState) -> DraftTree:
        self._tree = DraftTree.chain(self._block)
        return self._tree

    def observe(self, state: DecodeState, outcome: StepOutcome) -> None:
        done = len(outcome.committed)
        if outcome.tree is self._tree and outcome.next_tokens is not None:
            # Row i predicts the position of guess i, the last row the position after the block.
            rows = len(self._block) + (self.block == "moving")
            guesses = outcome.next_tokens[done:rows]
        else:  # cut by the engine, or another method's tree: the old guesses move up
            guesses = self._block[done:]
        if self.block == "moving" or done > len(self._block):
            guesses = self._filled(state, guesses)
        self._block = guesses

    def _filled(self, state: DecodeState, guesses: IntArray) -> IntArray:
        missing = self.block_len - len(guesses)
        if self.fill == "prompt":
            new = state.buffer[self._random.integers(0, state.n_prompt, missing)]
        elif self.fill == "vocabulary":
            new = self._random.integers(0, self._vocab_size, missing)
        else:
            last = guesses[-1] if len(guesses) else state.root
            new = np.full(missing, last, dtype=np.int64)
        return np.concatenate((guesses, new))
