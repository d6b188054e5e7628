"""DFlash and DSpark: one pass of a small head over mask tokens guesses a whole block of tokens.

Papers: "DFlash: Block Diffusion for Flash Speculative Decoding", arXiv 2602.06036; DSpark, arXiv
    2607.05147; for ``tree=dynamic`` DDTree, arXiv 2604.12989.
Reference code studied: z-lab/dflash 44947fb (``dflash/model.py``); deepseek-ai/DeepSpec afdfa7c
    (``modeling/dspark``, ``eval/dspark``).
A step: the states of tokens committed since become context; then the block, the root and masks, is
    run once (``specbench.models.heads.dflash``).
    dflash   the masks' likeliest tokens are a chain, at any temperature.
    dspark   the root guesses, too. The Markov head adds to a guess's logits what the token before
             it says. The token is the likeliest, or at a temperature a draw whose distribution the
             verifier gets. ``confidence`` ends a draft before a token that the confidence head
             finds less likely to be accepted; it has not seen that token.
``tree=dynamic`` drafts the likeliest prefixes under independence of the guesses, DDTree's rule
(``specbench.draft_structures.marginal_tree``). ``DraftTree.path_probs`` are products of the
tokens' probabilities, or of a chain's confidences where a head has them.
Where ours differs, and why:
    - Layers' sliding windows apply; in the reference only its flash-attention path applies them.
    - At a temperature the target's filters (top-k, top-p) also apply to the head's distributions.
    - The first draft comes after the prompt's pass, and none goes beyond the output limit.
    - Heads of Gemma-4 (other norms) and DFlash2 (a convolution, a selector) are refused.
Example: a block of 4 is "r m m m" with the root r; if the masks' likeliest tokens are a, b and c,
    "a b c" is drafted. With confidences .9, .4, .8 ``confidence`` .5 drafts a.
State kept: the head's keys and values and unread states, for a turn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from annotated_types import Ge, Le

from specbench.config.schema import Positive, Share, Text
from specbench.decoding.device import to_device
from specbench.decoding.protocols import ModelWork, TargetInfo
from specbench.decoding.sampling import sample
from specbench.decoding.structs import DecodeState, DraftContext, DraftTree, Needs, Proposal
from specbench.draft_structures.marginal_tree import likeliest_prefixes, top_log_probs
from specbench.errors import ConfigurationError
from specbench.models.heads import dflash
from specbench.models.heads.decoder import row_call
from specbench.models.heads.drafter import HeadDrafter


@dataclass(kw_only=True, eq=False)
class DFlash(HeadDrafter):
    """DFlash: a small head over mask tokens guesses a block of tokens in one pass.

    Attributes:
        head: the head's name in ``pair.heads``, a folder or a hub id.
        block_size: most rows of a block, the root's included; the head's block if it is smaller.
        tree: ``chain``: one token after the other; ``dynamic``: the likeliest prefixes.
        nodes: number of nodes of a dynamic tree.
        confidence: a chain ends before a token of lower confidence (0: never).
    """

    reads_root: ClassVar[bool] = True
    scores_rows: ClassVar[bool] = False

    name: str = "dflash"
    head: Text = "dflash"
    block_size: Annotated[int, Ge(2), Le(256)] = 16
    tree: Literal["chain", "dynamic"] = "chain"
    nodes: Positive = 32
    confidence: Share = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        # Until `setup` has read the head's configuration.
        self._layers, self._rows, self._infill = (0,), self.block_size, False

    @property
    def max_nodes(self) -> int:
        return self.nodes if self.tree == "dynamic" else self._levels

    @property
    def needs(self) -> Needs:
        return replace(super().needs, path_probs=True)

    @property
    def layers(self) -> tuple[int, ...]:
        return self._layers

    @property
    def _levels(self) -> int:
        return self._rows - self._infill

    @property
    def _nodes_read(self) -> int:
        return self._rows

    def _load(self, folder: Path, target: TargetInfo) -> dflash.BlockHead:
        return dflash.load(folder, target)

    def setup(self, context: DraftContext) -> None:
        super().setup(context)
        config, self._sampling = self._head.config, context.sampling
        self._layers, self._rows = config.layer_ids, min(self.block_size, config.block_size)
        self._infill, dynamic = config.infill, self.tree == "dynamic"
        self._draws = not (config.infill or context.sampling.greedy or dynamic)
        if self._draws:
            self._graph_tokens = 0  # a graph would draw the same numbers again
        unfit = dynamic and (config.markov_rank or self.confidence)
        if unfit or (self.confidence and not config.enable_confidence_head):
            raise ConfigurationError(
                f"method.tree={self.tree} method.confidence={self.confidence:g}: a dynamic tree "
                "needs a head without Markov head, confidence a chain and a confidence head, which "
                f"{context.heads[self.head]} has not. Type method.tree=chain method.confidence=0."
            )

    def begin(self, state: DecodeState) -> None:
        super().begin(state)
        self._random = np.random.default_rng([state.seed, 66])  # not a verifier's numbers

    def _growing(
        self, feature: torch.Tensor, levels: int, number: torch.Tensor | None
    ) -> ModelWork[torch.Tensor]:
        """Return ids and log-probabilities of the guesses, ``[2, levels, ranks]`` float64."""
        assert number is not None
        head, markov, memory = self._head, self._head.markov_head, None
        states = (yield from head.guessing(number, self._rows))[:levels]
        logits = yield from head.scoring(states)
        if self.tree == "dynamic":
            log_probs, ids = top_log_probs(logits, self.nodes)
            return torch.stack([ids.double(), log_probs.double()])  # ids are exact in it
        uniforms = None
        if self._draws:
            uniforms = to_device(1.0 - self._random.random(levels), self._device)
        tokens, rows, self._probs = [number], list(logits.split(1)), []
        for i, state in enumerate(states.split(1)):
            if markov is not None:
                read, memory = markov(tokens[-1], state, memory)
                rows[i] = rows[i] + (yield row_call(head.key("markov"), markov.markov_w2, read))
            if uniforms is None:
                tokens.append(rows[i].argmax(-1))
            else:
                self._probs.append(self._sampling.probs(rows[i]))
                tokens.append(sample(self._probs[-1], uniforms[i : i + 1]))
        ids = torch.cat(tokens[1:])
        if head.confidence_head is not None:
            log_probs = head.log_confidence(states, torch.cat(tokens[:-1]))
        else:
            log_probs = torch.cat(rows).double().log_softmax(-1).gather(1, ids[:, None])[:, 0]
        return torch.stack([ids.double(), log_probs])[..., None]

    def _tree_of(self, drafted: torch.Tensor, levels: int) -> DraftTree:
        ids, log_probs = drafted[:, :levels].cpu().numpy()  # the only copy to the host
        if self.confidence:
            levels = [*(log_probs[:, 0] < math.log(self.confidence)), True].index(True)
        if not levels:
            return DraftTree.empty()
        n_nodes = self.nodes if self.tree == "dynamic" else levels
        tree = likeliest_prefixes(ids[:levels].astype(np.int64), log_probs[:levels], n_nodes)
        if not self._draws:
            return tree
        return replace(tree, probs=Proposal(torch.cat(self._probs[:levels]), np.arange(levels)))


@dataclass(kw_only=True, eq=False)
class DSpark(DFlash):
    """DSpark: a block whose guesses follow each other, cut where the head is unsure."""

    name: str = "dspark"
    head: Text = "dspark"
