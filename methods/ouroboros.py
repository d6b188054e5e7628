"""Ouroboros: a draft model that drafts by lookahead, and phrases that lengthen its draft.

Paper: "Ouroboros: Generating Longer Drafts Phrase by Phrase for Faster Speculative Decoding", EMNLP
    2024, arXiv 2402.13720.
Reference code studied: thunlp/Ouroboros 7dac65b (``ouroboros/ouroboros.py``, ``cache_engine``,
    ``kv_cache_model.py`` and the lookahead in ``models/modeling_llama.py``). Its copy for
    Spec-Bench (``benchmark/test_specbench``) learns in another way and is not this.
Method: a pool holds phrases, for every token the newest G tuples of N - 1 tokens seen after it.
    *Draft*: the draft model decodes by lookahead (a window of W columns, N - 1 levels; phrases of
    the pool as guesses) until it has gamma tokens; more are cut off. An end token ends the draft.
    What its window completes enters the pool.
    *Verify*: the target reads the draft and, after its last token, the ``topk`` newest phrases of
    that token, side by side.
    *Learn*: if the draft was accepted, those phrases are overwritten by the target's choices along
    each of them, equal ones included. If it was rejected somewhere, the target's own tokens from
    there on are phrases, as far as the draft happened to go on with them (N - 1 tokens in a row).
    A model's own token after a whole phrase is lost, the target's and, in its lookahead, the draft
    model's: a phrase's last token rides along without being a candidate.
Switches for omissions of the reference, followed by default: ``cut_draft: false`` keeps the tokens
    beyond gamma, ``lost_bonus: false`` commits the token after a whole phrase, ``correct_rejected:
    true`` overwrites the phrases after a rejected draft too. (The reference's line for that counts
    phrases wrongly: topk // (N - 1), which is none of them with any settings of its scripts; where
    topk is larger, it overwrites the wrong ones, which is not followed.)
Parameters: gamma 4, W = G = 20, N 7, topk 3 are the code's defaults; its scripts run HumanEval with
    gamma 12, GSM8K with 4, 15, 6, MBPP with 6, 18, 5 (gamma, W = G, N).
Temperature above 0 (the public code is greedy only): draft model and pool work greedily, so a draft
    is a deterministic function of the text and of what earlier steps have shown, point masses to
    any verifier. The target's tokens that enter the pool are its most likely ones, never its draws.
Where ours differs, and why:
    - The first draft comes after the prompt's pass, not before it, as for every method here.
    - The draft is no longer than what may still be committed.
    - The window's first tokens depend on ``seed`` and the prompt, not on the order of cases.
Example: ``gamma`` 2, ``topk`` 1; the draft model writes "a b", and the newest phrase after b in the
    pool is "c d": the target reads "a b c d".
State kept: window and draft cache for a turn; the pool, at most vocab x G phrases, as
    ``state_scope`` says: ``prompt`` starts every case cold; ``run`` is the reference's benchmark
    (``paper``), which makes the pool once and keeps it warm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Ge

from specbench.arrays import IntArray
from specbench.config.schema import Count, Positive
from specbench.decoding.drafter import ModelDrafter, Scope
from specbench.decoding.protocols import ModelWork
from specbench.decoding.structs import (
    NO_TOKENS,
    DecodeState,
    DraftContext,
    DraftTree,
    Needs,
    ReportValue,
    StepOutcome,
)
from specbench.decoding.verify.greedy import longest_match
from specbench.draft_structures.lookahead import LookaheadWindow, NgramPool
from specbench.errors import ConfigurationError

_DRAFT, _PHRASE = 0, 1


@dataclass(kw_only=True, eq=False)
class Ouroboros(ModelDrafter):
    """Ouroboros: a draft model drafts by lookahead, and phrases make its draft longer.

    Attributes:
        gamma: tokens drafted per step.
        ngram: N, tokens of a phrase with the one it follows; also the window's levels plus one.
        window: W, columns of the window.
        guesses: G, phrases kept per token, and verified per pass of the draft model, at most.
        topk: phrases that continue the draft in the target's pass.
        cut_draft: cut off what lookahead drafts beyond ``gamma``, as the reference does.
        lost_bonus: lose a model's own token after a whole phrase, as the reference does.
        correct_rejected: also overwrite phrases after a rejected draft; the reference does not.
    """

    name: str = "ouroboros"
    version: int = 2
    paper_scope: Scope = "run"
    gamma: Positive = 4
    ngram: Annotated[int, Ge(2)] = 7
    window: Positive = 20
    guesses: Positive = 20
    topk: Count = 3
    cut_draft: bool = True
    lost_bonus: bool = True
    correct_rejected: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.topk <= self.guesses, "topk", f"at most guesses={self.guesses}")
        self._seed = 0
        self._pool = NgramPool(0, self.ngram - 1, self.guesses)
        self._window = LookaheadWindow(self.window, self.ngram)
        self._tree = DraftTree.empty()
        self._n_drafted = 0  # nodes of the tree that the draft model wrote
        self._n_held = 0  # of them, those that it has read
        self._n_read = 0  # tokens of the text that the draft model has read
        self._phrase_tokens = 0

    @property
    def _longest(self) -> int:
        """Longest draft of lookahead before the cut to ``gamma``."""
        return self.gamma + self.ngram - 1 - self.lost_bonus

    @property
    def _max_unread(self) -> int:
        """Most tokens that a step of this method commits."""
        return self._longest + self.ngram

    @property
    def needs(self) -> Needs:
        return Needs(
            tokens_only=False,
            draft_model=True,
            max_nodes=(self.gamma if self.cut_draft else self._longest)
            + self.topk * (self.ngram - 1),
            draft_nodes=self._max_unread + self._longest + self._window.most_nodes(self.guesses),
        )

    def setup(self, context: DraftContext) -> None:
        assert context.draft_model is not None
        if getattr(context.draft_model, "shared", None) is not None:
            raise ConfigurationError(
                "pair.draft.vocabulary=intersection: method=ouroboros drafts the target's tokens "
                "too, which the draft model may lack. Type pair.draft.vocabulary=same."
            )
        self._draft = context.draft_model
        self._seed = context.seed
        self._ends = context.eos_ids
        self._pool = NgramPool.compiled(context.vocab_size, self.ngram - 1, self.guesses)

    def reset(self) -> None:
        self._pool.clear()

    def begin(self, state: DecodeState) -> None:
        prompt = state.buffer[: state.n_prompt]
        self._window.begin(prompt, self._seed)
        self._draft.begin(prompt, state.seed)
        self._n_read = len(prompt)
        self._tree = DraftTree.empty()
        self._phrase_tokens = 0

    def drafting(self, state: DecodeState) -> ModelWork[DraftTree]:
        chain = yield from self._write(state)
        self._n_drafted = len(chain)
        if not len(chain):
            self._tree = DraftTree.empty()
            return self._tree
        n_phrases = self.topk if len(chain) < state.remaining - 1 else 0
        phrases = self._pool.after(int(chain[-1]))[::-1][:n_phrases]
        self._tree = _with_phrases(chain, phrases, self.lost_bonus)
        return self._tree

    def _write(self, state: DecodeState) -> ModelWork[IntArray]:
        """Draft ``[gamma]`` tokens by lookahead, or fewer at the output's end."""
        max_tokens = min(self.gamma, state.remaining - 1)
        ahead = self._longest + self.window + self.ngram  # how far the window may reach
        if max_tokens <= 0 or self._draft.free_rows(state.length) < ahead:
            return NO_TOKENS
        if state.length - self._n_read > self._max_unread:  # a union's other parts did well
            yield from self._draft.catching_up(state.tokens[:-1], draft_vocab=True)
            self._n_read = state.length - 1
        unread = state.tokens[self._n_read :]
        held = 0  # drafted tokens that have been read
        chain: list[IntArray] = []
        length = 0
        while length < max_tokens:
            accepted, bonus = yield from self._lookahead_pass(unread, held)
            if not chain:  # earlier commits are text from now on
                self._draft.commit_path(np.arange(len(unread)), accepted)
                self._n_read = state.length
                held = len(accepted)
            else:
                self._draft.commit_path(NO_TOKENS, np.append(np.arange(held + 1), accepted))
                held += 1 + len(accepted)
            ends = [i for i, token in enumerate(bonus.tolist()) if token in self._ends]
            if ends:
                chain.append(bonus[: ends[0] + 1])
                break
            chain.append(bonus)
            length += len(bonus)
            unread = bonus[-1:]
        longest = max_tokens if self.cut_draft else state.remaining - 1
        drafted = np.concatenate(chain)[:longest]
        self._n_held = min(held, len(drafted))
        return drafted

    def _lookahead_pass(self, unread: IntArray, held: int) -> ModelWork[tuple[IntArray, IntArray]]:
        """Run one pass of lookahead decoding after ``held`` drafted tokens.

        Args:
            unread: ``[u]`` the chain of tokens before the window, its root last.
            held: nodes that the draft model holds, a chain.

        Returns:
            Numbers of the nodes of the accepted guess, and the tokens that follow the root: that
            guess and the draft's own.
        """
        root = len(unread) - 1
        guesses = self._pool.after(int(unread[-1])) if self._window.full else None
        if guesses is None:
            guesses = np.empty((0, self.ngram - 1), dtype=np.int64)
        tokens, parents, aux = self._window.tree(int(unread[-1]), guesses, self.lost_bonus)
        before = np.arange(-1, root) + held
        numbers = np.concatenate((before, parents + held + len(unread)))
        read = np.concatenate((unread, tokens))
        logits = yield from self._draft.extending(read, numbers, draft_vocab=True)
        choices = self._draft.to_target_ids(self._draft.likeliest(logits)[root:]).cpu().numpy()
        path = np.empty(len(tokens), dtype=np.int64)
        path = path[: longest_match(tokens, parents, aux, choices, path)]
        self._pool.insert(self._window.advance(choices))
        last = path[-1] + 1 if len(path) else 0
        return path + held + len(unread), np.append(tokens[path], choices[last])

    def observe(self, state: DecodeState, outcome: StepOutcome) -> None:
        tree, path = outcome.tree, outcome.path
        if outcome.finished or tree is not self._tree or not len(tree):
            self._draft.drop_nodes()
            return
        n_drafted = self._n_drafted
        accepted = min(len(path), n_drafted)
        self._phrase_tokens += len(path) - accepted
        read = min(accepted, self._n_held)
        self._draft.commit_path(np.arange(read))
        self._n_read += read
        if outcome.next_tokens is not None:
            self._learn(np.asarray(tree.tokens), accepted, outcome.next_tokens)

    def _learn(self, tokens: IntArray, accepted: int, next_tokens: IntArray) -> None:
        """Learn phrases from the target's pass.

        Args:
            tokens: ``[n]`` of the tree.
            accepted: number of accepted draft tokens.
            next_tokens: ``[n + 1]`` the target's most likely token at the root and every node.
        """
        n_drafted, length = self._n_drafted, self.ngram - 1
        along = next_tokens[n_drafted + 1 :].reshape(-1, length)
        if len(along) and (accepted == n_drafted or self.correct_rejected):
            # Along a phrase: the token after the draft, then those after all but its last.
            first = np.full((len(along), 1), next_tokens[n_drafted])
            corrected = np.hstack((first, along[:, :-1]))
            # The newest was the first branch, and is the last in the pool.
            self._pool.replace(int(tokens[n_drafted - 1]), corrected[::-1])
        if accepted < n_drafted:
            draft, choices = tokens[accepted:n_drafted], next_tokens[accepted + 1 : n_drafted + 1]
            self._pool.insert(agreeing_phrases(draft, choices, length))

    def report(self) -> Mapping[str, ReportValue]:
        """Counters of the turn: phrases in the pool, and tokens committed from phrases."""
        return {
            **self._draft.report(),
            "pool": len(self._pool),
            "phrase_tokens": self._phrase_tokens,
        }


