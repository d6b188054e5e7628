import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from methods.pld import PromptLookup
from specbench.decoding.structs import DecodeState, DraftContext
from specbench.errors import ConfigurationError

CONTEXT = DraftContext(vocab_size=200, eos_ids=frozenset({0}))


def lookup(text, **knobs):
    drafter = PromptLookup(**knobs)
    drafter.setup(CONTEXT)
    tree = drafter.propose(DecodeState(np.array(text, dtype=np.int64), 4))
    assert tree.parents.tolist() == list(range(-1, len(tree) - 1))
    return tree.tokens.tolist()


def plain_lookup(text, variant, max_ngram, min_ngram, num_tokens):
    """Restate the rules without any index."""
    length = len(text)
    for n in range(max_ngram, min_ngram - 1, -1):
        tail = text[length - n :] if n < length else None
        starts = [i + n for i in range(length - n) if text[i : i + n] == tail]
        full = [start for start in starts if start + num_tokens <= length]
        if variant == "specbench":
            starts = [start for start in full if start < length - n]
        elif variant == "recent" and full:
            starts = full[::-1]
        if starts:
            draft = text[starts[0] : starts[0] + num_tokens]
            return draft[: draft.index(0)] if variant == "hf" and 0 in draft else draft
    return []


@pytest.mark.parametrize(
    ("knobs", "expected"),
    [
        ({}, (3, 1)),
        ({"variant": "hf"}, (2, 1)),
        ({"variant": "vllm"}, (5, 5)),
        ({"variant": "recent"}, (3, 1)),
        ({"variant": "hf", "max_ngram": 4}, (4, 1)),
        ({"variant": "vllm", "max_ngram": 3}, (3, 3)),
        ({"variant": "vllm", "min_ngram": 2}, (2, 2)),
        ({"variant": "vllm", "min_ngram": 1, "max_ngram": 3}, (3, 1)),
    ],
)
def test_a_variant_searches_the_lengths_of_its_home(knobs, expected):
    variant = knobs.get("variant", "specbench")
    random = np.random.default_rng(0)
    for length in range(20, 60):
        text = random.integers(1, 3, length).tolist()
        assert lookup(text, num_tokens=3, **knobs) == plain_lookup(text, variant, *expected, 3)


def test_without_a_match_the_dummy_token_is_drafted():
    assert lookup([1, 2, 3], dummy_token=100) == [100]
    with pytest.raises(ConfigurationError, match=r"`method\.dummy_token` must be below"):
        lookup([1, 2, 3], dummy_token=500)


def test_only_committed_tokens_are_searched():
    drafter = PromptLookup(variant="vllm", max_ngram=1)
    drafter.setup(CONTEXT)
    state = DecodeState(np.array([1, 2, 3], dtype=np.int64), 4)
    state.buffer[3:] = [1, 2, 3, 1]
    assert len(drafter.propose(state)) == 0


@given(
    text=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    variant=st.sampled_from(["specbench", "hf", "vllm", "recent"]),
    ngrams=st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted),
    num_tokens=st.integers(1, 8),
)
def test_equals_the_plain_search(text, variant, ngrams, num_tokens):
    knobs = {"min_ngram": ngrams[0], "max_ngram": ngrams[1], "num_tokens": num_tokens}
    assert lookup(text, variant=variant, **knobs) == plain_lookup(text, variant, **knobs)


def by_the_rule(tokens, n, m):
    """Draft as llama.cpp's ``ngram-simple``: a search backwards, position 0 left out."""
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
def test_the_variant_llamacpp_drafts_by_its_published_rule(tokens, n, m, remaining):
    drafter = PromptLookup(variant="llamacpp", max_ngram=n, num_tokens=m)
    state = DecodeState(np.array(tokens[:-1], dtype=np.int64), remaining + 1)
    state.commit(np.array(tokens[-1:], dtype=np.int64))
    expected = by_the_rule(tokens, n, m)[: remaining - 1]
    assert drafter.propose(state).tokens.tolist() == expected
