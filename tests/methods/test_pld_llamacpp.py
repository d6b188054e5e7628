"""PLD's variant ``llamacpp`` against llama.cpp's published rule, written out token by token."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from methods.pld import PromptLookup
from specbench.decoding.structs import DecodeState


def by_the_rule(tokens, n, m):
    """What ``ngram-simple`` drafts: a search backwards, position 0 left out."""
    *before, sampled = tokens
    length = len(before)
    if length <= n + m + 1:
        return []
    pattern = [*before[length - n + 1 :], sampled]
    for j in range(length - n - 1, 0, -1):
        if before[j : j + n] == pattern:
            copied = before[j + n : j + n + m]
            return copied if len(copied) >= n else []
    return []


@given(
    st.lists(st.integers(0, 2), min_size=2, max_size=40),
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(1, 8),
)
def test_drafts_are_those_of_the_rule(tokens, n, m, remaining):
    drafter = PromptLookup(variant="llamacpp", max_ngram=n, num_tokens=m)
    state = DecodeState(np.array(tokens[:-1], dtype=np.int64), remaining + 1)
    state.commit(np.array(tokens[-1:], dtype=np.int64))
    expected = by_the_rule(tokens, n, m)[: remaining - 1]
    assert drafter.propose(state).tokens.tolist() == expected
