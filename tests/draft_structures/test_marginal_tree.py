import itertools

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from specbench.draft_structures.marginal_tree import likeliest_prefixes, top_log_probs


@given(
    rows=st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), min_size=1, max_size=4),
    n_nodes=st.integers(1, 40),
)
def test_no_prefix_outside_the_tree_is_likelier(rows, n_nodes):
    """Few values, so that many prefixes weigh the same."""
    logits = torch.tensor(rows, dtype=torch.float64)
    log_probs, ids = top_log_probs(logits, n_nodes)
    tree = likeliest_prefixes(ids.numpy(), log_probs.numpy(), n_nodes)
    probs = logits.softmax(-1).tolist()
    weights = {
        path: np.prod([row[token] for row, token in zip(probs, path, strict=False)])
        for depth in range(1, len(rows) + 1)
        for path in itertools.product(range(3), repeat=depth)
    }
    heaviest = sorted(weights.values(), reverse=True)[:n_nodes]
    np.testing.assert_allclose(tree.path_probs, heaviest, rtol=1e-12)
    paths = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    np.testing.assert_allclose([weights[path] for path in paths], heaviest, rtol=1e-12)
    assert len(set(paths)) == len(paths)


def test_of_equals_the_first_ranks_come_first():
    ids, log_probs = np.array([[4, 5], [6, 7]]), np.log([[0.5, 0.5], [0.5, 0.5]])
    tree = likeliest_prefixes(ids, log_probs, 6)
    assert tree.tokens.tolist() == [4, 5, 6, 7, 6, 7]
    assert tree.parents.tolist() == [-1, -1, 0, 0, 1, 1]
