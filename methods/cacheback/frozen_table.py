"""Frozen tables: the frequent followers of the frequent leaders of a corpus, in one mapped file.

A leader's followers lie together, the most frequent first; equal counts are ordered by their
tokens. Leaders lie in the order of their tokens and are found by a hash index that is part of the
file. Nothing in it changes while decoding.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from methods.cacheback.kernels import NONE, find_frozen, index_leaders
from specbench.arrays import Array
from specbench.artifacts.corpora import Corpus
from specbench.artifacts.documentation import documentation
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
        """Build a table in memory from distinct leaders; see `FrozenArrays`."""
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
        """Return a leader's followers, the most frequent first; empty for an unknown leader."""
        index = int(find_frozen(self.arrays, np.array(leader, dtype=np.int64), 0))
        if index == NONE:
            return []
        begin, end = self.arrays.offsets[index : index + 2]
        return [tuple(row) for row in self.arrays.followers[begin:end].tolist()]


# Windows per run, and per merged range: with 4-grams about 150 MB of arrays while sorting.
CHUNK = 1 << 22


class WindowPacking:
    """Packs windows of ``width`` tokens below ``vocab_size`` into rows of uint64 words."""

    def __init__(self, width: int, vocab_size: int) -> None:
        self.width = width
        self.bits = max(1, int(vocab_size - 1).bit_length())
        self.per_word = 64 // self.bits
        self.n_words = -(-width // self.per_word)

    def _bit_position(self, i: int) -> tuple[int, np.uint64]:
        """Return word index and shift of token ``i``; token 0 takes the highest bits of word 0."""
        word_index, slot = divmod(i, self.per_word)
        return word_index, np.uint64((self.per_word - 1 - slot) * self.bits)

    def pack(self, tokens: Array, starts: Array) -> Array:
        """Pack the windows of ``tokens`` that begin at ``starts``, ``[len(starts), n_words]``."""
        packed = np.zeros((len(starts), self.n_words), dtype=np.uint64)
        for i in range(self.width):
            word_index, shift = self._bit_position(i)
            packed[:, word_index] |= tokens[starts + i].astype(np.uint64) << shift
        return packed

    def column(self, packed: Array, i: int) -> Array:
        """Return token ``i`` of every packed window, int32."""
        word_index, shift = self._bit_position(i)
        mask = np.uint64((1 << self.bits) - 1)
        return ((packed[:, word_index] >> shift) & mask).astype(np.int32)

    def unpack(self, packed: Array, first: int, last: int) -> Array:
        """Unpack tokens ``first .. last - 1`` of every window, ``[n, last - first]`` int32."""
        out = np.empty((len(packed), last - first), dtype=np.int32)
        for i in range(first, last):
            out[:, i - first] = self.column(packed, i)
        return out


def _changes(rows: Array) -> Array:
    """Return the indices at which sorted rows differ from the row before, 0 included."""
    if len(rows) == 0:
        return np.empty(0, dtype=np.int64)
    differ = np.ones(len(rows), dtype=np.bool_)
    np.any(rows[1:] != rows[:-1], axis=1, out=differ[1:])
    return np.flatnonzero(differ)


def _reduce(packed: Array, counts: Array | None) -> tuple[Array, Array]:
    """Return sorted distinct rows and their counts (weighted by ``counts`` if given)."""
    if counts is None and packed.shape[1] == 1:
        ordered = np.sort(packed, axis=0)
    else:
        order = np.lexsort(packed.T[::-1])
        ordered = packed[order]
        counts = None if counts is None else counts[order]
    first = _changes(ordered)
    if counts is None:
        totals = np.diff(first, append=len(ordered))
    else:
        totals = np.add.reduceat(counts, first) if len(first) else counts
    return ordered[first], totals.astype(np.int64)


class WindowCounter:
    """Counts the windows of documents; use it as a context manager (it owns a temporary folder).

    Args:
        width: tokens of a window.
        vocab_size: ids are below it.
        chunk: windows that are sorted at once; bounds the memory.
        keep: probability that a window is counted.
        seed: of that choice.
    """

    def __init__(
        self, width: int, vocab_size: int, *, chunk: int = CHUNK, keep: float = 1.0, seed: int = 0
    ) -> None:
        self.packing = WindowPacking(width, vocab_size)
        self.n_tokens = 0
        self.n_windows = 0
        self.n_documents = 0
        self._chunk = chunk
        self._keep = keep
        self._random = np.random.default_rng(seed)
        self._pending: list[Array] = []
        self._n_pending = 0
        self._folder = tempfile.TemporaryDirectory(prefix="specbench-ngrams-")
        self._runs: list[tuple[Array, Array]] = []

    def __enter__(self) -> WindowCounter:
        return self

    def __exit__(self, *error: object) -> None:
        self._runs.clear()
        self._folder.cleanup()

    def add(self, tokens: list[int] | Array) -> None:
        document = np.asarray(tokens, dtype=np.int32)
        self.n_documents += 1
        self.n_tokens += len(document)
        if len(document) < self.packing.width:
            return
        self._pending.append(document)
        self._n_pending += len(document)
        if self._n_pending >= self._chunk:
            self._spill()

    def _spill(self) -> None:
        if not self._pending:
            return
        lengths = np.array([len(document) for document in self._pending])
        tokens = np.concatenate(self._pending)
        self._pending, self._n_pending = [], 0
        # A window may not start in the last width - 1 tokens of its document.
        allowed = np.ones(len(tokens), dtype=np.bool_)
        ends = np.cumsum(lengths)
        for back in range(1, self.packing.width):
            allowed[ends - back] = False
        if self._keep < 1.0:
            allowed &= self._random.random(len(tokens)) < self._keep
        starts = np.flatnonzero(allowed)
        self.n_windows += len(starts)
        # One document may be longer than a chunk.
        for at in range(0, len(starts), self._chunk):
            run = _reduce(self.packing.pack(tokens, starts[at : at + self._chunk]), None)
            self._runs.append((self._store("rows", run[0]), self._store("counts", run[1])))

    def _store(self, name: str, array: Array) -> Array:
        path = Path(self._folder.name) / f"{name}-{len(self._runs)}.npy"
        np.save(path, array)
        stored: Array = np.load(path, mmap_mode="r")
        return stored

    def merged(self) -> Iterator[tuple[Array, Array]]:
        """Yield distinct windows in ascending order with their counts, range by range.

        All windows with one first token come in one range.
        """
        self._spill()
        if not self._runs:
            return
        firsts = [self.packing.column(rows, 0) for rows, _ in self._runs]
        per_token = np.zeros(1 << self.packing.bits, dtype=np.int64)
        for first in firsts:
            per_token += np.bincount(first, minlength=len(per_token))
        # A range ends before the token that would take it past the bound.
        group = np.cumsum(per_token) // self._chunk
        bounds = [0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), len(per_token)]
        cuts = [np.searchsorted(first, bounds) for first in firsts]
        for i in range(len(bounds) - 1):
            parts = [
                (rows[cut[i] : cut[i + 1]], counts[cut[i] : cut[i + 1]])
                for (rows, counts), cut in zip(self._runs, cuts, strict=True)
            ]
            yield _reduce(
                np.concatenate([rows for rows, _ in parts]),
                np.concatenate([counts for _, counts in parts]),
            )


