import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specbench.draft_structures.adjacency_matrix import UPDATE_RULES, AdjacencyMatrix, top_ids
from specbench.draft_structures.static_tree import grow_tree


@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 5),
    vocab_size=st.one_of(st.integers(9, 300), st.sampled_from([576, 640, 64 * 12, 1000, 4099])),
    k=st.integers(1, 9),
)
def test_top_ids_are_those_of_a_full_sort(seed, n, vocab_size, k):
    random = np.random.default_rng(seed)
    logits = np.stack([random.permutation(vocab_size) for _ in range(n)]).astype(np.float32)
    ids = top_ids(torch.from_numpy(logits), k).numpy()
    np.testing.assert_array_equal(ids, np.argsort(-logits, axis=1)[:, :k])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_top_ids_of_equal_logits_are_distinct_and_the_largest(dtype):
    torch.manual_seed(0)
    logits = torch.randint(0, 4, (7, 1500)).to(dtype)
    logits[0] = -torch.inf
    logits[0, 1499] = 0.0
    ids = top_ids(logits, 8)
    assert all(len(set(row)) == 8 for row in ids.tolist())
    assert torch.equal(logits.gather(1, ids), logits.topk(8).values)
    assert ids[0, 0] == 1499


@given(
    seed=st.integers(0, 10**6),
    k=st.integers(1, 5),
    vocab_size=st.integers(5, 12),
    passes=st.integers(0, 4),
    rule=st.sampled_from(UPDATE_RULES),
    compiled=st.booleans(),
)
def test_the_matrix_is_a_table_of_lists(seed, k, vocab_size, passes, rule, compiled):
    random = np.random.default_rng(seed)
    matrix = AdjacencyMatrix(vocab_size, k, compiled=compiled)
    table = {t: [0] * k for t in range(vocab_size)}
    for _ in range(passes):
        tokens = random.integers(0, vocab_size, random.integers(1, 30))
        logits = np.stack([random.permutation(vocab_size) for _ in tokens]).astype(np.float64)
        matrix.update(torch.from_numpy(tokens), torch.from_numpy(logits), rule)
        for token in set(tokens.tolist()):
            rows = [
                sorted(range(vocab_size), key=lambda t: -row[t])[:k]
                for row, at in zip(logits.tolist(), tokens, strict=True)
                if at == token
            ]
            which = {
                "first": [0] * k,
                "last": [-1] * k,
                "parallel": [j % len(rows) for j in range(k)],
            }[rule]
            table[token] = [rows[i][j] for j, i in enumerate(which)]
    assert dict(enumerate(matrix.rows.tolist())) == table

    nodes = int(random.integers(2, 2 + 3 * k))
    tree = grow_tree(k, nodes, 2) if nodes <= k + k * k else grow_tree(k, k, 1)
    matrix.prepare(tree)
    root = int(random.integers(0, vocab_size))
    tokens = {(): root}
    for path in tree.paths:
        tokens[path] = table[tokens[path[:-1]]][path[-1]]
    assert matrix.fill(root).tolist() == [tokens[path] for path in tree.paths]


def test_columns_beyond_the_vocabulary_are_never_candidates():
    matrix = AdjacencyMatrix(5, 2)
    matrix.update(torch.tensor([1]), torch.tensor([[0.0, 0.0, 0.0, 7.0, 9.0, 0.0, 8.0, 10.0]]))
    assert matrix.rows[1].tolist() == [4, 3]
