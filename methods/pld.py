"""Prompt lookup decoding: draft what followed the last tokens when they occurred before.

Paper: none; the method was published as a repository, apoorvumang/prompt-lookup-decoding.
Variants, each with the lengths it has in its home where none are given:
    specbench  Spec-Bench's copy (also the repository's README): oldest match with all
               ``num_tokens`` after it and not within the last n tokens, else the next match, then a
               shorter n; n from 3 to 1. Without a match Spec-Bench drafts token 100
               (``dummy_token``).
    hf         transformers' ``PromptLookupCandidateGenerator``: oldest match, a short continuation
               is allowed, cut before the first end-of-text token; n from 2 to 1.
    vllm       vLLM's n-gram proposer: the longest match within [min_ngram, max_ngram], the oldest
               among the longest, a short continuation is allowed; both 5, or equal to the other.
    llamacpp   llama.cpp's ``ngram-simple``: the newest match of exactly ``max_ngram`` tokens, never
               at the text's first token; nothing is drafted in a text of ``max_ngram + num_tokens
               + 2`` tokens or less, nor a continuation shorter than ``max_ngram``; n is 12 (and
               there 48 tokens are drafted). ``server.size_n`` and ``size_m`` are its knobs there.
    recent     the newest match with ``num_tokens`` after it, else the one with most; unpublished;
               n from 3 to 1.
Where ours differs: without a match nothing is drafted (``dummy_token: null``), and the first draft
    comes after the prompt's pass, not in it. The search is compiled but still linear in the text.
Example: ``num_tokens`` 2; after "a b c d x a b" the draft is "c d", which followed the first "a b".
State kept: none beyond the committed tokens, so the state scope changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numba import njit

from specbench.arrays import Array
from specbench.config.schema import Count, Positive
from specbench.decoding.drafter import Drafter
from specbench.decoding.structs import DecodeState, DraftContext, DraftTree, Needs

# Which match is taken, and whether its continuation may be short.
OLDEST_FULL, OLDEST, NEWEST = 0, 1, 2

_RULES = {
    "specbench": OLDEST_FULL,
    "hf": OLDEST,
    "vllm": OLDEST,
    "llamacpp": NEWEST,
    "recent": NEWEST,
}
_MAX_NGRAM = {"specbench": 3, "hf": 2, "vllm": 5, "llamacpp": 12, "recent": 3}


@dataclass(kw_only=True, eq=False)
class PromptLookup(Drafter):
    """Prompt lookup decoding: drafts what followed the last tokens when they occurred before.

    Attributes:
        max_ngram: length of the n-gram that is searched first; None takes the variant's.
        min_ngram: length of the last one tried; None takes the variant's.
        num_tokens: tokens drafted at most (exactly, in the variant ``specbench``).
        variant: ``specbench``, ``hf``, ``vllm``, ``llamacpp`` or ``recent``.
        dummy_token: id drafted where nothing matches; None drafts nothing.
    """

    name: str = "pld"
    version: int = 2
    max_ngram: Positive | None = None
    min_ngram: Positive | None = None
    num_tokens: Positive = 10
    variant: Literal["specbench", "hf", "vllm", "llamacpp", "recent"] = "specbench"
    dummy_token: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        longest, shortest = self._lengths = self._searched_lengths()
        self._require(longest >= shortest, "min_ngram", f"at most max_ngram={longest}")
        self._rule = _RULES[self.variant]
        self._eos_ids: frozenset[int] = frozenset()
        self._no_match = DraftTree.empty()

    def _searched_lengths(self) -> tuple[int, int]:
        """Return the longest and shortest n-gram; the variant's where a knob is None."""
        longest, shortest, vllm = self.max_ngram, self.min_ngram, self.variant == "vllm"
        if longest is None:
            longest = shortest if vllm and shortest is not None else _MAX_NGRAM[self.variant]
        if shortest is None:
            shortest = longest if vllm or self.variant == "llamacpp" else 1
        return longest, shortest

    @property
    def needs(self) -> Needs:
        return Needs(max_nodes=self.num_tokens)

    def setup(self, context: DraftContext) -> None:
        if self.dummy_token is not None:
            inside = self.dummy_token < context.vocab_size
            self._require(inside, "dummy_token", f"below {context.vocab_size}")
            self._no_match = DraftTree.chain(np.array([self.dummy_token], dtype=np.int64))
        if self.variant == "hf":
            self._eos_ids = context.eos_ids
        # Compiles, or loads what was compiled before, outside any clock.
        self.propose(DecodeState(np.zeros(4, dtype=np.int64), 1))

    def propose(self, state: DecodeState) -> DraftTree:
        if self.variant == "llamacpp":
            return self._as_llamacpp(state)
        start, count = find_continuation(
            state.buffer, state.length, *self._lengths, self.num_tokens, self._rule
        )
        if count == 0:
            return self._no_match
        draft = state.buffer[start : start + count].copy()
        if self._eos_ids:
            draft = self._before_eos(draft)
        return DraftTree.chain(draft) if len(draft) else self._no_match

    def _as_llamacpp(self, state: DecodeState) -> DraftTree:
        """Draft from the newest earlier match of the last n tokens that n tokens follow."""
        n, before = self._lengths[0], state.length - 1  # the root is not in the text searched
        if before <= n + self.num_tokens + 1:
            return self._no_match
        text, last = state.buffer[:before], state.buffer[before + 1 - n : before + 1]
        matches = np.ones(before - n, dtype=bool)
        for i in range(n):
            matches &= text[i : i + len(matches)] == last[i]
        matches[0] = False  # position 0 means "none" there
        starts = np.flatnonzero(matches)
        if not len(starts):
            return self._no_match
        draft = text[starts[-1] + n :][: self.num_tokens]
        if len(draft) < n:
            return self._no_match
        return DraftTree.chain(draft[: max(0, state.remaining - 1)].copy())

    def _before_eos(self, draft: np.ndarray) -> np.ndarray:
        for i, token in enumerate(draft.tolist()):
            if token in self._eos_ids:
                return draft[:i]
        return draft


