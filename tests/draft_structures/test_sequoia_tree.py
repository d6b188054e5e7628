import functools
import itertools
import json
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from methods.token_recycling import TokenRecycling
from scripts import best_tree as command
from specbench.draft_structures.sequoia_tree import best_tree, count_acceptance, worth_of
from specbench.draft_structures.static_tree import StaticTree, load_tree
from specbench.errors import ConfigurationError
from tests.small_run import run_here


@functools.cache
def subtrees(levels, ranks, n_nodes):
    """List sets of at most ``n_nodes`` paths in which a child has all elder siblings."""
    if levels == 0:
        return [()]
    trees = []
    for children in range(min(ranks, n_nodes) + 1):
        below = subtrees(levels - 1, ranks, n_nodes - children)
        for parts in itertools.product(below, repeat=children):
            paths = [(rank,) for rank in range(children)]
            paths += [(rank, *path) for rank, part in enumerate(parts) for path in part]
            if len(paths) <= n_nodes:
                trees.append(tuple(paths))
    return trees


@given(
    levels=st.integers(1, 3),
    ranks=st.integers(1, 3),
    n_nodes=st.integers(1, 6),
    seed=st.integers(0, 10**6),
    never=st.floats(0, 1),
)
def test_no_tree_is_worth_more(levels, ranks, n_nodes, seed, never):
    random = np.random.default_rng(seed)
    acceptance = random.random((levels, ranks)) * (random.random((levels, ranks)) > never / 2)
    acceptance[0, 0] = 0.5
    tree, worth = best_tree(acceptance, n_nodes)
    assert len(tree) <= n_nodes
    assert worth == pytest.approx(worth_of(tree, acceptance))
    candidates = [StaticTree.from_paths(p) for p in subtrees(levels, ranks, n_nodes) if p]
    assert worth == pytest.approx(max(worth_of(candidate, acceptance) for candidate in candidates))


def test_acceptance_is_counted_where_a_child_was_offered():
    tree = StaticTree.from_paths([[0], [1], [0, 0], [0, 1], [1, 0]])
    steps = [
        (5, [0, 1], True),  # to a leaf
        (5, [1], True),  # its one child was not accepted
        (5, [0], False),  # cut: nobody knows of its children
        (1, [], True),  # only the first node was drafted
    ]
    accepted, offered = count_acceptance(tree, steps)
    assert accepted.tolist() == [[2, 1], [0, 1]]
    assert offered.tolist() == [[4, 3], [2, 1]]


def test_a_run_s_tree_is_made_and_can_be_drafted(small, tmp_path, monkeypatch, capsys):
    run, out = tmp_path / "run", tmp_path / "tree.json"
    typed = [*small, "dataset.limit=1", "generation.max_new_tokens=24", f"output_dir={run}"]
    typed += ["method=token_recycling", "method.levels=[6,12,8]", "compare=[pld]", "baseline=false"]
    assert run_here(typed) == 0
    typed = ["best_tree.py", str(run), str(out), "--label", "token_recycling", "--nodes", "7"]
    monkeypatch.setattr(sys, "argv", typed)
    assert command.main() == 0
    assert "tokens a step" in capsys.readouterr().out
    assert json.loads(out.read_text())["tokens_per_step"] >= 1
    drafter = TokenRecycling(tree=str(out))
    assert drafter.shape.paths == load_tree(out).paths
    assert drafter.needs.max_nodes <= 7
    for label, message in (("pld", "fills no fixed tree"), ("medusa", "--label")):
        with pytest.raises(ConfigurationError, match=message):
            command.acceptance_of(run, label, False)
