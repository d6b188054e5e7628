"""ngram-mod: a table from hashes of n-grams to the token that came next, walked token by token.

Source: llama.cpp's ``--spec-type ngram-mod`` (ggml-org/llama.cpp, ``common/ngram-mod.cpp`` and
    ``common/speculative.cpp``, pull request 19164). There is no paper.
Method: each n-gram of the text is hashed into a table of 2^22 tokens, which holds the token that
    followed it last. A draft starts with the hash of the last n tokens and continues with hashes
    that include its own tokens, until an entry is empty or ``n_max`` tokens are drafted; a draft of
    fewer than ``n_min`` is dropped. N-grams are never compared, so another one of the same hash
    drafts its token. New text enters once more than 32 tokens follow the last n-gram stored. Five
    drafts in a row with less than a quarter accepted empty the table, and the text enters again.
Where ours differs, and why:
    - llama.cpp also empties a table that is a quarter full, 2^20 n-grams, after a prompt; ours
      counts filled entries, where its release may count entries written twice.
    - Drafts end at the last token that may still be committed.
Example: ``n_match`` 2, ``n_min`` 1, ``n_max`` 3; after "a b c d e x a b" the table has c after
    "a b", d after "b c" and e after "c d": the draft is "c d e".
Checked: steps identical to llama.cpp's functions (C++) in 6,872 of 6,872.
    ``tests/methods/test_llamacpp_ngrams.py`` restates the rule in plain code.
State kept: the table, 16 MB, which llama.cpp shares between all requests (``paper_scope: run``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit

from specbench.arrays import Array, IntArray, first_difference
from specbench.config.schema import Count, Positive
from specbench.decoding.drafter import Drafter, Scope
from specbench.decoding.structs import (
    NO_TOKENS,
    DecodeState,
    DraftContext,
    DraftTree,
    Needs,
    StepOutcome,
)

_EMPTY = -1
_FACTOR = np.uint64(6364136223846793005)
_CHUNK = 32  # new text is read once more than so many tokens follow the last n-gram stored
_FULLEST = 0.25  # share of filled entries
_LOW, _STREAK = 0.25, 5  # a low accepted share, and how many such drafts in a row empty the table


@dataclass(kw_only=True, eq=False)
class NgramMod(Drafter):
    """llama.cpp's ngram-mod: a hash table of what followed each n-gram, walked token by token.

    Attributes:
        n_match: tokens of an n-gram.
        n_max: tokens drafted at most.
        n_min: tokens that a draft must have.
        entries: size of the table.
    """

    name: str = "ngram_mod"
    paper_scope: Scope = "run"
    n_match: Positive = 24
    n_max: Positive = 64
    n_min: Count = 48
    entries: Positive = 2**22

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.n_min <= self.n_max, "n_min", f"at most n_max={self.n_max}")
        self._table = np.full(self.entries, _EMPTY, dtype=np.int32)
        self._used = self._read = self._low = 0
        self._draft: IntArray | None = None  # of the step under way

    @property
    def needs(self) -> Needs:
        return Needs(max_nodes=self.n_max)

    def setup(self, context: DraftContext) -> None:
        # Compiles, or loads what was compiled before, outside any clock.
        text = np.zeros(self.n_match + 1, dtype=np.int64)
        enter(self._table, text, 0, 0, self.n_match)
        walk(self._table, text, len(text), self.n_match, 1)

    def reset(self) -> None:
        self._table.fill(_EMPTY)
        self._used = 0

    def begin(self, state: DecodeState) -> None:
        self._read = self._low = 0
        self._draft = None
        if state.n_prompt >= self.n_match:
            self._enter(state.buffer, state.n_prompt)
            if self._used > _FULLEST * self.entries:
                self.reset()

    def propose(self, state: DecodeState) -> DraftTree:
        self._draft = self._walk(state.buffer, state.length)
        return DraftTree.chain(self._draft[: max(0, state.remaining - 1)])

    def observe(self, state: DecodeState, outcome: StepOutcome) -> None:
        begin, draft = state.length - len(outcome.committed), self._draft
        self._draft = None
        if draft is None:  # a recorded step
            draft = self._walk(state.buffer, begin)
        if len(draft) == 0 or state.remaining + len(outcome.committed) < 2:
            return
        accepted = first_difference(draft.tolist(), outcome.committed.tolist())
        low = accepted is not None and accepted / len(draft) < _LOW
        self._low = self._low + 1 if low else 0
        if self._low >= _STREAK:
            self.reset()
            self._low = self._read = 0

    def _walk(self, text: IntArray, length: int) -> IntArray:
        before = length - 1  # the root is not in the text that is read
        if before < self.n_match:
            return NO_TOKENS
        if self._read + _CHUNK < before:
            self._enter(text, before)
        draft: IntArray = walk(self._table, text, length, self.n_match, self.n_max)
        return draft if len(draft) >= self.n_min else NO_TOKENS

    def _enter(self, text: IntArray, end: int) -> None:
        self._used += enter(self._table, text, self._read, end - self.n_match, self.n_match)
        self._read = end - self.n_match


@njit(cache=True)
def _slot(table: Array, text: Array, begin: int, n: int) -> np.int64:
    state = np.uint64(0)
    for i in range(begin, begin + n):
        state = state * _FACTOR + np.uint64(text[i])
    return np.int64(state % np.uint64(len(table)))


@njit(cache=True)
def enter(table: Array, text: Array, begin: int, end: int, n: int) -> int:
    """Store what follows the n-grams that start in ``[begin, end)``; return entries filled."""
    new = 0
    for start in range(begin, end):
        slot = _slot(table, text, start, n)
        new += table[slot] == _EMPTY
        table[slot] = text[start + n]
    return new


@njit(cache=True)
def walk(table: Array, text: Array, length: int, n: int, most: int) -> IntArray:
    """Walk from entry to entry, starting with the last n tokens; ``[≤ most]`` int64 tokens."""
    tokens = np.empty(n + most, dtype=np.int64)
    tokens[:n] = text[length - n : length]
    for i in range(most):
        token = table[_slot(table, tokens, i, n)]
        if token == _EMPTY:
            return tokens[n : n + i].copy()
        tokens[n + i] = token
    return tokens[n:].copy()
