"""Layers that keep a state: what holds of rows, commits and trees, whatever the architecture."""

import importlib

import numpy as np
import pytest
import torch

from specbench.decoding.structs import DraftTree
from specbench.errors import ConfigurationError
from specbench.kernels import recurrent
from specbench.kernels.architectures import usable_context
from specbench.models.batch_target import BatchTarget
from specbench.models.target import Target
from tests.models.test_architectures import build

FAMILIES = [
    "Qwen3-Next", "LFM2", "Bamba", "Falcon-H1",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("Qwen3.5", "OLMo-Hybrid", "Granite-4 hybrid")
    ),
]  # fmt: skip
RECURRENT = [name for name in FAMILIES if name != "LFM2"]
PROMPT = np.random.default_rng(0).integers(4, 60, 20)
ROOT, CHAIN = 5, DraftTree.chain(np.random.default_rng(1).integers(4, 60, 6))
PARENTS = np.array([-1, -1, 0, 1, 1, 2, 4, 3])
TREE = DraftTree(np.random.default_rng(2).integers(4, 60, 8), PARENTS)
PATH = np.array([1, 4, 6])  # of the tree, none of it where it would lie in a chain


@pytest.fixture(scope="module")
def targets():
    """Makes each family's target once; its prompt is read anew for each test."""
    made = {}

    def target_of(name):
        if name not in made:
            made[name] = Target(build(name, torch.float64), max_len=64, max_nodes=8)
        made[name].prefill(PROMPT)
        return made[name]

    return target_of


def logits(target, tree, root=ROOT):
    return target.forward(root, tree).logits.clone()


def followed(target, tree, path, prompt=PROMPT):
    """The logits of a chain behind the accepted ``path`` of ``tree``."""
    target.prefill(prompt)
    logits(target, tree)
    target.commit(tree, path)
    return logits(target, CHAIN, root=7)


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_of_a_chain_are_passes_of_one_row(targets, name):
    target, single = targets(name), []
    together = logits(target, CHAIN)
    for token in (ROOT, *CHAIN.tokens):
        single.append(logits(target, DraftTree.empty(), root=int(token)))
        target.commit(DraftTree.empty(), np.empty(0, np.int64))
    assert (together - torch.cat(single)).abs().max() < 1e-13


@pytest.mark.parametrize("name", FAMILIES)
def test_a_pass_that_is_not_committed_changes_nothing(targets, name):
    target = targets(name)
    before = logits(target, TREE), logits(target, CHAIN)
    assert torch.equal(logits(target, TREE), before[0])
    assert torch.equal(logits(target, CHAIN), before[1])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_row_follows_its_ancestors_alone(targets, name):
    """Each path as a chain, and all siblings in another order."""
    target = targets(name)
    rows = logits(target, TREE)
    path = logits(target, DraftTree.chain(TREE.tokens[PATH]))
    assert (rows[[0, *(PATH + 1)]] - path).abs().max() < 1e-13
    order = np.array([1, 0, 4, 3, 2, 6, 7, 5])  # of nodes; parents still before children
    place = np.argsort(order)
    parents = np.array([-1 if p < 0 else place[p] for p in PARENTS[order]])
    moved = logits(target, DraftTree(TREE.tokens[order], parents))
    assert (rows[1:][order] - moved[1:]).abs().max() < 1e-13


@pytest.mark.parametrize("name", FAMILIES)
def test_text_goes_on_behind_an_accepted_path(targets, name):
    target = targets(name)
    behind = followed(target, TREE, PATH)
    chain = DraftTree.chain(TREE.tokens[PATH])
    assert torch.allclose(followed(target, chain, np.arange(3)), behind, rtol=0, atol=1e-13)
    target.prefill(np.concatenate([PROMPT, [ROOT], chain.tokens]))
    assert (logits(target, CHAIN, root=7) - behind).abs().max() < 1e-4  # chunks round in float32


