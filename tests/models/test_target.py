"""A tree pass is the sequential pass of each of its branches, for every architecture."""

import weakref
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.decoding.structs import DraftTree
from specbench.decoding.tree import visibility
from specbench.errors import CaseFailed
from specbench.models import target as target_module
from specbench.models.graph_target import GraphTarget
from specbench.models.kv_cache import KVCache
from specbench.models.scores import Scores
from specbench.models.target import Target
from tests.conftest import CARRIERS, VOCAB, side_by_side, tiny_model

TOLERANCE = 1e-10


def plain_logits(target: Target, ids: list[int]) -> torch.Tensor:
    """Logits ``[len(ids), vocab]`` of transformers' own forward and mask, without a cache."""
    model = target.model
    model.set_attn_implementation("sdpa")
    try:
        with torch.inference_mode():
            return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    finally:
        model.set_attn_implementation("specbench")


def branch(tree: DraftTree, node: int) -> list[int]:
    """Tokens from the root's child down to ``node``."""
    tokens: list[int] = []
    while node >= 0:
        tokens.append(int(tree.tokens[node]))
        node = int(tree.parents[node])
    return tokens[::-1]


@st.composite
def trees(draw: st.DrawFn, most: int = 14) -> DraftTree:
    """Random trees; parents come before children."""
    n = draw(st.integers(0, most))
    parents = [draw(st.integers(-1, i - 1)) for i in range(n)]
    tokens = [draw(st.integers(0, VOCAB - 1)) for _ in range(n)]
    return DraftTree(np.array(tokens, dtype=np.int64), np.array(parents, dtype=np.int64))


