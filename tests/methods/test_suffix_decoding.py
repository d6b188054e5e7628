import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from methods.suffix_decoding import FREED, TAIL, SuffixDecoding, SuffixTree, speculate
from specbench.decoding.structs import NO_TOKENS, DecodeState, DraftContext, DraftTree, StepOutcome
from tests.conftest import VOCAB
from tests.methods.suffix_reference import PlainSuffixTree

LOCAL, GLOBAL = 0, 1


def best(tree, text, factor, offset, longest, least, branching):
    score, nodes, survival = speculate(
        tree.arrays,
        np.array(text, dtype=np.int64),
        len(text),
        float(factor),
        float(offset),
        longest,
        float(least),
        branching,
    )
    assert survival.sum() == pytest.approx(score)  # path probabilities, node by node
    return score, nodes[0].tolist(), nodes[1].tolist()


# -- the tree --------------------------------------------------------------------------------------


def test_old_requests_make_room_for_new_tokens():
    tree = SuffixTree(3, max_tokens=16)
    for token in (1, 2, 3):
        tree.start_request(6)
        tree.extend(np.full(6, token), 0, 6)
    tree.end_request()
    assert (len(tree), tree.n_requests) == (12, 2)
    assert tree.count([1]) == 0


def test_a_request_that_fills_the_tree_alone_ends_there():
    tree = SuffixTree(3, 8)
    tree.start_request()
    tree.extend(np.arange(20), 0, 6)
    tree.extend(np.arange(20), 6, 20)
    assert (len(tree), tree.count([7]), tree.count([8])) == (8, 1, 0)
    tree.extend(np.arange(20), 0, 3)
    assert len(tree) == 8


operations = st.lists(st.lists(st.integers(0, 3), max_size=25), max_size=8)


@given(
    requests=operations,
    depth=st.integers(2, 6),
    max_requests=st.integers(1, 4),
    pieces=st.integers(1, 5),
    base=st.sampled_from([0, 2**31 - 9, 2**32 - 9]),
)
def test_counts_are_those_of_substrings(requests, depth, max_requests, pieces, base):
    tree, reference = SuffixTree(depth, 2**20, max_requests), PlainSuffixTree(depth, max_requests)
    # As if so many tokens had come and gone: positions are kept in 32 bits.
    tree.arrays.meta[TAIL] = base
    for request in requests:
        tree.start_request()
        reference.start_request()
        for begin in range(0, len(request), pieces):
            end = min(begin + pieces, len(request))
            tree.extend(np.array(request), begin, end)
            reference.extend(request[begin:end])
        assert len(tree) == sum(map(len, reference.requests))
        assert tree.n_nodes <= 2 * len(tree)
        for path, count in reference.counts.items():
            assert tree.count(list(path)) == count
            assert tree.count([*path, 9]) == 0
    while tree.n_requests:
        tree._evict()
    assert tree.n_nodes == 0


@given(
    requests=operations,
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    depth=st.integers(2, 6),
    max_requests=st.integers(1, 4),
    factor=st.sampled_from([0.5, 1.0, 2.0]),
    offset=st.sampled_from([0.0, 2.0]),
    longest=st.integers(1, 8),
    least=st.sampled_from([0.0, 0.1, 0.4]),
    branching=st.booleans(),
)
def test_drafts_are_those_of_the_plain_tree(
    requests, prompt, depth, max_requests, factor, offset, longest, least, branching
):
    tree, reference = SuffixTree(depth, 2**20, max_requests), PlainSuffixTree(depth, max_requests)
    for request in requests:
        tree.start_request()
        reference.start_request()
        for n in range(1, len(request) + 1):
            tree.extend(np.array(request), n - 1, n)
            reference.extend(request[n - 1 : n])
            text = prompt + request[:n]
            knobs = factor, offset, longest, least, branching
            score, tokens, parents = best(tree, text, *knobs)
            expected, draft = reference.speculate(text, *knobs)
            assert score == pytest.approx(expected)
            assert (tokens, parents) == draft


def test_memory_is_capped_under_many_insertions():
    n_insertions, max_tokens = 100_000, 2**13
    text = np.random.default_rng(2).integers(0, 30, n_insertions)
    tree = SuffixTree(16, max_tokens, 40)
    for begin in range(0, n_insertions, 500):
        tree.start_request(500)
        tree.extend(text, begin, min(begin + 500, n_insertions))
        assert len(tree) <= tree.max_tokens and tree.n_requests <= 40
        assert tree.n_nodes <= 2 * len(tree)
    assert sum(a.nbytes for a in tree.arrays) <= 100 * tree.max_tokens + 1000
    # Slots of evicted nodes are used again.
    assert tree.arrays.meta[FREED] >= -1 and len(tree.arrays.nodes) <= 2 * tree.max_tokens + 2


# -- the drafter -----------------------------------------------------------------------------------


def ready(**knobs):
    drafter = SuffixDecoding(**knobs)
    drafter.setup(DraftContext(VOCAB, frozenset()))
    drafter.reset()
    return drafter


def after(drafter, prompt, answer):
    state = DecodeState(np.array(prompt, dtype=np.int64), 50)
    state.commit(np.array(answer[:1]))
    drafter.begin(state)
    commit(drafter, state, answer[1:])
    return state


def commit(drafter, state, tokens):
    if tokens:
        state.commit(np.array(tokens))
        outcome = StepOutcome(DraftTree.empty(), NO_TOKENS, np.array(tokens), None)
        drafter.observe(state, outcome)


def turn(drafter, prompt, answer):
    drafter.end(after(drafter, prompt, answer))


def test_earlier_answers_are_continued_but_not_earlier_prompts():
    drafter = ready()
    turn(drafter, [9, 8, 7], [1, 2, 3, 4])
    tree = drafter.propose(after(drafter, [5], [1, 2]))
    assert (tree.tokens.tolist(), tree.sources.tolist()) == ([3, 4], [GLOBAL, GLOBAL])
    assert len(drafter.propose(after(drafter, [5], [9, 8]))) == 0


def test_no_cached_requests_is_no_global_tree():
    drafter = ready(max_cached_requests=0)
    turn(drafter, [9], [1, 2, 3, 4])
    assert len(drafter.propose(after(drafter, [5], [1, 2]))) == 0


def test_the_oldest_answers_are_forgotten():
    drafter = ready(max_cached_requests=2)
    turn(drafter, [9], [1, 2, 3, 4])
    turn(drafter, [9], [5, 6, 7])
    # The one in progress is the second.
    assert len(drafter.propose(after(drafter, [8], [1, 2]))) == 0
    assert drafter.propose(after(drafter, [8], [1, 2])).tokens.tolist() == []
    drafter = ready(max_cached_requests=-1)
    for _ in range(3):
        turn(drafter, [9], [1, 2, 3, 4])
    assert drafter.propose(after(drafter, [8], [1, 2])).tokens.tolist() == [3, 4]


def test_the_text_itself_wins_ties():
    drafter = ready()
    turn(drafter, [9], [1, 2, 3])
    tree = drafter.propose(after(drafter, [4, 1, 2, 5, 6], [1, 2]))
    # Locally 2 of 2 earlier ends continue with 5 once; globally 3 once: the same score.
    assert tree.tokens.tolist()[:1] == [5] and tree.sources[0] == LOCAL
