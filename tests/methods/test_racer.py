"""RACER step by step against its rules restated with objects; lossless, forgetful, resumable."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from methods.racer import Racer
from specbench.decoding.drafter import Drafter
from specbench.decoding.structs import DecodeState, DraftContext, StepOutcome
from specbench.errors import ConfigurationError
from tests.conftest import engine
from tests.contract import driver
from tests.decoding.table_models import TableTarget, table
from tests.methods.racer_reference import PlainRacer

VOCABULARY = 12


def ready(vocab_size=VOCABULARY, **knobs):
    drafter = Racer(**knobs)
    drafter.setup(DraftContext(vocab_size, frozenset()))
    drafter.reset()
    return drafter


def best_of(logits, k):
    return logits.topk(k).indices.tolist()


@given(
    seed=st.integers(0, 10**6),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=2),
    ngram=st.integers(2, 6),
    more_nodes=st.sampled_from([0, 9, 60, 1000]),
    least_depth=st.integers(1, 3),
    capacity=st.integers(2, 30),
    k=st.integers(1, 8),
    learn_prompt=st.booleans(),
)
def test_every_step_is_the_plain_one(
    seed, lengths, ngram, more_nodes, least_depth, capacity, k, learn_prompt
):
    random = np.random.default_rng(seed)
    nodes = 2 * ngram + 2 + more_nodes
    knobs = {"ngram": ngram, "least_depth": least_depth, "capacity": capacity, "k": k}
    ours = ready(max_nodes=nodes, learn_prompt=learn_prompt, **knobs)
    plain = PlainRacer(nodes, **knobs)
    # Few tokens, so that much repeats, with logits that are never equal.
    favourites = random.permuted(np.tile(np.arange(VOCABULARY), (VOCABULARY, 1)), axis=1)
    for n_prompt in lengths:  # questions of one run
        prompt = random.integers(0, 4, n_prompt)
        state = DecodeState(prompt, 60)
        state.commit(random.integers(0, 4, 1))
        if learn_prompt:
            logits = torch.from_numpy(random.random((n_prompt, VOCABULARY)))
            ours.observe_prompt(prompt, logits)
            plain.table |= dict(zip(prompt.tolist(), best_of(logits, k), strict=True))
        ours.begin(state)
        plain.read_prompt(prompt.tolist())
        while state.remaining > 0:
            tree = ours.propose(state)
            expected = plain.draft(state.root)
            paths = [()]
            for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
                paths.append((*paths[parent + 1], token))
            assert paths[1:] == expected
            rows = [state.root, *tree.tokens.tolist()]
            logits = random.random((len(rows), VOCABULARY)) + 0.2 * favourites[rows]
            # Accepts some way down the tree, whatever the logits say.
            path, at = [], -1
            while len(below := np.flatnonzero(tree.parents == at)) and random.random() < 0.7:
                at = int(below[random.integers(len(below))])
                path.append(at)
            path = path[: state.remaining - 1]
            committed = np.append(tree.tokens[path], random.integers(0, 4))
            state.commit(committed)
            rows_seen = torch.from_numpy(logits)
            ours.observe(
                state,
                StepOutcome(tree, np.array(path, np.int64), committed, None, logits=rows_seen),
            )
            plain.table |= dict(zip(rows, best_of(rows_seen, k), strict=True))
            plain.read_step(state.tokens[:-1].tolist(), len(path))


@pytest.mark.parametrize("knobs", [{}, {"capacity": 8}, {"max_nodes": 40}])
def test_greedy_output_is_that_of_plain_decoding_and_comes_sooner(knobs):
    loop = engine(TableTarget(table(1, driver.VOCABULARY, 3.0)))
    drafter = ready(driver.VOCABULARY, **knobs)
    for seed in range(2):
        prompt = driver.toy_text(seed, 30)
        plain = loop.decode(prompt, Drafter(name="ar"), max_new_tokens=60)
        result = loop.decode(prompt, drafter, max_new_tokens=60)
        assert result.output_ids == plain.output_ids
        assert result.n_target_passes < plain.n_target_passes


def test_a_later_turn_counts_new_ngrams_only():
    """So the automaton is that of one turn with all of the text."""
    whole = driver.toy_text(5, 80)
    tries = []
    for prompts in ([80], [50, 80]):
        drafter, seen = ready(60, learn_prompt=False), whole[:0]
        for length in prompts:
            state = DecodeState(whole[:length], 5, seen=seen)
            state.commit(whole[length : length + 1] if length < 80 else whole[:1])
            drafter.begin(state)
            seen = state.tokens.copy()
        tries.append(drafter._trie)
    assert all((single == split).all() for single, split in zip(*tries, strict=True))


@pytest.mark.parametrize(
    ("knobs", "message"),
    [({"max_nodes": 21}, "at least 22"), ({"k": 13}, "size, 12")],
)
def test_values_out_of_range_are_refused(knobs, message):
    with pytest.raises(ConfigurationError, match=message):
        ready(**knobs)
