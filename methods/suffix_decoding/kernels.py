"""All compiled code of depth-limited suffix trees; `methods.suffix_decoding.tree` owns the arrays.

One file, because numba's cache on disk notices a change in a function's own file only.

Invariants, on which everything here rests:
    - A node's count is the number of stored suffixes that pass its whole edge.
    - Every stored suffix (cut at the tree's depth) and every growing one ends at the end of an
      edge, never inside it. So all positions of an edge have the node's count.
    - A node but the root that has one child has a suffix ending at it; hence at most two nodes for
      each token.
    - A node's label lies in the newest text that passed it, so that it outlives older requests.
    - Siblings are ordered by count, equal ones by who reached it first (the root's are unordered).
"""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
from numba import njit

from specbench.arrays import Array

NONE = -1
ROOT = 0

# Columns of a node. CHAIN links the nodes of one hash bucket, NEXT also the freed nodes. SINGLE is
# the first child with count 1. BEGIN and LENGTH name the edge's label in the text, TOKEN is its
# first token.
PARENT, FIRST, LAST, SINGLE, NEXT, PREV, CHAIN, COUNT, BEGIN, LENGTH, TOKEN = range(11)
COLUMNS = 11
# Entries of ``meta``: nodes in use, never-used node, freed node, growing suffixes, end of the text.
NODES, FRESH, FREED, GROWING, TAIL = range(5)
N_META = 5

# The hash of `methods.cacheback.kernels`, again: an edit there would leave stale code here.
_SEED = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_SHIFT = np.uint64(29)


@njit(cache=True, inline="always")
def _mix(state: int, token: int) -> np.uint64:
    mixed = (state ^ (np.uint64(token) + _SEED)) * _MIX
    return mixed ^ (mixed >> _SHIFT)


@njit(cache=True, inline="always")
def _bucket(parent: int, token: int, buckets: Array) -> int:
    return _mix(_mix(np.uint64(0), parent), token) & np.uint64(len(buckets) - 1)


@njit(cache=True)
def _hash(nodes: Array, buckets: Array, node: int) -> None:
    bucket = _bucket(nodes[node, PARENT], nodes[node, TOKEN], buckets)
    nodes[node, CHAIN] = buckets[bucket]
    buckets[bucket] = node


@njit(cache=True)
def _unhash(nodes: Array, buckets: Array, node: int) -> None:
    bucket = _bucket(nodes[node, PARENT], nodes[node, TOKEN], buckets)
    if buckets[bucket] == node:
        buckets[bucket] = nodes[node, CHAIN]
        return
    at = buckets[bucket]
    while nodes[at, CHAIN] != node:
        at = nodes[at, CHAIN]
    nodes[at, CHAIN] = nodes[node, CHAIN]


@njit(cache=True)
def rehash(tree: tuple[Array, ...]) -> None:
    """Fill empty buckets with all nodes."""
    nodes, buckets, _, _, meta = tree
    for node in range(1, meta[FRESH]):
        if nodes[node, COUNT] > 0:
            _hash(nodes, buckets, node)


@njit(cache=True)
def _child(nodes: Array, buckets: Array, parent: int, token: int) -> np.int64:
    """The child whose edge begins with ``token``, or -1; the most frequent one is tried first."""
    node = np.int64(nodes[parent, FIRST])
    if node == NONE or nodes[node, TOKEN] == token:
        return node
    node = np.int64(buckets[_bucket(parent, token, buckets)])
    while node != NONE and (nodes[node, PARENT] != parent or nodes[node, TOKEN] != token):
        node = np.int64(nodes[node, CHAIN])
    return node


# -- children by count -----------------------------------------------------------------------------


@njit(cache=True)
def _insert_before(nodes: Array, parent: int, node: int, after: int) -> None:
    """Make ``node`` a child of ``parent`` in front of ``after``; -1 is the end."""
    before = nodes[parent, LAST] if after == NONE else nodes[after, PREV]
    _insert_between(nodes, parent, node, before, after)


@njit(cache=True)
def _insert_between(nodes: Array, parent: int, node: int, before: int, after: int) -> None:
    nodes[node, NEXT] = after
    nodes[node, PREV] = before
    if before == NONE:
        nodes[parent, FIRST] = node
    else:
        nodes[before, NEXT] = node
    if after == NONE:
        nodes[parent, LAST] = node
    else:
        nodes[after, PREV] = node


