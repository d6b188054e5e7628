"""A frozen suffix automaton of a corpus: its text, occurrence counts, best continuations, one file.

The transitions of a state lie together: first the `TOP` that lead to the most frequent states
(equal counts by token), then the others by token. So a draft reads a state's best continuations
off its beginning, and a look-up is a short scan and a binary search, without a hash table.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from methods.sam.automaton import (
    EDGES,
    END,
    LENGTH,
    LINK,
    PREFIXES,
    STATES,
    TARGET,
    TOKEN,
    SuffixAutomaton,
)
from specbench.arrays import Array, IntArray
from specbench.artifacts.corpora import Corpus
from specbench.artifacts.documentation import documentation
from specbench.storage.arrays import ArrayTable

# Continuations of a state that a draft may take, as in the reference.
TOP = 8

NONE = -1


class StaticArrays(NamedTuple):
    """The whole content of one frozen automaton; state 0 is the start.

    Attributes:
        lengths: ``[states]`` int32 length of the longest substring.
        links: ``[states]`` int32 suffix link, -1 at the start.
        counts: ``[states]`` int32 occurrences in the corpus; of the start, its tokens.
        offsets: ``[states + 1]`` int32; transitions of state s: ``offsets[s] : offsets[s + 1]``.
        tokens: ``[transitions]`` int32.
        targets: ``[transitions]`` int32.
        ends: ``[states]`` int32 position in ``text`` of the token at which the state first ended.
        text: int32, the documents one after the other.
    """

    lengths: Array
    links: Array
    counts: Array
    offsets: Array
    tokens: Array
    targets: Array
    ends: Array
    text: Array


@njit(cache=True)
def _total_counts(links: Array, by_length: Array, counts: Array) -> None:
    for i in range(len(by_length) - 1, 0, -1):
        state = by_length[i]
        counts[links[state]] += counts[state]


@njit(cache=True)
def _order_edges(offsets: Array, tokens: Array, targets: Array, counts: Array) -> None:
    """Bring the transitions of every state into the file's order, in place."""
    for state in range(len(offsets) - 1):
        begin, end = offsets[state], offsets[state + 1]
        for position in range(begin, min(begin + TOP, end)):
            best = position
            for i in range(position + 1, end):
                more = counts[targets[i]] - counts[targets[best]]
                if more > 0 or (more == 0 and tokens[i] < tokens[best]):
                    best = i
            tokens[position], tokens[best] = tokens[best], tokens[position]
            targets[position], targets[best] = targets[best], targets[position]
        if end - begin > TOP + 1:
            order = np.argsort(tokens[begin + TOP : end])
            tokens[begin + TOP : end] = tokens[begin + TOP : end][order]
            targets[begin + TOP : end] = targets[begin + TOP : end][order]


@njit(cache=True)
def find_target(automaton: tuple[Array, ...], state: int, token: int) -> np.int64:
    """Find the state after ``state`` and ``token``; -1 if there is none."""
    _, _, _, offsets, tokens, targets, _, _ = automaton
    low, high = np.int64(offsets[state]), np.int64(offsets[state + 1])
    best = min(low + TOP, high)
    while low < best:
        if tokens[low] == token:
            return np.int64(targets[low])
        low += 1
    while low < high:
        middle = (low + high) // 2
        if tokens[middle] < token:
            low = middle + 1
        else:
            high = middle
    if low < offsets[state + 1] and tokens[low] == token:
        return np.int64(targets[low])
    return np.int64(NONE)


@njit(cache=True)
def follow(automaton: tuple[Array, ...], cursor: Array, text: Array, begin: int, end: int) -> None:
    """Move a cursor over ``text[begin:end]``, amortised O(1) look-ups a token.

    ``cursor [2]`` int64 is written: the state of the longest suffix of the text that occurs in the
    corpus, and that suffix's length.
    """
    lengths, links, _, _, _, _, _, _ = automaton
    state, matched = cursor[0], cursor[1]
    for position in range(begin, end):
        target = find_target(automaton, state, text[position])
        while target == NONE and state != 0:
            state = np.int64(links[state])
            matched = np.int64(lengths[state])
            target = find_target(automaton, state, text[position])
        if target == NONE:
            matched = 0
        else:
            state = target
            matched += 1
    cursor[0], cursor[1] = state, matched


