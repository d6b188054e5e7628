"""Traversal verification: a drawn tree is tested from its leaves up, eldest branch first.

Paper: "Traversal Verification for Speculative Tree Decoding", arXiv 2505.12398.
Upstream: none by the authors. From the text; ``tests/decoding/test_enumerated_law.py`` compares it
    with full enumeration of the output law, and what it accepts with the best that is possible.
Rule, for the target's distribution P at each row (the root or a node) and the distribution Q that
the row's children were drawn from; each row has a weight, the root's is 1::

    visit(row):
        for each child, the eldest first, x its token:
            weight(child) = min(1, weight P[x] / Q[x])
            end where visit(child) accepts; it is rejected otherwise, and
            left = max(0, weight P - Q),  S = sum left
            P <- left / S,  weight <- S / (S + 1 - weight)
            without replacement also Q[x] <- 0, Q <- norm(Q)
        accept the row with probability ``weight``, the root always
    then a token of P at the accepted row

A chain is tested as by ``block``, one level of siblings as by ``rejection``. Deeper trees gain: a
rejected leaf passes its mass to its siblings before their parent is tested.
Where ours differs, and why:
    - The weight is 1 if its denominator is 0: then P = Q, and a child is accepted for certain. P
      stays as it is where nothing is left of it.
    - A child without mass in Q cannot have been drawn. It is skipped with all below it, which
      leaves the row unchanged.
    - A bonus proposal (``DraftTree.bonus``) is the last node's child; the pass has not read it, so
      no token follows if it is accepted.
    - Auxiliary nodes are no children, and a draft that was not drawn is verified by ``match``: for
      a Q with all mass on one token the rule accepts exactly the same tokens.
Example: a chain of 2 drawn from (2/3, 1/3), where the target has (1/3, 2/3): 11/9 tokens are
    accepted, as by ``block``, and 10/9 by ``rejection``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from specbench.arrays import FloatArray, IntArray
from specbench.decoding.sampling import sample
from specbench.decoding.structs import AcceptedPath, DraftTree, Proposal
from specbench.decoding.tree import NO_AUX, sibling_table
from specbench.decoding.verify.interface import PassScores, choices_and_tokens
from specbench.decoding.verify.rejection import RejectionVerifier, with_bonus


class TraversalVerifier(RejectionVerifier):
    """Exact for drawn trees; accepts at least as much as ``rejection``.

    A step with n nodes takes n + 1 random numbers: one for the test of each node, reached or not,
    and one for the token after the path. One test decides which comes next, so a GPU's rows of P
    and Q are copied to the host one by one.
    """

    name = "traversal"

    @torch.inference_mode()
    def verify(self, tree: DraftTree, scores: PassScores) -> AcceptedPath:
        """Return the accepted path of ``tree`` and the token drawn after it."""
        whole = with_bonus(tree)
        proposal, n = whole.probs, len(whole)
        if proposal is None or not n:
            return super().verify(tree, scores)
        uniforms = self._uniforms.take(n + 1)
        choices, tokens, _ = choices_and_tokens(whole, scores)
        children = sibling_table(whole.parents, NO_AUX if whole.aux is None else whole.aux)
        logits = scores.logits

        def target_row(row: int) -> FloatArray:
            p: FloatArray = self._sampling.probs(logits[row]).cpu().numpy()
            return p

        nodes, left = traverse(children, tokens, uniforms, target_row, proposal)
        if len(nodes) and nodes[-1] == len(tree):  # the bonus proposal
            return AcceptedPath(nodes[:-1], tokens[nodes], choices)
        rest = target_row(int(nodes[-1]) + 1 if len(nodes) else 0) if left is None else left
        after = sample(torch.from_numpy(rest)[None], torch.from_numpy(uniforms[n:]))
        return AcceptedPath(nodes, np.append(tokens[nodes], after.numpy()), choices)


@dataclass(slots=True)
class _Row:
    """The root or a node on the path being tested, and its children not yet rejected."""

    number: int
    weight: float
    children: list[int]  # the eldest last
    p: FloatArray | None = None  # [vocab], and the children's, from the first visit of a child on
    q: FloatArray | None = None

    def reject(self, token: int, replacement: bool) -> None:
        """Take the eldest child, of this token, out of what is left."""
        assert self.p is not None and self.q is not None
        self.children.pop()
        if self.q[token] <= 0:
            return
        left = np.maximum(self.weight * self.p - self.q, 0.0)
        total = float(left.sum())
        denominator = total + (1.0 - self.weight)  # in this order a weight of 1 stays exact
        self.weight = total / denominator if denominator > 0 else 1.0
        if total > 0:
            self.p = left / total
        if not replacement:
            self.q[token] = 0.0
            remaining = self.q.sum()
            self.q /= remaining if remaining > 0 else 1.0


def traverse(
    children: IntArray,
    tokens: IntArray,
    uniforms: FloatArray,
    target_row: Callable[[int], FloatArray],
    proposal: Proposal,
) -> tuple[IntArray, FloatArray | None]:
    """Visit the tree from its root until a row is accepted.

    Args:
        children: ``[n + 1, w]`` nodes below each row in the order of their draws; -1: none.
        tokens: ``[n]``.
        uniforms: ``[n]`` or more, a number in (0, 1] for the test of each node.
        target_row: for a row with children, the target's distribution ``[vocab]`` there.
        proposal: the nodes' distributions.

    Returns:
        The accepted nodes, and the distribution ``[vocab]`` of the token after them up to a factor,
        or None where it is the target's.
    """

    def opened(row: int, weight: float) -> _Row:
        # Below a weight of 0 nothing can be accepted.
        below = children[row][::-1].tolist() if weight > 0 else []
        return _Row(row, weight, [node for node in below if node >= 0])

    path = [opened(0, 1.0)]
    while True:
        row = path[-1]
        if row.children:
            child = row.children[-1]
            token = int(tokens[child])
            if row.p is None or row.q is None:
                row.p = target_row(row.number)
                q = proposal.q[int(proposal.row[child])]
                row.q = q.cpu().numpy().astype(row.p.dtype)  # a copy: `reject` writes to it
            mass = row.q[token]
            ratio = float(row.p[token] / mass) if mass > 0 else 0.0
            path.append(opened(child + 1, min(1.0, row.weight * ratio)))
        elif len(path) == 1 or uniforms[row.number - 1] <= row.weight:
            return np.array([row.number - 1 for row in path[1:]], dtype=np.int64), row.p
        else:
            path.pop()
            path[-1].reject(int(tokens[row.number - 1]), proposal.replacement)
