import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from methods.ouroboros import Ouroboros, phrases_spoken
from specbench.decoding.drafter import Drafter
from specbench.decoding.structs import DecodeState, DraftContext, StepOutcome
from specbench.index.ngram.pool import NgramPool
from tests.methods.table_turns import PROMPT, VOCAB, pair, turn


def ouroboros(draft, **knobs):
    drafter = Ouroboros(**({"gamma": 3, "ngram": 3, "window": 4, "guesses": 4} | knobs))
    drafter.setup(DraftContext(VOCAB, frozenset(), draft_model=draft))
    return drafter


KNOBS = [{}, {"gamma": 1, "topk": 0}, {"ngram": 2, "window": 1, "guesses": 1, "topk": 1}]
KNOBS += [{"gamma": 6, "ngram": 5}, {"gamma": 2, "ngram": 4, "window": 1}]


@pytest.mark.parametrize("knobs", KNOBS)
@pytest.mark.parametrize("seed", range(2))
def test_nothing_changes_the_text(knobs, seed):
    for noise, room in ((0.0, 10**6), (1.0, 10**6), (0.5, 40)):
        target, draft = pair(10 * seed, noise, room)
        expected = turn(target, Drafter(name="ar"), n=60).output_ids
        drafter = ouroboros(draft, **knobs)
        for _ in range(2):  # cold, then with a pool
            result = turn(target, drafter)
            assert result.output_ids == expected
            assert max(result.drafted_per_step) <= drafter.needs.max_nodes
            assert max(draft.fed, default=0) <= drafter.needs.draft_nodes
        end = expected[20]
        stopped = turn(target, drafter, eos=frozenset({end}))
        assert stopped.output_ids == expected[: expected.index(end) + 1]


def test_the_draft_is_what_the_draft_model_says():
    """Lookahead is lossless for the draft model too."""
    target, draft = pair(noise=0.8)
    drafter = ouroboros(draft)
    chains = []
    propose = drafter.propose

    def spied(state):
        tree = propose(state)
        chains.append((state.tokens.tolist(), tree.tokens[tree.sources == 0].tolist()))
        return tree

    drafter.propose = spied
    turn(target, drafter)
    assert len(chains) > 5
    for text, chain in chains[:-1]:
        assert len(chain) >= 3
        for token in chain:
            assert token == int(draft.table[text[-2], text[-1]].argmax())
            text.append(token)


def test_a_perfect_draft_commits_whole_drafts():
    target, draft = pair()
    result = turn(target, ouroboros(draft, gamma=4), n=60)
    assert all(count >= 5 for count in result.committed_per_step[:-1])


def test_a_warm_pool_saves_passes():
    target, draft = pair(noise=0.3)
    drafter = ouroboros(draft, gamma=4, ngram=4)
    drafter.reset()
    cold = turn(target, drafter)
    warm = turn(target, drafter)
    drafter.reset()
    again = turn(target, drafter)
    assert cold.committed_per_step == again.committed_per_step
    assert cold.drafter == again.drafter
    assert warm.drafter["draft_forwards"] < cold.drafter["draft_forwards"]
    assert warm.drafter["phrase_tokens"] > 0


def test_the_tree_and_what_is_learnt_by_hand():
    """A draft of two tokens, two phrases behind it; then what the target said of both."""
    _, draft = pair()
    drafter = ouroboros(draft, gamma=2, ngram=3, topk=2)
    drafter._write = lambda state: np.array([5, 6])
    pool = drafter._pool
    pool.insert(np.array([[6, 0, 1], [6, 2, 3], [6, 4, 5], [7, 7, 7]]))
    state = DecodeState(PROMPT, 20)
    state.commit(np.array([2]))
    drafter.begin(state)
    tree = drafter.propose(state)
    assert tree.tokens.tolist() == [5, 6, 4, 5, 2, 3]  # the newest phrase first
    assert tree.parents.tolist() == [-1, 0, 1, 2, 1, 4]
    assert tree.sources.tolist() == [0, 0, 1, 1, 1, 1]
    # The target: 5 after the root, 6 after 5, 2 after 6; then 7, 0 along 4 5 and 3, 1 along 2 3.
    draft.nodes = [[*draft.text, 2], [*draft.text, 2, 5]]
    draft.text = [*draft.text, 2]
    draft.nodes = [[*draft.text, 5]]
    said = np.array([5, 6, 2, 7, 0, 3, 1])
    state.commit(np.array([5, 6, 2, 3, 1]))
    drafter._read = 4
    drafter.observe(state, StepOutcome(tree, np.array([0, 1, 4, 5]), state.tokens[-5:], said))
    assert pool.after(6).tolist() == [[0, 1], [2, 3], [2, 7]]
    assert drafter.report()["phrase_tokens"] == 2
    assert drafter._read == 5  # the root and the draft's first token


def test_the_targets_words_on_a_rejected_draft_are_phrases():
    #               0  1  2  3  4
    draft = np.array([9, 4, 5, 6, 2])
    said = np.array([4, 5, 7, 2, 3])
    assert phrases_spoken(draft, said, 3).tolist() == [[9, 4, 5, 7]]
    assert phrases_spoken(draft, said, 2).tolist() == [[9, 4, 5], [4, 5, 7], [6, 2, 3]]
    assert phrases_spoken(draft, said, 1).tolist() == np.column_stack((draft, said)).tolist()
    assert phrases_spoken(draft[:2], said[:2], 3).shape == (0, 4)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(0, 12), length=st.integers(1, 4))
def test_spoken_phrases_are_those_of_the_plain_walk(seed, n, length):
    random = np.random.default_rng(seed)
    draft, said = random.integers(0, 2, (2, n))
    expected = []
    for j in range(n):
        phrase = [int(said[j])]
        while len(phrase) < length and j + len(phrase) < n and draft[j + len(phrase)] == phrase[-1]:
            phrase.append(int(said[j + len(phrase)]))
        if len(phrase) == length:
            expected.append([int(draft[j]), *phrase])
    assert phrases_spoken(draft, said, length).tolist() == expected


def test_replaced_phrases_keep_their_places_and_never_repeat():
    pool = NgramPool(10, 2, 4)
    pool.insert(np.array([[7, 1, 1], [7, 2, 2], [7, 3, 3], [7, 4, 4], [6, 1, 1]]))
    pool.replace(7, np.array([[8, 8], [9, 9]]))
    assert pool.after(7).tolist() == [[1, 1], [2, 2], [8, 8], [9, 9]]
    pool.replace(7, np.array([[1, 1], [9, 9]]))
    assert pool.after(7).tolist() == [[2, 2], [1, 1], [9, 9]]
    assert pool.after(6).tolist() == [[1, 1]]