@njit(cache=True)
def grow_best_first(
    automaton: tuple[Array, ...], state: np.int64, max_nodes: int, per_depth: int
) -> Array:
    """Grow a tree of the most probable continuations of a state.

    A node's probability is the product of count(child) / count(parent) along its path. The most
    probable candidate is taken first, of equals the one pushed first; a candidate at a
    depth that has ``per_depth`` nodes already is dropped.

    Returns:
        ``[2, nodes]`` int64 tokens and parents, in the order in which they were taken; at most
        ``max_nodes`` nodes.
    """
    _, _, counts, offsets, tokens, targets, _, _ = automaton
    out = np.empty((2, max_nodes), dtype=np.int64)
    at_depth = np.zeros(max_nodes + 2, dtype=np.int64)
    n = 0
    n_pushed = 0
    # Minus probability, order of pushes, transition, parent node, depth.
    heap: Any = [(-1.0, 0, np.int64(NONE), np.int64(NONE), 0)]
    while n < max_nodes and len(heap) > 0:
        minus, _, edge, parent, depth = heapq.heappop(heap)
        here = state
        node = np.int64(NONE)
        if edge != NONE:
            if at_depth[depth] >= per_depth:
                continue
            at_depth[depth] += 1
            node = np.int64(n)
            out[0, n] = tokens[edge]
            out[1, n] = parent
            n += 1
            here = np.int64(targets[edge])
        if at_depth[depth + 1] >= per_depth:
            continue
        begin = np.int64(offsets[here])
        for child in range(begin, min(begin + TOP, np.int64(offsets[here + 1]))):
            n_pushed += 1
            below = minus * counts[targets[child]] / counts[here]
            heapq.heappush(heap, (below, n_pushed, child, node, depth + 1))
    return out[:, :n].copy()


def text_after(arrays: StaticArrays, state: int, count: int) -> IntArray:
    """Return the ``[≤ count]`` int64 tokens after a state's first end, across documents too."""
    begin = int(arrays.ends[state]) + 1
    return arrays.text[begin : begin + count].astype(np.int64)


class StaticAutomaton(ArrayTable[StaticArrays]):
    """One frozen automaton, read-only."""

    kind = "static_automaton"
    version = 2
    layout = StaticArrays

    @classmethod
    def freeze(cls, growing: SuffixAutomaton, text: Array) -> StaticAutomaton:
        """Freeze the automaton of a text."""
        n_states = int(growing.arrays.meta[STATES])
        n_edges = int(growing.arrays.meta[EDGES])
        states = growing.arrays.states[:n_states]
        edges = growing.arrays.edges[:n_edges]
        lengths = np.ascontiguousarray(states[:, LENGTH])
        links = np.ascontiguousarray(states[:, LINK])
        counts = np.ascontiguousarray(states[:, PREFIXES])
        _total_counts(links, np.argsort(lengths, kind="stable"), counts)
        # Column 0 of a transition is its source.
        sources = edges[:, 0]
        offsets = np.zeros(n_states + 1, dtype=np.int32)
        np.cumsum(np.bincount(sources, minlength=n_states), out=offsets[1:])
        order = np.argsort(sources, kind="stable")
        tokens = edges[order, TOKEN]
        targets = edges[order, TARGET]
        _order_edges(offsets, tokens, targets, counts)
        ends = np.ascontiguousarray(states[:, END])
        ids = text.astype(np.int32)
        return cls(StaticArrays(lengths, links, counts, offsets, tokens, targets, ends, ids))

    def facts(self) -> dict[str, Any]:
        return {"n_states": len(self), "n_edges": len(self.arrays.tokens)}

    def __len__(self) -> int:
        return len(self.arrays.lengths)


STEM = "static_automaton"
# Raised when the same text gives another automaton: every machine then builds again.
BUILDER_VERSION = 2


class DocumentAutomaton:
    """An automaton that documents are added to.

    Args:
        end_token: put after every document that does not end with it; None for nothing.

    Attributes:
        n_documents: documents added.
        n_tokens: their tokens, end tokens included.
    """

    def __init__(self, end_token: int | None = None) -> None:
        self.n_documents = 0
        self.n_tokens = 0
        self._end = [] if end_token is None else [end_token]
        self._growing = SuffixAutomaton()
        self._text = np.empty(1024, dtype=np.int64)

    def add(self, ids: Sequence[int] | Array) -> None:
        self.n_documents += 1
        self.n_tokens += self._append([*ids])

    def finish(self, vocab_size: int) -> StaticAutomaton:
        """Add every id below ``vocab_size`` as a document and freeze the automaton."""
        for i in range(vocab_size):
            self._append([i])
        return StaticAutomaton.freeze(self._growing, self._text[: len(self._growing)])

    def _append(self, ids: list[int]) -> int:
        """Add a document with its end; returns its tokens."""
        document = ids if ids[-1:] == self._end else [*ids, *self._end]
        begin = len(self._growing)
        end = begin + len(document)
        if end > len(self._text):
            self._text = np.resize(self._text, 2 * end)
        self._text[begin:end] = document
        self._growing.extend(self._text, begin, end)
        return len(document)


def build(tokenizer: Any, path: Path, *, corpus: Corpus | None = None) -> None:
    """Write the automaton of a corpus; None takes installed documentation."""
    from specbench.models import loading

    if corpus is None:
        corpus = documentation(tokenizer, path.parent.parent)
    added = DocumentAutomaton(getattr(tokenizer, "eos_token_id", None))
    for ids in corpus:
        added.add(ids.tolist())
    header = {
        "builder_version": BUILDER_VERSION,
        "corpus": corpus.described(),
        "n_documents": added.n_documents,
        "n_tokens": added.n_tokens,
    }
    added.finish(len(tokenizer)).write(
        path, tokenizer_hash=loading.tokenizer_hash(tokenizer), header=header
    )
