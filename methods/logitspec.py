"""LogitSpec: the runners-up of the last logits as next-next tokens, each extended by n-grams.

Paper: "LogitSpec: Accelerating Retrieval-based Speculative Decoding via Next Next Token
    Speculation", arXiv 2507.01449.
Reference code studied: smart-lty/LogitSpec at 659bba9 (``model/logitspec``).
Method: the logits that chose the root also rank other tokens, which are likely to come right after
    it. The first branch is the continuation of the root's n-gram in the text. Then each ranked
    token but the root becomes a child of the root with the continuation of its n-gram: at most 4
    tokens at ranks up to 8 (the root has rank 0), 3 up to 32, only the child beyond, until the tree
    is full. The longest n-gram that occurred counts: its newest occurrence with ``num_tokens``
    after it, else the occurrence with most.
Where ours differs, and why:
    - Equal beginnings of branches share their nodes (of the first branch and one other; children
      are distinct). The budget counts them twice, as there, so both have the same branches.
    - The reference looks back 40 tokens at each step, so that after a step of more than 17 a
      continuation may stay short; in a text of fewer than 40 tokens its negative positions store
      stretches from the text's end. Ours finds the match of the rule.
    - ``capacity`` also limits the first branch; in the reference it can exceed a small capacity.
    - At a temperature the root was drawn; the reference decodes greedily only.
Example: ``num_tokens`` 2; after "e f a b c d x a b", whose b was chosen before e and c: the first
    branch is "c d", the second e followed by "f a", the third "c d x", of which x is new.
Checked: branches identical to the authors' code in 3,778 of 3,794 steps; its look-back explains the
    other 16. ``tests/methods/test_logitspec.py`` restates the rule in plain code.
State kept: the n-grams' positions in the turn's text, 4 bytes for each of ``max_ngram`` and twice
    the text's tokens, so the state scope has no effect. On a GPU each step copies the ranking to
    the host.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import torch
from annotated_types import Ge, Len
from numba import njit

from specbench.arrays import Array, IntArray
from specbench.config.schema import Positive
from specbench.decoding.drafter import Drafter
from specbench.decoding.structs import (
    NO_TOKENS,
    DecodeState,
    DraftContext,
    DraftTree,
    Needs,
    StepOutcome,
)
from specbench.draft_structures.adjacency_matrix import top_ids

_SEED = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_SHIFT = np.uint64(29)


@dataclass(kw_only=True, eq=False)
class LogitSpec(Drafter):
    """LogitSpec: the runners-up of the last logits as next-next tokens, extended by n-grams.

    Attributes:
        max_ngram: tokens of the n-gram that is looked up first; the last lookup takes one token.
        num_tokens: tokens of the first branch at most.
        capacity: rows of the target pass at most, the root included.
        caps: tokens of the other branches at most: at ranks up to 8, up to 32, beyond.
    """

    name: str = "logitspec"
    max_ngram: Positive = 3
    num_tokens: Positive = 20
    capacity: Annotated[int, Ge(2)] = 64
    caps: Annotated[list[Positive], Len(3, 3)] = field(default_factory=lambda: [4, 3, 1])

    def __post_init__(self) -> None:
        super().__post_init__()
        self._caps = np.array(self.caps, dtype=np.int64)
        self._ranking: IntArray = NO_TOKENS
        self._start(0)

    @property
    def needs(self) -> Needs:
        return Needs(tokens_only=False, logits=True, first_logits=True, max_nodes=self.capacity - 1)

    def setup(self, context: DraftContext) -> None:
        self._vocab_size = context.vocab_size
        # Compiles, or loads what was compiled before, outside any clock.
        state = DecodeState(np.zeros(self.num_tokens + 4, dtype=np.int64), 1)
        self.begin(state)
        self.propose(state)

    def observe_prompt(self, prompt: IntArray, logits: torch.Tensor) -> None:
        self._rank(logits[-1:])

    def begin(self, state: DecodeState) -> None:
        self._start(len(state.buffer))
        self._read(state)

    def propose(self, state: DecodeState) -> DraftTree:
        nodes = grow(
            state.buffer,
            state.length,
            self._positions,
            self._ranking,
            self._caps,
            self.num_tokens,
            self.capacity - 1,
        )
        return DraftTree(nodes[0], nodes[1])

    def observe(self, state: DecodeState, outcome: StepOutcome) -> None:
        self._ranking = NO_TOKENS
        if outcome.finished:
            return
        self._read(state)
        # Otherwise a union's other part had nodes after ours, whose rows we do not get.
        if outcome.logits is not None and len(outcome.committed) == len(outcome.path) + 1:
            last = int(outcome.path[-1]) + 1 if len(outcome.path) else 0
            self._rank(outcome.logits[last : last + 1])

    def end(self, state: DecodeState) -> None:
        self._ranking = NO_TOKENS

    def _start(self, max_tokens: int) -> None:
        """Forget the text; the next text has at most ``max_tokens`` tokens."""
        size = 1 << max(3, (2 * max_tokens).bit_length())
        self._positions = np.full((self.max_ngram, size), -1, dtype=np.int32)
        self._next = 1

    def _read(self, state: DecodeState) -> None:
        """Store positions with ``num_tokens`` after them; the root is not in the text yet."""
        end = state.length - self.num_tokens
        if end > self._next:
            store(self._positions, state.buffer, self._next, end)
            self._next = end

    def _rank(self, logits: torch.Tensor) -> None:
        row = logits[:, : self._vocab_size]
        ids = top_ids(row, min(self.capacity, row.shape[1]))[0]
        # Recorded logits hold only the likeliest tokens; the others are at -inf.
        self._ranking = ids[row[0, ids] > -torch.inf].cpu().numpy()


@njit(cache=True)
def _slot(positions: Array, text: Array, key: Array, end: int, n: int) -> np.int64:
    """Return the slot of the n-gram ``key[end - n : end]``, or the free slot for it."""
    state = np.uint64(0)
    for i in range(end - n, end):
        state = (state ^ (np.uint64(key[i]) + _SEED)) * _MIX
        state = state ^ (state >> _SHIFT)
    slot_mask = len(positions) - 1
    slot = np.int64(state & np.uint64(slot_mask))
    while positions[slot] >= 0 and not _same(text, positions[slot], key, end, n):
        slot = (slot + 1) & slot_mask
    return slot


@njit(cache=True)
def _same(text: Array, at: int, key: Array, end: int, n: int) -> bool:
    for i in range(1, n + 1):  # noqa: SIM110 (numba compiles no generator expressions)
        if text[at - i] != key[end - i]:
            return False
    return True


@njit(cache=True)
def store(positions: Array, text: Array, begin: int, end: int) -> None:
    """Store every n-gram that ends before a position in ``[begin, end)``; the newest wins.

    Args:
        positions: ``[longest, slots]`` int32, -1 where free; row n - 1 holds the n-grams of n
            tokens, each as the position after it.
        text: int64.
    """
    for at in range(begin, end):
        for n in range(1, min(len(positions), at) + 1):
            positions[n - 1, _slot(positions[n - 1], text, text, at, n)] = at


@njit(cache=True)
def _continuation(
    positions: Array, text: Array, length: int, key: Array, end: int, count: int
) -> tuple[int, int]:
    """Return start and length of what followed the longest n-gram at ``key``'s end, or length 0."""
    for n in range(min(len(positions), end), 0, -1):
        at = positions[n - 1, _slot(positions[n - 1], text, key, end, n)]
        if at >= 0:
            return at, count
        # Of positions with fewer tokens after them, the oldest has most.
        for at in range(max(n, length - count + 1), length):
            if _same(text, at, key, end, n):
                return at, length - at
    return 0, 0


