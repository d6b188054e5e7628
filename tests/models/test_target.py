"""A pass is transformers' own over each branch, in logits, hidden states and what it keeps.

Of prompts, chains, trees and batch layouts, for every architecture, exact and padded.
"""

import weakref
from functools import cache, partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from methods.pld import PromptLookup
from methods.union import Union
from specbench.decoding.drafter import Drafter
from specbench.decoding.protocols import TargetInfo
from specbench.decoding.structs import AFTER_FINAL_NORM, DraftTree, Needs
from specbench.decoding.tree import visibility
from specbench.decoding.verify import GreedyVerifier
from specbench.errors import CaseFailed, ConfigurationError, NeedsNotMet
from specbench.models import target as target_module
from specbench.models.graph_target import GraphTarget
from specbench.models.kv_cache import KVCache
from specbench.models.scores import Scores
from specbench.models.target import Target
from specbench.replay.replayer import RecordedTarget, replay_kind
from tests.conftest import CARRIERS, VOCAB, side_by_side, tiny_model

TOLERANCE = 1e-10
ALL = (0, 1, 2, AFTER_FINAL_NORM)  # hidden states of two layers
MAKE = {"exact": Target, "padded": partial(GraphTarget, capture=False)}
same = partial(torch.testing.assert_close, atol=TOLERANCE, rtol=0)


def plain(target: Target, ids) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Logits and hidden states of transformers' own forward and mask, without a cache."""
    model = target.model
    model.set_attn_implementation("sdpa")
    try:
        with torch.inference_mode():
            out = model(
                input_ids=torch.tensor([list(ids)]), use_cache=False, output_hidden_states=True
            )
    finally:
        model.set_attn_implementation("specbench")
    return out.logits[0], tuple(states[0] for states in out.hidden_states)


def plain_logits(target: Target, ids: list[int]) -> torch.Tensor:
    return plain(target, ids)[0]


def branch(tree: DraftTree, node: int) -> list[int]:
    """Nodes from the root's child down to ``node``."""
    return [*branch(tree, int(tree.parents[node])), node] if node >= 0 else []


@st.composite
def trees(draw: st.DrawFn, most: int = 14) -> DraftTree:
    """Random trees; parents come before children."""
    n = draw(st.integers(0, most))
    parents = [draw(st.integers(-1, i - 1)) for i in range(n)]
    tokens = [draw(st.integers(0, VOCAB - 1)) for _ in range(n)]
    return DraftTree(np.array(tokens, dtype=np.int64), np.array(parents, dtype=np.int64))


@pytest.fixture(scope="module")
def targets():
    return cache(
        lambda kind, name: MAKE[kind](tiny_model(name), max_len=600, max_nodes=40, batch=3)
    )


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("architecture", CARRIERS)
@settings(max_examples=8)
@given(
    tree=st.one_of(trees(), trees(4), st.just(side_by_side(np.arange(3, 11), 4))),
    n_prompt=st.sampled_from([1, 9, 30, 250, 257]),
    seed=st.integers(0, 99),
)
def test_rows_are_those_of_sequential_passes(kind, architecture, tree, n_prompt, seed, targets):
    target, rng = targets(kind, architecture), np.random.default_rng(seed)
    prompt = rng.integers(0, VOCAB, n_prompt + 1).tolist()
    scores = target.prefill(np.array(prompt[:-1]), all_logits=True, hidden_layers=ALL)
    logits, states = plain(target, prompt[:-1])
    same(scores.logits, logits)
    assert tuple(scores.hidden) == ALL
    for i in ALL:
        same(scores.hidden[i], states[i])
    scores = target.forward(prompt[-1], tree, hidden_layers=ALL)
    own_logits = scores.logits.clone()
    hidden = {i: rows.clone() for i, rows in scores.hidden.items()}
    for node in range(-1, len(tree)):
        logits, states = plain(target, [*prompt, *tree.tokens[branch(tree, node)]])
        same(own_logits[node + 1], logits[-1])
        for i in ALL:
            same(hidden[i][node + 1], states[i][-1])
    accepted_path = GreedyVerifier().verify(tree, scores)
    path = accepted_path.path
    if kind == "padded" and scores.outcome is not None:  # the pass moved the accepted rows itself
        assert scores.verified[0].tolist() == path.tolist()
        assert scores.verified[1].tolist() == accepted_path.next_tokens.tolist()
    else:
        path = np.array(branch(tree, int(rng.integers(-1, len(tree)))), dtype=np.int64)
    target.commit(tree, path)
    text = np.array([*prompt, *tree.tokens[path]])
    assert target.cache.length == len(text)
    rows_before = target.cache.storage[:, 0, :, : len(text)].clone()
    target.prefill(text)
    same(rows_before, target.cache.storage[:, 0, :, : len(text)])


