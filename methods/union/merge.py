"""Merging several draft trees into one trie under one node budget, compiled."""

from __future__ import annotations

import numpy as np
from numba import njit

from specbench.arrays import Array

NONE = -1
LEFT_OUT = -2

# What an auxiliary node costs more than its parent: next to nothing, but more.
_AUX_COST = 1e-6


@njit(cache=True)
def _costs(parents: Array, aux: Array, offsets: Array, depth_cost: float) -> Array:
    """Each node's cost: along its path, its rank among its siblings plus ``depth_cost``."""
    cost = np.zeros(len(parents), dtype=np.float64)
    children = np.zeros(len(parents) + 1, dtype=np.int64)
    for part in range(len(offsets) - 1):
        base = offsets[part]
        children[:] = 0
        for node in range(base, offsets[part + 1]):
            parent = parents[node]
            above = 0.0 if parent == NONE else cost[base + parent]
            if aux[node]:
                cost[node] = above + _AUX_COST
            else:
                cost[node] = above + children[parent + 1] + depth_cost
                children[parent + 1] += 1
    return cost


@njit(cache=True)
def merge_trees(
    tokens: Array,
    parents: Array,
    aux: Array,
    offsets: Array,
    budget: int,
    quotas: Array,
    depth_cost: float,
    by_part: bool,
) -> tuple[Array, Array, Array]:
    """One trie of the nodes of several trees, equal branches shared.

    Nodes are taken one after the other; a node whose branch is in the trie already is shared and
    costs nothing, any other one takes a place while its part's quota and the budget last. A node
    whose parent was left out is left out. Auxiliary nodes are never shared.

    Args:
        tokens: ``[n]`` int64 of all trees, one after the other, the first in priority first.
        parents: ``[n]`` int64, each within its own tree; -1 is the root.
        aux: ``[n]`` bool.
        offsets: ``[parts + 1]`` int64: tree i has the nodes ``offsets[i] : offsets[i + 1]``.
        budget: nodes of the trie at most.
        quotas: ``[parts]`` int64: nodes that a tree may take places for.
        depth_cost: above 0, what a level costs; a place among its siblings costs 1. Within a tree,
            and between trees unless ``by_part``, the cheaper path goes first.
        by_part: whether a tree is finished before the next one begins.

    Returns:
        ``[3, m]`` int64 tokens, parents and part of each node (the first in priority that has it);
        ``[m]`` bool, auxiliary; ``[n]`` int64, the node that each given node became, or `LEFT_OUT`.
    """
    n = len(parents)
    cost = _costs(parents, aux, offsets, depth_cost)
    part_of = np.empty(n, dtype=np.int64)
    for part in range(len(offsets) - 1):
        part_of[offsets[part] : offsets[part + 1]] = part
    # Stable: of equal costs the first in priority comes first, and parents before children.
    order = np.argsort(cost, kind="mergesort")
    if by_part:
        order = order[np.argsort(part_of[order], kind="mergesort")]

    out = np.empty((3, budget), dtype=np.int64)
    out_aux = np.zeros(budget, dtype=np.bool_)
    # Children of a trie node are linked; entry 0 is the root.
    first = np.full(budget + 1, NONE, dtype=np.int64)
    following = np.full(budget + 1, NONE, dtype=np.int64)
    place = np.full(n, LEFT_OUT, dtype=np.int64)
    taken = np.zeros(len(offsets) - 1, dtype=np.int64)
    m = 0
    for i in range(n):
        node = order[i]
        part = part_of[node]
        above = parents[node]
        if above != NONE:
            above = place[offsets[part] + above]
            if above == LEFT_OUT:
                continue
        if not aux[node]:
            child = first[above + 1]
            while child != NONE and out[0, child] != tokens[node]:
                child = following[child]
            if child != NONE:
                place[node] = child
                out[2, child] = min(out[2, child], part)
                continue
        if m == budget or taken[part] == quotas[part]:
            continue
        place[node] = m
        taken[part] += 1
        out[0, m] = tokens[node]
        out[1, m] = above
        out[2, m] = part
        out_aux[m] = aux[node]
        if not aux[node]:
            following[m] = first[above + 1]
            first[above + 1] = m
        m += 1
    return out[:, :m].copy(), out_aux[:m].copy(), place


@njit(cache=True)
def part_view(
    place: Array, parents: Array, n_verified: int, path: Array
) -> tuple[Array, Array, Array]:
    """What became of one part's tree; ``place`` says what each of its nodes became in the trie.

    Args:
        n_verified: nodes of the trie that were verified, from the first.
        path: accepted ones among them.

    Returns:
        ``[kept]`` the part's nodes that were verified; ``[kept]`` the verified nodes they became;
        the part's nodes (among the kept) on the accepted path.
    """
    n = len(place)
    kept = np.empty(n, dtype=np.int64)
    new_parents = np.empty(n, dtype=np.int64)
    rows = np.empty(n, dtype=np.int64)
    renumbered = np.full(n, NONE, dtype=np.int64)
    m = 0
    for node in range(n):
        if place[node] == LEFT_OUT or place[node] >= n_verified:
            continue
        renumbered[node] = m
        kept[m] = node
        new_parents[m] = NONE if parents[node] == NONE else renumbered[parents[node]]
        rows[m] = place[node]
        m += 1
    # A part's tree is closed towards the root, so it has a first stretch of the path. Its deepest
    # node leads up to the others: the part may have two nodes for one.
    for depth in range(len(path) - 1, -1, -1):
        for node in range(m):
            if rows[node] == path[depth]:
                own = np.empty(depth + 1, dtype=np.int64)
                at = node
                for k in range(depth, -1, -1):
                    own[k] = at
                    at = new_parents[at]
                return kept[:m].copy(), rows[:m].copy(), own
    return kept[:m].copy(), rows[:m].copy(), np.empty(0, dtype=np.int64)
