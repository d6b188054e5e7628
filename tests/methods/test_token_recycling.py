import itertools
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from methods.token_recycling import TokenRecycling
from specbench.decoding.structs import NO_TOKENS, DecodeState, DraftContext, DraftTree, StepOutcome
from specbench.draft_structures.static_tree import (
    TREES,
    StaticTree,
    grow_tree,
    load_tree,
)
from specbench.errors import ArtifactError, ConfigurationError
from tests.conftest import VOCAB


def recycling(vocab_size=VOCAB, eos_ids=frozenset(), **knobs):
    drafter = TokenRecycling(**knobs)
    drafter.setup(DraftContext(vocab_size=vocab_size, eos_ids=eos_ids))
    drafter.reset()
    return drafter


def logits_with(vocab_size, *best):
    """One row per argument, in which these ids are the largest, in this order."""
    logits = torch.zeros(len(best), vocab_size)
    for row, ids in enumerate(best):
        for rank, token in enumerate(ids):
            logits[row, token] = 10.0 - rank
    return logits


def after(*tokens):
    state = DecodeState(np.array(tokens[:-1], dtype=np.int64), 50)
    state.commit(np.array(tokens[-1:], dtype=np.int64))
    return state


def observe(drafter, state, tree, committed, logits, **kwargs):
    state.commit(np.array(committed))
    path = np.arange(len(committed) - 1)
    drafter.observe(
        state, StepOutcome(tree, path, np.array(committed), None, logits=logits, **kwargs)
    )


# -- shapes of trees -------------------------------------------------------------------------------


def test_a_tree_by_hand():
    tree = StaticTree.from_paths([[1], [0, 2], [0], [1, 0], [0, 0], [1, 0, 1]])
    assert tree.paths == ((0,), (1,), (0, 0), (0, 2), (1, 0), (1, 0, 1))
    assert tree.parents.tolist() == [-1, -1, 0, 0, 1, 4]
    levels = [[a.tolist() for a in level] for level in tree.levels]
    assert levels == [[[0, 0], [0, 1]], [[0, 0, 1], [0, 2, 0]], [[2], [1]]]
    assert tree.level_sizes == [2, 3, 1] and tree.n_ranks == 3


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([[0], [0]], "twice"),
        ([[]], "empty"),
        ([[0], [1, 0]], "no parent"),
    ],
)
def test_a_set_of_paths_that_is_no_tree_is_refused(paths, message):
    with pytest.raises(ValueError, match=message):
        StaticTree.from_paths(paths)


def test_the_template_is_the_one_of_the_reference_code():
    tree = load_tree(TREES["template"])
    assert tree.level_sizes == [8, 21, 25, 15, 8, 3]
    assert len(tree) == 80 and tree.n_ranks == 8
    assert len(set(range(80)) - set(tree.parents.tolist())) == 40  # leaves
    assert tree.paths[-3:] == ((0,) * 6, (0, 0, 0, 0, 0, 1), (0, 0, 0, 1, 0, 0))


@pytest.mark.parametrize("content", [None, "{", "[]", '{"paths": [[1, 0]]}', '{"paths": 3}'])
def test_a_broken_template_is_refused_by_name(tmp_path, content):
    path = tmp_path / "tree.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ArtifactError, match=re.escape(str(path))):
        load_tree(path)


@given(k=st.integers(1, 4), depth=st.integers(1, 4), share=st.floats(0, 1))
def test_a_grown_tree_is_the_cheapest_one(k, depth, share):
    everything = [p for d in range(1, depth + 1) for p in itertools.product(range(k), repeat=d)]
    n_nodes = depth + round(share * (len(everything) - depth))
    tree = grow_tree(k, n_nodes, depth)

    def cost(path):
        zipf = math.prod(rank + 1 for rank in path)
        return round(zipf * k ** ((len(path) - 1) / depth), 9), len(path), path

    spine = [(0,) * d for d in range(1, depth + 1)]
    others = sorted((p for p in everything if p not in spine), key=cost)
    cheapest = sorted(everything, key=cost)[:n_nodes]
    if set(spine) <= set(cheapest):
        assert set(tree.paths) == set(cheapest)
    else:  # the branch of first candidates is always there, the rest is as cheap as can be
        assert set(spine) <= set(tree.paths)
        assert set(tree.paths) - set(spine) == set(others[: n_nodes - depth])
    assert len(tree.level_sizes) == depth


def test_the_grown_tree_of_the_templates_size_is_close_to_it():
    grown = grow_tree(8, 80, 6)
    assert grown.level_sizes == [8, 20, 20, 19, 6, 7]
    assert len(set(grown.paths) & set(load_tree(TREES["template"]).paths)) == 70


# -- the method ------------------------------------------------------------------------------------


def test_the_root_of_a_step_is_the_token_before_what_it_committed():
    drafter = recycling(10, k=1, levels=[1])
    state = after(9, 1)
    other = DraftTree.chain(np.array([4, 5]))  # merged by another method
    observe(drafter, state, other, [4, 5, 6], logits_with(10, (4,), (5,), (6,)))
    assert drafter._matrix.rows[:, 0].tolist() == [0, 4, 0, 0, 5, 6, 0, 0, 0, 0]


def test_the_prompt_teaches_only_with_learn_prompt():
    assert not recycling().needs.prompt_logits
    drafter = recycling(10, k=2, levels=[2, 2], learn_prompt=True)
    assert drafter.needs.prompt_logits
    logits = logits_with(10, (1, 2), (3, 4), (5, 6))
    drafter.observe_prompt(np.array([7, 5, 7]), logits)
    assert drafter.propose(after(0, 7)).tokens.tolist() == [5, 6, 3, 4]
    drafter.reset()
    assert drafter.propose(after(0, 7)).tokens.tolist() == [0] * 4


@pytest.mark.parametrize(
    ("knobs", "sizes"),
    [
        ({}, [8, 21, 25, 15, 8, 3]),
        ({"breadth": 40}, [8, 10, 13, 5, 3, 1]),
        ({"depth": 4}, [8, 25, 28, 19]),
        ({"k": 3, "breadth": 12, "depth": 2}, [3, 9]),
        ({"levels": [7, 20, 21]}, [7, 20, 21]),
        ({"tree": "sam_60"}, [7, 20, 21, 8, 4]),
    ],
)
def test_knobs_shape_the_tree_and_max_nodes_is_its_size(knobs, sizes):
    drafter = recycling(**knobs)
    assert drafter.needs.max_nodes == sum(sizes)
    assert drafter._tree.level_sizes == sizes
    assert len(drafter.propose(after(1, 2))) == sum(sizes)


def test_more_candidates_than_tokens_are_refused():
    with pytest.raises(ConfigurationError, match="the vocabulary's size, 7"):
        recycling(7)


# -- on the engine ---------------------------------------------------------------------------------


def test_a_tree_cut_by_the_engine_still_teaches(make_target, rng):
    target = make_target("llama", max_nodes=40)
    drafter, state = recycling(breadth=40), after(1, 2)
    tree = drafter.propose(state)
    target.prefill(np.array([1]))
    cut = DraftTree(tree.tokens[:3], tree.parents[:3])
    logits = target.forward(2, cut).logits
    state.commit(np.array([5]))
    drafter.observe(state, StepOutcome(cut, NO_TOKENS, np.array([5]), None, logits=logits))
    assert drafter._matrix.rows[2].tolist() == logits[0].topk(8).indices.tolist()
