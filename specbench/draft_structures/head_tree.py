"""A fixed tree filled with a trained head's candidates: shared by Medusa, Hydra, EAGLE-1."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from specbench.decoding.structs import DraftContext, DraftTree, Needs
from specbench.draft_structures.static_tree import StaticTree, tree_files, tree_of_knobs
from specbench.errors import ConfigurationError
from specbench.models.heads.drafter import HeadDrafter


@dataclass(kw_only=True, eq=False)
class FixedTreeDrafter(HeadDrafter):
    """Base of drafters that fill a fixed tree with a head's candidates.

    Attributes:
        head: the head's name in ``pair.heads``, a folder or a hub id.
        tree: ``medusa_63``, Medusa's 63 nodes in 4 levels, or its others (``vicuna_7b_stage2``,
            ``vicuna_13b_stage2``, ``vicuna_33b_stage2``, ``zephyr_stage2``), ``eagle_25``, EAGLE's
            25 in 5, another method's (``template``, ``sam_60``), or a JSON file with each node's
            ranks from the root.
        levels: instead, nodes of each level of a tree, the cheapest by rank; [1, 1, 1] is a chain.
        vocabulary: folder of a draft model with a list of ids; a head that shares the target's LM
            head then drafts only these. None drafts from all ids.
    """

    tree: str = "medusa_63"
    levels: list[int] | None = None
    vocabulary: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._tree = self._shape()

    @property
    def shape(self) -> StaticTree:
        """The tree that its drafts fill; their ``sources`` are its ranks."""
        return self._tree

    def _shape(self) -> StaticTree:
        return tree_of_knobs(self.tree, self.levels, type(self).tree)

    def _shape_for(self, context: DraftContext) -> StaticTree:
        """Return the tree, now that the head is loaded."""
        return self._tree

    @property
    def max_nodes(self) -> int:
        return len(self._tree)

    @property
    def _levels(self) -> int:
        return len(self._tree.levels)

    @property
    def _variant(self) -> str | None:
        return self.vocabulary

    @property
    def needs(self) -> Needs:
        files = tree_files(self.tree) if self.levels is None else ()
        return replace(super().needs, artifacts=files)

    def setup(self, context: DraftContext) -> None:
        super().setup(context)
        ids = self._head.target_ids
        self._n_ids = context.vocab_size if ids is None else len(ids)
        self._tree = self._shape_for(context)
        self._node_ranks = self._tree.ranks
        layers = self._tree.layers()
        self._n_ranks = [layer.n_ranks for layer in layers]
        # By level: each node's parent among the last nodes read, its rank, and the nodes to read.
        self._plan = [
            tuple(torch.from_numpy(part).to(self._device) for part in (x.above, x.ranks, x.inner))
            for x in layers
        ]
        if self._tree.n_ranks > self._n_ids:
            key = "tree" if self.levels is None else "levels"
            raise ConfigurationError(
                f"method.{key}={getattr(self, key)} takes {self._tree.n_ranks} candidates of a "
                f"node, and there are {self._n_ids} ids. Name a tree of smaller ranks."
            )

    def _tree_of(self, drafted: torch.Tensor, levels: int) -> DraftTree:
        return self._filled(drafted[: sum(self._tree.level_sizes[:levels])])

    def _filled(self, tokens: torch.Tensor) -> DraftTree:
        """Build the tree's first nodes with ``tokens [n]``, target ids on its device."""
        on_host, n = self._device.type == "cpu", len(tokens)
        return DraftTree(
            tokens.numpy() if on_host else tokens,
            self._tree.parents[:n],
            sources=self._node_ranks[:n],
        )