@pytest.mark.parametrize("architecture", CARRIERS)
@settings(max_examples=12)
@given(tree=trees(), n_prompt=st.integers(1, 30), seed=st.integers(0, 99))
def test_each_branch_is_a_sequential_pass(architecture, tree, n_prompt, seed, make_target):
    target = make_target(architecture)
    prompt = np.random.default_rng(seed).integers(0, VOCAB, n_prompt + 1)
    target.prefill(prompt[:-1])
    got = target.forward(int(prompt[-1]), tree).logits
    for node in range(-1, len(tree)):
        ids = [*prompt.tolist(), *branch(tree, node)]
        assert torch.allclose(got[node + 1], plain_logits(target, ids)[-1], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("architecture", CARRIERS)
def test_kept_rows_equal_a_fresh_prefill(architecture, make_target, rng):
    target = make_target(architecture)
    text = rng.integers(0, VOCAB, 9).tolist()
    target.prefill(np.array(text))
    root = 7
    for _ in range(6):
        n = 12
        parents = np.array([rng.integers(-1, i) for i in range(n)], dtype=np.int64)
        tree = DraftTree(rng.integers(0, VOCAB, n), parents)
        target.forward(root, tree)
        node, path = int(rng.integers(-1, n)), []
        while node >= 0:
            path.insert(0, node)
            node = int(parents[node])
        target.commit(tree, np.array(path, dtype=np.int64))
        text += [root, *[int(tree.tokens[p]) for p in path]]
        assert target.cache.length == len(text)
        kept = target.cache.storage[..., : len(text), :].clone()
        target.prefill(np.array(text))
        fresh = target.cache.storage[..., : len(text), :]
        assert torch.allclose(kept, fresh, atol=TOLERANCE, rtol=0)
        root = int(rng.integers(0, VOCAB))


@pytest.mark.parametrize("architecture", CARRIERS)
def test_batch_layout_gives_the_tree_layouts_scores(architecture, make_target, rng):
    k, w = 3, 4
    rows = side_by_side(rng.integers(0, VOCAB, k * w), w)
    prompt = rng.integers(0, VOCAB, 11)
    as_tree, as_batch = make_target(architecture), make_target(architecture, batch=k)
    for target in (as_tree, as_batch):
        target.prefill(prompt)
    expected = as_tree.forward(5, rows)
    got = as_batch.forward(5, rows)
    assert torch.allclose(got.logits, expected.logits, atol=TOLERANCE, rtol=0)
    assert torch.equal(got.greedy(), expected.greedy())
    path = np.array([w, w + 1])  # two tokens of the second row
    for target in (as_tree, as_batch):
        target.commit(rows, path)
    after = as_tree.forward(9, DraftTree.empty()).logits
    assert torch.allclose(as_batch.forward(9, rows).logits[:1], after, atol=TOLERANCE, rtol=0)


def test_a_hidden_key_is_really_hidden(make_target):
    """A canary: changing a sibling's token must not change a node's logits."""
    target = make_target("llama")
    target.prefill(np.arange(5))
    parents = np.array([-1, -1, 0])
    first = target.forward(3, DraftTree(np.array([4, 5, 6]), parents)).logits.clone()
    second = target.forward(3, DraftTree(np.array([4, 9, 6]), parents)).logits
    assert torch.equal(first[[0, 1, 3]], second[[0, 1, 3]])
    assert not torch.allclose(first[2], second[2])


def test_all_prompt_logits(make_target, rng):
    target = make_target("llama")
    prompt = rng.integers(0, VOCAB, 8)
    got = target.prefill(prompt, all_logits=True).logits
    assert torch.allclose(got, plain_logits(target, prompt.tolist()), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("tokens", "parents", "aux", "reason"),
    [
        ([VOCAB], [-1], None, "outside the vocabulary"),
        ([-1], [-1], None, "outside the vocabulary"),
        ([1, 2], [1, -1], None, "parent"),
        ([1], [-2], None, "parent"),
        ([1] * 41, [-1] * 41, None, "needs.max_nodes"),
        ([1, 2], [-1, 0], np.array([True, False]), "auxiliary"),
    ],
)
def test_bad_drafts_are_refused(make_target, tokens, parents, aux, reason):
    target = make_target("llama")
    target.prefill(np.arange(4))
    with pytest.raises(CaseFailed, match=reason) as caught:
        target.forward(1, DraftTree(np.array(tokens), np.array(parents), aux=aux))
    assert caught.value.kind == "invalid_draft"


def test_ties_go_to_the_smallest_id_and_nan_is_marked():
    raw = torch.tensor([[0.0, 5.0, 5.0], [1.0, float("nan"), 0.0], [float("inf"), 0.0, 0.0]])
    assert Scores(raw).greedy().tolist() == [1, -1, -1]


def test_plain_decoding_builds_no_mask(monkeypatch, rng):
    """On a GPU its few launches would be a good part of a small model's pass."""
    plain = Target(tiny_model("llama"), max_len=64, max_nodes=8)
    text, tree = rng.integers(0, VOCAB, 9), DraftTree.chain(rng.integers(0, VOCAB, 3))
    plain.prefill(text)
    wanted = [plain.forward(3, each).logits for each in (DraftTree.empty(), tree)]
    built: list[int] = []
    monkeypatch.setattr(
        target_module, "visibility", lambda p: (built.append(len(p)), visibility(p))[1]
    )
    monkeypatch.setattr(target_module, "to_device", lambda values, _: torch.as_tensor(values))
    plain.device = SimpleNamespace(type="cuda")  # as far as choosing goes
    got = [plain.forward(3, each).logits for each in (DraftTree.empty(), tree)]
    assert built == [3]
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_growing_buffers_are_freed_before_larger_ones_are_made(monkeypatch):
    target = Target(tiny_model("llama"), max_len=40, max_nodes=10)
    cache = target.cache
    target.reserve(30, 5)
    assert target.cache is cache  # large enough
    del cache
    old, alive = weakref.ref(target.cache), []

    class Watched(KVCache):
        def __init__(self, *args, **kwargs):
            alive.append(old() is not None)
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(target_module, "KVCache", Watched)
    target.reserve(900, 4)
    assert alive == [False]
    assert target.cache.max_len >= 900 and target.max_nodes == 10


@pytest.mark.parametrize("made", [Target, partial(GraphTarget, capture=False)])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])  # a GPU's, a CPU's
def test_where_larger_buffers_do_not_fit_the_smaller_ones_are_there_again(made, error, monkeypatch):
    target = made(tiny_model("llama"), max_len=40, max_nodes=4)
    wanted = target.prefill(np.arange(3, 9)).logits.clone()
    length = target.cache.max_len

    class Small(KVCache):
        def __init__(self, *args, max_len, **kwargs):
            if max_len > length:
                raise error("made up: no room")
            super().__init__(*args, max_len=max_len, **kwargs)

    monkeypatch.setattr(target_module, "KVCache", Small)
    with pytest.raises(error, match="no room"):
        target.reserve(900, 4)
    assert target.cache.max_len == length
    assert torch.equal(target.prefill(np.arange(3, 9)).logits, wanted)
