"""Medusa: heads on the target's last state, each guessing the token at another distance.

Paper: "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", ICML
    2024, arXiv 2401.10774.
Reference code studied: FasterDecoding/Medusa e2a5d20 (``medusa_model_legacy.py``,
    ``medusa_model.py``, ``utils.py``, ``medusa_choices.py``); Spec-Bench fd2c1cd.
Heads: ``specbench.models.heads.medusa``, those of Medusa-1, which leave the target as it is.
A step: one product of all heads with the state of the last token before the root. The node at the
    path of ranks (r1, ..., rd) holds candidate rd of head d, whatever is above it: the tree is
    a cartesian product, and nothing is computed along its branches.
Where ours differs, and why:
    - At a temperature the reference accepts tokens that are likely enough. Here the output is plain
      sampling's; ``verifier=typical`` (lossy, and labelled so) is that rule but for what
      ``specbench.decoding.verify.typical`` says.
    - The tree is that of ``medusa_model_legacy.py``, of the evaluation scripts there and of
      Spec-Bench, whatever the target. ``tree=by_model`` chooses as ``medusa_model.py`` does.
    - ``tree=dynamic`` is DDTree over Medusa's heads: the ``nodes`` likeliest prefixes under their
      independence, whatever the temperature (``specbench.draft_structures.marginal_tree``).
    - The tree has parent indices; the reference pads its paths with id 0, which it can accept.
    - The first draft comes after the prompt's pass, as for every method here.
Example: head 1 ranks a before b and head 2 c before d: the paths (0), (1), (0, 0) and (1, 1) are
    a, b, "a c" and "b d". ``tree=dynamic``, ``nodes`` 3, head 1 giving a .6 and b .3, head 2 c .7
    and d .2: the prefixes weigh .6 (a), .42 ("a c"), .3 (b) and .21 ("b c"): a, "a c" and b.
State kept: none beyond the last state.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from specbench.arrays import IntArray
from specbench.config.schema import Positive, Text
from specbench.decoding.protocols import ModelWork, TargetInfo
from specbench.decoding.structs import AFTER_FINAL_NORM, DecodeState, DraftContext, DraftTree, Needs
from specbench.draft_structures.head_tree import FixedTreeDrafter
from specbench.draft_structures.marginal_tree import likeliest_prefixes, top_log_probs
from specbench.draft_structures.static_tree import (
    TREES,
    StaticTree,
    load_tree,
    require_heads,
    tree_of_knobs,
)
from specbench.models.heads import medusa
from specbench.models.heads.checkpoint import read_json

_ROWS_AHEAD = 64  # of the vocabulary's size each
_BY_MODEL, _DYNAMIC = "by_model", "dynamic"
# Parts of the name of the target that a head was trained for, and the tree that the reference code
# (``get_medusa_choice``) then takes: the first match, else `_OTHERS`.
_AUTHORS = (
    ("vicuna", "7b", "vicuna_7b_stage2"),
    ("vicuna", "13b", "vicuna_13b_stage2"),
    ("vicuna", "33b", "vicuna_33b_stage2"),
    ("zephyr", "", "zephyr_stage2"),
)
_OTHERS = "medusa_63"

log = logging.getLogger(__name__)


def authors_tree(target: str) -> str:
    """Return the tree in `TREES` that the reference code takes for a target of this name."""
    matches = (tree for family, size, tree in _AUTHORS if family in target and size in target)
    return next(matches, _OTHERS)


@dataclass(kw_only=True, eq=False)
class Medusa(FixedTreeDrafter):
    """Medusa-1: trained heads on the target's last state, one for each token ahead.

    Attributes:
        tree: also ``by_model``: by the name in the head's config.json, as the reference code does;
            and ``dynamic``: the likeliest prefixes of each step.
        nodes: of a dynamic tree.
    """

    name: str = "medusa"
    head: Text = "medusa"
    nodes: Positive = 32

    @property
    def max_nodes(self) -> int:
        return self.nodes if self.tree == _DYNAMIC else super().max_nodes

    @property
    def needs(self) -> Needs:
        return replace(super().needs, path_probs=self.tree == _DYNAMIC)

    def _shape(self) -> StaticTree:
        # Until the head is loaded; all trees of `by_model` have as many nodes.
        later = self.tree in (_BY_MODEL, _DYNAMIC) and self.levels is None
        tree = _OTHERS if later else self.tree
        return tree_of_knobs(tree, self.levels, type(self).tree, also=[_BY_MODEL, _DYNAMIC])

    def _shape_for(self, context: DraftContext) -> StaticTree:
        if self.tree == _DYNAMIC:  # all candidates that its nodes may be of, level by level
            ranks, levels = range(min(self.nodes, self._n_ids)), range(len(self._head.heads))
            return StaticTree.from_paths(
                (0,) * level + (rank,) for level in levels for rank in ranks
            )
        if self.tree == _BY_MODEL and self.levels is None:
            config = read_json(context.heads[self.head])
            tree = authors_tree(str(config.get("base_model_name_or_path")))
            log.info("%s: method.tree=by_model is %s", context.heads[self.head], tree)
            return load_tree(TREES[tree])
        return self._tree

    def setup(self, context: DraftContext) -> None:
        super().setup(context)
        require_heads(self._tree, len(self._head.heads), context.heads[self.head])
        depths = np.array([len(path) - 1 for path in self._tree.paths])
        ranks = np.array([path[-1] for path in self._tree.paths])
        self._depths = torch.from_numpy(depths).to(self._device)
        self._ranks = torch.from_numpy(ranks).to(self._device)
        self._ahead: torch.Tensor | None = None  # candidates of each row from the last prompt's on

    def _load(self, folder: Path, target: TargetInfo) -> medusa.MedusaHeads:
        return medusa.load(folder, target, self.vocabulary)

    @torch.inference_mode()
    def foresee(self, n_prompt: int, hidden: Mapping[int, torch.Tensor]) -> None:
        rows = hidden[AFTER_FINAL_NORM][n_prompt - 1 :].split(_ROWS_AHEAD)
        self._ahead = torch.cat([self._best(self._head(x, self._levels)) for x in rows])

    def end(self, state: DecodeState) -> None:
        super().end(state)
        self._ahead = None

    def drafting(self, state: DecodeState) -> ModelWork[DraftTree]:
        levels = min(self._levels, state.remaining - 1)
        if self._ahead is None or levels < 1:
            return (yield from super().drafting(state))
        self._waiting = []
        best = self._ahead[state.length - state.n_prompt - 1]
        return self._tree_of(self._chosen(best, levels), levels)

    def _growing(
        self, feature: torch.Tensor, levels: int, number: torch.Tensor | None
    ) -> ModelWork[torch.Tensor]:
        """Return the tree's tokens ``[n]``; of a dynamic one what `_best` gives of a row."""
        logits = yield from self._head.guessing(feature, levels)
        return self._chosen(self._best(logits)[0], levels)

    def _scoring_first(self, features: torch.Tensor, after: IntArray) -> ModelWork[torch.Tensor]:
        return (yield from self._head.guessing(features, 1))[:, 0]

    def _chosen(self, best: torch.Tensor, levels: int) -> torch.Tensor:
        """Return what `_tree_of` reads of the first ``levels``' nodes, from one row of `_best`."""
        if self.tree == _DYNAMIC:
            return best[:, :levels]
        n = sum(self._tree.level_sizes[:levels])
        tokens: torch.Tensor = self._head.to_target_ids(best[self._depths[:n], self._ranks[:n]])
        return tokens

    def _best(self, logits: torch.Tensor) -> torch.Tensor:
        """Return each row's candidates, ``[n, levels, ranks]``, as the heads' own ids.

        For a dynamic tree ``[n, 2, levels, ranks]`` float64: target ids and log-probabilities.
        """
        if self.tree != _DYNAMIC:
            return logits.topk(self._tree.n_ranks, dim=-1).indices
        log_probs, ids = top_log_probs(logits, self._tree.n_ranks)
        return torch.stack([self._head.to_target_ids(ids).double(), log_probs.double()], dim=1)

    def _tree_of(self, drafted: torch.Tensor, levels: int) -> DraftTree:
        if self.tree != _DYNAMIC:
            return super()._tree_of(drafted, levels)
        ids, log_probs = drafted[:, :levels].cpu().numpy()  # the only copy to the host
        return likeliest_prefixes(ids.astype(np.int64), log_probs, self.nodes)
