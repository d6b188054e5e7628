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
    """The rules as sentences, without any index."""
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


# The last three tokens 5 6 7 occurred at the start and in the middle.
TEXT = [5, 6, 7, 1, 2, 3, 5, 6, 7, 4, 8, 9, 5, 6, 7]


def test_specbench_copies_what_followed_the_oldest_match():
    assert lookup(TEXT, num_tokens=4) == [1, 2, 3, 5]


def test_recent_copies_what_followed_the_newest_match():
    assert lookup(TEXT, num_tokens=4, variant="recent") == [4, 8, 9, 5]


def test_specbench_wants_the_whole_continuation_and_else_a_shorter_ngram():
    # 6 7 occurred once and has three tokens after it; 7 alone occurred earlier, with six.
    text = [7, 1, 2, 3, 6, 7, 9, 6, 7]
    assert lookup(text, num_tokens=4) == [1, 2, 3, 6]
    assert lookup(text, num_tokens=4, variant="hf") == [9, 6, 7]
    assert lookup(text, num_tokens=9) == []


def test_specbench_refuses_a_match_within_the_last_n_tokens():
    # The continuation of 1 1 1 at the start would begin at 3, not before 6 - 3.
    assert lookup([1, 1, 1, 1, 1, 1], max_ngram=3, min_ngram=3, num_tokens=2) == []
    assert lookup([1, 1, 1, 1, 1, 1, 1], max_ngram=3, min_ngram=3, num_tokens=2) == [1, 1]


def test_hf_cuts_before_the_first_end_of_text():
    text = [5, 6, 1, 0, 2, 5, 6]
    assert lookup(text, variant="hf", num_tokens=4) == [1]
    assert lookup(text, variant="vllm", max_ngram=2, num_tokens=4) == [1, 0, 2, 5]
    assert lookup(text, variant="vllm", num_tokens=4) == []  # no five tokens occur twice
    # Nothing is left before it: nothing is drafted, and no shorter n-gram is tried.
    assert lookup([5, 6, 0, 6, 9, 5, 6], variant="hf", num_tokens=4) == []


def test_vllm_takes_the_longest_match_and_the_oldest_among_these():
    text = [7, 1, 6, 7, 2, 5, 6, 7, 3, 5, 6, 7, 4, 5, 6, 7]
    assert lookup(text, variant="vllm", max_ngram=5, min_ngram=1, num_tokens=2) == [3, 5]
    assert lookup(text, variant="vllm", max_ngram=2, min_ngram=2, num_tokens=2) == [2, 5]
    assert lookup(text, variant="vllm", max_ngram=9, min_ngram=6, num_tokens=2) == []


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


def test_recent_prefers_a_whole_continuation():
    # The newest 7 has two tokens after it, the one before four.
    assert lookup([7, 1, 2, 3, 7, 9, 7], variant="recent", num_tokens=3) == [1, 2, 3]
    assert lookup([7, 1, 2, 3, 7, 9, 7], variant="recent", num_tokens=9) == [1, 2, 3, 7, 9, 7]


@pytest.mark.parametrize("variant", ["specbench", "hf", "vllm", "recent"])
@pytest.mark.parametrize("text", [[4], [4, 5], [1, 2, 3, 4, 5]])
def test_nothing_is_drafted_without_a_match(text, variant):
    assert lookup(text, variant=variant, num_tokens=1) == []


def test_the_dummy_token_stands_in_for_no_match():
    assert lookup([1, 2, 3], dummy_token=100) == [100]
    with pytest.raises(ConfigurationError, match="dummy_token=500"):
        lookup([1, 2, 3], dummy_token=500)


def test_only_committed_tokens_are_searched():
    drafter = PromptLookup(variant="vllm", max_ngram=1)
    drafter.setup(CONTEXT)
    state = DecodeState(np.array([1, 2, 3], dtype=np.int64), 4)
    state.buffer[3:] = [1, 2, 3, 1]
    assert len(drafter.propose(state)) == 0


def test_the_draft_is_a_copy():
    drafter = PromptLookup(num_tokens=2)
    drafter.setup(CONTEXT)
    state = DecodeState(np.array([1, 2, 3, 4, 1], dtype=np.int64), 4)
    draft = drafter.propose(state).tokens
    state.buffer[:] = 9
    assert draft.tolist() == [2, 3]


@given(
    text=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    variant=st.sampled_from(["specbench", "hf", "vllm", "recent"]),
    ngrams=st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted),
    num_tokens=st.integers(1, 8),
)
def test_equals_the_plain_search(text, variant, ngrams, num_tokens):
    knobs = {"min_ngram": ngrams[0], "max_ngram": ngrams[1], "num_tokens": num_tokens}
    assert lookup(text, variant=variant, **knobs) == plain_lookup(text, variant, **knobs)
