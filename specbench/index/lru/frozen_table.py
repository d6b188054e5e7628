"""Frozen tables: the frequent followers of the frequent leaders of a corpus, in one mapped file.

A leader's followers lie together, the most frequent first; equal counts are ordered by their
tokens. Leaders lie in the order of their tokens and are found by a hash index that is part of the
file. Nothing in it changes while decoding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from specbench.index.lru.kernels import NONE, find_frozen, index_leaders
from specbench.storage.arrays import open_array_file, write_array_file

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from specbench.arrays import Array


KIND = "frozen_table"
VERSION = 1


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


class FrozenTable:
    """One table, read-only.

    Attributes:
        arrays: what compiled code works on.
        header: facts about the table: corpus, parameters, counts, tokenizer hash.
    """

    def __init__(self, arrays: FrozenArrays, header: Mapping[str, Any]) -> None:
        self.arrays = arrays
        self.header = dict(header)

    @classmethod
    def from_followers(cls, leaders: Array, offsets: Array, followers: Array) -> FrozenTable:
        """A table in memory.

        Args:
            leaders: ``[n, leader_len]`` distinct leaders.
            offsets: ``[n + 1]`` ranges of their followers.
            followers: ``[total, follower_len]``, in the order in which they are to be drafted.
        """
        leaders = np.ascontiguousarray(leaders, dtype=np.int32)
        buckets = np.full(1 << max(2 * len(leaders), 2).bit_length(), NONE, dtype=np.int32)
        index_leaders(leaders, buckets)
        arrays = FrozenArrays(
            leaders,
            buckets,
            np.ascontiguousarray(offsets, dtype=np.int64),
            np.ascontiguousarray(followers, dtype=np.int32),
        )
        for array in arrays:
            # As when mapped, so that compiled code sees one type.
            array.flags.writeable = False
        return cls(arrays, {})

    @classmethod
    def empty(cls, leader_len: int = 1, follower_len: int = 1) -> FrozenTable:
        return cls.from_followers(
            np.empty((0, leader_len)), np.zeros(1), np.empty((0, follower_len))
        )

    @classmethod
    def open(cls, path: Path, tokenizer_hash: str | None = None) -> FrozenTable:
        """Map a table from its file; arguments and errors are those of `open_array_file`."""
        header, arrays = open_array_file(
            path, kind=KIND, version=VERSION, tokenizer_hash=tokenizer_hash
        )
        return cls(FrozenArrays(**arrays), header)

    def write(self, path: Path, *, tokenizer_hash: str, header: Mapping[str, Any]) -> None:
        """Write the table to ``path``; ``header`` says from what it was built."""
        facts = {
            "leader_len": self.leader_len,
            "follower_len": self.follower_len,
            "n_leaders": len(self.arrays.leaders),
            "n_followers": len(self.arrays.followers),
        }
        write_array_file(
            path,
            kind=KIND,
            version=VERSION,
            tokenizer_hash=tokenizer_hash,
            arrays=self.arrays._asdict(),
            header={**header, **facts},
        )

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