@njit(cache=True)
def find_continuation(
    tokens: Array, length: int, longest: int, shortest: int, count: int, rule: int
) -> tuple[int, int]:
    """Find where the last tokens occurred before, trying ``longest`` to ``shortest`` n-grams.

    Args:
        tokens: int64 text; only ``tokens[:length]`` counts.
        count: tokens to draft after the match.
        rule: `OLDEST_FULL`: the oldest match with all ``count`` tokens after it, and which ends
            more than n tokens before the text's end. `OLDEST`: the oldest match, however few
            tokens follow. `NEWEST`: the newest match with all ``count`` tokens after it, else the
            match with the most tokens after it.

    Returns:
        Start and length of the continuation; the length is 0 where there is none.
    """
    for n in range(min(longest, length - 1), shortest - 1, -1):
        tail = length - n
        last = tokens[length - 1]
        fallback = -1
        newest = -1
        for start in range(n, length):
            # ``start`` is where the continuation would begin; the match ends right before it.
            if tokens[start - 1] != last:
                continue
            same = True
            for i in range(1, n):
                if tokens[start - 1 - i] != tokens[length - 1 - i]:
                    same = False
                    break
            if not same:
                continue
            full = start + count <= length
            if rule == OLDEST:
                return start, min(count, length - start)
            if rule == OLDEST_FULL:
                if full and start < tail:
                    return start, count
                # Later matches have fewer tokens after them and end nearer to the text's end.
                break
            elif full:
                newest = start
            elif fallback < 0:
                fallback = start
        if newest >= 0:
            return newest, count
        if fallback >= 0:
            return fallback, length - fallback
    return 0, 0
