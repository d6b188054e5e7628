import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from methods.lookahead import Lookahead
from specbench.decoding.structs import DecodeState, DraftContext, DraftTree, StepOutcome
from specbench.draft_structures.lookahead import NgramPool
from tests.conftest import VOCAB
from tests.methods.lookahead_reference import PlainLookahead
from tests.methods.toy_turns import continued, markov_rule, play


def lookahead(vocab_size=VOCAB, seed=0, **knobs):
    drafter = Lookahead(**knobs)
    drafter.setup(DraftContext(vocab_size=vocab_size, eos_ids=frozenset(), seed=seed))
    drafter.reset()
    return drafter


# -- the pool --------------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 4),
    per_token=st.integers(1, 5),
    count=st.integers(0, 200),
)
def test_the_pool_is_a_list_per_token(seed, n, per_token, count):
    rows = np.random.default_rng(seed).integers(0, 3, (count, 1 + n))
    pool, lists = NgramPool(3, n, per_token), {token: [] for token in range(3)}
    for i in range(0, count, 7):
        pool.insert(rows[i : i + 7])
    for token, *gram in rows.tolist():
        if gram in lists[token]:
            lists[token].remove(gram)
        lists[token] = [*lists[token], gram][-per_token:]
    assert {token: pool.after(token).tolist() for token in range(3)} == lists


# -- against the reference's algorithm -------------------------------------------------------------


def plain_lookahead(prompt, n, rule, first_level, n_gram, cap, from_text, lost_bonus):
    """Tokens of every step."""
    text = [*prompt, rule(list(prompt))]
    plain = PlainLookahead(rule, first_level, n_gram, cap, lost_bonus=lost_bonus)
    steps = []

    def insert_text(begin):
        for end in range(max(begin, n_gram - 1), len(text)):
            plain.insert(text[end - n_gram + 1], tuple(text[end - n_gram + 2 : end + 1]))

    if from_text:
        insert_text(0)
    while len(text) - len(prompt) < n:
        before = list(text)
        new = plain.new_tokens(text)[: n - (len(text) - len(prompt))]
        text += new
        steps.append(new)
        if from_text:
            insert_text(len(text) - len(new))
        plain.move(before)
    return steps


@given(
    seed=st.integers(0, 10**6),
    n_gram=st.integers(2, 5),
    width=st.integers(1, 6),
    cap=st.integers(1, 5),
    n=st.integers(1, 60),
    from_text=st.booleans(),
    lost_bonus=st.booleans(),
)
def test_steps_are_those_of_the_plain_algorithm(seed, n_gram, width, cap, n, from_text, lost_bonus):
    rule = markov_rule(seed)
    prompt = np.random.default_rng(seed).integers(0, 6, 8).tolist()
    knobs = dict(ngram=n_gram, window=width, guesses=cap)
    knobs |= dict(pool_from_prompt=from_text, lost_bonus=lost_bonus)
    drafter = lookahead(6, **knobs)
    state = DecodeState(np.array(prompt), 1)
    state.commit(np.array([0]))
    drafter.begin(state)
    first_level = drafter._window._grid[0, 1:].tolist()
    assert len(first_level) == width + n_gram - 3 and set(first_level) <= set(prompt)
    drafter.reset()
    output, steps = play(drafter, prompt, n, rule)
    assert output == continued(rule, prompt, n)
    expected = plain_lookahead(prompt, n, rule, first_level, n_gram, cap, from_text, lost_bonus)
    assert [tokens for tokens, _ in steps] == expected
    assert max(map(len, expected), default=1) <= (n_gram - 1 if lost_bonus else n_gram)


# -- on the engine ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_gram", "width", "cap", "nodes"),
    [
        (5, 15, 15, 4 * 15 - 1 + 15 * 4),
        (5, 7, 7, 27 + 28),
        (2, 1, 1, 1),
        (8, 1, 1, 15),  # the fill phase's 4 levels of 4 columns are more than 6 + 7 later on
    ],
)
def test_max_nodes_is_declared_exactly(n_gram, width, cap, nodes):
    drafter = lookahead(6, ngram=n_gram, window=width, guesses=cap)
    assert drafter.needs.max_nodes == nodes
    sizes = [
        len(tree)
        for seed in range(40)
        for _, tree in play(drafter, [1, 2, 3], 60, markov_rule(seed, order=4))[1]
    ]
    assert max(sizes) <= nodes
    if cap <= 7:
        assert max(sizes) == nodes


def test_a_cut_tree_leaves_the_window_waiting():
    drafter = lookahead(20, ngram=3, window=3, guesses=1)
    state = DecodeState(np.arange(5), 9)
    state.commit(np.array([7]))
    drafter.begin(state)
    tree = drafter.propose(state)
    cut = DraftTree(tree.tokens[:2], tree.parents[:2], aux=tree.aux[:2])
    state.commit(np.array([8]))
    empty = np.empty(0, dtype=np.int64)
    drafter.observe(state, StepOutcome(cut, empty, np.array([8]), np.array([8, 9, 10])))
    assert drafter.propose(state).tokens.tolist() == tree.tokens.tolist()
