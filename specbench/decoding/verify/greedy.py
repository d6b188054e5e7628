"""Greedy verification: the tokens of plain greedy decoding, and no others."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from specbench.arrays import BoolArray, IntArray
from specbench.decoding.structs import AcceptedPath, DraftTree
from specbench.decoding.tree import NO_AUX
from specbench.decoding.verify.interface import PassScores, choices_and_tokens, finite, to_host


class GreedyVerifier:
    """Accept exactly the tokens that plain greedy decoding would emit.

    A pass costs one copy to the host: the choices of all rows, together with the draft's tokens
    if those are on the device.
    """

    name = "greedy"
    lossless = True

    def __init__(self) -> None:
        self._path = np.empty(1024, dtype=np.int64)

    def begin(self, seed: int) -> None:
        """Do nothing: greedy verification draws no random numbers."""

    def first(self, scores: PassScores) -> int:
        choices = scores.greedy()
        if isinstance(choices, torch.Tensor):
            choices = to_host(choices)[0]
        return int(finite(choices[-1:])[0])

    def verify(self, tree: DraftTree, scores: PassScores) -> AcceptedPath:
        """Return the longest branch of ``tree`` that agrees with the target's greedy choices."""
        if (accepted := self._accepted_by_pass(scores)) is not None:
            return accepted
        choices, tokens, _ = choices_and_tokens(tree, scores)
        return self._agreement(tree, tokens, choices, choices)

    def _accepted_by_pass(self, scores: PassScores) -> AcceptedPath | None:
        """Return what the pass itself has accepted; None where it verified nothing."""
        verified = scores.verified  # once: the property computes it at each reading
        if verified is None:
            return None
        path, chosen, choices = verified
        return AcceptedPath(path, chosen[np.concatenate(([0], path + 1))], finite(choices))

    def _agreement(
        self, tree: DraftTree, tokens: IntArray, chosen: IntArray, greedy: IntArray
    ) -> AcceptedPath:
        """Return the longest branch of ``tokens`` that agrees with ``chosen [n + 1]``."""
        if len(tokens) > len(self._path):
            self._path = np.empty(2 * len(tokens), dtype=np.int64)
        aux = NO_AUX if tree.aux is None else tree.aux
        count = longest_match(tokens, tree.parents, aux, chosen, self._path)
        rows = np.zeros(count + 1, dtype=np.int64)  # the root and the accepted nodes
        rows[1:] = self._path[:count] + 1
        # The target's choice at a matched row is the token of the node below it.
        return AcceptedPath(rows[1:] - 1, chosen[rows], greedy)


@njit(cache=True)  # type: ignore[untyped-decorator]
def longest_accepted(parents: IntArray, accepted: BoolArray, path: IntArray) -> int:
    """Find the deepest node that is accepted with all its ancestors; on ties the first one.

    Writes the nodes from the top into ``path [>= n]`` and returns their number. ``accepted [n]``
    holds for each node whether it is accepted, given its parent.
    """
    n = len(parents)
    depth = np.zeros(n, dtype=np.int64)
    best, best_depth = -1, 0
    for i in range(n):
        parent = parents[i]
        above = 0 if parent < 0 else depth[parent]
        if accepted[i] and (parent < 0 or above > 0):
            depth[i] = above + 1
            if depth[i] > best_depth:
                best, best_depth = i, depth[i]
    node = best
    for k in range(best_depth - 1, -1, -1):
        path[k] = node
        node = parents[node]
    return best_depth


@njit(cache=True)  # type: ignore[untyped-decorator]
def longest_match(
    tokens: IntArray, parents: IntArray, aux: BoolArray, next_tokens: IntArray, path: IntArray
) -> int:
    """Find the deepest node whose whole path equals the target's choices.

    Siblings may repeat a token (Cacheback without merging), so every matching branch is followed;
    see `longest_accepted`. ``next_tokens [n + 1]`` holds the target's choice at the root and at
    each node. Auxiliary nodes (``aux [n]``, or ``[0]`` for none) never match.
    """
    n = len(parents)
    accepted = np.zeros(n, dtype=np.bool_)
    for i in range(n):
        if len(aux) == 0 or not aux[i]:
            accepted[i] = tokens[i] == next_tokens[parents[i] + 1]
    count: int = longest_accepted(parents, accepted, path)
    return count