@pytest.mark.parametrize("name", FAMILIES)
def test_a_commit_is_the_same_with_replay_and_without(targets, name):
    target = targets(name)
    logits(target, CHAIN)
    target.cache.commit(None, 7)
    whole = {k: (s.inputs, s.recurrent) for k, s in target.cache.layers.items()}
    target.prefill(PROMPT)
    logits(target, CHAIN)
    target.cache.commit(torch.arange(7), 7)
    for key, state in target.cache.layers.items():
        assert torch.equal(state.inputs, whole[key][0])
        assert state.recurrent is whole[key][1] or torch.equal(state.recurrent, whole[key][1])


def test_the_last_commit_is_taken_back(targets):
    target = targets("Falcon-H1")
    before = logits(target, CHAIN)
    target.commit(CHAIN, np.arange(3))
    target.cache.truncate(len(PROMPT))
    assert torch.equal(logits(target, CHAIN), before)


def test_a_failing_pass_leaves_the_kernels_of_transformers(targets, monkeypatch):
    target = targets("Qwen3-Next")
    (file,) = (f for f in target.kernel_files if hasattr(f, "torch_chunk_gated_delta_rule"))
    stock = dict(vars(file))
    seen = []

    def failing(*_, **__):
        seen.append(file.torch_chunk_gated_delta_rule)
        raise RuntimeError("planted")

    monkeypatch.setattr(target.model.lm_head, "forward", failing)
    with pytest.raises(RuntimeError, match="planted"):
        target.forward(ROOT, TREE)
    assert seen[0] is not stock["torch_chunk_gated_delta_rule"] and dict(vars(file)) == stock


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_mamba_2_row_by_row_is_the_stock_update(dtype):
    file = importlib.import_module("transformers.models.bamba.modeling_bamba")
    draw = torch.Generator().manual_seed(0)
    x, dt, b, c, bias, d = (
        torch.randn(size, generator=draw).to(dtype)
        for size in ((1, 5, 4, 8), (1, 5, 4), (1, 5, 2, 16), (1, 5, 2, 16), (4,), (4,))
    )
    a, state = -torch.rand(4, generator=draw), torch.randn(1, 4, 8, 16, generator=draw)
    states = recurrent.States()
    states.update_conv_state(x.flatten(2).mT, 0, conv_kernel_size=4)
    states.layers[0, 0].recurrent = state.clone()
    ours, last = recurrent._scan(states, None)(
        x, dt, a, b, c, D=d, dt_bias=bias, dt_limit=(0.0, float("inf"))
    )
    by_head = {"D": d[:, None].expand(-1, 8), "dt_bias": bias[:, None].expand(-1, 8)}
    decay = a[:, None, None].expand(-1, 8, 16)
    for i in range(5):
        step = dt[:, i, :, None].expand(-1, -1, 8)
        stock = file.mamba2_selective_state_update(
            state, x[:, i], step, decay, b[:, i], c[:, i], dt_softplus=True, **by_head
        )
        assert torch.allclose(ours[:, i], stock, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
    assert torch.allclose(last, state, atol=1e-5)


def test_a_tree_convolution_sees_the_nearest_ancestors():
    window, weight = torch.randn(1, 3, 4 + 9), torch.randn(3, 4)
    parents = np.append(-1, PARENTS + 1)
    file = importlib.import_module("transformers.models.lfm2.modeling_lfm2")
    ours = recurrent._tree_convolution(file.causal_conv1d_fn, parents)(window, weight)
    for row in range(9):
        columns, above = [row + 4], row
        while len(columns) < 4:
            above = parents[above] if above >= 0 else above - 1
            columns.insert(0, above + 4)
        assert torch.allclose(ours[0, :, row], (window[0][:, columns] * weight).sum(1), atol=1e-6)


def test_what_keeps_no_state_of_ours_is_refused(targets):
    target = targets("LFM2")
    with pytest.raises(ConfigurationError, match="layer 3 computes its state by code"):
        target.cache.update_recurrent_state(torch.zeros(1), 3)
    with pytest.raises(ConfigurationError, match=r"batch\.size=2: layers that keep a state"):
        BatchTarget(target, 2)
    with pytest.raises(ConfigurationError, match=r"tiny reads several rows .* from an empty state"):
        usable_context(build("Mamba"), "model.id=tiny", 64, 8)
