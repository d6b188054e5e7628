"""Rejection sampling: speculative sampling's ratio test, for chains and trees.

Papers: "Fast Inference from Transformers via Speculative Decoding" (Leviathan et al., arXiv
    2211.17192) and "Accelerating Large Language Model Decoding with Speculative Sampling" (Chen et
    al., arXiv 2302.01318) for chains; multi-step speculative sampling of SpecInfer (arXiv
    2305.09781, section 4.3) for siblings drawn with replacement; Sequoia (arXiv 2402.12374,
    algorithm 1) for siblings drawn without.

At a node where the target's distribution is P, for its children x in the order of their draws from
Q::

    accept x with probability min(1, P(x) / Q(x)), else
    P <- norm(max(0, P - Q)); without replacement also Q[x] <- 0, Q <- norm(Q)

and a token of the remaining P if no child is accepted (or there is none). For children that are a
deterministic function of the context, Q has all its mass on them:
``specbench.decoding.verify.match``.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from specbench.arrays import FloatArray, IntArray
from specbench.decoding.device import to_device
from specbench.decoding.sampling import sample
from specbench.decoding.structs import AcceptedPath, DraftTree, Proposal
from specbench.decoding.tree import NO_AUX, sibling_table
from specbench.decoding.verify.interface import PassScores, choices_and_tokens, row_by_row
from specbench.decoding.verify.match import MatchVerifier


class RejectionVerifier(MatchVerifier):
    """Exact for drafts whose nodes were drawn from the distributions they come with.

    A step with n nodes takes n + 1 random numbers: one for the test of each node, reached or not,
    and one for the token after the path. If ``DraftTree.probs`` is None or the draft is empty, it
    takes one per committed token (see :class:`MatchVerifier`).

    A bonus proposal (``DraftTree.bonus``) is one more node, below the last one, that the pass has
    not read. If accepted, its token replaces the target's token after the path, and follows
    the target's distribution like any other accepted token.

    A child without mass in Q cannot have been drawn from it. It is skipped, which leaves the
    distribution unchanged.

    A pass costs one copy to the host.
    """

    name = "rejection"

    @torch.inference_mode()
    def verify(self, tree: DraftTree, scores: PassScores) -> AcceptedPath:
        """Return the accepted path of ``tree`` and the token drawn after it."""
        rows = len(tree) + 1
        tree = with_bonus(tree)
        proposal = tree.probs
        if proposal is None or not len(tree):
            return super().verify(tree, scores)
        n = len(tree)
        uniforms = self._uniforms.take(n + 1)
        node_uniforms, last = uniforms[:n], uniforms[n:]
        children = sibling_table(tree.parents, NO_AUX if tree.aux is None else tree.aux)
        logits = scores.logits
        # An id outside the vocabulary is refused below; here it must not end the process.
        on_device = to_device(tree.tokens, logits.device).clamp(0, scores.vocab_size - 1)

        def test(selected: IntArray) -> tuple[torch.Tensor, torch.Tensor]:
            p = self._sampling.probs(logits[to_device(selected, logits.device)])
            accept_probs, residual = ratio_tests(p, children[selected], on_device, proposal)
            threshold = to_device(last, logits.device).expand(len(selected))
            return accept_probs, sample(residual, threshold)

        lazy = row_by_row(logits)
        if lazy:
            choices, tokens, _ = choices_and_tokens(tree, scores)
        else:
            every, drawn = test(np.arange(rows))
            choices, tokens, host = choices_and_tokens(tree, scores, every, drawn)
            table, ends = host[0].reshape(rows, -1), host[1]

        def test_row(row: int) -> tuple[FloatArray, int]:
            if not lazy:
                return table[row], int(ends[row])
            accept_probs, drawn = test(np.array([row]))
            return accept_probs[0].numpy(), int(drawn)

        nodes, after = descend(children, node_uniforms, test_row, rows)
        if after is None:  # the bonus proposal
            return AcceptedPath(nodes[:-1], tokens[nodes], choices)
        return AcceptedPath(nodes, np.append(tokens[nodes], after), choices)


def descend(
    children: IntArray,
    uniforms: FloatArray,
    test_row: Callable[[int], tuple[FloatArray, int]],
    rows: int,
) -> tuple[IntArray, int | None]:
    """Walk from the root to the eldest child that passes its test, and on from there.

    Args:
        children: ``[n + 1, w]`` nodes below each row, -1: none.
        uniforms: ``[n]`` a number in (0, 1] for the test of each node.
        test_row: for a row, acceptance probabilities ``[w]`` of its children and the token drawn if
            all fail.
        rows: rows that can be tested; after a node beyond them the token after the path is None.
    """
    path: list[int] = []
    row = 0
    while row < rows:
        accept_probs, after = test_row(row)
        passed = (children[row] >= 0) & (uniforms[children[row]] <= accept_probs)
        if not passed.any():
            return np.array(path, dtype=np.int64), after
        path.append(int(children[row][passed.argmax()]))  # the eldest
        row = path[-1] + 1
    return np.array(path, dtype=np.int64), None


def with_bonus(tree: DraftTree) -> DraftTree:
    """Append the tree's bonus proposal, if any, as its last node.

    It gains nothing below nodes that are a function of the context: they are tested by drawing the
    target's token first.
    """
    bonus, proposal, n = tree.bonus, tree.probs, len(tree)
    if bonus is None or (proposal is None and n):
        return tree
    q, row = bonus.q[None], np.zeros(n, dtype=np.int64)
    if proposal is not None:
        q, row = torch.cat([proposal.q, q.to(proposal.q)]), proposal.row
    if isinstance(tree.tokens, torch.Tensor):
        tokens: IntArray | torch.Tensor = torch.cat(
            [tree.tokens, tree.tokens.new_full((1,), bonus.token)]
        )
    else:
        tokens = np.append(tree.tokens, bonus.token)
    return DraftTree(
        tokens,
        np.append(tree.parents, n - 1),
        aux=None if tree.aux is None else np.append(tree.aux, False),
        probs=Proposal(
            q, np.append(row, len(q) - 1), True if proposal is None else proposal.replacement
        ),
    )


def ratio_tests(
    p: torch.Tensor, children: IntArray, tokens: torch.Tensor, proposal: Proposal
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute each child's acceptance probability after its elder siblings' rejection, by row.

    Args:
        p: ``[r, vocab]`` the target's distribution at each row.
        children: ``[r, w]`` nodes below each row in the order in which they were drawn; -1: none.
        tokens: ``[n]`` on the device of ``p``.
        proposal: the nodes' distributions.

    Returns:
        ``[r, w]`` acceptance probabilities (0 without a child; above 1 is certain), and
        ``[r, vocab]`` the residual of ``p`` if all are rejected.
    """
    device = p.device
    accept_probs = p.new_zeros(children.shape)
    residual = p.clone()
    left = torch.zeros_like(p)  # of Q, without replacement
    for rank in range(children.shape[1]):
        holders = np.flatnonzero(children[:, rank] >= 0)
        nodes = children[holders, rank]
        rows = to_device(holders, device)
        drawn = tokens[to_device(nodes, device)].unsqueeze(-1)
        distribution = residual[rows]
        if proposal.replacement or rank == 0:
            q = proposal.q[to_device(proposal.row[nodes], device)].to(distribution.dtype)
        else:
            q = left[rows]
        mass = q.gather(1, drawn)
        possible = mass > 0
        ratio = distribution.gather(1, drawn) / mass.where(possible, 1.0)
        accept_probs[rows, rank] = torch.where(possible, ratio, 0.0).squeeze(-1)
        leftover = (distribution - q).clamp_(min=0.0)
        total = leftover.sum(-1, keepdim=True)
        # Equal distributions leave nothing but were never rejected either, up to rounding.
        changed = possible & (total > 0)
        residual[rows] = torch.where(changed, leftover / total.where(changed, 1.0), distribution)
        if not proposal.replacement:
            q = q.scatter(1, drawn, 0.0)
            remaining = q.sum(-1, keepdim=True)
            left[rows] = q / remaining.where(remaining > 0, 1.0)
    return accept_probs, residual