@pytest.mark.parametrize("architecture", CARRIERS)
def test_batch_layout_gives_the_tree_layouts_scores(architecture, make_target, rng):
    k, w = 3, 4
    rows = side_by_side(rng.integers(0, VOCAB, k * w), w)
    as_tree, as_batch = pair = make_target(architecture), make_target(architecture, batch=k)
    prompt = rng.integers(0, VOCAB, 11)
    for target in pair:
        target.prefill(prompt)
    expected, got = (target.forward(5, rows) for target in pair)
    same(got.logits, expected.logits)
    assert torch.equal(got.greedy(), expected.greedy())
    for target in pair:
        target.commit(rows, np.array([w, w + 1]))  # two tokens of the second row
    same(as_batch.forward(9, rows).logits[:1], as_tree.forward(9, DraftTree.empty()).logits)


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
    target = Target(tiny_model("llama"), max_len=64, max_nodes=8)
    text, tree = rng.integers(0, VOCAB, 9), DraftTree.chain(rng.integers(0, VOCAB, 3))
    target.prefill(text)
    expected = [target.forward(3, draft).logits for draft in (DraftTree.empty(), tree)]
    built: list[int] = []
    monkeypatch.setattr(
        target_module, "visibility", lambda p: (built.append(len(p)), visibility(p))[1]
    )
    monkeypatch.setattr(target_module, "to_device", lambda values, _: torch.as_tensor(values))
    target.device = SimpleNamespace(type="cuda")  # as far as choosing goes
    got = [target.forward(3, draft).logits for draft in (DraftTree.empty(), tree)]
    assert built == [3]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


# -- buffers ---------------------------------------------------------------------------------------


def test_growing_buffers_are_freed_before_larger_ones_are_made(monkeypatch):
    target = Target(tiny_model("llama"), max_len=40, max_nodes=10)
    first = target.cache
    target.reserve(30, 5)
    assert target.cache is first  # large enough
    del first
    old, alive = weakref.ref(target.cache), []

    class Watched(KVCache):
        def __init__(self, *args, **kwargs):
            alive.append(old() is not None)
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(target_module, "KVCache", Watched)
    target.reserve(900, 4)
    assert alive == [False]
    assert target.cache.max_len >= 900 and target.max_nodes == 10


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])  # a GPU's, a CPU's
def test_where_larger_buffers_do_not_fit_the_smaller_ones_are_there_again(kind, error, monkeypatch):
    target = MAKE[kind](tiny_model("llama"), max_len=40, max_nodes=4)
    expected = target.prefill(np.arange(3, 9)).logits.clone()
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
    assert torch.equal(target.prefill(np.arange(3, 9)).logits, expected)


# -- hidden states ---------------------------------------------------------------------------------