@njit(cache=True)
def _take_out(nodes: Array, node: int) -> None:
    parent, before, after = nodes[node, PARENT], nodes[node, PREV], nodes[node, NEXT]
    if nodes[parent, SINGLE] == node:
        nodes[parent, SINGLE] = after
    if before == NONE:
        nodes[parent, FIRST] = after
    else:
        nodes[before, NEXT] = after
    if after == NONE:
        nodes[parent, LAST] = before
    else:
        nodes[after, PREV] = before


@njit(cache=True)
def _take_place(nodes: Array, node: int, old: int) -> None:
    """Put ``node`` where ``old`` is among its siblings; ``old`` is in no list afterwards."""
    parent, before, after = nodes[old, PARENT], nodes[old, PREV], nodes[old, NEXT]
    nodes[node, PARENT] = parent
    if nodes[parent, SINGLE] == old:
        nodes[parent, SINGLE] = node
    _insert_between(nodes, parent, node, before, after)


@njit(cache=True)
def _count_up(nodes: Array, node: int) -> None:
    parent = nodes[node, PARENT]
    nodes[node, COUNT] += 1
    count = nodes[node, COUNT]
    if parent == ROOT:
        return
    if count == 2:
        # A node may have thousands of children that were seen once: pass them all at a stroke.
        _take_out(nodes, node)
        _insert_before(nodes, parent, node, nodes[parent, SINGLE])
        return
    after = node
    while nodes[after, PREV] != NONE and nodes[nodes[after, PREV], COUNT] < count:
        after = nodes[after, PREV]
    if after != node:
        _take_out(nodes, node)
        _insert_before(nodes, parent, node, after)


@njit(cache=True)
def _count_down(nodes: Array, node: int) -> None:
    parent = nodes[node, PARENT]
    nodes[node, COUNT] -= 1
    count = nodes[node, COUNT]
    if parent == ROOT:
        return
    after = nodes[node, NEXT]
    if after != NONE and nodes[after, COUNT] > count:
        _take_out(nodes, node)
        while after != NONE and nodes[after, COUNT] > count:
            after = nodes[after, NEXT]
        _insert_before(nodes, parent, node, after)
    if count == 1:
        nodes[parent, SINGLE] = node


# -- growing ---------------------------------------------------------------------------------------


@njit(cache=True)
def _new_node(nodes: Array, meta: Array, begin: int, token: int) -> int:
    node = meta[FREED]
    if node == NONE:
        node = meta[FRESH]
        meta[FRESH] += 1
    else:
        meta[FREED] = nodes[node, NEXT]
    meta[NODES] += 1
    nodes[node, FIRST] = NONE
    nodes[node, LAST] = NONE
    nodes[node, SINGLE] = NONE
    nodes[node, COUNT] = 1
    nodes[node, BEGIN] = begin
    nodes[node, LENGTH] = 1
    nodes[node, TOKEN] = token
    return node


@njit(cache=True)
def _free(nodes: Array, meta: Array, node: int) -> None:
    nodes[node, COUNT] = 0
    nodes[node, NEXT] = meta[FREED]
    meta[FREED] = node
    meta[NODES] -= 1


@njit(cache=True)
def _advance(tree: tuple[Array, ...], node: int, token: int, position: int) -> int:
    """Move one growing suffix from the end of ``node`` over the token at ``position``."""
    nodes, buckets, text, _, meta = tree
    child = _child(nodes, buckets, node, token)
    if child == NONE:
        if node != ROOT and nodes[node, FIRST] == NONE and nodes[node, COUNT] == 1:
            nodes[node, LENGTH] += 1
            nodes[node, BEGIN] = position + 1 - nodes[node, LENGTH]
            return node
        leaf = _new_node(nodes, meta, position, token)
        nodes[leaf, PARENT] = node
        _insert_before(nodes, node, leaf, NONE)
        if nodes[node, SINGLE] == NONE:
            nodes[node, SINGLE] = leaf
        _hash(nodes, buckets, leaf)
        return leaf
    # Whether nothing ends at ``node`` once this suffix has left it.
    alone = (
        node != ROOT
        and nodes[node, FIRST] == nodes[node, LAST]
        and nodes[node, COUNT] == nodes[child, COUNT] + 1
    )
    if nodes[child, LENGTH] == 1:
        if not alone:
            _count_up(nodes, child)
            nodes[child, BEGIN] = position
            return child
        _join(nodes, buckets, meta, node, child)
        nodes[child, BEGIN] = position + 1 - nodes[child, LENGTH]
        return child
    _unhash(nodes, buckets, child)
    nodes[child, BEGIN] += 1
    nodes[child, LENGTH] -= 1
    nodes[child, TOKEN] = text[nodes[child, BEGIN] & (len(text) - 1)]
    if alone:
        nodes[node, LENGTH] += 1
        nodes[node, BEGIN] = position + 1 - nodes[node, LENGTH]
        _hash(nodes, buckets, child)
        return node
    middle = _new_node(nodes, meta, position, token)
    nodes[middle, COUNT] = nodes[child, COUNT]
    _take_place(nodes, middle, child)
    _hash(nodes, buckets, middle)
    nodes[child, PARENT] = middle
    _insert_before(nodes, middle, child, NONE)
    if nodes[child, COUNT] == 1:
        nodes[middle, SINGLE] = child
    _hash(nodes, buckets, child)
    _count_up(nodes, middle)
    return middle


