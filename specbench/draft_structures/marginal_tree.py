"""The likeliest prefixes of a block of marginals as a tree: DDTree's builder.

Paper: "Accelerating Speculative Decoding with Block Diffusion Draft Trees", arXiv 2604.12989.
Reference code studied: liranringel/ddtree c96427a (``ddtree.py``).
For drafters that guess each position independently of the tokens drafted before it. A prefix's
weight is the product of its tokens' probabilities, so no child outweighs its parent or an elder
sibling. As in the reference the next node comes from a heap: the heaviest, and of equals the one
with the lowest ranks.
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np
import torch

from specbench.arrays import FloatArray, IntArray
from specbench.decoding.structs import DraftTree


def top_log_probs(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the ``k`` likeliest ids of each row, or all if there are fewer, the likeliest first.

    Args:
        logits: ``[..., vocab]``.

    Returns:
        Log-probabilities among all ids, no coarser than float32, and ids, ``[..., k]``.
    """
    if logits.dtype != torch.float64:
        logits = logits.float()
    best, ids = logits.topk(min(k, logits.shape[-1]), dim=-1)
    # Normalizing the likeliest ones alone rounds less than a softmax over all.
    return best - logits.logsumexp(-1, keepdim=True), ids


def likeliest_prefixes(ids: IntArray, log_probs: FloatArray, n_nodes: int) -> DraftTree:
    """Build the tree of the ``n_nodes`` likeliest prefixes, or of all, the likeliest first.

    Args:
        ids: ``[levels, ranks]`` candidates of each position after the root.
        log_probs: ``[levels, ranks]`` their log-probabilities, falling along each row.

    Returns:
        The tree, with ``path_probs``.
    """
    rows: list[list[float]] = log_probs.tolist()
    nodes: list[tuple[int, int, int, float]] = []  # parent, level, rank, -log of the weight
    heap: list[tuple[float, tuple[int, ...], int]] = [(-rows[0][0], (0,), -1)]
    while heap and len(nodes) < n_nodes:
        cost, ranks, parent = heappop(heap)
        level, rank = len(ranks) - 1, ranks[-1]
        row = rows[level]
        nodes.append((parent, level, rank, cost))
        if rank + 1 < len(row):
            # From the elder sibling, in the reference's order: another one may swap equals.
            younger = cost + row[rank] - row[rank + 1]
            heappush(heap, (younger, (*ranks[:-1], rank + 1), parent))
        if level + 1 < len(rows):
            heappush(heap, (cost - rows[level + 1][0], (*ranks, 0), len(nodes) - 1))
    parents, levels, chosen, costs = zip(*nodes, strict=True)
    return DraftTree(
        ids[np.array(levels), np.array(chosen)],
        np.array(parents, dtype=np.int64),
        path_probs=np.exp(-np.array(costs)),
    )