@njit(cache=True)
def grow(
    text: Array, length: int, positions: Array, ranking: Array, caps: Array, count: int, room: int
) -> Array:
    """Draft a tree below the root ``text[length - 1]``.

    Args:
        text: int64; the text searched ends before the root.
        positions: see `store`; all positions with ``count`` tokens between them and the root.
        ranking: int64 ids, the likeliest first.
        caps: int64 ``[3]`` maximum tokens of a branch by its rank.
        count: maximum tokens of the first branch.
        room: maximum nodes.

    Returns:
        ``[2, n]`` int64 tokens and parents.
    """
    nodes = np.empty((2, room), dtype=np.int64)
    before = length - 1
    # The end of the text with its root, and room for a child.
    size = min(len(positions), length)
    key = np.empty(size + 1, dtype=np.int64)
    key[:size] = text[length - size : length]
    start, length_found = _continuation(positions, text, before, key, size, count)
    first = min(length_found, room)
    for i in range(first):
        nodes[0, i] = text[start + i]
        nodes[1, i] = i - 1
    n = used = first
    for rank in range(len(ranking)):
        if used >= room:
            break
        if ranking[rank] == text[before]:
            continue
        key[size] = ranking[rank]
        start, length_found = _continuation(positions, text, before, key, size + 1, count)
        cap = caps[0] if rank <= 8 else caps[1] if rank <= 32 else caps[2]
        taken = min(length_found + 1, cap, room - used)
        used += taken
        parent, shared = -1, True
        for i in range(taken):
            token = ranking[rank] if i == 0 else text[start + i - 1]
            shared = shared and i < first and nodes[0, i] == token
            if shared:
                parent = i
                continue
            nodes[0, n], nodes[1, n] = token, parent
            parent = n
            n += 1
    return nodes[:, :n].copy()
