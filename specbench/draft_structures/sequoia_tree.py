"""The static tree with most accepted tokens, from acceptance rates by position: Sequoia's program.

Paper: "Sequoia: Scalable, Robust, and Hardware-aware Speculative Decoding", arXiv 2402.12374.
Reference code studied: Infini-AI-Lab/Sequoia at 0ff3ff7 (``tree_search.py``).
A tree's worth is the sum over its nodes, the root included, of the products of acceptance along
their paths. As there, a tree has a child only together with all elder ones. Where ours differs:
acceptance may also depend on the level, and the tree's depth and nodes are given.
Checked: equal to the authors' program in 776 of 776 cases;
``tests/draft_structures/test_sequoia_tree.py`` compares it with all trees of small cases.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from specbench.arrays import FloatArray, IntArray
from specbench.draft_structures.static_tree import RankPath, StaticTree


def best_tree(acceptance: FloatArray, n_nodes: int) -> tuple[StaticTree, float]:
    """Find the best tree of at most ``n_nodes`` nodes, without the root, and its worth.

    Args:
        acceptance: ``[levels, ranks]`` the share of children accepted, by the depth of the parent
            (0 the root) and by rank; a tree has at most as many levels and ranks.

    Raises:
        ValueError: there is no node, level or rank.
    """
    levels, ranks = acceptance.shape
    if min(n_nodes, levels, ranks) < 1:
        raise ValueError("a tree has at least one node, one level and one rank")
    rows = n_nodes + 1
    # worth[n]: the best subtree of n + 1 nodes at the present depth, its top node included.
    worth = np.full(rows, -np.inf)
    worth[0] = 1.0
    plans: list[list[tuple[FloatArray, IntArray]]] = []  # by level, then by number of children
    for chances in acceptance[::-1]:
        best = np.full(rows, -np.inf)
        best[0] = 1.0
        plan = [(best, np.zeros(rows, dtype=np.int64))]
        possible = np.isfinite(worth)
        for chance in chances:
            gain = np.where(possible, chance * np.where(possible, worth, 0.0), -np.inf)
            before, values_at = plan[-1][0], np.full(rows, -np.inf)
            last = np.zeros(rows, dtype=np.int64)  # nodes of the youngest child's subtree
            for n in range(1, rows):
                # The youngest child has 1 to n of the n nodes below.
                values = before[:n][::-1] + gain[:n]
                last[n] = 1 + int(values.argmax())
                values_at[n] = values[last[n] - 1]
            plan.append((values_at, last))
        plans.insert(0, plan)
        worth = np.max([value for value, _ in plan], axis=0)
    # On ties the fewest nodes: a child that is never accepted is worth nothing.
    size = int(worth.argmax())
    paths: list[RankPath] = []
    _collect(plans, 0, size, (), paths)
    return StaticTree.from_paths(paths), float(worth[size])


def _collect(
    plans: Sequence[Sequence[tuple[FloatArray, IntArray]]],
    depth: int,
    size: int,
    path: RankPath,
    paths: list[RankPath],
) -> None:
    """Add the paths of the best subtree with ``size`` nodes below ``path``."""
    if size == 0:
        return
    plan = plans[depth]
    children = int(np.argmax([value[size] for value, _ in plan]))
    for rank in range(children - 1, -1, -1):
        taken = int(plan[rank + 1][1][size])
        paths.append((*path, rank))
        _collect(plans, depth + 1, taken - 1, paths[-1], paths)
        size -= taken


def worth_of(tree: StaticTree, acceptance: FloatArray) -> float:
    """Return the mean tokens committed by a step with the tree, the target's token included."""
    reached: dict[RankPath, float] = {(): 1.0}
    for path in tree.paths:
        reached[path] = reached[path[:-1]] * acceptance[len(path) - 1, path[-1]]
    return sum(reached.values())


def count_acceptance(
    tree: StaticTree, steps: Iterable[tuple[int, Sequence[int], bool]]
) -> tuple[IntArray, IntArray]:
    """Count how often children were accepted, and could have been, by level and rank.

    Args:
        steps: for each step with the tree its drafted nodes (the first ones of the tree), the ranks
            of the accepted nodes from the root down, and whether the target's token follows these:
            otherwise a stop rule cut them, and the next acceptance is unknown.

    Returns:
        Two ``[levels, ranks]`` int64 arrays.
    """
    node_of = {path: node for node, path in enumerate(tree.paths)}
    accepted = np.zeros((len(tree.levels), tree.n_ranks), dtype=np.int64)
    offered = np.zeros_like(accepted)
    for drafted, ranks, whole in steps:
        path: RankPath = ()
        for depth in range(min(len(ranks) + whole, len(tree.levels))):
            for rank in range(tree.n_ranks):
                offered[depth, rank] += node_of.get((*path, rank), drafted) < drafted
            if depth < len(ranks):
                accepted[depth, ranks[depth]] += 1
                path = (*path, ranks[depth])
    return accepted, offered
