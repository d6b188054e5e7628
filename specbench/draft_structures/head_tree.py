"""Trees of a trained head's candidates: fixed ones, and those that grow where the head is sure."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from specbench.config.schema import Count, Positive
from specbench.decoding.protocols import ModelWork
from specbench.decoding.structs import DraftContext, DraftTree, Needs
from specbench.draft_structures.marginal_tree import top_log_probs
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


@dataclass(kw_only=True, eq=False)
class DynamicTreeDrafter(HeadDrafter):
    """Drafts the likeliest nodes of a tree that is grown level by level.

    Attributes:
        head: the head's name in ``pair.heads``, a folder or a hub id.
        total: rows of the target pass, the root among them.
        depth: levels below the first: the tree has one more.
        top_k: nodes read of each level, and children made of each.
    """

    total: Positive = 60
    depth: Count = 5  # 0: one level
    top_k: Positive = 10

    @property
    def needs(self) -> Needs:
        return replace(super().needs, path_probs=True)

    @property
    def max_nodes(self) -> int:
        return max(1, min(self.total - 1, self.top_k + self.depth * self.top_k**2))

    @property
    def _levels(self) -> int:
        return min(self.depth + 1, self.total - 1)  # a node needs all nodes above it

    @property
    def _nodes_read(self) -> int:
        return max(1, self.depth * self.top_k)

    def _growing(
        self, feature: torch.Tensor, levels: int, number: torch.Tensor | None
    ) -> ModelWork[torch.Tensor]:
        """Return ids, parents and path probabilities, the likeliest first, ``[3, n]`` float64."""
        head = self._head
        scores, ids = top_log_probs((yield from head.scoring(feature)), self.top_k)
        k = scores.shape[1]
        scores, ids = scores[0], head.to_target_ids(ids[0])
        # All nodes, in the order of their creation.
        all_ids, all_scores = [ids], [scores]
        parents = [torch.full_like(ids, -1)]
        # The nodes to read next: their numbers among all nodes, and their parents' features and
        # numbers among read nodes.
        best = torch.arange(k, device=self._device)
        above = feature.expand(k, -1)
        read = torch.full_like(best, -1)
        n_nodes = k
        for level in range(levels - 1):
            out = yield from head.extending(ids, above, read)
            gained, children = top_log_probs((yield from head.scoring(out)), self.top_k)
            children = head.to_target_ids(children).flatten()
            gained = (scores[:, None] + gained).flatten()
            all_ids.append(children)
            all_scores.append(gained)
            parents.append(best[:, None].expand(-1, k).flatten())
            chosen = _first(gained, k)
            ids, scores, best = children[chosen], gained[chosen], n_nodes + chosen
            row = chosen // k
            above, read = out[row], level * k + row
            n_nodes += k * k
        # A child scores at most as high as its parent and comes later: the best nodes are a tree.
        every_score = torch.cat(all_scores)
        if number is not None:
            beyond = torch.arange(n_nodes, device=self._device) >= k + (number - 1) * k * k
            every_score = every_score.masked_fill(beyond, -torch.inf)
        top = _first(every_score, min(self.total - 1, n_nodes))
        index = torch.full((n_nodes + 1,), -1, device=self._device)
        index[top] = torch.arange(len(top), device=self._device)
        nodes = (torch.cat(all_ids)[top], index[torch.cat(parents)[top]], every_score[top].exp())
        return torch.stack([part.double() for part in nodes])  # ids are exact in it

    def _tree_of(self, drafted: torch.Tensor, levels: int) -> DraftTree:
        k = min(self.top_k, self._n_ids)
        n_nodes = k + (levels - 1) * k * k
        # The only copy to the host per draft.
        tokens, above, probs = drafted.cpu().numpy()[:, : min(self.total - 1, n_nodes)]
        return DraftTree(tokens.astype(np.int64), above.astype(np.int64), path_probs=probs.copy())


def _first(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indices of the ``count`` largest, largest first; the first of equals wins."""
    return scores.argsort(descending=True, stable=True)[:count]