def hooks(model) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("kind", MAKE)
def test_a_pass_that_is_asked_for_none_collects_none(kind, monkeypatch):
    """Same outputs, bit by bit, with no hook in the model while it runs or later."""
    target = MAKE[kind](tiny_model("llama"), max_len=60, max_nodes=12)
    seen, decoder, tree = [], type(target.model.get_decoder()), DraftTree.chain(np.arange(3, 8))
    forward = decoder.forward

    def watched(self, *args, **kwargs):
        seen.append(hooks(target.model))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(decoder, "forward", watched)
    logits = []
    for states in ((), (1,), ()):
        logits.append(target.prefill(np.arange(9), hidden_layers=states).logits)
        scores = target.forward(3, tree, hidden_layers=states)
        assert list(scores.hidden or ()) == list(states)
        logits.append(scores.logits.clone())
    assert seen == [0, 0, 1, 1, 0, 0]
    assert all(torch.equal(a, b) for a, b in zip(logits, logits[:2] * 3, strict=True))

    def fails(*_args, **_kwargs):
        raise RuntimeError("no memory")

    monkeypatch.setattr(target.layers[1], "forward", fails)
    with pytest.raises(RuntimeError, match="no memory"):
        target.forward(1, DraftTree.empty(), hidden_layers=(0, 1, 2))
    assert hooks(target.model) == 0


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("number", [3, -4])
def test_states_that_the_model_has_not_are_refused_by_number(kind, number):
    target = MAKE[kind](tiny_model("llama"), max_len=60, max_nodes=12)
    message = rf"hidden states {number}, and the model has 0 to 2.*needs\.hidden_layers"
    with pytest.raises(ConfigurationError, match=message):
        target.prefill(np.arange(4), hidden_layers=(0, number))
    target.prefill(np.arange(4))
    with pytest.raises(ConfigurationError, match=message):
        target.forward(1, DraftTree.empty(), hidden_layers=(number,))
    with pytest.raises(ConfigurationError, match=r"^method=eagle asks for"):
        target.hidden_states.check((number,), "method=eagle")


@pytest.mark.parametrize("packed_bytes", [0, 10**8])
def test_embedding_and_lm_head_are_the_models(packed_bytes, rng):
    """The LM head's product with the states after the final norm is the pass's logits."""
    model = tiny_model("llama", dtype=torch.float32 if packed_bytes else torch.float64)
    target: TargetInfo = Target(model, packed_bytes=packed_bytes, max_len=60, max_nodes=12)
    prompt = rng.integers(0, VOCAB, 9)
    scores = target.prefill(prompt, all_logits=True, hidden_layers=ALL)
    close = partial(torch.testing.assert_close, rtol=0, atol=1e-4 if packed_bytes else 1e-12)
    head = target.embeddings
    close(head.logits(scores.hidden[AFTER_FINAL_NORM]), scores.logits)
    close(head.embedding[torch.from_numpy(prompt)], scores.hidden[0])
    close(scores.hidden[AFTER_FINAL_NORM] @ head.lm_head.T, scores.logits)
    assert head.lm_head_bias is None and target.n_layers == 2
    assert not head.logits(scores.hidden[AFTER_FINAL_NORM]).requires_grad
    assert not head.embedding.requires_grad and not head.lm_head.requires_grad
    if packed_bytes:  # a packed model gives the states of an unpacked one
        assert target.packed_weights["products"]
        unpacked = Target(tiny_model("llama", dtype=torch.float32), max_len=60, max_nodes=12)
        for i, states in unpacked.prefill(prompt, hidden_layers=ALL).hidden.items():
            close(scores.hidden[i], states)


def test_an_lm_heads_bias_is_read():
    model = tiny_model("llama")
    model.lm_head.bias = torch.nn.Parameter(torch.arange(VOCAB, dtype=torch.float64))
    embeddings = Target(model, max_len=60).embeddings
    assert embeddings.lm_head_bias.tolist() == list(range(VOCAB))
    states = torch.zeros(1, embeddings.lm_head.shape[1], dtype=torch.float64)
    assert embeddings.logits(states)[0].tolist() == list(range(VOCAB))


@pytest.mark.parametrize("tokens_only", [False, True])
def test_a_replay_refuses_whoever_asks_for_them(tokens_only):
    """Also a method that forgets to say that tokens alone do not suffice it, within another."""

    class Head(Drafter):
        needs = Needs(tokens_only=tokens_only, hidden_layers=(1,))

    for drafter in (Head(name="head"), Union(drafters=[Head(name="head"), PromptLookup()])):
        with pytest.raises(NeedsNotMet, match=r"cannot be replayed .*runner=offline"):
            replay_kind(drafter, SimpleNamespace(path="traces"))


def test_a_recorded_output_refuses_them():
    target = RecordedTarget(VOCAB, 4)
    target.load(np.arange(5))
    with pytest.raises(CaseFailed, match=r"hidden states 1, -1 .*runner=offline"):
        target.prefill(np.arange(3), hidden_layers=(1, AFTER_FINAL_NORM))
    target.prefill(np.arange(3))
    with pytest.raises(CaseFailed, match="were not recorded"):
        target.forward(0, DraftTree.empty(), hidden_layers=(1,))
