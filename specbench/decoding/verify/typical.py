"""Typical acceptance: a draft token that the target finds likely enough is taken. Lossy.

Paper: Medusa (arXiv 2401.10774, section 2.3.1): accept x where
    ``p(x) > min(epsilon, delta * exp(-H(p)))``, H being the entropy of the target's distribution p.
Reference code studied: FasterDecoding/Medusa, ``medusa/model/utils.py``
    (``posterior_threshold=0.09``, ``posterior_alpha=0.3``).
Where ours differs, and why:
    - The token after the path is drawn from p among the tokens that would have been accepted, as
      Medusa's tokens are without its ``fast`` mode; with it the most likely one is taken whatever
      the temperature.
    - Among equally long paths the first one wins, not the likeliest.
"""

from __future__ import annotations

import numpy as np
import torch

from specbench.decoding.sampling import Sampling, sample
from specbench.decoding.structs import AcceptedPath, DraftTree
from specbench.decoding.verify.greedy import longest_accepted
from specbench.decoding.verify.interface import PassScores, choices_and_tokens
from specbench.decoding.verify.match import MatchVerifier


class TypicalVerifier(MatchVerifier):
    """Trades the target's distribution for longer accepted paths; records and tables show this.

    The first token is drawn from the target's distribution; a step takes one random number. A
    probability of ``epsilon`` always suffices, and so does ``delta`` times ``exp(-entropy)``, the
    probability of each of equally likely tokens.
    """

    name = "typical"
    lossless = False

    def __init__(self, sampling: Sampling, *, epsilon: float, delta: float) -> None:
        super().__init__(sampling)
        self._epsilon, self._delta = epsilon, delta

    @torch.inference_mode()
    def verify(self, tree: DraftTree, scores: PassScores) -> AcceptedPath:
        """Return the longest branch of likely enough tokens, and a likely enough token after it."""
        n = len(tree)
        p = self._sampling.probs(scores.logits)
        entropy = -torch.special.xlogy(p, p).sum(-1, keepdim=True)
        limit = (self._delta * torch.exp(-entropy)).clamp(max=self._epsilon)
        # The most likely token passes where delta is above 1 too.
        typical = (p > limit) | (p == p.amax(-1, keepdim=True))
        uniform = torch.from_numpy(self._uniforms.take(1)).to(p.device)
        after = sample(p.where(typical, 0.0), uniform.expand(n + 1))
        parents = torch.from_numpy(tree.parents).to(p.device)
        # An id outside the vocabulary is refused below; here it must not end the process.
        drafts = torch.as_tensor(tree.tokens, device=p.device).clamp(0, scores.vocab_size - 1)
        passed = typical[parents + 1, drafts].long()
        choices, tokens, host = choices_and_tokens(tree, scores, passed, after)
        accepted = host[0].astype(np.bool_)
        if tree.aux is not None:
            accepted &= ~tree.aux
        path = np.empty(n, dtype=np.int64)
        nodes = path[: longest_accepted(tree.parents, accepted, path)]
        row = int(nodes[-1]) + 1 if len(nodes) else 0
        return AcceptedPath(nodes, np.append(tokens[nodes], host[1][row]), choices)
