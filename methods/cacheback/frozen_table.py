"""Frozen tables: the frequent followers of the frequent leaders of a corpus, in one mapped file.

A leader's followers lie together, the most frequent first; equal counts are ordered by their
tokens. Leaders lie in the order of their tokens and are found by a hash index that is part of the
file. Nothing in it changes while decoding.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from methods.cacheback.kernels import NONE, find_frozen, index_leaders
from specbench.arrays import Array
from specbench.storage.arrays import ArrayTable


class FrozenArrays(NamedTuple):
    """The whole content of one table.

    Attributes:
        leaders: ``[n, leader_len]`` int32, ascending.
        buckets: ``[power of two]`` int32 index into ``leaders``, -1 is empty; linear probing.
        offsets: ``[n + 1]`` int64; leader i's followers are rows ``offsets[i] : offsets[i + 1]``.
        followers: ``[total, follower_len]`` int32, the most frequent of each leader first.
    """

    leaders: Array
    buckets: Array
    offsets: Array
    followers: Array


class FrozenTable(ArrayTable[FrozenArrays]):
    """One table, read-only."""

    kind = "frozen_table"
    version = 1
    layout = FrozenArrays

    @classmethod
    def from_followers(cls, leaders: Array, offsets: Array, followers: Array) -> FrozenTable:
        """A table in memory, of distinct leaders; see `FrozenArrays`."""
        leaders = np.ascontiguousarray(leaders, dtype=np.int32)
        buckets = np.full(1 << max(2 * len(leaders), 2).bit_length(), NONE, dtype=np.int32)
        index_leaders(leaders, buckets)
        offsets = np.ascontiguousarray(offsets, dtype=np.int64)
        followers = np.ascontiguousarray(followers, dtype=np.int32)
        return cls(FrozenArrays(leaders, buckets, offsets, followers))

    @classmethod
    def empty(cls, leader_len: int = 1, follower_len: int = 1) -> FrozenTable:
        return cls.from_followers(
            np.empty((0, leader_len)), np.zeros(1), np.empty((0, follower_len))
        )

    def facts(self) -> dict[str, Any]:
        return {
            "leader_len": self.leader_len,
            "follower_len": self.follower_len,
            "n_leaders": len(self.arrays.leaders),
            "n_followers": len(self.arrays.followers),
        }

    @property
    def leader_len(self) -> int:
        return int(self.arrays.leaders.shape[1])

    @property
    def follower_len(self) -> int:
        return int(self.arrays.followers.shape[1])

    def followers(self, leader: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The followers of a leader, the most frequent first; empty if it is unknown."""
        index = int(find_frozen(self.arrays, np.array(leader, dtype=np.int64), 0))
        if index == NONE:
            return []
        begin, end = self.arrays.offsets[index : index + 2]
        return [tuple(row) for row in self.arrays.followers[begin:end].tolist()]
