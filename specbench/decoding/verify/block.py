"""Block verification: the tokens of a drawn chain are tested together, not one after another.

Paper: "Block Verification Accelerates Speculative Decoding", ICLR 2025, arXiv 2403.10444
    (algorithm 2).
Upstream: none by the authors. From the text; ``tests/decoding/test_enumerated_law.py`` compares it
    with full enumeration of the output law, where it accepts as much as the theorem states: the
    first i tokens with probability w(i), given that they were drafted.
Rule, for a chain x(1) .. x(n) drawn from rows q(1) .. q(n), and the target's rows p(0) .. p(n)::

    w(0) = 1,  w(i) = min(1, w(i-1) p(i-1)[x(i)] / q(i)[x(i)])
    S(i) = sum max(0, w(i) p(i) - q(i+1)),  h(i) = S(i) / (S(i) + 1 - w(i)),  h(n) = w(n)
    accept up to the last i whose uniform is at most h(i)
    then a token of p(n) if all are accepted, else of norm(max(0, w(i) p(i) - q(i+1)))

Where ours differs, and why:
    - h(i) is 1 if its denominator is 0: then w(i) = 1 and p(i) = q(i+1), so that w(i+1) = 1 too
      and a longer prefix is accepted for certain.
    - A token to which its row q gives no mass cannot have been drawn: it has w = 0, and neither it
      nor later tokens are accepted.
    - A bonus proposal (``DraftTree.bonus``) is the chain's last token; the pass has not read it, so
      no token follows if it is accepted.
    - The rule is for one chain. A drawn tree with siblings or auxiliary nodes is verified by
      ``rejection``, and a draft that was not drawn by ``match``: for a q with all mass on one token
      the rule accepts exactly the same tokens.
"""

from __future__ import annotations

import numpy as np
import torch

from specbench.arrays import IntArray
from specbench.decoding.device import to_device
from specbench.decoding.sampling import sample
from specbench.decoding.structs import AcceptedPath, DraftTree
from specbench.decoding.verify.interface import PassScores, choices_and_tokens
from specbench.decoding.verify.rejection import RejectionVerifier, with_bonus


class BlockVerifier(RejectionVerifier):
    """Exact for drawn chains, of which it accepts more than any other exact rule can.

    A step with n nodes takes n + 1 random numbers, one for the test of each node and one for the
    token after the path. All rows are tested, because the last success counts. A pass costs one
    copy to the host.
    """

    name = "block"

    @torch.inference_mode()
    def verify(self, tree: DraftTree, scores: PassScores) -> AcceptedPath:
        """Return the accepted part of a drawn chain and the token drawn after it."""
        whole = with_bonus(tree)
        proposal, n = whole.probs, len(whole)
        chain = np.array_equal(whole.parents, np.arange(-1, n - 1))
        if proposal is None or not n or not chain or whole.aux is not None:
            return super().verify(tree, scores)
        p = self._sampling.probs(scores.logits)
        # An id outside the vocabulary is refused below; here it must not end the process.
        drafts = to_device(whole.tokens, p.device).clamp(0, scores.vocab_size - 1)
        q = proposal.q[to_device(proposal.row, p.device)].to(p.dtype)
        accept_probs, residual = block_tests(p, q, drafts)
        uniforms = to_device(self._uniforms.take(n + 1), p.device)
        counts = torch.arange(1, n + 1, device=p.device)
        accepted = ((uniforms[:n] <= accept_probs) * counts).amax(0, keepdim=True)
        # There is no row after a bonus proposal: the draw there is unused.
        row = p.index_select(0, accepted.clamp(max=len(p) - 1))
        remainder = residual.index_select(0, accepted.clamp(max=n - 1))
        # Equal distributions leave no residual but are never rejected either, up to rounding.
        whole_row = (accepted == n) | (remainder.sum(-1) <= 0)
        after = sample(torch.where(whole_row[:, None], row, remainder), uniforms[n:])
        choices, tokens, (count, drawn) = choices_and_tokens(whole, scores, accepted, after)
        nodes: IntArray = np.arange(int(count[0]))
        if len(nodes) == len(choices):  # the bonus proposal
            return AcceptedPath(nodes[:-1], tokens[nodes], choices)
        return AcceptedPath(nodes, np.append(tokens[nodes], drawn), choices)


def block_tests(
    p: torch.Tensor, q: torch.Tensor, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the acceptance probability of each prefix of a chain, and the residual after it.

    Args:
        p: ``[n + 1, vocab]`` the target's distributions at the root and at each node; the last row
            may be missing.
        q: ``[n, vocab]`` the distribution of each node.
        tokens: ``[n]`` on the device of ``p``.

    Returns:
        ``[n]`` probability of the test of the first i + 1 nodes, and ``[n, vocab]`` the
        distribution of the token after 0 .. n - 1 accepted nodes, up to a factor.
    """
    n, ids = len(tokens), tokens.unsqueeze(-1)
    mass = q.gather(1, ids).squeeze(-1)
    ratios = torch.where(mass > 0, p[:n].gather(1, ids).squeeze(-1) / mass, 0.0)
    weights = [p.new_ones(())]
    for ratio in ratios:
        weights.append((weights[-1] * ratio).clamp(max=1.0))
    joint = torch.stack(weights)
    residual = (joint[:n, None] * p[:n]).sub_(q).clamp_(min=0.0)
    total = residual[1:].sum(-1)
    denominator = total + 1.0 - joint[1:n]
    inner = torch.where(denominator > 0, total / denominator, 1.0)
    return torch.cat([inner, joint[n:]]), residual
