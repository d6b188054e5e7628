"""PEARL: draft model and target run side by side, and the target verifies the previous draft.

Paper: "PEARL: Parallel Speculative Decoding with Adaptive Draft Length", ICLR 2025, arXiv
    2408.11850.
Reference code studied: smart-lty/ParallelSpeculativeDecoding (``src/engine.py``), by its
    description.
Method: during each target pass the draft model drafts gamma more tokens.
    *pre-verify*: nothing is pending. The pass reads the text's last token, and its output tests
    the first of the gamma tokens drafted meanwhile. If that one is accepted, the other
    gamma - 1 are pending.
    *post-verify*: the pass reads the gamma - 1 pending tokens too. It tests them, and the first of
    the next gamma tokens, drafted meanwhile. If all are accepted, the next gamma - 1 are pending,
    and so on: the draft's length adapts itself by the number of such passes in a row. At the first
    rejection both models go back to the accepted text, and the next pass is a pre-verify.
How this is a draft tree: the tree is the chain of pending tokens, and empty in pre-verify. The
    token after its last node is the target's own, and it is at once PEARL's test of the token
    drafted meanwhile: if both are equal, the drafted block is kept. At temperature > 0 ``overlap``
    also hands the token and its distribution to the verifier (``DraftTree.bonus``), which draws the
    target's token by the ratio test min(1, p / q) of that bonus, as PEARL does; pending
    tokens are tested likewise. As in PEARL there is no bonus token: a pass in which all of the
    gamma tests succeed commits gamma.
gamma: ``auto`` is the paper's ceil(t_target / t_draft), measured in ``setup`` (a draft pass has one
    row, a target pass 4), once for a run, resumed or not; the number is in every record.
Where ours differs, and why:
    - End tokens and the limit are respected: the reference has no end at all and counts up to
      gamma - 1 unverified tokens. Here only verified tokens are committed, and the draft
      model drafts no token that could not be committed.
    - The engine calls after the prompt's pass, so the draft model reads the prompt during the first
      pre-verify.
    - Tokens and one row of probabilities cross from draft to verifier, not the whole history of
      both models' probabilities.
    - Verifiers other than ``rejection`` (``match``) draw the token without regard to the bonus:
      still exact, but with fewer accepted tokens.
Example: ``gamma`` 3; during a pass over the last token alone the draft model writes "a b c". The
    target's token is a, so "b c" are pending: the next pass reads them, and "d e f" is written.
State kept: pending tokens and the draft's cache, for a turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from annotated_types import Ge, Le

from specbench.arrays import IntArray
from specbench.decoding.drafter import Drafter
from specbench.decoding.structs import (
    NO_TOKENS,
    BonusProposal,
    DecodeState,
    DraftContext,
    DraftTree,
    Needs,
    Proposal,
    ReportValue,
    StepOutcome,
)

_GAMMA_LIMIT = 64
_ROWS = 4  # of the target's passes when gamma is measured; the reference's gamma is 3 to 5


@dataclass(kw_only=True, eq=False)
class Pearl(Drafter):
    """PEARL: a draft model drafts on while the target verifies its previous draft.

    Attributes:
        gamma: tokens drafted per target pass; ``auto`` measures how many fit into one.
    """

    name: str = "pearl"
    gamma: Annotated[int, Ge(1), Le(_GAMMA_LIMIT)] | Literal["auto"] = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        self._gamma = 0 if self.gamma == "auto" else self.gamma
        self._prompt_read = False  # whether the draft model has read this turn's prompt
        self._pending: IntArray = NO_TOKENS
        self._pending_q: torch.Tensor | None = None
        self._block: IntArray = NO_TOKENS  # drafted during the present pass
        self._block_q: torch.Tensor | None = None
        self._counts = dict.fromkeys(("pre_verify", "post_verify"), 0)

    @property
    def needs(self) -> Needs:
        gamma = self._gamma or _GAMMA_LIMIT
        return Needs(
            tokens_only=False,
            draft_model=True,
            overlap=True,
            max_nodes=max(gamma - 1, 1),
            draft_nodes=2 * gamma,
        )

    def setup(self, context: DraftContext) -> None:
        assert context.draft_model is not None
        self._draft = context.draft_model
        self._sampling = context.sampling
        self._device = torch.device("cpu") if context.target is None else context.target.device
        if self.gamma == "auto":
            assert context.latency_ratio is not None
            self._gamma = min(context.latency_ratio("gamma", _ROWS, 1), _GAMMA_LIMIT)

    def begin(self, state: DecodeState) -> None:
        self._prompt_read = False
        self._pending, self._pending_q = NO_TOKENS, None
        self._block, self._block_q = NO_TOKENS, None
        self._counts = dict.fromkeys(self._counts, 0)

    def propose(self, state: DecodeState) -> DraftTree:
        self._counts["post_verify" if len(self._pending) else "pre_verify"] += 1
        chain = DraftTree.chain(self._pending)
        if self._pending_q is None:
            return chain
        proposal = Proposal(self._pending_q, np.arange(len(chain)))
        return DraftTree(chain.tokens, chain.parents, probs=proposal)

    def overlap(self, state: DecodeState, tree: DraftTree) -> BonusProposal | None:
        draft, pending = self._draft, self._pending
        if not self._prompt_read:
            draft.begin(state.tokens, state.seed)
            self._prompt_read = True
        n_pending = len(pending)
        # The last token that may be committed in the pass after this one is never a draft token.
        n_draft = min(
            self._gamma, state.remaining - n_pending - 1, draft.free_rows(state.length) - n_pending
        )
        if n_draft <= 0 or len(tree) < n_pending:  # the engine cut the tree: no parent for a block
            self._block, self._block_q = NO_TOKENS, None
            return None
        if n_pending:  # its rows are there, but for the last token's
            logits = draft.extend(pending[-1:], np.array([n_pending - 2]), draft_vocab=True)
        else:
            logits = draft.catch_up(state.tokens, draft_vocab=True)[None]
        tokens: list[torch.Tensor] = []
        distributions: list[torch.Tensor] = []
        while True:
            if self._sampling.greedy:
                drawn = draft.likeliest(logits)
            else:
                distribution = self._sampling.probs(logits)
                drawn = draft.draw(distribution)
                distributions.append(draft.to_target_vocab(distribution))
            tokens.append(draft.to_target_ids(drawn))
            if len(tokens) == n_draft:
                break
            last = np.array([n_pending + len(tokens) - 2])
            logits = draft.extend(tokens[-1], last, draft_vocab=True)
        self._block = torch.cat(tokens).cpu().numpy()
        if not distributions:
            return None
        self._block_q = torch.cat(distributions).to(self._device)
        return BonusProposal(int(self._block[0]), self._block_q[0])

    def observe(self, state: DecodeState, outcome: StepOutcome) -> None:
        if outcome.finished or not len(outcome.committed):
            return
        draft, n_pending, block = self._draft, len(self._pending), self._block
        # In a union other drafters may have added nodes after the pending tokens.
        tested = len(outcome.path) == n_pending and len(outcome.committed) == n_pending + 1
        block_accepted = tested and len(block) > 0 and block[0] == state.root
        if not block_accepted:
            # Without a block the last pending token has not been read.
            held = n_pending if len(block) else max(n_pending - 1, 0)
            draft.commit_path(np.arange(min(len(outcome.path), held)))
            self._pending, self._pending_q = NO_TOKENS, None
            return
        # Of the block, all but the last token have been read.
        read = n_pending + len(block) - 1
        first = min(n_pending + 1, read)
        draft.commit_path(np.arange(first), np.arange(first, read))
        self._pending = block[1:]
        self._pending_q = None if self._block_q is None else self._block_q[1:]

    def report(self) -> Mapping[str, ReportValue]:
        """Counters of the turn: passes with nothing pending (``pre_verify``) and with."""
        return {**self._draft.report(), "gamma": self._gamma, **self._counts}
