"""ngram-map: draft what followed the last n tokens if one continuation is much more frequent.

Source: llama.cpp's ``--spec-type ngram-map-k4v`` and ``ngram-map-k`` (ggml-org/llama.cpp,
    ``common/ngram-map.cpp``, pull request 18471). There is no paper.
Method: the last n tokens are the key. If it occurred before, with m tokens after it and at least
    one before, ``k4v`` counts the first four different continuations of m tokens up to that
    position, and drafts from there if the most frequent one has at least twice the others' count.
    ``k`` drafts without counting. A draft is at most as long as the accepted part of the key's
    last draft by that continuation, so a key whose draft failed drafts no more. A key's position is
    the newest at the step when the key was first met; a table of 2^18 hashes stores it, and the
    first of two keys with one hash.
Where ours differs, and why:
    - llama.cpp keeps a slot's map for the next request, whose text it compares; ours starts each
      turn with an empty map.
    - Drafts end at the last token that may still be committed.
As there, a counted position is counted again at the key's next draft, until the key moves on.
Example: ``size_n`` and ``size_m`` 2; in "x a b c d y a b c d z a b" both "a b" continue with
    "c d", which is drafted.
Checked: steps identical to llama.cpp's functions (C++) in 25,254 of 25,254.
    ``tests/methods/test_llamacpp_ngrams.py`` restates the rule in plain code.
State kept: map and table, for a turn (1 MB), so the state scope has no effect.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numba import njit

from specbench.arrays import Array
from specbench.config.schema import Positive
from specbench.decoding.drafter import Drafter
from specbench.decoding.structs import DecodeState, DraftContext, DraftTree, Needs, StepOutcome

_HASHES = 2**18
_FACTOR = np.uint64(2654435761)
_MASK = np.uint64(2**32 - 1)
_MOST_COUNTED = 16380

# Columns of a key: position, last counted position, times met; then for each of four values:
# position (0: none), count, and accepted tokens of its last draft.
_POSITION, _COUNTED, _HITS, _VALUES = 0, 1, 2, 3
_COUNT, _ACCEPTED, _WIDTH = 1, 2, 3
_MOST_VALUES = 4
# Entries of ``meta``.
_N_KEYS, _INDEXED, _KEY, _VALUE = 0, 1, 2, 3


@dataclass(kw_only=True, eq=False)
class NgramMap(Drafter):
    """llama.cpp's ngram-map: drafts what followed the last n tokens, if it mostly was the same.

    Attributes:
        size_n: tokens of a key.
        size_m: tokens of a value, and so of a draft, at most.
        min_hits: times that a key must have been met, in ``k4v``.
        variant: ``k4v`` or ``k``.
    """

    name: str = "ngram_map"
    size_n: Positive = 12
    size_m: Positive = 48
    min_hits: Positive = 1
    variant: Literal["k4v", "k"] = "k4v"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._first = np.zeros(_HASHES, dtype=np.int32)
        self._keys = np.zeros((1, _VALUES + _MOST_VALUES * _WIDTH), dtype=np.int64)
        self._meta = np.zeros(4, dtype=np.int64)

    @property
    def needs(self) -> Needs:
        return Needs(max_nodes=self.size_m)

    def setup(self, context: DraftContext) -> None:
        # Compiles, or loads what was compiled before, outside any clock.
        state = DecodeState(np.zeros(2 * self.size_n + self.size_m + 2, dtype=np.int64), 2)
        self.begin(state)
        self.propose(state)

    def begin(self, state: DecodeState) -> None:
        self._first.fill(0)
        # A step adds one key at most.
        self._keys = np.zeros((state.remaining + 1, self._keys.shape[1]), dtype=np.int64)
        self._meta.fill(0)
        self._meta[_KEY] = -1

    def propose(self, state: DecodeState) -> DraftTree:
        start, count = find(
            self._keys,
            self._meta,
            self._first,
            state.buffer,
            state.length - 1,
            state.n_prompt,
            self.size_n,
            self.size_m,
            self.min_hits,
            self.variant == "k",
        )
        draft = state.buffer[start : start + min(count, max(0, state.remaining - 1))]
        return DraftTree.chain(draft.copy())

    def observe(self, state: DecodeState, outcome: StepOutcome) -> None:
        key, value = self._meta[_KEY], self._meta[_VALUE]
        if key >= 0 and len(outcome.tree):
            accepted = _VALUES + value * _WIDTH + _ACCEPTED
            self._keys[key, accepted] = len(outcome.path)


@njit(cache=True)
def _hash(text: Array, end: int, n: int) -> np.int64:
    state = np.uint64(0)
    for i in range(end - n, end):
        state = (state * _FACTOR + np.uint64(text[i])) & _MASK
    return np.int64(state % np.uint64(_HASHES))


@njit(cache=True)
def _same(text: Array, start: int, other: int, count: int) -> bool:
    for i in range(count):  # noqa: SIM110 (numba compiles no generator expressions)
        if text[start + i] != text[other + i]:
            return False
    return True


@njit(cache=True)
def find(
    keys: Array, meta: Array, first: Array, text: Array, length: int, n_prompt: int, n: int, m: int,
    min_hits: int, key_only: bool,
) -> tuple[int, int]:  # fmt: skip
    """Return start and length of the draft; the key is ``text[length + 1 - n : length + 1]``.

    Args:
        keys: ``[≥ keys, 15]`` int64, the keys met so far, and room for one more.
        meta: ``[4]`` int64: number of keys; position below which all n-grams are in ``first``; key
            and value of the draft, -1 for none.
        first: int32 positions by hash, 0 for none.
        text: int64, of which ``text[length]`` is the root.
    """
    meta[_KEY] = -1
    if length < 2 * n + m:
        return 0, 0
    key = length + 1 - n
    newest = length - n - m - 1
    position = 0
    cached = first[_hash(text, length + 1, n)]
    if 0 < cached < newest and _same(text, cached, key, n):
        position = cached
    # The prompt's new positions first, then the output's.
    borders = (n_prompt - n - m - 1, newest)
    lower = meta[_INDEXED]
    for part in range(2):
        least = lower if part == 0 else max(lower, n_prompt)
        if position == 0:
            for at in range(borders[part], least, -1):
                if _same(text, at, key, n):
                    position = at
                    break
    for part in range(2):
        least = lower if part == 0 else max(lower, n_prompt)
        for at in range(borders[part], least, -1):
            hashed = _hash(text, at + n, n)
            if first[hashed] == 0:
                first[hashed] = at
    meta[_INDEXED] = max(newest, lower)
    if position == 0:
        return 0, 0
    key_row = np.int64(0)
    while key_row < meta[_N_KEYS] and not _same(text, keys[key_row, _POSITION], key, n):
        key_row += 1
    row = keys[key_row]
    if key_row == meta[_N_KEYS]:
        meta[_N_KEYS] += 1
        row[:] = 0
        row[_POSITION] = position
        row[_VALUES + _ACCEPTED :: _WIDTH] = m
    row[_HITS] = min(row[_HITS] + 1, _MOST_COUNTED)
    best = 0
    if not key_only:
        if row[_HITS] < min_hits:
            return 0, 0
        _count_values(row, text, position, key, n, m)
        total = np.int64(0)
        for v in range(_MOST_VALUES):
            count = row[_VALUES + v * _WIDTH + _COUNT]
            total += count
            if count > row[_VALUES + best * _WIDTH + _COUNT]:
                best = v
        others = total - row[_VALUES + best * _WIDTH + _COUNT]
        if row[_VALUES + best * _WIDTH + _COUNT] < 2 * others:
            return 0, 0
    meta[_KEY], meta[_VALUE] = key_row, best
    return position + n, min(m, row[_VALUES + best * _WIDTH + _ACCEPTED])


@njit(cache=True)
def _count_values(row: Array, text: Array, last: int, key: int, n: int, m: int) -> None:
    """Count what followed the key, from its last counted position up to ``last``."""
    for at in range(row[_COUNTED], last + 1):
        if not _same(text, at, key, n):
            continue
        for v in range(_MOST_VALUES):
            value = _VALUES + v * _WIDTH
            if row[value] == 0:
                row[value], row[value + _COUNT], row[value + _ACCEPTED] = at + n, 0, m
            elif not _same(text, at + n, row[value], m):
                continue
            row[value + _COUNT] = min(row[value + _COUNT] + 1, _MOST_COUNTED)
            break
    row[_COUNTED] = last