def frequent_followers(
    counter: WindowCounter,
    leader_len: int,
    leader_capacity: int,
    follower_capacity: int,
) -> FrozenTable:
    """Build the table of the most frequent followers of the most frequent leaders.

    A leader's count is the number of windows that begin with it. Ties go to the smaller tokens.

    Args:
        counter: the counted windows, of leader and follower together.
    """
    width = counter.packing.width
    leaders, totals, sizes, followers = [], [], [], []
    for rows, counts in counter.merged():
        heads = counter.packing.unpack(rows, 0, leader_len)
        first = _changes(heads)
        owner = np.repeat(np.arange(len(first)), np.diff(first, append=len(rows)))
        # Rows are ascending within a leader, and a stable sort keeps that order among equals.
        order = np.lexsort((-counts, owner))
        rank = np.arange(len(rows)) - first[owner]
        frequent = rank < follower_capacity
        followers.append(counter.packing.unpack(rows[order[frequent]], leader_len, width))
        sizes.append(np.bincount(owner[frequent], minlength=len(first)))
        leaders.append(heads[first])
        totals.append(np.add.reduceat(counts, first) if len(first) else counts)
    if not leaders:
        return FrozenTable.empty(leader_len, width - leader_len)
    all_leaders, all_sizes = np.concatenate(leaders), np.concatenate(sizes)
    all_followers, all_totals = np.concatenate(followers), np.concatenate(totals)
    if len(all_leaders) > leader_capacity:
        best = np.argsort(-all_totals, kind="stable")[:leader_capacity]
        chosen = np.zeros(len(all_leaders), dtype=np.bool_)
        chosen[best] = True
        all_followers = all_followers[np.repeat(chosen, all_sizes)]
        all_leaders, all_sizes = all_leaders[chosen], all_sizes[chosen]
    offsets = np.concatenate(([0], np.cumsum(all_sizes)))
    return FrozenTable.from_followers(all_leaders, offsets, all_followers)


STEM = "frozen_table"
# Raised when the same text gives another table: every machine then builds again.
BUILDER_VERSION = 1


def build(
    tokenizer: Any,
    path: Path,
    *,
    leader_len: int,
    follower_len: int,
    leader_capacity: int,
    follower_capacity: int,
    corpus: Corpus | None = None,
    keep_windows: float = 1.0,
    seed: int = 0,
    chunk: int = CHUNK,
) -> None:
    """Count a corpus and write its frequent leaders and followers.

    Args:
        corpus: None takes installed documentation, whose ids are stored in the cache folder of
            ``path``, so that tables of other lengths take seconds.
        keep_windows: probability that a window is counted.
        seed: of that choice.
        chunk: windows sorted at once; bounds the memory.
    """
    from specbench.models import loading

    if corpus is None:
        corpus = documentation(tokenizer, path.parent.parent)
    width = leader_len + follower_len
    with WindowCounter(width, len(tokenizer), chunk=chunk, keep=keep_windows, seed=seed) as counter:
        for ids in corpus:
            counter.add(ids)
        table = frequent_followers(counter, leader_len, leader_capacity, follower_capacity)
    header = {
        "builder_version": BUILDER_VERSION,
        "corpus": corpus.described(),
        "leader_capacity": leader_capacity,
        "follower_capacity": follower_capacity,
        "keep_windows": keep_windows,
        "seed": seed,
        "n_documents": counter.n_documents,
        "n_tokens": counter.n_tokens,
        "n_windows": counter.n_windows,
    }
    table.write(path, tokenizer_hash=loading.tokenizer_hash(tokenizer), header=header)