@njit(cache=True)
def _join(nodes: Array, buckets: Array, meta: Array, node: int, child: int) -> None:
    """Make ``node`` and its only child one node, the child; its BEGIN is left as it was."""
    _unhash(nodes, buckets, node)
    _unhash(nodes, buckets, child)
    _take_place(nodes, child, node)
    nodes[child, TOKEN] = nodes[node, TOKEN]
    nodes[child, LENGTH] += nodes[node, LENGTH]
    nodes[child, COUNT] = nodes[node, COUNT]
    _hash(nodes, buckets, child)
    _free(nodes, meta, node)


@njit(cache=True)
def append(tree: tuple[Array, ...], tokens: Array, begin: int, end: int) -> None:
    """Add ``tokens[begin:end]`` to the request in progress; there must be room for them."""
    _, _, text, active, meta = tree
    depth = len(active)
    for i in range(begin, end):
        token = tokens[i]
        position = meta[TAIL]
        meta[TAIL] += 1
        text[position & (len(text) - 1)] = token
        growing = min(meta[GROWING], depth - 1)
        # The longest suffix first: whoever leaves a node or moves its end is then alone there.
        for k in range(growing - 1, -1, -1):
            active[k + 1] = _advance(tree, active[k], token, position)
        active[0] = _advance(tree, ROOT, token, position)
        meta[GROWING] = growing + 1


@njit(cache=True)
def remove(tree: tuple[Array, ...], begin: int, end: int) -> None:
    """Take the oldest request, stored at positions ``begin`` to ``end``, out of the tree."""
    nodes, buckets, text, active, meta = tree
    mask = len(text) - 1
    path = np.empty(len(active), dtype=np.int64)
    for first in range(begin, end):
        stop = min(first + len(active), end)
        position = first
        node = np.int64(ROOT)
        n = 0
        while position < stop:
            node = _child(nodes, buckets, node, text[position & mask])
            path[n] = node
            n += 1
            position += nodes[node, LENGTH]
        survivor = np.int64(ROOT)
        for i in range(n - 1, -1, -1):
            node = path[i]
            if nodes[node, COUNT] == 1:
                _unhash(nodes, buckets, node)
                _take_out(nodes, node)
                _free(nodes, meta, node)
            else:
                _count_down(nodes, node)
                if survivor == ROOT:
                    survivor = node
        if survivor != ROOT:
            child = np.int64(nodes[survivor, FIRST])
            only = child != NONE and child == nodes[survivor, LAST]
            if only and nodes[child, COUNT] == nodes[survivor, COUNT]:
                nodes[child, BEGIN] -= nodes[survivor, LENGTH]
                _join(nodes, buckets, meta, survivor, child)


# -- drafting --------------------------------------------------------------------------------------


@njit(cache=True)
def locate(
    tree: tuple[Array, ...], tokens: Array, begin: int, end: int
) -> tuple[np.int64, np.int64]:
    """Node and place in its edge where ``tokens[begin:end]`` leads from the root, or (-1, 0)."""
    nodes, buckets, text, _, _ = tree
    mask = len(text) - 1
    node = np.int64(ROOT)
    used = np.int64(0)
    for i in range(begin, end):
        if used < nodes[node, LENGTH]:
            if text[(nodes[node, BEGIN] + used) & mask] != tokens[i]:
                return np.int64(NONE), np.int64(0)
            used += 1
        else:
            node = _child(nodes, buckets, node, tokens[i])
            if node == NONE:
                return np.int64(NONE), np.int64(0)
            used = np.int64(1)
    return node, used


