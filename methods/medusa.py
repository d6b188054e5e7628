"""Medusa: heads on the target's last state, each guessing the token at another distance.

Paper: "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", ICML
    2024, arXiv 2401.10774.
Reference code studied: FasterDecoding/Medusa e2a5d20 (``medusa_model_legacy.py``,
    ``medusa_model.py``, ``utils.py``, ``medusa_choices.py``); Spec-Bench fd2c1cd.
Heads: ``specbench.models.heads.medusa``, those of Medusa-1, which leave the target as it is.
A step: one product of all heads with the state of the last token before the root. The node at the
    path of ranks (r1, ..., rd) holds candidate rd of head d, whatever stands above it: the tree is
    a cartesian product, and nothing is computed along its branches.
Where ours differs, and why:
    - The reference accepts at a temperature what is likely enough. Here the output is plain
      sampling's; ``verifier=typical`` (lossy, and labelled so) is that rule but for what
      ``specbench.decoding.verify.typical`` says.
    - The tree is that of ``medusa_model_legacy.py``, of the evaluation scripts there and of
      Spec-Bench, whatever the target. ``tree=by_model`` chooses as ``medusa_model.py`` does.
    - The tree has parent indices; the reference pads its paths with id 0, which it can accept.
    - The first draft comes after the prompt's pass, as for every method here.
State kept: none beyond the last state.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from specbench.config.schema import Text
from specbench.decoding.protocols import ModelWork
from specbench.decoding.structs import AFTER_FINAL_NORM, DecodeState, DraftContext, DraftTree
from specbench.index.head_tree import FixedTreeDrafter
from specbench.index.static_tree import (
    TREES,
    StaticTree,
    load_tree,
    require_heads,
    tree_of_knobs,
)
from specbench.models.heads import medusa
from specbench.models.heads.checkpoint import ends_of, read_json
from specbench.models.heads.head_graphs import HeadGraphs

_ROWS_AHEAD = 64  # of the vocabulary's size each
_BY_MODEL = "by_model"
# Words in the name of the target that a head was trained for, and the tree that the reference code
# (``get_medusa_choice``) then takes: the first that fits, else `_OTHERS`.
_AUTHORS = (
    ("vicuna", "7b", "vicuna_7b_stage2"),
    ("vicuna", "13b", "vicuna_13b_stage2"),
    ("vicuna", "33b", "vicuna_33b_stage2"),
    ("zephyr", "", "zephyr_stage2"),
)
_OTHERS = "medusa_63"

log = logging.getLogger(__name__)


def authors_tree(target: str) -> str:
    """The tree in `TREES` that the reference code takes for a target of this name."""
    fitting = (tree for family, size, tree in _AUTHORS if family in target and size in target)
    return next(fitting, _OTHERS)


@dataclass(kw_only=True, eq=False)
class Medusa(FixedTreeDrafter):
    """Medusa-1: trained heads on the target's last state, one for each token ahead.

    Attributes:
        tree: also ``by_model``: by the name in the head's config.json, as the reference code does.
    """

    name: str = "medusa"
    head: Text = "medusa"

    def _shape(self) -> StaticTree:
        # Until `setup` has read the head's configuration; all its trees have as many nodes.
        tree = _OTHERS if self.tree == _BY_MODEL and self.levels is None else self.tree
        return tree_of_knobs(tree, self.levels, type(self).tree, also=[_BY_MODEL])

    def setup(self, context: DraftContext) -> None:
        if self.tree == _BY_MODEL and self.levels is None:
            config = read_json(context.heads[self.head])
            tree = authors_tree(str(config.get("base_model_name_or_path")))
            log.info("%s: method.tree=by_model is %s", context.heads[self.head], tree)
            self._tree = load_tree(TREES[tree])
        super().setup(context)
        assert context.target is not None
        target, folder = context.target, context.heads[self.head]
        ends, ids = ends_of(target, self.vocabulary)
        self._check_ranks(ids, context.vocab_size)
        load = partial(medusa.load, folder, ends, dtype=target.dtype, device=target.device)
        self._heads = self._twin(context, load, self.vocabulary)
        self._ids = None if self._heads.own_lm_heads else ids
        require_heads(self._tree, len(self._heads.heads), folder)
        depths = np.array([len(path) - 1 for path in self._tree.paths])
        ranks = np.array([path[-1] for path in self._tree.paths])
        self._depths = torch.from_numpy(depths).to(self._device)
        self._ranks = torch.from_numpy(ranks).to(self._device)
        self._ends = np.cumsum(self._tree.level_sizes)  # nodes down to each level
        self._graphs: HeadGraphs | None = None
        if target.graph_tokens:
            self._graphs = HeadGraphs(
                lambda hidden, *_: self._chosen(
                    self._best(self._heads(hidden, len(self._ends)))[0]
                ),
                size=target.embeddings.embedding.shape[1],
                device=self._device,
                dtype=target.dtype,
            )
            self._graphs.capture()
        self._state: torch.Tensor | None = None
        self._ahead: torch.Tensor | None = None  # candidates of each row from the last prompt's on

    @torch.inference_mode()
    def foresee(self, n_prompt: int, hidden: Mapping[int, torch.Tensor]) -> None:
        rows = hidden[AFTER_FINAL_NORM][n_prompt - 1 :]
        self._ahead = torch.cat(
            [self._best(self._heads(x, len(self._ends))) for x in rows.split(_ROWS_AHEAD)]
        )

    def begin(self, state: DecodeState) -> None:
        self._state = None

    def end(self, state: DecodeState) -> None:
        super().end(state)
        self._ahead = None

    def drafting(self, state: DecodeState) -> ModelWork[DraftTree]:
        unread = self._unread()
        if unread is not None:
            self._state = unread[-1:]
        levels = min(len(self._ends), state.remaining - 1)
        if self._state is None or levels < 1:
            return DraftTree.empty()
        n = int(self._ends[levels - 1])
        if self._ahead is not None:
            best = self._ahead[state.length - state.n_prompt - 1]
            return self._filled(self._chosen(best, n))
        tokens = self._graphs.draft(0, self._state) if self._graphs is not None else None
        if tokens is None:
            self._launched += 1
            best = self._best((yield from self._heads.guessing(self._state, levels)))[0]
            tokens = self._chosen(best, n)
        return self._filled(tokens[:n])

    def _chosen(self, best: torch.Tensor, n: int | None = None) -> torch.Tensor:
        """Tokens of the first ``n`` nodes, of one row of `_best`; None: of all."""
        tokens = best[self._depths[:n], self._ranks[:n]]
        return tokens if self._ids is None else self._ids[tokens]

    def _best(self, logits: torch.Tensor) -> torch.Tensor:
        """``[n, levels, ranks]`` candidates of each row's heads, by their own ids."""
        return logits.topk(self._tree.n_ranks, dim=-1).indices
