"""DFlash and DSpark: one pass of a small head over mask tokens guesses a whole block of tokens.

Papers: "DFlash: Block Diffusion for Flash Speculative Decoding", arXiv 2602.06036; DSpark, arXiv
    2607.05147; for ``tree=dynamic`` DDTree, arXiv 2604.12989.
Reference code studied: z-lab/dflash 44947fb (``dflash/model.py``); deepseek-ai/DeepSpec afdfa7c
    (``modeling/dspark``, ``eval/dspark``).
Heads: ``specbench.models.heads.dflash``. Each committed token but the root gives the head's layers
    a row of context, made of several of the target's layers.
A step: the rows committed since are read; then the block, the root and masks, is run once.
    dflash   the masks' likeliest tokens are a chain, at any temperature.
    dspark   the root guesses as well. The Markov head adds to each guess's logits what the token
             before it says; that token is the likeliest, at a temperature a draw, whose
             distributions the verifier gets. ``confidence`` ends the draft before the first token
             that the confidence head finds less likely to be accepted.
``tree=dynamic`` drafts the likeliest prefixes under independence of the guesses, DDTree's rule
(``specbench.draft_structures.marginal_tree``); a Markov head has no such guesses.
``DraftTree.path_probs`` are products of the tokens' probabilities, of dspark's chains of its
confidences where it has them, so that ``adaptive`` can cut either.
Where ours differs, and why:
    - Layers of a sliding window look back as far as its size. There flash-attention does so, too,
      but torch's attention looks at everything.
    - At a temperature draft and target get the same filters (top-k, top-p), too.
    - ``block_size`` is the head's own or fewer rows, as there; it bounds our buffers.
    - The first draft comes after the prompt's pass, which reads the prompt's context, as for every
      method here; guesses that could no longer be committed are not drafted.
Heads of Gemma-4 (other norms) and DFlash2 (a convolution and a selector) are refused.
Example: a block of 4 after root r, "r m m m"; the masks' likeliest tokens are a, b, c: "a b c" is
    drafted. With confidences .9, .4, .8 ``confidence`` .5 drafts a.
State kept: the head's keys and values and unread states, for a turn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from annotated_types import Ge, Le

from specbench.arrays import IntArray
from specbench.config.schema import Positive, Share, Text
from specbench.decoding.device import to_device
from specbench.decoding.protocols import ModelWork, TargetInfo
from specbench.decoding.sampling import sample
from specbench.decoding.structs import (
    AFTER_FINAL_NORM,
    DecodeState,
    DraftContext,
    DraftTree,
    Needs,
    Proposal,
)
from specbench.draft_structures.marginal_tree import likeliest_prefixes, top_log_probs
from specbench.errors import ConfigurationError
from specbench.models.heads import dflash, state_ids
from specbench.models.heads.decoder import row_call
from specbench.models.heads.drafter import HeadDrafter


@dataclass(kw_only=True, eq=False)
class DFlash(HeadDrafter):
    """DFlash: a head over mask tokens guesses a block of tokens in one pass.

    Attributes:
        head: the head's name in ``pair.heads``, a folder or a hub id.
        block_size: rows of the block at most, the root's among them; the head's own if fewer.
        tree: ``chain``: the likeliest tokens; ``dynamic``: the likeliest prefixes.
        nodes: of a dynamic tree.
        layer_ids: states that the head reads, numbered as transformers' ``hidden_states``; null
            takes the head's configuration, else the reference code's.
    """

    reads_root: ClassVar[bool] = True
    scores_rows: ClassVar[bool] = False

    name: str = "dflash"
    head: Text = "dflash"
    block_size: Annotated[int, Ge(2), Le(256)] = 16
    tree: Literal["chain", "dynamic"] = "chain"
    nodes: Positive = 32
    layer_ids: list[int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._rows = self.block_size  # with `_layers`, until `setup` has read the configuration
        self._layers = tuple(self.layer_ids or (AFTER_FINAL_NORM,))

    @property
    def max_nodes(self) -> int:
        return self.nodes if self.tree == "dynamic" else self._rows

    @property
    def needs(self) -> Needs:
        return replace(super().needs, path_probs=True)

    @property
    def layers(self) -> tuple[int, ...]:
        return self._layers

    @property
    def _levels(self) -> int:
        return self._head.guesses(self._rows)

    @property
    def _nodes_read(self) -> int:
        return self._rows

    @property
    def _variant(self) -> tuple[int, ...]:
        return tuple(self.layer_ids or ())

    def _load(self, folder: Path, target: TargetInfo) -> dflash.BlockHead:
        return dflash.load(folder, target, self._variant)

    def setup(self, context: DraftContext) -> None:
        super().setup(context)
        self._layers = self._head.layer_ids
        self._rows = min(self.block_size, self._head.block_size)
        markov = self._head.markov_head is not None
        if markov and (self.name == "dflash" or self.tree == "dynamic"):
            raise ConfigurationError(
                f"{context.heads[self.head]} has a Markov head: each guess depends on the token "
                "before it. Type method=dspark method.tree=chain."
            )

    def check_layers(self, ids: IntArray, states: Sequence[torch.Tensor]) -> None:
        self._head.reserve(len(ids), self._head.block_size)
        self._reserved = 0  # the cache was made for this sequence
        here = [rows.to(self._device) for rows in states]
        state_ids.checked_ids(self._head, here, to_device(ids, self._device), self._layers)

    def _growing(
        self, feature: torch.Tensor, levels: int, number: torch.Tensor | None
    ) -> ModelWork[torch.Tensor]:
        """Return ids and log-probabilities of each guess, ``[2, levels, ranks]`` float64."""
        assert number is not None
        states = yield from self._head.guessing(number, self._rows)
        logits = yield from self._head.scoring(states)
        log_probs, ids = top_log_probs(logits, self.nodes if self.tree == "dynamic" else 1)
        return torch.stack([ids.double(), log_probs.double()])  # ids are exact in it

    def _tree_of(self, drafted: torch.Tensor, levels: int) -> DraftTree:
        ids, log_probs = drafted[:, :levels].cpu().numpy()  # the only copy to the host
        n_nodes = self.nodes if self.tree == "dynamic" else levels
        return likeliest_prefixes(ids.astype(np.int64), log_probs, n_nodes)


@dataclass(kw_only=True, eq=False)
class DSpark(DFlash):
    """DSpark: DFlash's block with guesses that follow each other, and a say in their number.

    Attributes:
        confidence: a draft ends before the first token that is accepted with less than this
            probability, by the head's own account; 0 never.
    """

    name: str = "dspark"
    head: Text = "dspark"
    confidence: Share = 0.0

    def setup(self, context: DraftContext) -> None:
        super().setup(context)
        self._sampling = context.sampling
        self._draws = self.tree == "chain" and not context.sampling.greedy
        if self._draws:
            self._graph_tokens = 0  # a graph would draw the same numbers again
            self._generator = torch.Generator(self._device)
        if self.confidence and (self.tree == "dynamic" or self._head.confidence_head is None):
            raise ConfigurationError(
                f"method.confidence={self.confidence:g} needs method.tree=chain and a head with a "
                f"confidence head, got method.tree={self.tree} and {context.heads[self.head]}. "
                "Type method.confidence=0."
            )

    def begin(self, state: DecodeState) -> None:
        super().begin(state)
        if self._draws:
            self._generator.manual_seed(state.seed)

    def _growing(
        self, feature: torch.Tensor, levels: int, number: torch.Tensor | None
    ) -> ModelWork[torch.Tensor]:
        """Return as DFlash does; of a chain the log-confidences where the head has them."""
        if self.tree == "dynamic":
            return (yield from super()._growing(feature, levels, number))
        assert number is not None
        head, markov, memory = self._head, self._head.markov_head, None
        states = (yield from head.guessing(number, self._rows))[:levels]
        logits = list((yield from head.scoring(states)).split(1))
        chain, probs = [number], []
        for i, state in enumerate(states.split(1)):
            if markov is not None:
                read, memory = markov(chain[-1], state, memory)
                logits[i] = logits[i] + (yield row_call(head.key("markov"), markov.markov_w2, read))
            if self._draws:
                probs.append(self._sampling.probs(logits[i]))
                chain.append(sample(probs[-1], 1.0 - self._random()))
            else:
                chain.append(logits[i].argmax(-1))
        ids = torch.cat(chain[1:])
        if self._draws:
            self._q = torch.cat(probs)
        if head.confidence_head is not None:
            log_probs = head.log_confidence(states, torch.cat(chain[:-1]))
        else:
            log_probs = torch.cat(logits).double().log_softmax(-1).gather(1, ids[:, None])[:, 0]
        return torch.stack([ids.double(), log_probs.double()])[..., None]

    def _random(self) -> torch.Tensor:
        """Draw a number in [0, 1), ``[1]`` float64."""
        return torch.rand(1, dtype=torch.float64, device=self._device, generator=self._generator)

    def _tree_of(self, drafted: torch.Tensor, levels: int) -> DraftTree:
        if self.confidence:
            drafted = drafted[:, :levels].cpu()
            unsure = (drafted[1, :, 0] < math.log(self.confidence)).tolist()
            levels = [*unsure, True].index(True)
        tree = super()._tree_of(drafted, levels) if levels else DraftTree.empty()
        if not (self._draws and levels):
            return tree
        return replace(tree, probs=Proposal(self._q[:levels], np.arange(levels)))
