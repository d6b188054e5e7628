"""A table of leaders and their followers, both under LRU eviction, in a handful of arrays.

The table of Cacheback (arXiv 2511.21699, section 3.1): a leader of ``leader_len`` tokens maps to
the tuples of ``follower_len`` tokens that came after it. Every operation is O(1): hash chains find
entries, doubly linked lists order them by recency.

Touch rules: inserting and querying move the leader to the recent end of the leaders; a follower
moves only when it is inserted, among the followers of its own leader. A new leader beyond
``leader_capacity`` evicts the least recent one with all its followers, a new follower beyond
``follower_capacity`` the least recent one of its leader.

Compiled code works on the arrays (`TableArrays`). They double when full, up to the two
capacities, so an empty table of any capacity takes kilobytes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from methods.cacheback import kernels as k  # columns and operations
from specbench.arrays import Array

FIRST_ROWS = 1024
_INDEX_LIMIT = 2**31 - 1


class TableArrays(NamedTuple):
    """The whole state of one table.

    Attributes:
        leaders: ``[n, 6 + leader_len]`` int32.
        followers: ``[n, 4 + follower_len]`` int32.
        leader_buckets: ``[power of two]`` int32 heads of the hash chains.
        follower_buckets: the same for followers; the key is leader slot and tokens.
        meta: ``[12]`` int64, see the kernels' constants.
    """

    leaders: Array
    followers: Array
    leader_buckets: Array
    follower_buckets: Array
    meta: Array


def _buckets(size: int) -> Array:
    return np.full(1 << max(size - 1, 1).bit_length(), k.NONE, dtype=np.int32)


def _wider(entries: Array, limit: int) -> Array:
    """Copy the rows into an array of twice the size, at most ``limit``."""
    size = min(2 * len(entries), limit)
    if size == len(entries):
        return entries
    grown = np.empty((size, entries.shape[1]), dtype=np.int32)
    grown[: len(entries)] = entries
    return grown


class LruTable:
    """One table; see the module's text for its rules.

    Args:
        leader_capacity: maximum leaders.
        follower_capacity: maximum followers of one leader.
    """

    def __init__(
        self, leader_len: int, follower_len: int, leader_capacity: int, follower_capacity: int
    ) -> None:
        self.leader_len = leader_len
        self.follower_len = follower_len
        self.window = leader_len + follower_len
        self._leader_limit = min(leader_capacity, _INDEX_LIMIT)
        self._follower_limit = min(leader_capacity * follower_capacity, _INDEX_LIMIT)
        n_leaders = min(FIRST_ROWS, self._leader_limit)
        n_followers = min(FIRST_ROWS, self._follower_limit)
        meta = np.zeros(k.N_META, dtype=np.int64)
        meta[k.LEADER_LEN], meta[k.FOLLOWER_LEN] = leader_len, follower_len
        meta[k.LEADER_CAPACITY], meta[k.FOLLOWER_CAPACITY] = leader_capacity, follower_capacity
        self.arrays = TableArrays(
            np.empty((n_leaders, k.LEADER_TOKENS + leader_len), dtype=np.int32),
            np.empty((n_followers, k.FOLLOWER_TOKENS + follower_len), dtype=np.int32),
            _buckets(n_leaders),
            _buckets(n_followers),
            meta,
        )
        self.clear()
        # Compiled now: the first growth may fall into a timed step.
        k.rechain(self.arrays)

    def clear(self) -> None:
        _, _, leader_buckets, follower_buckets, meta = self.arrays
        leader_buckets.fill(k.NONE)
        follower_buckets.fill(k.NONE)
        meta[[k.LEADERS, k.FOLLOWERS, k.FRESH_LEADER, k.FRESH_FOLLOWER]] = 0
        meta[[k.FREE_LEADER, k.FREE_FOLLOWER, k.MOST_RECENT, k.LEAST_RECENT]] = k.NONE

    def __len__(self) -> int:
        return int(self.arrays.meta[k.LEADERS])

    @property
    def n_followers(self) -> int:
        return int(self.arrays.meta[k.FOLLOWERS])

    def insert_windows(self, tokens: Array, begin: int, end: int) -> bool:
        """Insert every window of ``tokens`` that ends at a position in ``[begin, end)``.

        Windows that would start before position 0 are skipped; the oldest comes first.

        Returns:
            Whether ``arrays`` was replaced by a larger one.
        """
        done = k.insert_windows(self.arrays, tokens, begin, end)
        if done == end:
            return False
        while done < end:
            self._grow()
            done = k.insert_windows(self.arrays, tokens, done, end)
        return True

    def snapshot(self) -> list[tuple[tuple[int, ...], list[tuple[int, ...]]]]:
        """Return leaders from least to most recent, each with its followers in the same order."""
        leaders, followers, _, _, meta = self.arrays
        entries = []
        leader = int(meta[k.LEAST_RECENT])
        while leader != k.NONE:
            chain = []
            follower = int(leaders[leader, k.LAST])
            while follower != k.NONE:
                chain.append(tuple(followers[follower, k.FOLLOWER_TOKENS :].tolist()))
                follower = int(followers[follower, k.NEWER])
            entries.append((tuple(leaders[leader, k.LEADER_TOKENS :].tolist()), chain))
            leader = int(leaders[leader, k.NEWER])
        return entries

    def _grow(self) -> None:
        old = self.arrays
        meta = old.meta
        leaders, followers = old.leaders, old.followers
        if meta[k.FRESH_LEADER] == len(leaders):
            leaders = _wider(leaders, self._leader_limit)
        if meta[k.FRESH_FOLLOWER] == len(followers):
            followers = _wider(followers, self._follower_limit)
        if leaders is old.leaders and followers is old.followers:
            raise MemoryError(f"a table holds at most {_INDEX_LIMIT} followers")
        self.arrays = TableArrays(
            leaders, followers, _buckets(len(leaders)), _buckets(len(followers)), meta
        )
        k.rechain(self.arrays)