def _with_phrases(chain: IntArray, phrases: IntArray, lost_bonus: bool) -> DraftTree:
    """Add every row of ``phrases`` to ``chain`` as a branch below its last token.

    With ``lost_bonus`` the last token of a branch is no candidate, so none is committed after it.
    """
    count, length = phrases.shape
    below = np.arange(count * length).reshape(count, length) + len(chain) - 1
    below[:, :1] = len(chain) - 1
    tokens = np.concatenate((chain, phrases.reshape(-1)))
    sources = np.full(len(tokens), _PHRASE)
    sources[: len(chain)] = _DRAFT
    parents = np.concatenate((np.arange(-1, len(chain) - 1), below.reshape(-1)))
    aux = None
    if lost_bonus and count:
        aux = np.zeros(len(tokens), dtype=np.bool_)
        aux[len(chain) + length - 1 :: length] = True
    return DraftTree(tokens, parents, sources=sources, aux=aux)


def agreeing_phrases(draft: IntArray, choices: IntArray, length: int) -> IntArray:
    """Cut phrases out of a model's choices along a draft, where the draft agrees with them.

    Args:
        draft: ``[d]`` tokens.
        choices: ``[d]`` the model's token after each of them.
        length: tokens of a phrase.

    Returns:
        ``[m, 1 + length]`` draft tokens with the phrases after them: ``choices`` at the token and
        at the following ones, where the draft went on with exactly those.
    """
    if len(draft) < length:
        return np.empty((0, 1 + length), dtype=np.int64)
    phrases = np.lib.stride_tricks.sliding_window_view(choices, length)
    keys = draft[: len(phrases)]
    agrees = draft[1:] == choices[:-1]
    if length > 1:
        whole = np.lib.stride_tricks.sliding_window_view(agrees, length - 1).all(1)
        keys, phrases = keys[whole], phrases[whole]
    return np.column_stack((keys, phrases))
