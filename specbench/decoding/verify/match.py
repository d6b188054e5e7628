"""Sample and match: the target draws its token, and the draft is followed while it agrees.

CARD's code verifies like this at temperature > 0 (repo hunzhizi/CARD), as does "naive sampling"
in SpecInfer (arXiv 2305.09781, section 4.3).

If the children of a node are fixed before anything is drawn, this is the ratio test for a draft
distribution that puts all mass on one token ("accept x with P(x), else P[x] = 0, renormalise, next
child"): both accept child x with probability P(x) and otherwise emit a token of P without the
children. Drawing first takes one random number per committed token instead of one per child.
"""

from __future__ import annotations

import numpy as np
import torch

from specbench.arrays import FloatArray, IntArray
from specbench.decoding.device import to_device
from specbench.decoding.sampling import Sampling, Uniforms, sample
from specbench.decoding.structs import AcceptedPath, DraftTree
from specbench.decoding.verify.greedy import GreedyVerifier
from specbench.decoding.verify.interface import PassScores, choices_and_tokens, row_by_row


class MatchVerifier(GreedyVerifier):
    """Exact for any draft.

    The k-th token of a turn is drawn with the k-th random number of the turn, whatever was drafted.
    So with one seed the output equals plain sampling's token by token (except for numbers within
    rounding of a border between two tokens); the draft decides only how many tokens a pass commits.
    All nodes with the same path of tokens draw the same token.

    A pass costs one copy to the host, or draws itself with the same ``uniforms``.
    """

    name = "match"

    def __init__(self, sampling: Sampling, uniforms: Uniforms | None = None) -> None:
        super().__init__()
        self._sampling = sampling
        self._uniforms = uniforms or Uniforms()

    def begin(self, seed: int) -> None:
        self._uniforms.begin(seed)

    @torch.inference_mode()
    def first(self, scores: PassScores) -> int:
        super().first(scores)  # refuses logits that are not finite
        return int(self._draw(scores.logits[-1:], self._uniforms.take(1))[0])

    @torch.inference_mode()
    def verify(self, tree: DraftTree, scores: PassScores) -> AcceptedPath:
        """Return the longest branch of ``tree`` that agrees with the target's draws."""
        if (accepted := self._accepted_by_pass(scores)) is not None:
            self._uniforms.take(len(accepted.tokens))
            return accepted
        depths = scores.depths
        uniforms = self._uniforms.peek(int(depths.max()) + 1)[depths]
        logits = scores.logits
        if row_by_row(logits):
            choices, tokens, _ = choices_and_tokens(tree, scores)
            drawn = self._draw_where_reached(tree, tokens, logits, uniforms)
        else:
            ids = self._draw(logits, uniforms)
            choices, tokens, (drawn,) = choices_and_tokens(tree, scores, ids)
        accepted = self._agreement(tree, tokens, drawn, choices)
        self._uniforms.take(len(accepted.tokens))
        return accepted

    def _draw(self, logits: torch.Tensor, uniforms: FloatArray) -> torch.Tensor:
        """Draw one token per row of ``logits [r, vocab]``."""
        on_device = to_device(uniforms, logits.device)
        return sample(self._sampling.probs(logits), on_device)

    def _draw_where_reached(
        self, tree: DraftTree, tokens: IntArray, logits: torch.Tensor, uniforms: FloatArray
    ) -> IntArray:
        """Draw ``[n + 1]`` tokens level by level; -1 at rows that no agreement reaches."""
        drawn = np.full(len(tokens) + 1, -1, dtype=np.int64)
        rows = np.zeros(1, dtype=np.int64)
        while len(rows):
            drawn[rows] = self._draw(logits[torch.from_numpy(rows)], uniforms[rows]).numpy()
            reached = (tokens == drawn[tree.parents + 1]) & (drawn[1:] < 0)
            if tree.aux is not None:
                reached &= ~tree.aux
            rows = np.flatnonzero(reached) + 1
        return drawn
