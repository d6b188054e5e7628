"""A suffix automaton that grows token by token, in a handful of flat arrays.

A state stands for all substrings that end at the same positions; it has the longest one's length,
its suffix link, where it first ended, and whether it is a prefix of the text. The transitions of
all states share one hash table with open addressing; a state's are also linked, because a cloned
state copies them. For n tokens there are fewer than 2n states and 3n transitions, so an
array never grows while a token is added, and adding n tokens takes O(n).

The automaton of a single text answers prompt look-up without searching: the suffix link of its last
state is the longest suffix that occurred before, kept up to date by construction.

`methods.sam.static_automaton` freezes the automaton of a corpus.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from specbench.arrays import Array

NONE = -1
START = 0

# Columns of a state: length of its longest substring, suffix link, first transition, position of
# the token at which it first ended, and whether it is a prefix of the text.
LENGTH, LINK, FIRST, END, PREFIXES = 0, 1, 2, 3, 4
# Columns of a transition; NEXT links a state's transitions, the newest first.
SOURCE, TOKEN, TARGET, NEXT = 0, 1, 2, 3
# Entries of ``meta``.
STATES, EDGES, LAST, TOKENS = 0, 1, 2, 3

_FIRST_SIZE = 1024
_MAX_TOKENS = 1 << 29


class AutomatonArrays(NamedTuple):
    """The whole state of one automaton with room for N tokens.

    Attributes:
        states: ``[2N + 1, 5]`` int32.
        edges: ``[3N, 4]`` int32.
        buckets: ``[power of two ≥ 4N]`` int32 index into ``edges``, -1 is empty; linear probing
            from the hash of source and token.
        meta: ``[4]`` int64: states and transitions in use, the last state, tokens added.
    """

    states: Array
    edges: Array
    buckets: Array
    meta: Array


# Cacheback's hash, again: an edit there would leave stale code here.
_SEED = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_SHIFT = np.uint64(29)


@njit(cache=True, inline="always")
def _mix(state: int, token: int) -> np.uint64:
    mixed = (state ^ (np.uint64(token) + _SEED)) * _MIX
    return mixed ^ (mixed >> _SHIFT)


@njit(cache=True, inline="always")
def _bucket(state: int, token: int, mask: int) -> np.int64:
    return np.int64(_mix(_mix(np.uint64(0), state), token) & np.uint64(mask))


@njit(cache=True)
def find_edge(automaton: tuple[Array, ...], state: int, token: int) -> np.int64:
    """Index of the transition from ``state`` by ``token``, or -1."""
    _, edges, buckets, _ = automaton
    mask = len(buckets) - 1
    at = _bucket(state, token, mask)
    while buckets[at] != NONE:
        edge = np.int64(buckets[at])
        if edges[edge, SOURCE] == state and edges[edge, TOKEN] == token:
            return edge
        at = (at + 1) & mask
    return np.int64(NONE)


@njit(cache=True)
def _place_edge(edges: Array, buckets: Array, edge: int) -> None:
    mask = len(buckets) - 1
    at = _bucket(edges[edge, SOURCE], edges[edge, TOKEN], mask)
    while buckets[at] != NONE:
        at = (at + 1) & mask
    buckets[at] = edge


@njit(cache=True)
def _add_edge(automaton: tuple[Array, ...], source: int, token: int, target: int) -> None:
    states, edges, buckets, meta = automaton
    edge = meta[EDGES]
    meta[EDGES] += 1
    edges[edge, SOURCE] = source
    edges[edge, TOKEN] = token
    edges[edge, TARGET] = target
    edges[edge, NEXT] = states[source, FIRST]
    states[source, FIRST] = edge
    _place_edge(edges, buckets, edge)


@njit(cache=True)
def _add_state(automaton: tuple[Array, ...], length: int, end: int) -> int:
    states, _, _, meta = automaton
    state = meta[STATES]
    meta[STATES] += 1
    states[state, LENGTH] = length
    states[state, LINK] = NONE
    states[state, FIRST] = NONE
    states[state, END] = end
    states[state, PREFIXES] = 0
    return state


@njit(cache=True)
def _clone(automaton: tuple[Array, ...], above: np.int64, token: int) -> np.int64:
    """Split off the part of the target of ``above`` by ``token`` that this transition reaches."""
    states, edges, _, _ = automaton
    whole = np.int64(edges[find_edge(automaton, above, token), TARGET])
    clone = _add_state(automaton, states[above, LENGTH] + 1, states[whole, END])
    states[clone, LINK] = states[whole, LINK]
    states[whole, LINK] = clone
    edge = np.int64(states[whole, FIRST])
    while edge != NONE:
        _add_edge(automaton, clone, edges[edge, TOKEN], edges[edge, TARGET])
        edge = np.int64(edges[edge, NEXT])
    state = above
    while state != NONE:
        edge = find_edge(automaton, state, token)
        if edges[edge, TARGET] != whole:
            break
        edges[edge, TARGET] = clone
        state = np.int64(states[state, LINK])
    return clone


@njit(cache=True)
def extend(automaton: tuple[Array, ...], tokens: Array, begin: int, end: int) -> None:
    """Add ``tokens[begin:end]``, which the arrays must have room for."""
    states, edges, _, meta = automaton
    for position in range(begin, end):
        token = tokens[position]
        meta[TOKENS] += 1
        last = meta[LAST]
        state = _add_state(automaton, states[last, LENGTH] + 1, position)
        above = last
        while above != NONE:
            edge = find_edge(automaton, above, token)
            if edge != NONE:
                break
            _add_edge(automaton, above, token, state)
            above = np.int64(states[above, LINK])
        if above == NONE:
            states[state, LINK] = START
        else:
            target = np.int64(edges[edge, TARGET])
            if states[target, LENGTH] == states[above, LENGTH] + 1:
                states[state, LINK] = target
            else:
                states[state, LINK] = _clone(automaton, above, token)
        states[state, PREFIXES] = 1
        meta[LAST] = state


@njit(cache=True)
def repeated_suffix(
    automaton: tuple[Array, ...], n_tokens: np.int64, room: int
) -> tuple[np.int64, np.int64]:
    """Find the longest suffix of a single text of ``n_tokens`` that occurred before.

    Args:
        room: tokens needed between the suffix's first occurrence and the text's end; where there
            are fewer, shorter suffixes are tried, and the one with most is taken.

    Returns:
        Length of the longest one (0 where there is none) and, of the one taken, the position after
        its first occurrence.
    """
    states, _, _, meta = automaton
    longest = np.int64(states[meta[LAST], LINK]) if meta[LAST] != START else START
    length = np.int64(states[longest, LENGTH])
    after = n_tokens
    state = longest
    # First occurrences of shorter suffixes are never later ones.
    while state > START:
        after = np.int64(states[state, END]) + 1
        if n_tokens - after >= room:
            break
        state = np.int64(states[state, LINK])
    return length, after


@njit(cache=True)
def _rehash(edges: Array, n_edges: int, buckets: Array) -> None:
    for edge in range(n_edges):
        _place_edge(edges, buckets, edge)


class SuffixAutomaton:
    """One automaton, over one text.

    Args:
        max_tokens: tokens held at most, which bounds the memory (124 bytes a token). A single text
            that grows longer is forgotten but for its newest half, which costs amortised O(1).

    Attributes:
        arrays: what compiled code works on; replaced when the automaton grows.
    """

    def __init__(self, max_tokens: int = _MAX_TOKENS) -> None:
        self.max_tokens = min(max_tokens, _MAX_TOKENS)
        self._room = min(_FIRST_SIZE, self.max_tokens)
        self.arrays = _empty_arrays(self._room)
        self.clear()

    def __len__(self) -> int:
        return int(self.arrays.meta[TOKENS])

    def clear(self) -> None:
        states, _, buckets, meta = self.arrays
        buckets.fill(NONE)
        meta[:] = (1, 0, START, 0)
        states[START] = (0, NONE, NONE, NONE, 0)

    def extend(self, tokens: Array, begin: int, end: int) -> None:
        """Add ``tokens[begin:end]`` of the text ``tokens``, of which positions are remembered.

        Beyond ``max_tokens`` the oldest part of it is forgotten.
        """
        while begin < end:
            free = self._room - len(self)
            if free == 0:
                if self._room < self.max_tokens:
                    self._grow(len(self) + end - begin)
                else:
                    begin = max(0, begin - self.max_tokens // 2)
                    self.clear()
                continue
            stop = min(end, begin + free)
            extend(self.arrays, tokens, begin, stop)
            begin = stop

    def repeated_suffix(self, n_tokens: int, room: int = 0) -> tuple[int, int]:
        length, after = repeated_suffix(self.arrays, n_tokens, room)
        return int(length), int(after)

    def _grow(self, required: int) -> None:
        old = self.arrays
        self._room = min(max(2 * self._room, required), self.max_tokens)
        new = _empty_arrays(self._room)._replace(meta=old.meta)
        n_states, n_edges = int(old.meta[STATES]), int(old.meta[EDGES])
        new.states[:n_states] = old.states[:n_states]
        new.edges[:n_edges] = old.edges[:n_edges]
        _rehash(new.edges, n_edges, new.buckets)
        self.arrays = new


def _empty_arrays(room: int) -> AutomatonArrays:
    return AutomatonArrays(
        np.empty((2 * room + 1, 5), dtype=np.int32),
        np.empty((3 * room, 4), dtype=np.int32),
        np.full(1 << max(4 * room - 1, 1).bit_length(), NONE, dtype=np.int32),
        np.zeros(4, dtype=np.int64),
    )
