"""RACER's automaton: a trie of n-grams with counts and fail links, its oldest nodes reused."""

from __future__ import annotations

import numpy as np

from methods.racer import kernels
from specbench.arrays import Array, IntArray


class Automaton:
    """The trie and the state that reads the text.

    Args:
        n_nodes: nodes at most, the root included; 48 bytes each.
    """

    def __init__(self, n_nodes: int) -> None:
        self._nodes = np.empty((n_nodes, kernels.COLUMNS), dtype=np.int32)
        self._buckets = np.empty(1 << n_nodes.bit_length(), dtype=np.int32)
        self._meta = np.empty(4, dtype=np.int64)
        self.clear()

    def clear(self) -> None:
        kernels.clear(self._nodes, self._buckets, self._meta)

    def read_prompt(self, text: IntArray, begin: int, end: int, n: int) -> None:
        """Count the n-grams that end behind ``begin``, up to ``end``; then link all nodes."""
        kernels.read_prompt(self._nodes, self._buckets, self._meta, text, begin, end, n)

    def read_step(self, text: IntArray, begin: int, end: int, n: int) -> None:
        """Count the n-grams that end behind ``begin``; the newest first. Then go on to the end.

        The state has read ``text[begin]`` already, when it was the root of a draft.
        """
        kernels.read_step(self._nodes, self._buckets, self._meta, text, begin, end, n)

    def draft(
        self, root: int, limit: int, least_depth: int, tokens: Array, parents: Array
    ) -> IntArray:
        """The draft below a root, which the state reads.

        Args:
            limit: nodes of the trie at most that are drafted from, each counted for every suffix of
                the text that it continues; what is left of it goes to the logits' tree, whose root
                takes one.
            least_depth: tokens of a suffix at least, the root included.
            tokens: int64, those of the logits' tree, breadth first.
            parents: int64 of the logits' tree.

        Returns:
            ``[2, n]`` int64 tokens and parents, breadth first.
        """
        drafted: IntArray = kernels.draft(
            self._nodes, self._buckets, self._meta, root, limit, least_depth, tokens, parents
        )
        return drafted
