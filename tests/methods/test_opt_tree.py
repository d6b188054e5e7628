"""The tree is the best there is: against all paths of a small vocabulary, and the paper's loop."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from methods.opt_tree import OptTree
from specbench.decoding.sampling import GREEDY, Sampling
from specbench.decoding.structs import DecodeState, StepOutcome
from tests.decoding.table_models import TableDraft
from tests.methods.table_turns import ready

VOCAB = 5


def table_draft(seed, sharpness):
    random = np.random.default_rng(seed)
    logits = torch.from_numpy(random.normal(size=(VOCAB, VOCAB, VOCAB)) * sharpness)
    return TableDraft(logits)


def grow(draft, sampling=GREEDY, remaining=100, **knobs):
    drafter = ready(OptTree(**knobs), draft, sampling=sampling)
    state = DecodeState(np.array([1, 3]), remaining + 1)
    state.commit(np.array([2]))
    drafter.begin(state)
    return drafter, drafter.propose(state), state


def path_scores(draft, depth, sampling=GREEDY):
    """``{path: product of its draft probabilities}`` for all paths up to ``depth``."""
    distribution = draft.table.softmax(-1) if sampling.greedy else sampling.probs(draft.table)
    distribution = distribution.numpy()
    scores = {(): 1.0}
    for length in range(1, depth + 1):
        for path in product(range(VOCAB), repeat=length):
            context = ((3, 2, *path[:-1]))[-2:]
            scores[path] = scores[path[:-1]] * distribution[context][path[-1]]
    return {path: score for path, score in scores.items() if path and score > 0}


def paths(tree):
    result = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        result.append((*(result[parent] if parent >= 0 else ()), token))
    return result


@given(
    seed=st.integers(0, 999),
    nodes=st.integers(1, 20),
    depth=st.integers(1, 4),
    sharpness=st.floats(0.1, 4.0),
    sampling=st.sampled_from([GREEDY, Sampling(0.7), Sampling(1.0, top_k=2), Sampling(1.3, 0.6)]),
)
def test_the_tree_is_the_best_of_all(seed, nodes, depth, sharpness, sampling):
    draft = table_draft(seed, sharpness)
    drafter, tree, _ = grow(draft, sampling, nodes=nodes, max_depth=depth + 1, threshold=0.0)
    scores = path_scores(draft, depth, sampling)
    best = sorted(scores.values(), reverse=True)[:nodes]
    grown = paths(tree)
    assert len(set(grown)) == len(grown) == len(best)
    np.testing.assert_allclose(sorted((scores[p] for p in grown), reverse=True), best, rtol=1e-6)
    assert drafter.report()["expected_per_step"] == pytest.approx([sum(best)], abs=1e-4)


def layers_of_the_paper(scores, nodes, threshold, max_depth):
    """Depth at which the paper's loop stops, over full layers."""
    expected = 0.0
    for depth in range(1, max_depth + 1):
        best = sorted((s for p, s in scores.items() if len(p) <= depth), reverse=True)[:nodes]
        gain, expected = sum(best) - expected, sum(best)
        if gain <= threshold:
            break
    return depth, expected


@given(
    seed=st.integers(0, 999),
    nodes=st.integers(1, 20),
    sharpness=st.floats(0.1, 4.0),
    threshold=st.floats(0.0, 1.0),
)
def test_layers_are_added_as_long_as_they_pay(seed, nodes, sharpness, threshold):
    draft = table_draft(seed, sharpness)
    drafter, _, _ = grow(draft, nodes=nodes, max_depth=5, threshold=threshold)
    depth, expected = layers_of_the_paper(path_scores(draft, 4), nodes, threshold, 4)
    assert draft.forwards == depth - 1
    assert drafter.report()["expected_per_step"] == pytest.approx([expected], abs=1e-4)
    assert draft.tokens <= drafter.needs.draft_nodes


def test_equal_scores_leave_no_orphans():
    draft = table_draft(0, 0.0)  # every path of a length is as likely as any other
    for nodes in range(1, 40):
        _, tree, _ = grow(draft, nodes=nodes, max_depth=4, threshold=0.0)
        assert len(tree) == nodes
        assert (tree.parents < np.arange(nodes)).all()
        # A certain draft gives parents and children the same score.
    draft.table[..., 1] = 100.0
    _, tree, _ = grow(draft, nodes=3, max_depth=7, threshold=0.0)
    assert paths(tree) == [(1,), (1, 1), (1, 1, 1)]


def test_no_deeper_than_can_be_committed():
    draft = table_draft(0, 3.0)
    assert len(grow(draft, remaining=1, max_depth=4)[1]) == 0
    _, tree, _ = grow(draft, remaining=3, max_depth=4, threshold=0.0)
    assert max(map(len, paths(tree))) <= 2


def test_accepted_nodes_stay_in_the_drafts_cache():
    draft = table_draft(3, 3.0)
    drafter, tree, state = grow(draft, nodes=10, max_depth=4, threshold=0.0)
    tree_paths = paths(tree)
    deepest = max(range(len(tree)), key=lambda i: len(tree_paths[i]))
    path = [tree_paths.index(tree_paths[deepest][: n + 1]) for n in range(len(tree_paths[deepest]))]
    drafter.observe(state, StepOutcome(tree, np.array(path), tree.tokens[path], None))
    fed = draft.text[state.length :]
    assert fed == list(tree_paths[deepest][: len(fed)])
    assert len(fed) >= len(path) - 1
    state.commit(np.append(tree.tokens[path], 0))
    drafter.propose(state)
    drafter.observe(state, StepOutcome(tree, np.array(path), tree.tokens[path], None))
    assert not draft.nodes  # another tree than the last one


def published(scores, nodes, threshold, max_depth):
    """Grow the reference code's tree, which drafts a layer more than the tree has."""
    layers, weight = [], 0.0
    while True:
        depth = len(layers) + 1
        above = None if not layers else set(layers[-1])
        layer = [p for p in scores if len(p) == depth and (above is None or p[:-1] in above)]
        layers.append(sorted(layer, key=scores.get, reverse=True)[:nodes])
        if depth == 1:
            continue
        above_nodes = [path for layer in layers[:-1] for path in layer]
        best = sorted(above_nodes, key=scores.get, reverse=True)[:nodes]
        total = sum(scores[path] for path in best)
        if not (total - weight > threshold and depth < max_depth):
            return set(best)
        weight = total


def test_trees_are_those_of_the_reference_code():
    """150 random ones."""
    random = np.random.default_rng(0)
    depths = set()
    for seed in range(150):
        nodes, max_depth = int(random.integers(2, 12)), int(random.integers(2, 6))
        threshold = float(random.uniform(0.0, 0.6))
        draft = table_draft(seed, float(random.uniform(0.5, 4.0)))
        _, tree, _ = grow(draft, nodes=nodes, max_depth=max_depth, threshold=threshold)
        expected = published(path_scores(draft, max_depth), nodes, threshold, max_depth)
        assert set(paths(tree)) == expected
        depths.add((max_depth, max(map(len, expected))))
    assert {(m, m - 1) for m in range(2, 6)} <= depths  # and never deeper
