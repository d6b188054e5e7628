"""Draft-tree geometry: depths, the ancestor matrix, paths.

Two implementations, each the other's test: a compiled walk for parents on the
host (a few microseconds), and a fixed number of tensor operations for parents on a device.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from specbench.arrays import BoolArray, IntArray
from specbench.decoding.structs import NO_TOKENS, DraftTree
from specbench.errors import CaseFailed

NO_AUX: BoolArray = np.empty(0, dtype=np.bool_)  # no auxiliary node
ROOT_ALONE: IntArray = np.zeros(1, dtype=np.int64)  # depths without a draft

VALID, BAD_PARENT, BAD_TOKEN, BAD_AUX = 0, 1, 2, 3


@njit(cache=True)  # type: ignore[untyped-decorator]
def fill_tree(
    tokens: IntArray,
    parents: IntArray,
    aux: BoolArray,
    vocab_size: int,
    depths: IntArray,
    visible: BoolArray,
) -> int:
    """Check a tree and write its geometry for the root (row 0) and the n nodes (rows 1 .. n).

    ``tokens [n]`` may be ``[0]`` to skip the check of ids, and ``aux [n]`` may be ``[0]`` for none.
    Writes ``depths [>= n + 1]`` and ``visible [>= n + 1, >= n + 1]``: row i sees row j.
    """
    n = len(parents)
    depths[0] = 0
    visible[: n + 1, : n + 1] = False
    visible[0, 0] = True
    for i in range(n):
        parent = parents[i]
        if parent < -1 or parent >= i:
            return BAD_PARENT
        if len(tokens) > 0 and (tokens[i] < 0 or tokens[i] >= vocab_size):
            return BAD_TOKEN
        if len(aux) > 0 and parent >= 0 and aux[parent] and not aux[i]:
            return BAD_AUX
        depths[i + 1] = depths[parent + 1] + 1
        visible[i + 1, : i + 1] = visible[parent + 1, : i + 1]
        visible[i + 1, i + 1] = True
    return VALID


@njit(cache=True)  # type: ignore[untyped-decorator]
def sibling_table(parents: IntArray, aux: BoolArray) -> IntArray:
    """List the candidates below root (row 0) and nodes: ``[n + 1, widest]``, padded with -1."""
    n = len(parents)
    counts = np.zeros(n + 1, dtype=np.int64)
    for i in range(n):
        if len(aux) == 0 or not aux[i]:
            counts[parents[i] + 1] += 1
    table = np.full((n + 1, counts.max()), -1, dtype=np.int64)
    counts[:] = 0
    for i in range(n):
        if len(aux) == 0 or not aux[i]:
            row = parents[i] + 1
            table[row, counts[row]] = i
            counts[row] += 1
    return table


def host_tokens(tree: DraftTree) -> IntArray:
    """Return ``[n]`` ids that the host can read without waiting; ``[0]`` for ids on a GPU."""
    if isinstance(tree.tokens, np.ndarray):
        return tree.tokens
    return tree.tokens.numpy() if tree.tokens.device.type == "cpu" else NO_TOKENS


class TreeGeometry:
    """Depths and ancestors of one tree after another, in buffers allocated once.

    Attributes:
        depths: ``[max_nodes + 1]`` of root and nodes.
        visible: ``[max_nodes + 1, max_nodes + 1]`` bool: row i sees row j.
    """

    def __init__(self, max_nodes: int) -> None:
        self.depths: IntArray = np.zeros(max_nodes + 1, dtype=np.int64)
        self.visible: BoolArray = np.zeros((max_nodes + 1, max_nodes + 1), dtype=np.bool_)

    def read(self, tree: DraftTree, vocab_size: int) -> None:
        """Check a tree and write its geometry to the buffers.

        Raises:
            CaseFailed: it is malformed, or has an id outside ``[0, vocab_size)``. The verifier
                checks ids on a GPU.
        """
        aux = NO_AUX if tree.aux is None else tree.aux
        args = (host_tokens(tree), tree.parents, aux, vocab_size, self.depths, self.visible)
        status = fill_tree(*args)
        if status != VALID or len(tree.tokens) != len(tree):
            fault = {
                BAD_TOKEN: f"a draft token is outside the vocabulary [0, {vocab_size})",
                BAD_AUX: "a candidate node hangs below an auxiliary one",
            }.get(status, "a node's parent does not come before it, or tokens and parents differ")
            raise CaseFailed("invalid_draft", f"malformed draft: {fault}")


def visibility(parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ancestor matrix and depths from parents on any device, without a loop over nodes.

    Pointer doubling: after k squarings a row sees all ancestors up to distance 2^k.

    Returns:
        ``visible [n + 1, n + 1]`` bool and ``depths [n + 1]`` int64, root first.
    """
    n = parents.shape[0]
    reach = torch.eye(n + 1, device=parents.device)
    rows = torch.arange(1, n + 1, device=parents.device)
    reach[rows, parents + 1] = reach.new_ones(())  # a Python number would be sent from the host
    for _ in range(max(n, 1).bit_length()):
        reach = (reach @ reach).clamp_(max=1.0)
    return reach.bool(), reach.sum(1).long() - 1
