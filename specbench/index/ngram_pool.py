"""Lookahead decoding's pool: for every token the n-grams seen after it, the most recent ones.

One array of fixed size, whose pages the system hands out as tokens are met: inserting costs one
walk over a token's few n-grams, forgetting everything one pass over the counts.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from specbench.arrays import Array, IntArray


@njit(cache=True)
def insert_grams(grams: Array, counts: Array, new: Array) -> None:
    """Insert ``new [m, 1 + n]`` (token, then its n-gram) row by row; an n-gram is put last."""
    n = grams.shape[2]
    for row in range(len(new)):
        token = new[row, 0]
        count = counts[token]
        # An equal one makes room for itself, else the oldest one where the token has no room left.
        slot = 0 if count == grams.shape[1] else count
        for i in range(count):
            same = True
            for j in range(n):
                if grams[token, i, j] != new[row, 1 + j]:
                    same = False
                    break
            if same:
                slot = i
                break
        if slot == count:
            counts[token] = count + 1
        for i in range(slot, counts[token] - 1):
            for j in range(n):
                grams[token, i, j] = grams[token, i + 1, j]
        for j in range(n):
            grams[token, counts[token] - 1, j] = new[row, 1 + j]


class NgramPool:
    """At most ``per_token`` n-grams after every token, under LRU eviction.

    Args:
        n: tokens of an n-gram, without the token it follows.
        per_token: n-grams kept per token.
    """

    def __init__(self, vocab_size: int, n: int, per_token: int) -> None:
        self.n = n
        self._grams: Array = np.zeros((vocab_size, per_token, n), dtype=np.int32)
        self._counts: Array = np.zeros(vocab_size, dtype=np.int32)

    @classmethod
    def compiled(cls, vocab_size: int, n: int, per_token: int) -> NgramPool:
        """An empty pool whose code is compiled, or loaded, now and not under a clock."""
        pool = cls(vocab_size, n, per_token)
        pool.insert(np.zeros((1, 1 + n), dtype=np.int64))
        pool.clear()
        return pool

    def clear(self) -> None:
        self._counts.fill(0)

    def __len__(self) -> int:
        return int(self._counts.sum())

    def after(self, token: int) -> IntArray:
        """``[m, n]`` n-grams after ``token``, the least recently inserted one first."""
        return self._grams[token, : self._counts[token]].astype(np.int64)

    def insert(self, new: IntArray) -> None:
        """Insert ``new [m, 1 + n]``: in each row a token and the n-gram after it, in this order."""
        # A copy of one layout, so that one compiled version serves columns and views alike.
        insert_grams(self._grams, self._counts, np.array(new, dtype=np.int64, order="C"))

    def insert_text(self, tokens: IntArray, begin: int, end: int) -> None:
        """Insert every n-gram of a text that ends at a position in ``[begin, end)``."""
        begin = max(begin, self.n)
        if end > begin:
            text = tokens[begin - self.n : end]
            self.insert(np.lib.stride_tricks.sliding_window_view(text, 1 + self.n))

    def replace(self, token: int, grams: IntArray) -> None:
        """Put ``grams [m, n]`` in the place of the m most recent n-grams after ``token``.

        They may be equal to each other, or to others of the token.
        """
        count = self._counts[token]
        self._grams[token, count - len(grams) : count] = grams
