"""Speculative sampling: a small model drafts a chain, the target checks it in one pass.

Papers: "Fast Inference from Transformers via Speculative Decoding", ICML 2023, arXiv 2211.17192,
    and "Accelerating Large Language Model Decoding with Speculative Sampling", arXiv 2302.01318.
Reference code studied: smart-lty/ParallelSpeculativeDecoding ``src/engine.py``
    (``speculative_decoding``); for the schedules, huggingface/transformers
    ``generation/candidate_generator.py`` (``AssistedCandidateGenerator``) of 4.37 and 5.23, and the
    loop around it in Spec-Bench fd2c1cd (``model/sps/decoding.py``).
Method: the draft model reads what was committed since (one token, or two where all of its draft was
    accepted), then adds ``gamma`` tokens one by one: its likeliest ones when decoding is greedy,
    else draws from its own distribution, which the ratio test is given. Lossless either way.
Schedules: the papers' number of tokens is constant. transformers' assisted generation was, until
    4.45, and Spec-Bench's row "SpS" (4.37) is ``gamma=5 schedule=heuristic``: two tokens more after
    a draft that was accepted whole, one fewer after any other, one at least. Since then it is
    ``gamma=20 confidence=0.4``; where scikit-learn is installed, it moves that threshold as it
    goes, which is ``adaptive`` around this method.
Where ours differs, and why:
    - Draft probabilities and the target's get the same temperature and filters, in float32.
    - Greedy drafting on a GPU never waits for it, ids go there from pinned memory; with
      ``confidence`` each token has to be looked at on the host before the next one is drafted.
    - Drafts stop at the output limit, because later tokens could not be committed.
    - The first draft comes after the prompt's pass, not in it, as for every method here; and an end
      token does not end a draft, because drafts are not inspected before the target verifies.
    - ``max_gamma`` bounds ``heuristic``, since buffers have a size; the library has no bound. From
      5 on, drafts accepted whole reach 64 only after more than 1,000 tokens.
Example: ``gamma`` 4; the draft model goes on with "a b c d" and the target with "a b e": a, b and e
    are committed.
State kept: the draft length under ``heuristic``, as ``state_scope`` says (paper: ``turn``, which is
    Spec-Bench's; from 4.38 on the library keeps it for a run); the draft model's cache for a turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from specbench.config.schema import Positive, Share
from specbench.decoding.drafter import ModelDrafter, Scope
from specbench.decoding.protocols import ModelWork
from specbench.decoding.structs import (
    DecodeState,
    DraftContext,
    DraftTree,
    Needs,
    Proposal,
    ReportValue,
    StepOutcome,
)


@dataclass(kw_only=True, eq=False)
class Sps(ModelDrafter):
    """Speculative sampling: a small draft model drafts a chain.

    Attributes:
        gamma: tokens drafted per step.
        schedule: ``constant``, or ``heuristic``: two more after a draft that was accepted whole,
            one fewer after any other (transformers' rule).
        max_gamma: upper bound of ``heuristic``.
        confidence: drafting ends after a token whose draft probability is below this; 0 never.
    """

    name: str = "sps"
    paper_scope: Scope = "turn"
    gamma: Positive = 4
    schedule: Literal["constant", "heuristic"] = "constant"
    max_gamma: int = 64
    confidence: Share = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.max_gamma >= self.gamma, "max_gamma", f"at least gamma={self.gamma}")
        self._gamma = self.gamma
        self._tree = DraftTree.empty()

    @property
    def needs(self) -> Needs:
        longest = self.gamma if self.schedule == "constant" else self.max_gamma
        return Needs(tokens_only=False, draft_model=True, max_nodes=longest, path_probs=True)

    def setup(self, context: DraftContext) -> None:
        assert context.draft_model is not None
        self._draft = context.draft_model
        self._sampling = context.sampling
        # A draft that is drawn on a GPU stays there; on the CPU all readers take an array.
        self._device = torch.device("cpu") if context.target is None else context.target.device

        self._graph_length = 0  # tokens of a draft that one graph can make
        if self._sampling.greedy and self.schedule == "constant" and not self.confidence:
            self._graph_length = self.gamma
            self._draft.expect_chain(self.gamma)

    def reset(self) -> None:
        self._gamma = self.gamma

    def begin(self, state: DecodeState) -> None:
        self._draft.begin(state.tokens, state.seed)

    def drafting(self, state: DecodeState) -> ModelWork[DraftTree]:
        longest = min(self._gamma, state.remaining - 1, self._draft.free_rows(state.length))
        self._tree = DraftTree.empty()
        if longest > 0:
            self._tree = yield from self._chain(state, longest)
        return self._tree

    def _chain(self, state: DecodeState, longest: int) -> ModelWork[DraftTree]:
        if longest == self._graph_length and state.stop_when is None:
            drafted = self._draft.likeliest_chain(state.tokens, longest)
            if drafted is not None:
                return self._chain_of(drafted)
        tokens: list[torch.Tensor] = []
        rows: list[torch.Tensor] = []
        chain_probs: list[float] = []  # if confidence or a stop rule needs it
        logits = (yield from self._draft.catching_up(state.tokens, draft_vocab=True))[None]
        while True:
            if self._sampling.greedy:
                drawn = self._draft.likeliest(logits)
            else:
                probs = self._sampling.probs(logits)
                drawn = self._draft.draw(probs)
                rows.append(self._draft.to_target_vocab(probs))
            tokens.append(self._draft.to_target_ids(drawn))
            stop_when = state.stop_when
            if (self.confidence and len(tokens) < longest) or stop_when is not None:
                # Certainty of a greedy draft is its probability at temperature 1.
                draft_probs = logits.softmax(-1) if self._sampling.greedy else probs
                token_prob = float(draft_probs[0, drawn])
                if stop_when is not None:
                    chain_probs.append(token_prob * (chain_probs[-1] if chain_probs else 1.0))
                if token_prob < self.confidence:
                    break
                if stop_when is not None and stop_when(token_prob, chain_probs[-1]):
                    break
            if len(tokens) == longest:
                break
            last = np.array([len(tokens) - 2], dtype=np.int64)
            logits = yield from self._draft.extending(tokens[-1], last, draft_vocab=True)
        tree = self._chain_of(torch.cat(tokens))
        proposal, path_probs = None, np.array(chain_probs) if chain_probs else None
        if rows:
            q = torch.cat(rows).to(self._device)
            proposal = Proposal(q, np.arange(len(tokens), dtype=np.int64))
        return DraftTree(tree.tokens, tree.parents, probs=proposal, path_probs=path_probs)

    def _chain_of(self, drafted: torch.Tensor) -> DraftTree:
        ids = drafted.to(self._device)
        return DraftTree.chain(ids.numpy() if self._device.type == "cpu" else ids)

    def observe(self, state: DecodeState, outcome: StepOutcome) -> None:
        drafted, accepted = len(outcome.tree), len(outcome.path)
        if outcome.tree is not self._tree:  # cut by the engine: held tokens are read again
            self._draft.drop_nodes()
        elif drafted:
            self._draft.commit_path(outcome.path[: drafted - 1])  # the last token was never fed
        if self.schedule == "heuristic" and drafted:
            change = 2 if accepted == drafted else -1
            self._gamma = min(max(1, self._gamma + change), self.max_gamma)

    def report(self) -> Mapping[str, ReportValue]:
        return self._draft.report()
