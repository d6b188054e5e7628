"""A fixed tree filled with the candidates of a trained head: what Medusa, Hydra, EAGLE-1 share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specbench.decoding.head_drafter import HeadDrafter
from specbench.decoding.structs import DraftContext, DraftTree
from specbench.index.static_tree import tree_of_knobs


@dataclass(kw_only=True, eq=False)
class FixedTreeDrafter(HeadDrafter):
    """Base of drafters that fill a fixed tree with a head's candidates.

    Attributes:
        head: the head's name in ``pair.heads``, a folder or a hub id.
        tree: ``medusa_63``, Medusa's 63 nodes in 4 levels, ``eagle_25``, EAGLE's 25 in 5, or
            another method's (``template``, ``sam_60``).
        levels: nodes of each level of a tree instead, the cheapest by rank; [1, 1, 1] is a chain.
        vocabulary: folder of a draft model whose list of ids is drafted from alone, where the head
            shares the target's LM head; None drafts from all ids.
    """

    tree: str = "medusa_63"
    levels: list[int] | None = None
    vocabulary: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._tree = tree_of_knobs(self.tree, self.levels)

    @property
    def max_nodes(self) -> int:
        return len(self._tree)

    def setup(self, context: DraftContext) -> None:
        super().setup(context)
        assert context.target is not None
        self._device = context.target.device
        layers = self._tree.layers()
        self._n_ranks = [layer.n_ranks for layer in layers]
        # By level: each node's parent among the nodes read last, its rank, and the nodes to read.
        self._plan = [
            tuple(torch.from_numpy(part).to(self._device) for part in (x.above, x.ranks, x.inner))
            for x in layers
        ]

    def _filled(self, tokens: torch.Tensor) -> DraftTree:
        """The tree's first nodes with ``tokens [n]``, ids of the target on its device."""
        on_host = self._device.type == "cpu"
        return DraftTree(tokens.numpy() if on_host else tokens, self._tree.parents[: len(tokens)])
