"""Lookahead decoding: each target pass also generates n-grams, which later passes verify.

Paper: "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding", ICML 2024,
    arXiv 2402.02057.
Reference code studied: hao-ai-lab/LookaheadDecoding eed010d (``lade/decoding.py``) and Spec-Bench's
    older copy, fd2c1cd (``model/lade``).
Method: a window of N − 1 levels and W columns holds guesses of the tokens ahead. Each pass predicts
    one more level (a Jacobi iteration per column), completes W n-grams for the pool, and drops the
    oldest level. The pool's n-grams after the last token, G at most, are verified with it.
The window (``specbench.draft_structures.lookahead``) is a tree of auxiliary nodes: they are in
    the pass, but none is a candidate. The pool's n-grams are candidate chains below the root.
Parameters: the authors run a 7B model with N = 5 and W = G = 15; Spec-Bench takes 5, 7, 7; the
    code's fallback is 8, 60, 60.
As in the reference: level 0 starts with tokens drawn from the prompt, the first N − 2 steps fill
    the window and verify nothing, and the window moves by one column a step however many tokens
    are committed, so it drifts against the text. The target's own token after a complete match is
    lost, so a step commits at most N − 1 tokens: the last token of every guess is in the pass
    without being a candidate. ``lost_bonus: false`` is ours: it commits that token too, at most N.
Where ours differs, and why:
    - The fill phase begins after the prompt's pass, not in it, as for every method here.
    - With ``pool_from_prompt`` every n-gram that a step completes is inserted, the oldest first.
      The reference inserts those of a text in which a step's last token is repeated for each of
      its tokens.
    - End tokens in the window stay; the reference replaces them where it samples.
    - N = 2 works; the reference crashes.
    - At a temperature the window still holds the target's likeliest tokens, so its n-grams are
      independent of the random numbers that will verify them.
    - The window's first tokens depend on ``seed`` and the prompt, not on the order of cases.
Example: ``ngram`` 3; an earlier pass has completed "a b c". Once a is the last token, "b c" is
    verified along with the window, and one step commits b and c if the target agrees.
State kept: the window, for a turn; the pool, at most vocab × G n-grams, as ``state_scope`` says
    (paper: ``turn``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Ge

from specbench.config.schema import Positive
from specbench.decoding.drafter import Drafter, Scope
from specbench.decoding.structs import DecodeState, DraftContext, DraftTree, Needs, StepOutcome
from specbench.draft_structures.lookahead import LookaheadWindow, NgramPool

_NO_GUESSES = np.empty((0, 1), dtype=np.int64)


@dataclass(kw_only=True, eq=False)
class Lookahead(Drafter):
    """Lookahead decoding: the target makes n-grams in each pass and verifies them later.

    Attributes:
        ngram: N, tokens of an n-gram and the token before it; also the window's levels plus one.
        window: W, columns of the window.
        guesses: G, maximum n-grams stored per token, and so verified per step.
        pool_from_prompt: insert the n-grams of prompt and output, too.
        lost_bonus: lose the target's token after a complete match, as the reference does.
    """

    name: str = "lookahead"
    version: int = 2
    paper_scope: Scope = "turn"
    ngram: Annotated[int, Ge(2)] = 5
    window: Positive = 15
    guesses: Positive = 15
    pool_from_prompt: bool = False
    lost_bonus: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._seed = 0
        self._pool = NgramPool(0, self.ngram - 1, self.guesses)
        self._window = LookaheadWindow(self.window, self.ngram)
        self._tree = DraftTree.empty()

    @property
    def needs(self) -> Needs:
        return Needs(tokens_only=False, max_nodes=self._window.most_nodes(self.guesses))

    def setup(self, context: DraftContext) -> None:
        self._seed = context.seed
        self._pool = NgramPool.compiled(context.vocab_size, self.ngram - 1, self.guesses)

    def reset(self) -> None:
        self._pool.clear()

    def begin(self, state: DecodeState) -> None:
        self._window.begin(state.buffer[: state.n_prompt], self._seed)
        if self.pool_from_prompt:
            self._pool.insert_text(state.buffer, 0, state.length)

    def propose(self, state: DecodeState) -> DraftTree:
        guesses = self._pool.after(state.root) if self._window.full else _NO_GUESSES
        tokens, parents, aux = self._window.tree(state.root, guesses, self.lost_bonus)
        self._tree = DraftTree(tokens, parents, aux=aux)
        return self._tree

    def observe(self, state: DecodeState, outcome: StepOutcome) -> None:
        if self.pool_from_prompt:
            begin = state.length - len(outcome.committed)
            self._pool.insert_text(state.buffer, begin, state.length)
        # A tree that was cut may lack a part of the window, which then waits for the next step. A
        # union may drop candidates but leave the window, which comes last, whole.
        if outcome.next_tokens is not None and self._window_verified(outcome.tree):
            self._pool.insert(self._window.advance(outcome.next_tokens))

    def _window_verified(self, tree: DraftTree) -> bool:
        """Return whether the verified tree holds all of the window, which follows the guesses."""
        begin = len(tree) - self._window.n_nodes
        dropped = len(self._tree) - len(tree)
        if begin < 0 or tree is self._tree:
            return begin >= 0
        parents = self._tree.parents[dropped + begin :]
        return np.array_equal(tree.tokens[begin:], self._tree.tokens[dropped + begin :]) and (
            np.array_equal(tree.parents[begin:], np.where(parents < 0, parents, parents - dropped))
        )
