"""Lookahead decoding: the target makes n-grams of its own beside the text, and verifies them later.

Paper: "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding", ICML 2024,
    arXiv 2402.02057.
Reference code studied: hao-ai-lab/LookaheadDecoding (``lade/decoding.py``) and Spec-Bench's older
    copy, by their description.
Method: a window of N − 1 levels and W columns holds guesses of the tokens ahead. Each pass predicts
    one more level (a Jacobi iteration per column), completes W n-grams for the pool, and drops the
    oldest level. N-grams that follow the last token in the pool, G at most, are verified beside it.
The window is a tree: level 0 is a chain below the root (whose place is column 0), and column j of a
    level hangs below column j of the level before. Ancestors and depths are then exactly the
    reference's mask and positions. Its nodes are auxiliary: they ride in the pass, none is a
    candidate. The pool's n-grams are candidate chains below the root.
Parameters: N 5 and W = G = 15 is what the authors run a 7B model with; Spec-Bench takes 5, 7, 7;
    the code's own fallback is 8, 60, 60.
As in the reference: level 0 starts with tokens drawn from the prompt, the first N − 2 steps fill
    the window and verify nothing, and the window moves on by one column a step however many tokens
    are committed, so that it drifts against the text.
Where ours differs, and why:
    - The reference loses the target's own token after a complete match, so a step commits N − 1
      tokens at most. Ours commits N; ``lost_bonus: true`` restores the loss at the same cost: the
      last token of every guess rides along without being a candidate.
    - The fill phase begins after the prompt's pass, not in it, as for every method here.
    - With ``pool_from_prompt`` every n-gram that a step completes is inserted, the oldest first.
    - End tokens in the window stay; the engine stops at the first one committed anyway.
    - N = 2 works; the reference crashes.
    - At a temperature the window is still made of the target's likeliest tokens, which keeps its
      n-grams free of the random numbers that will judge them.
    - The window's first tokens depend on ``seed`` and the prompt, not on the order of cases.
State kept: the window, for a turn; the pool, at most vocab × G n-grams, as ``state_scope`` says
    (the reference: ``turn``).
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

from specbench.drafter import Drafter
from specbench.index.ngram_pool import NgramPool
from specbench.structs import DecodeState, DraftContext, DraftTree, IntArray, Needs, StepOutcome

_NO_GUESSES = np.empty((0, 1), dtype=np.int64)


@dataclass(kw_only=True, eq=False)
class Lookahead(Drafter):
    """Drafts the pool's n-grams, with the window as auxiliary nodes.

    Attributes:
        state_scope: how long the pool is kept; the reference's is ``turn``.
        ngram: N, tokens of an n-gram with the one it follows; also the window's levels plus one.
        window: W, columns of the window.
        guesses: G, n-grams kept per token, and so verified per step, at most.
        pool_from_prompt: insert the n-grams of the prompt and of the answer too.
        lost_bonus: the reference's loss of the target's token after a complete match.
    """

    name: str = "lookahead"
    state_scope: str = "turn"
    ngram: int = 5
    window: int = 15
    guesses: int = 15
    pool_from_prompt: bool = False
    lost_bonus: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.ngram >= 2, "ngram", "at least 2")
        self._require(self.window >= 1, "window", "at least 1")
        self._require(self.guesses >= 1, "guesses", "at least 1")
        self._seed = 0
        self._pool = NgramPool(0, self.ngram - 1, self.guesses)
        self._grid = np.zeros((1, 1), dtype=np.int64)
        self._tree = DraftTree.empty()
        self._shapes: dict[tuple[int, int, int], tuple[IntArray, np.ndarray]] = {}

    @property
    def needs(self) -> Needs:
        filling = (
            (filled + 1) * (self.window + self.ngram - 2 - filled) - 1
            for filled in range(self.ngram - 2)
        )
        steady = (self.ngram - 1) * (self.window + self.guesses) - 1
        return Needs(tokens_only=False, max_nodes=max(steady, *filling, 0))

    def setup(self, context: DraftContext) -> None:
        self._seed = context.seed
        self._pool = NgramPool(context.vocab_size, self.ngram - 1, self.guesses)
        # Compiles, or loads what was compiled before, outside any clock.
        self._pool.insert(np.zeros((1, self.ngram), dtype=np.int64))
        self.reset()

    def reset(self) -> None:
        self._pool.clear()

    def begin(self, state: DecodeState) -> None:
        prompt = state.buffer[: state.n_prompt]
        random = np.random.default_rng([self._seed, zlib.crc32(prompt.tobytes())])
        # One level, as much wider than W as the fill phase will drop; column 0 is the root's.
        width = self.window + self.ngram - 2
        self._grid = prompt[random.integers(0, len(prompt), width)][None]
        if self.pool_from_prompt:
            self._pool.insert_text(state.buffer, 0, state.length)

    def propose(self, state: DecodeState) -> DraftTree:
        self._grid[0, 0] = state.root
        levels, columns = self._grid.shape
        filled = levels == self.ngram - 1
        guesses = self._pool.after(state.root) if filled else _NO_GUESSES
        parents, aux = self._shape(levels, columns, len(guesses))
        tokens = np.concatenate((guesses.reshape(-1), self._grid.reshape(-1)[1:]))
        self._tree = DraftTree(tokens, parents, aux=aux)
        return self._tree

    def observe(self, state: DecodeState, outcome: StepOutcome) -> None:
        if self.pool_from_prompt:
            begin = state.length - len(outcome.committed)
            self._pool.insert_text(state.buffer, begin, state.length)
        # A tree cut by the engine has lost a part of the window: it waits for the next step.
        if outcome.tree is self._tree and outcome.next_tokens is not None:
            self._advance(outcome.next_tokens)

    def _advance(self, next_tokens: IntArray) -> None:
        """Move the window on by one column, with the target's tokens as its last level."""
        levels, columns = self._grid.shape
        predicted = next_tokens[-columns:]
        if levels == 1:  # column 0 is the root, whose row is the first
            predicted = np.concatenate((next_tokens[:1], predicted[1:]))
        grown = np.concatenate((self._grid, predicted[None]))
        if levels < self.ngram - 1:
            self._grid = grown[:, 1:].copy()
        else:
            self._pool.insert(grown.T)
            self._grid = grown[1:]

    def _shape(self, levels: int, columns: int, guesses: int) -> tuple[IntArray, np.ndarray]:
        """Parents and auxiliary nodes: the guesses first, then the window level by level."""
        key = (levels, columns, guesses)
        if key not in self._shapes:
            self._shapes[key] = tree_shape(
                levels, columns, guesses, self.ngram - 1, self.lost_bonus
            )
        return self._shapes[key]


def tree_shape(
    levels: int, columns: int, guesses: int, length: int, lost_bonus: bool
) -> tuple[IntArray, np.ndarray]:
    """Geometry of ``guesses`` chains of ``length`` tokens and a window.

    Args:
        levels: levels of the window.
        columns: its columns; column 0 of level 0 is the root and no node.
        guesses: chains below the root.
        length: tokens of a chain.
        lost_bonus: whether a chain's last token is auxiliary.

    Returns:
        ``parents [n]`` and ``aux [n]``: the chains, then the window level by level.
    """
    chains = np.arange(guesses * length).reshape(guesses, length) - 1
    chains[:, 0] = -1
    # Node numbers of the window's places, root included, and what each hangs below.
    nodes = np.arange(levels * columns).reshape(levels, columns) + guesses * length - 1
    nodes[0, 0] = -1
    above = np.concatenate((np.roll(nodes[:1], 1), nodes[:-1]))
    parents = np.concatenate((chains.reshape(-1), above.reshape(-1)[1:]))
    aux = np.ones(len(parents), dtype=np.bool_)
    aux[: guesses * length] = False
    if lost_bonus:
        aux[length - 1 : guesses * length : length] = True
    return parents.astype(np.int64), aux
