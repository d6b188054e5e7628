"""Tree geometry by hand, and the compiled walk against the tensor version."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from specbench.decoding.structs import BonusProposal, DraftTree, Proposal
from specbench.decoding.tree import BAD_PARENT, VALID, fill_tree, visibility
from specbench.decoding.verify.greedy import longest_match
from tests.decoding.table_models import plain_depths

NO_AUX = np.empty(0, dtype=bool)


def geometry(parents: list[int]) -> tuple[np.ndarray, np.ndarray]:
    n = len(parents)
    depths, visible = np.full(n + 3, 9), np.ones((n + 3, n + 3), dtype=bool)
    status = fill_tree(
        np.zeros(n, dtype=np.int64), np.array(parents, dtype=np.int64), NO_AUX, 5, depths, visible
    )
    assert status == VALID
    return depths[: n + 1], visible[: n + 1, : n + 1]


parents_lists = st.lists(st.floats(0, 1), max_size=40).map(
    lambda xs: [int(x * (i + 1)) - 1 if x < 1 else i - 1 for i, x in enumerate(xs)]
)


@given(parents_lists)
def test_both_implementations_agree(parents):
    depths, visible = geometry(parents)
    tensor_visible, tensor_depths = visibility(torch.tensor(parents, dtype=torch.int64))
    assert tensor_visible.tolist() == visible.tolist()
    assert tensor_depths.tolist() == depths.tolist()
    assert plain_depths(np.array(parents, dtype=np.int64)).tolist() == depths.tolist()


def test_a_parent_after_its_child_is_refused():
    buffers = np.zeros(4, dtype=np.int64), np.zeros((4, 4), dtype=bool)
    for parents in ([0], [-1, 1], [-2]):
        n = np.zeros(len(parents), dtype=np.int64)
        assert fill_tree(n, np.array(parents), NO_AUX, 5, *buffers) == BAD_PARENT


def paths(tree: DraftTree) -> list[tuple]:
    """List every node by the path to it: the reference, which knows no indices."""
    nodes: list[tuple] = []
    for i, parent in enumerate(tree.parents.tolist()):
        node = (
            int(tree.tokens[i]),
            bool(tree.aux[i]) if tree.aux is not None else None,
            tree.probs.q[tree.probs.row[i]].tolist() if tree.probs is not None else None,
            int(tree.sources[i]) if tree.sources is not None else None,
        )
        nodes.append((*(nodes[parent] if parent >= 0 else ()), node))
    return nodes


@given(parents_lists, st.integers(0, 10_000), st.booleans(), st.booleans())
def test_a_part_of_a_tree_has_the_same_nodes_on_the_same_paths(parents, seed, bare, on_device):
    rng = np.random.default_rng(seed)
    n = len(parents)
    tokens = rng.integers(0, 9, n)
    described = dict(
        aux=rng.random(n) < 0.3,
        probs=Proposal(torch.rand(3, 9), rng.integers(0, 3, n)),
        sources=rng.integers(0, 4, n),
    )
    tree = DraftTree(
        torch.from_numpy(tokens) if on_device else tokens,
        np.array(parents, dtype=np.int64),
        rows=(n, 1),
        bonus=BonusProposal(1, torch.rand(9)),
        **({} if bare else described),
    )
    selected = []
    for i, parent in enumerate(parents):
        if (parent < 0 or parent in selected) and rng.random() < 0.8:
            selected.append(i)
    for nodes in (selected, range(n), range(n // 2), ()):
        part = tree.take(np.array(nodes, dtype=np.int64))
        assert paths(part) == [paths(tree)[i] for i in nodes]
        assert isinstance(part.tokens, type(tree.tokens))
        assert (part.aux is None) == (part.probs is None) == (part.sources is None) == bare
        if len(nodes) < n:
            assert part.rows is None and part.bonus is None
    assert tree.take(np.arange(n)) is tree


def match(tokens, parents, choices, aux=None) -> list[int]:
    path = np.zeros(16, dtype=np.int64)
    flags = NO_AUX if aux is None else np.array(aux)
    as_array = lambda x: np.array(x, dtype=np.int64)  # noqa: E731
    n = longest_match(as_array(tokens), as_array(parents), flags, as_array(choices), path)
    return path[:n].tolist()


@given(parents_lists, st.integers(0, 10_000))
def test_longest_match_against_the_definition(parents, seed):
    rng = np.random.default_rng(seed)
    n = len(parents)
    tokens, choices, aux = rng.integers(0, 2, n), rng.integers(0, 2, n + 1), rng.random(n) < 0.2

    def path_to(node: int) -> list[int]:
        return [] if node < 0 else [*path_to(parents[node]), node]

    accepted = [
        path
        for path in map(path_to, range(n))
        if all(tokens[i] == choices[parents[i] + 1] and not aux[i] for i in path)
    ]
    longest = max(accepted, key=len, default=[])
    assert match(tokens, parents, choices, aux) == longest


def test_a_tree_of_paths_shares_equal_beginnings():
    tree = DraftTree.from_paths([[5, 7], [5, 9, 7], [], [7], [5, 7]])
    assert tree.tokens.tolist() == [5, 7, 9, 7, 7]
    assert tree.parents.tolist() == [-1, 0, 0, 2, -1]
    assert len(DraftTree.from_paths([])) == 0
