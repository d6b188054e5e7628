"""EAGLE: a decoder layer extends the target's hidden states, and its guesses form a draft tree.

Papers: EAGLE "Speculative Sampling Requires Rethinking Feature Uncertainty", ICML 2024, arXiv
    2401.15077; EAGLE-2 "Faster Inference of Language Models with Dynamic Draft Trees", EMNLP 2024,
    arXiv 2406.16858; EAGLE-3, NeurIPS 2025, arXiv 2503.01840.
Reference code studied: SafeAILab/EAGLE, branch v1 4a9cf3a (``cnets.py``, ``choices.py``) and main
    cb7e084 (``cnets1.py``, ``cnets.py``: ``topK_genrate``); Spec-Bench fd2c1cd.
Heads: ``specbench.models.heads`` (``eagle``, ``eagle3``). EAGLE-2 has EAGLE-1's weights.
A step: the head reads the rows committed since, each with the next token's embedding, and drops its
    cache of guessed nodes. Its last output gives the first level. Then
    eagle    each node of a fixed tree takes a fixed rank among its parent's candidates;
    eagle2   the ``top_k`` best nodes of a level are read, each gives its ``top_k`` best children,
             scored by the sum of log-probabilities along the path; the best ``total`` - 1 of
             all nodes are drafted;
    eagle3   as eagle2, with a head over three layers' states and a separate vocabulary.
Where ours differs, and why:
    - At a temperature EAGLE-1 draws its children without replacement. Here, as in EAGLE-2, they are
      the likeliest ones at any temperature: a function of the context, so the output is plain
      sampling's, and scores are taken at temperature 1.
    - Ties go to the node that was made first, which keeps every parent of a chosen node; there a
      child may be cut off.
    - The first draft comes after the prompt's pass, as for every method here; levels that
      could no longer be committed are not grown.
Example: ``eagle2``, ``total`` 4, ``top_k`` 2; of the paths a (.6), b (.3), "a c" (.4), "a d" (.1)
    and "b e" (.2) the three likeliest are drafted: a, "a c" and b.
State kept: none beyond the head's cache and unread states, for a turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from specbench.arrays import IntArray
from specbench.config.schema import Count, Text
from specbench.decoding.device import to_device
from specbench.decoding.protocols import ModelWork, TargetInfo
from specbench.decoding.structs import AFTER_FINAL_NORM, DraftContext
from specbench.draft_structures.head_tree import DynamicTreeDrafter, FixedTreeDrafter
from specbench.models.heads import eagle, eagle3


@dataclass(kw_only=True, eq=False)
class Eagle(FixedTreeDrafter):
    """EAGLE: a trained head drafts a fixed tree from the target's hidden states."""

    name: str = "eagle"
    head: Text = "eagle"
    tree: str = "eagle_25"

    @property
    def _nodes_read(self) -> int:
        return max(1, sum(len(layer.inner) for layer in self._tree.layers()))

    def _load(self, folder: Path, target: TargetInfo) -> eagle.EagleHead:
        return eagle.load(folder, target, self.vocabulary)

    def setup(self, context: DraftContext) -> None:
        super().setup(context)
        # By level: each read node's parent, as a number among all nodes that were read.
        self._above: list[torch.Tensor] = []
        numbers, count = torch.full((1,), -1, device=self._device), 0
        for above, _, inner in self._plan:
            self._above.append(numbers[above[inner]])
            numbers = count + torch.arange(len(inner), device=self._device)
            count += len(inner)

    def _growing(
        self, feature: torch.Tensor, levels: int, number: torch.Tensor | None
    ) -> ModelWork[torch.Tensor]:
        """Return the tree's tokens, ``[n]``."""
        head, tokens = self._head, []
        features = feature
        for level, (above, ranks, inner) in enumerate(self._plan[:levels]):
            logits = yield from head.scoring(features)
            best = logits.topk(self._n_ranks[level], dim=-1).indices
            tokens.append(head.to_target_ids(best[above, ranks]))
            if level + 1 < levels:
                above = above[inner]
                ids, read = tokens[-1][inner], self._above[level]
                features = yield from head.extending(ids, features[above], read)
        return torch.cat(tokens)


@dataclass(kw_only=True, eq=False)
class Eagle2(DynamicTreeDrafter):
    """EAGLE-2: EAGLE's head drafts a tree that grows where the head is confident.

    Attributes:
        vocabulary: folder of a draft model or head with a list of ids; only these are drafted.
            None drafts from all ids.
    """

    name: str = "eagle2"
    head: Text = "eagle"
    vocabulary: str | None = None

    @property
    def _variant(self) -> str | None:
        return self.vocabulary

    def _load(self, folder: Path, target: TargetInfo) -> eagle.EagleHead:
        return eagle.load(folder, target, self.vocabulary)


@dataclass(kw_only=True, eq=False)
class Eagle3(DynamicTreeDrafter):
    """EAGLE-3: a head that reads three of the target's layers drafts a tree.

    Attributes:
        depth: as for EAGLE-2; the paper's is 7, Spec-Bench's 5.
        layer_ids: states that the head reads, numbered as transformers' ``hidden_states``; null
            takes the head's configuration, else the reference code's.
    """

    name: str = "eagle3"
    head: Text = "eagle3"
    depth: Count = 7
    layer_ids: list[int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        # A placeholder until `setup` has read the head's configuration.
        self._layers = tuple(self.layer_ids or (AFTER_FINAL_NORM,))

    def setup(self, context: DraftContext) -> None:
        super().setup(context)
        assert context.target is not None
        if self._head.config.joins_states:
            layers = self._head.config.layer_ids
            self._layers = layers or eagle3.default_ids(context.target.n_layers)

    @property
    def layers(self) -> tuple[int, ...]:
        return self._layers

    def check_layers(self, ids: IntArray, states: Sequence[torch.Tensor]) -> None:
        if self._head.config.joins_states:
            self._head.reserve(len(ids), 1)
            self._reserved = 0  # the cache was made for this sequence
            here = [rows.to(self._device) for rows in states]
            eagle3.checked_ids(self._head, here, to_device(ids, self._device), self._layers)

    @property
    def _variant(self) -> tuple[int, ...]:
        return tuple(self.layer_ids or ())

    def _load(self, folder: Path, target: TargetInfo) -> eagle3.Eagle3Head:
        return eagle3.load(folder, target, self._variant)
