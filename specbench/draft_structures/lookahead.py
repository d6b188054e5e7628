"""Lookahead decoding's window, guesses of the tokens ahead, and its pool of recent n-grams.

The window is a tree: level 0 is a chain below the root (in column 0), and column j of a level hangs
below column j of the level before. Ancestors and depths are then exactly the
reference's mask and positions. Candidates, if any, are chains below the root and come first.
"""

from __future__ import annotations

import zlib

import numpy as np
from numba import njit

from specbench.arrays import Array, BoolArray, IntArray


class LookaheadWindow:
    """N - 1 levels and W columns of guessed tokens.

    Args:
        columns: W.
        ngram: N, tokens of the n-grams that the columns make; the levels plus one.
    """

    def __init__(self, columns: int, ngram: int) -> None:
        self._columns, self._ngram = columns, ngram
        self._grid: IntArray = np.zeros((1, 1), dtype=np.int64)
        self._shapes: dict[tuple[int, ...], tuple[IntArray, BoolArray]] = {}

    @property
    def full(self) -> bool:
        """True if all levels are there; until then no n-gram is complete."""
        return len(self._grid) == self._ngram - 1

    @property
    def n_nodes(self) -> int:
        """Nodes of the window; column 0 of level 0 is the root and not a node."""
        return self._grid.size - 1

    def most_nodes(self, guesses: int) -> int:
        """Count the nodes of the largest tree with at most ``guesses`` candidate chains."""
        filling = (
            (filled + 1) * (self._columns + self._ngram - 2 - filled) - 1
            for filled in range(self._ngram - 2)
        )
        steady = (self._ngram - 1) * (self._columns + guesses) - 1
        return max(steady, *filling, 0)

    def begin(self, tokens: IntArray, seed: int) -> None:
        """Start with one level of tokens drawn from ``tokens``.

        The draw depends on the seed and on ``tokens``, not on the order of cases. The level is
        wider than W by the columns that the fill phase will drop; column 0 is the root's.
        """
        random = np.random.default_rng([seed, zlib.crc32(tokens.tobytes())])
        width = self._columns + self._ngram - 2
        self._grid = tokens[random.integers(0, len(tokens), width)][None]

    def tree(
        self, root: int, guesses: IntArray, lost_bonus: bool = False
    ) -> tuple[IntArray, IntArray, BoolArray]:
        """Build the window below ``root``, after the candidate chains ``guesses [g, N - 1]``.

        Returns:
            ``tokens [n]``, ``parents [n]`` (-1 is the root) and ``aux [n]``: true for the window,
            and for a chain's last token if ``lost_bonus``.
        """
        self._grid[0, 0] = root
        key = (*self._grid.shape, len(guesses), lost_bonus)
        if key not in self._shapes:
            levels, columns = self._grid.shape
            length = self._ngram - 1
            self._shapes[key] = tree_shape(levels, columns, len(guesses), length, lost_bonus)
        parents, aux = self._shapes[key]
        return np.concatenate((guesses.reshape(-1), self._grid.reshape(-1)[1:])), parents, aux

    def advance(self, next_tokens: IntArray) -> IntArray:
        """Move on by one column, with the model's tokens as the last level.

        Args:
            next_tokens: ``[n + 1]`` the model's tokens after the root and every node of ``tree``.

        Returns:
            ``[W, N]`` the completed n-grams, each with the token it follows; none while the window
            fills.
        """
        levels, columns = self._grid.shape
        predicted = next_tokens[-columns:]
        if levels == 1:  # column 0 is the root, whose row is the first
            predicted = np.concatenate((next_tokens[:1], predicted[1:]))
        grown = np.concatenate((self._grid, predicted[None]))
        if levels < self._ngram - 1:
            self._grid = grown[:, 1:].copy()
            return np.empty((0, self._ngram), dtype=np.int64)
        self._grid = grown[1:]
        return grown.T


def tree_shape(
    levels: int, columns: int, guesses: int, length: int, lost_bonus: bool
) -> tuple[IntArray, BoolArray]:
    """Compute the geometry of ``guesses`` chains of ``length`` tokens and a window.

    Column 0 of the window's level 0 is the root and not a node.

    Returns:
        ``parents [n]`` and ``aux [n]``: the chains, then the window level by level.
    """
    chains = np.arange(guesses * length).reshape(guesses, length) - 1
    chains[:, 0] = -1
    # Node numbers of the window's cells, root included, and their parents.
    nodes = np.arange(levels * columns).reshape(levels, columns) + guesses * length - 1
    nodes[0, 0] = -1
    above = np.concatenate((np.roll(nodes[:1], 1), nodes[:-1]))
    parents = np.concatenate((chains.reshape(-1), above.reshape(-1)[1:]))
    aux = np.ones(len(parents), dtype=np.bool_)
    aux[: guesses * length] = False
    if lost_bonus:
        aux[length - 1 : guesses * length : length] = True
    return parents.astype(np.int64), aux


@njit(cache=True)
def insert_grams(grams: Array, counts: Array, new: Array) -> None:
    """Insert ``new [m, 1 + n]`` (token, then its n-gram) row by row, each n-gram at the end."""
    n = grams.shape[2]
    for row in range(len(new)):
        token = new[row, 0]
        count = counts[token]
        # Replaces an equal n-gram, or the oldest one if the token has no room left.
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
        per_token: n-grams stored per token.
    """

    def __init__(self, vocab_size: int, n: int, per_token: int) -> None:
        self.n = n
        self._grams: Array = np.zeros((vocab_size, per_token, n), dtype=np.int32)
        self._counts: Array = np.zeros(vocab_size, dtype=np.int32)

    @classmethod
    def compiled(cls, vocab_size: int, n: int, per_token: int) -> NgramPool:
        """Make an empty pool and compile, or load, its code now instead of under a clock."""
        pool = cls(vocab_size, n, per_token)
        pool.insert(np.zeros((1, 1 + n), dtype=np.int64))
        pool.clear()
        return pool

    def clear(self) -> None:
        self._counts.fill(0)

    def __len__(self) -> int:
        return int(self._counts.sum())

    def after(self, token: int) -> IntArray:
        """Return ``[m, n]`` n-grams after ``token``, the least recently inserted one first."""
        return self._grams[token, : self._counts[token]].astype(np.int64)

    def insert(self, new: IntArray) -> None:
        """Insert ``new [m, 1 + n]``: in each row a token and the n-gram after it, in this order."""
        # A copy in one layout, so that one compiled version serves columns and views.
        insert_grams(self._grams, self._counts, np.array(new, dtype=np.int64, order="C"))

    def insert_text(self, tokens: IntArray, begin: int, end: int) -> None:
        """Insert every n-gram of a text that ends at a position in ``[begin, end)``."""
        begin = max(begin, self.n)
        if end > begin:
            text = tokens[begin - self.n : end]
            self.insert(np.lib.stride_tricks.sliding_window_view(text, 1 + self.n))

    def replace(self, token: int, grams: IntArray) -> None:
        """Replace the m most recent n-grams after ``token`` by ``grams [m, n]``.

        They may equal each other, or other n-grams of the token.
        """
        count = self._counts[token]
        self._grams[token, count - len(grams) : count] = grams
