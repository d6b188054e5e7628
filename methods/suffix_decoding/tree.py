"""Compressed suffix trees of limited depth with occurrence counts, over requests that come and go.

SuffixDecoding's data structure (arXiv 2411.04975): the tree holds every substring of up to
``depth`` tokens of the stored requests, with its number of occurrences, and is extended as a
request is produced. Adding a token takes O(depth). Whole requests are evicted, the oldest first.

The arrays (`TreeArrays`) double when full, up to what ``max_tokens`` needs; then requests are
evicted for their room. `methods.suffix_decoding.kernels` has the rules in detail.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from methods.suffix_decoding import kernels as k  # columns and operations
from specbench.arrays import Array

_FIRST_SIZE = 1024
# Text positions are kept modulo 2³², of which any size below is a divisor.
_MOST_TOKENS = 1 << 29


class TreeArrays(NamedTuple):
    """The whole state of one tree with room for N tokens, a power of two.

    Attributes:
        nodes: ``[2N + 2, 11]`` int32; node 0 is the root.
        buckets: ``[2N]`` int32 heads of the hash chains; the key is parent and first token.
        text: ``[N]`` int32 ring of the stored requests' tokens.
        active: ``[depth]`` int32; entry p - 1 is where the last p tokens of the request in progress
            end.
        meta: ``[5]`` int64, see the kernels' constants.
    """

    nodes: Array
    buckets: Array
    text: Array
    active: Array
    meta: Array


class SuffixTree:
    """One tree; see the module's text.

    Args:
        depth: longest substring that is counted.
        max_tokens: tokens of all stored requests at most, rounded up to a power of two; bounds the
            memory (100 bytes a token).
        max_requests: requests stored at most; None for any number.

    Attributes:
        arrays: what compiled code works on; replaced when the tree grows.
    """

    def __init__(
        self, depth: int, max_tokens: int = _MOST_TOKENS, max_requests: int | None = None
    ) -> None:
        self.max_tokens = 1 << (min(max_tokens, _MOST_TOKENS) - 1).bit_length()
        self.max_requests = max_requests
        room = min(_FIRST_SIZE, self.max_tokens)
        self.arrays = TreeArrays(
            np.empty((2 * room + 2, k.COLUMNS), dtype=np.int32),
            np.empty(2 * room, dtype=np.int32),
            np.empty(room, dtype=np.int32),
            np.empty(depth, dtype=np.int32),
            np.empty(k.N_META, dtype=np.int64),
        )
        # Positions at which the stored requests begin, the oldest first.
        self._begins: deque[int] = deque()
        self._recording = False
        self.clear()

    def __len__(self) -> int:
        return int(self.arrays.meta[k.TAIL]) - self._begins[0] if self._begins else 0

    @property
    def n_requests(self) -> int:
        """Requests stored, the one in progress included."""
        return len(self._begins)

    @property
    def n_nodes(self) -> int:  # without the root
        return int(self.arrays.meta[k.NODES])

    @property
    def n_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def clear(self) -> None:
        nodes, buckets, _, _, meta = self.arrays
        buckets.fill(k.NONE)
        meta[[k.NODES, k.GROWING, k.TAIL]] = 0
        meta[k.FRESH], meta[k.FREED] = 1, k.NONE
        nodes[k.ROOT, [k.PARENT, k.FIRST, k.LAST, k.SINGLE]] = k.NONE
        nodes[k.ROOT, [k.COUNT, k.LENGTH]] = 0
        self._begins.clear()
        self._recording = False

    def start_request(self, expected: int = 0) -> None:
        """End the request in progress and begin another, of ``expected`` tokens at most.

        Old requests make room for them now, not in its midst.
        """
        self.end_request()
        if self.max_requests == 0:
            return
        while self.max_requests is not None and self.n_requests >= self.max_requests:
            self._evict()
        while self._begins and len(self) + expected > self.max_tokens:
            self._evict()
        self._begins.append(int(self.arrays.meta[k.TAIL]))
        self._recording = True

    def end_request(self) -> None:
        """End the request in progress, if there is one; it stays stored."""
        self.arrays.meta[k.GROWING] = 0
        self._recording = False

    def extend(self, tokens: Array, begin: int, end: int) -> None:
        """Add ``tokens[begin:end]`` to the request in progress, if there is one.

        Older requests are evicted for it. A request that fills the tree alone ends here.
        """
        if not self._recording or begin >= end:
            return
        count = end - begin
        while self.n_requests > 1 and len(self) + count > self.max_tokens:
            self._evict()
        free = self.max_tokens - len(self)
        if len(self) + min(count, free) > len(self.arrays.text):
            self._grow(len(self) + min(count, free))
        k.append(self.arrays, tokens, begin, begin + min(count, free))
        if count > free:
            self.end_request()

    def count(self, tokens: Array) -> int:
        node, _ = k.locate(self.arrays, np.asarray(tokens, dtype=np.int64), 0, len(tokens))
        return 0 if node == k.NONE else int(self.arrays.nodes[node, k.COUNT])

    def _evict(self) -> None:
        begin = self._begins.popleft()
        end = self._begins[0] if self._begins else int(self.arrays.meta[k.TAIL])
        k.remove(self.arrays, begin, end)

    def _grow(self, wanted: int) -> None:
        old = self.arrays
        room = min(1 << (wanted - 1).bit_length(), self.max_tokens)
        nodes = np.empty((2 * room + 2, k.COLUMNS), dtype=np.int32)
        nodes[: len(old.nodes)] = old.nodes
        text = np.empty(room, dtype=np.int32)
        stored = np.arange(int(old.meta[k.TAIL]) - len(self), int(old.meta[k.TAIL]))
        text[stored & (room - 1)] = old.text[stored & (len(old.text) - 1)]
        buckets = np.full(2 * room, k.NONE, dtype=np.int32)
        self.arrays = TreeArrays(nodes, buckets, text, old.active, old.meta)
        k.rehash(self.arrays)
