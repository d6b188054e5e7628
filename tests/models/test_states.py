"""Layers that keep a state: what holds of rows, commits and trees, whatever the architecture."""

import numpy as np
import pytest
import torch

from specbench.decoding.structs import DraftTree
from specbench.errors import ConfigurationError
from specbench.kernels import recurrent
from specbench.kernels.architectures import usable_context
from specbench.kernels.recurrent import Kept, LayerPass, States
from specbench.models.batch_target import BatchTarget
from specbench.models.kv_cache import KVCache, StateCache
from specbench.models.target import Target
from tests.models.test_architectures import ARCHITECTURES, build, checked_target

FAMILIES = ["Qwen3-Next", "Qwen3.5", "OLMo-Hybrid", "LFM2", "Bamba", "Granite-4 hybrid"]
FAMILIES += ["Falcon-H1", "Kimi-Linear"]
PROMPT = np.random.default_rng(0).integers(4, 60, 20)
ROOT, CHAIN = 5, DraftTree.chain(np.random.default_rng(1).integers(4, 60, 6))
PARENTS = np.array([-1, -1, 0, 1, 1, 2, 4, 3])
TREE = DraftTree(np.random.default_rng(2).integers(4, 60, 8), PARENTS)
PATH = np.array([1, 4, 6])  # in the tree
PATH_CHAIN = DraftTree.chain(TREE.tokens[PATH])


@pytest.fixture(scope="module", params=FAMILIES)
def hybrid(request):
    model_type, sizes = ARCHITECTURES[request.param]
    sizes = sizes | {"first_k_dense_replace": 2}  # Kimi routes to experts in float32
    return Target(build((model_type, sizes), torch.float64), max_len=64, max_nodes=8)


@pytest.fixture
def target(hybrid):
    hybrid.prefill(PROMPT)
    return hybrid


def logits(target, tree, root=ROOT):
    return target.forward(root, tree).logits.clone()


def apart(a, b):
    return float((a - b).abs().max())


def test_rows_of_a_chain_are_passes_of_one_row(target):
    together, single = logits(target, CHAIN), []
    for token in (ROOT, *CHAIN.tokens):
        single.append(logits(target, DraftTree.empty(), root=int(token)))
        target.commit(DraftTree.empty(), np.empty(0, np.int64))
    assert apart(together, torch.cat(single)) < 1e-13


def test_a_pass_that_is_not_committed_changes_nothing(target):
    before = logits(target, TREE), logits(target, CHAIN)
    assert torch.equal(logits(target, TREE), before[0])
    assert torch.equal(logits(target, CHAIN), before[1])


def test_a_row_follows_its_ancestors_alone(target):
    """Each path as a chain, and siblings in another order."""
    rows = logits(target, TREE)
    assert apart(rows[[0, *(PATH + 1)]], logits(target, PATH_CHAIN)) < 1e-13
    order = np.array([1, 0, 4, 3, 2, 6, 7, 5])  # of nodes, a parent still before its children
    parents = np.array([-1 if p < 0 else np.argsort(order)[p] for p in PARENTS[order]])
    moved = logits(target, DraftTree(TREE.tokens[order], parents))
    assert apart(rows[1:][order], moved[1:]) < 1e-13


def test_text_goes_on_behind_an_accepted_path(target):
    behind = {}
    for name, tree, path in (("tree", TREE, PATH), ("chain", PATH_CHAIN, np.arange(3))):
        target.prefill(PROMPT)
        logits(target, tree)
        target.commit(tree, path)
        behind[name] = logits(target, CHAIN, root=7)
    assert apart(behind["tree"], behind["chain"]) < 1e-13
    target.prefill(np.concatenate([PROMPT, [ROOT], PATH_CHAIN.tokens]))
    # Their prompt's chunks round in float32, whatever the dtype.
    assert apart(logits(target, CHAIN, root=7), behind["tree"]) < 1e-4


def test_a_commit_is_the_same_with_replay_and_without_and_is_taken_back(target):
    first, states = logits(target, CHAIN), {}
    for rows in (None, torch.arange(7)):
        target.cache.commit(rows, 7)
        states[rows is None] = [*target.cache.layers.values()]
        target.cache.truncate(len(PROMPT))
        assert torch.equal(logits(target, CHAIN), first)
    for whole, replayed in zip(states[True], states[False], strict=True):
        assert torch.equal(whole.inputs, replayed.inputs)
        assert whole.recurrent is None or torch.equal(whole.recurrent, replayed.recurrent)


def test_a_failing_pass_leaves_the_kernels_of_transformers(target, monkeypatch):
    stock = [dict(vars(file)) for file in target.kernel_files]
    monkeypatch.setattr(target.model.lm_head, "forward", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        target.forward(ROOT, TREE)
    assert [dict(vars(file)) for file in target.kernel_files] == stock


def test_what_cannot_keep_its_state_here_is_refused():
    target = Target(build("LFM2"), max_len=64, max_nodes=8)
    with pytest.raises(ConfigurationError, match="layer 3 computes its state by code"):
        target.cache.update_recurrent_state(torch.zeros(1), 3)
    with pytest.raises(ConfigurationError, match=r"batch\.size=2: layers that keep a state"):
        BatchTarget(target, 2)
    from_empty = "tiny starts each pass of several rows from an empty state"
    with pytest.raises(ConfigurationError, match=from_empty):
        usable_context(build("Mamba"), "model.id=tiny", 64, 8)


# -- faults, each of which the self-check at load refuses ------------------------------------------


def written_by_the_pass(run):
    def fault(states, *kernels):
        out, behind = run(states, *kernels)
        states.layers[states._current] = states.layers[states._current]._replace(recurrent=behind)
        return out, behind

    return fault


def one_column_late(update):
    def fault(states, *new, **options):
        window = update(states, *new, **options)
        if states._prompt:
            states.layers[states._current] = Kept(window[..., -5:-1])
        return window

    return fault


def not_rolled_back(behind):
    def fault(read, state, rows, count):
        last = read.recurrence(slice(None), state.recurrent)[1]
        return behind(read, state, rows, count)._replace(recurrent=last)

    return fault


def not_rolled_back_in_a_chain(behind):
    def fault(read, state, rows, count):
        new = behind(read, state, rows, count)
        return new if rows is not None or read.last is None else new._replace(recurrent=read.last)

    return fault


FAULTS = {
    "states follow the order of rows": (
        recurrent, "_along_tree", lambda _: lambda rule, _, state: rule(slice(None), state)
    ),
    "convolutions follow it": (recurrent, "_tree_convolution", lambda _: lambda stock, _: stock),
    "a window one column late": (States, "update_conv_state", one_column_late),
    "states not rolled back": (LayerPass, "behind", not_rolled_back),
    "states not rolled back in a chain": (LayerPass, "behind", not_rolled_back_in_a_chain),
    "states stay for the next text": (StateCache, "reset", lambda _: KVCache.reset),
    "states written by a pass": (States, "run", written_by_the_pass),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ["Bamba", pytest.param("Qwen3-Next", marks=pytest.mark.slow)])
def test_a_planted_fault_is_refused_at_load(name, fault, monkeypatch):
    owner, attribute, plant = FAULTS[fault]
    monkeypatch.setattr(owner, attribute, plant(getattr(owner, attribute)))
    with pytest.raises(ConfigurationError, match=r"logits of .* differ by"):
        checked_target(build(name, torch.float64))