@njit(cache=True)
def _draft_path(
    tree: tuple[Array, ...],
    node: np.int64,
    used: np.int64,
    budget: int,
    least: float,
    out: Array,
    chances: Array,
) -> tuple[int, float]:
    nodes, _, text, _, _ = tree
    mask = len(text) - 1
    probability = 1.0
    score = 0.0
    n = 0
    while n < budget:
        if used < nodes[node, LENGTH]:
            token = text[(nodes[node, BEGIN] + used) & mask]
            used += 1
        else:
            child = np.int64(nodes[node, FIRST])
            if child == NONE:
                break
            probability *= nodes[child, COUNT] / nodes[node, COUNT]
            if probability < least:
                break
            node = child
            token = nodes[node, TOKEN]
            used = np.int64(1)
        out[0, n] = token
        out[1, n] = n - 1
        chances[n] = probability
        score += probability
        n += 1
    return n, score


@njit(cache=True)
def _draft_tree(
    tree: tuple[Array, ...],
    node: np.int64,
    used: np.int64,
    budget: int,
    least: float,
    out: Array,
    chances: Array,
) -> tuple[int, float]:
    nodes, _, text, _, _ = tree
    mask = len(text) - 1
    score = 0.0
    n = 0
    found = 0
    # Minus probability, order of discovery, node, tokens of its edge used, draft node.
    heap: Any = [(-1.0, 0, node, used, np.int64(NONE))]
    while n < budget and len(heap) > 0:
        minus, order, node, used, above = heapq.heappop(heap)
        place = np.int64(NONE)
        if order > 0:
            place = np.int64(n)
            out[0, n] = text[(nodes[node, BEGIN] + used - 1) & mask]
            out[1, n] = above
            chances[n] = -minus
            score -= minus
            n += 1
        if used < nodes[node, LENGTH]:
            found += 1
            heapq.heappush(heap, (minus, found, node, used + 1, place))
            continue
        child = np.int64(nodes[node, FIRST])
        while child != NONE:
            below = minus * nodes[child, COUNT] / nodes[node, COUNT]
            if -below < least:
                break
            found += 1
            heapq.heappush(heap, (below, found, child, np.int64(1), place))
            child = np.int64(nodes[child, NEXT])
    return n, score


@njit(cache=True)
def speculate(
    tree: tuple[Array, ...],
    tokens: Array,
    length: int,
    factor: float,
    offset: float,
    longest: int,
    least: float,
    branching: bool,
) -> tuple[float, Array, Array]:
    """The best draft over all suffixes of a text that the tree knows.

    A suffix of p tokens may draft ``int(factor × p + offset)`` tokens. A draft's score is the sum
    of its nodes' path probabilities: the number of tokens it is expected to get accepted. Of equal
    scores the longest suffix's counts.

    Args:
        tree: its request in progress, if any, ends as the text does.
        tokens: int64 text; only ``tokens[:length]`` counts.
        longest: nodes of a draft at most.
        least: path probability below which nothing is drafted.
        branching: whether the draft is a tree, the most probable node first, or a chain of the most
            frequent continuations.

    Returns:
        The score, ``[2, nodes]`` int64 tokens and parents, and ``[nodes]`` path probabilities.
    """
    nodes, _, _, active, meta = tree
    best = np.empty((2, longest), dtype=np.int64)
    trial = np.empty((2, longest), dtype=np.int64)
    best_chances = np.empty(longest, dtype=np.float64)
    chances = np.empty(longest, dtype=np.float64)
    best_n, best_score = 0, 0.0
    for p in range(1, min(len(active), length)):
        if p <= meta[GROWING]:
            node = np.int64(active[p - 1])
            used = np.int64(nodes[node, LENGTH])
        else:
            node, used = locate(tree, tokens, length - p, length)
            if node == NONE:
                break
        budget: Any = min(longest, np.int64(factor * p + offset))
        # No node counts for more than 1.
        if budget <= 0 or budget < best_score:
            continue
        if branching:
            n, score = _draft_tree(tree, node, used, budget, least, trial, chances)
        else:
            n, score = _draft_path(tree, node, used, budget, least, trial, chances)
        if score >= best_score:
            best, trial = trial, best
            best_chances, chances = chances, best_chances
            best_n, best_score = n, score
    return best_score, best[:, :best_n].copy(), best_chances[:best_n].copy()
