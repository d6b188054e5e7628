"""Hidden states of chosen layers are transformers' own, of prompts, trees and padded passes."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from methods.pld import PromptLookup
from methods.union import Union
from specbench.decoding.drafter import Drafter
from specbench.decoding.protocols import TargetInfo
from specbench.decoding.structs import AFTER_FINAL_NORM, DraftTree, Needs
from specbench.errors import CaseFailed, ConfigurationError, NeedsNotMet
from specbench.models.graph_target import GraphTarget
from specbench.models.target import Target
from specbench.replay.replayer import RecordedTarget, replay_kind
from tests.conftest import CARRIERS, VOCAB, side_by_side, tiny_model
from tests.models.test_target import branch

ALL = (0, 1, 2, AFTER_FINAL_NORM)  # of two layers
SIZES = {"max_len": 60, "max_nodes": 12, "batch": 3}
same = partial(torch.testing.assert_close, atol=1e-10, rtol=0)


def plain_states(target: Target, ids) -> tuple[torch.Tensor, ...]:
    """``[len(ids), hidden]`` by number, of transformers' own forward and mask."""
    model = target.model
    model.set_attn_implementation("sdpa")
    try:
        with torch.inference_mode():
            out = model(input_ids=torch.tensor([list(ids)]), output_hidden_states=True)
    finally:
        model.set_attn_implementation("specbench")
    return tuple(states[0] for states in out.hidden_states)


@pytest.fixture(params=["exact", "padded"])
def make(request):
    return Target if request.param == "exact" else partial(GraphTarget, capture=False)


def random_tree(rng, n=9):
    return DraftTree(rng.integers(0, VOCAB, n), np.array([rng.integers(-1, i) for i in range(n)]))


@pytest.mark.parametrize("architecture", CARRIERS)
def test_rows_of_prompt_chain_and_tree_are_transformers(architecture, make, rng):
    target = make(tiny_model(architecture), **SIZES)
    prompt = rng.integers(0, VOCAB, 24)
    hidden = target.prefill(prompt, hidden_layers=ALL).hidden
    wanted = plain_states(target, prompt)
    assert tuple(hidden) == ALL and len(wanted) == 3
    for i in ALL:
        same(hidden[i], wanted[i])
    assert not torch.allclose(hidden[1], hidden[2])
    chain = DraftTree.chain(rng.integers(0, VOCAB, 5))
    trees = (DraftTree.empty(), chain, random_tree(rng), side_by_side(chain.tokens[:4], 2))
    for tree in trees:
        scores = target.forward(3, tree, hidden_layers=ALL)
        hidden = {i: states.clone() for i, states in scores.hidden.items()}
        for node in range(-1, len(tree)):
            wanted = plain_states(target, [*prompt, 3, *branch(tree, node)])
            for i in ALL:
                assert hidden[i].shape == (len(tree) + 1, wanted[i].shape[1])
                same(hidden[i][node + 1], wanted[i][-1])


def hooks(model) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_a_pass_that_is_asked_for_none_collects_none(make, rng):
    """Same outputs, bit by bit, with no hook in the model while it runs or later."""
    target, untouched = (make(tiny_model("llama"), **SIZES) for _ in range(2))
    prompt, tree = rng.integers(0, VOCAB, 9), random_tree(rng)
    seen, decoder = [], type(target.model.get_decoder())
    forward = decoder.forward

    def watched(self, *args, **kwargs):
        seen.append(hooks(target.model))
        return forward(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "forward", watched)
        with_states = [
            target.prefill(prompt, hidden_layers=(1,)).logits,
            target.forward(3, tree, hidden_layers=(1, -1)).logits.clone(),
        ]
        assert seen == [1, 2]
        scores = target.forward(3, tree)
        assert seen == [1, 2, 0] and scores.hidden is None
        assert list(target.forward(3, tree, hidden_layers=(1,)).hidden) == [1]
        scores = target.forward(3, tree)
        assert target.prefill(prompt).hidden is None
    plain = [untouched.prefill(prompt).logits, untouched.forward(3, tree).logits]
    for one, other, again in zip(with_states, plain, [with_states[0], scores.logits], strict=True):
        assert torch.equal(one, other) and torch.equal(again, other)


def test_a_pass_that_fails_leaves_no_hook(make, monkeypatch):
    target = make(tiny_model("llama"), **SIZES)
    target.prefill(np.arange(4))

    def fails(*_args, **_kwargs):
        raise RuntimeError("no memory")

    monkeypatch.setattr(target.layers[1], "forward", fails)
    with pytest.raises(RuntimeError, match="no memory"):
        target.forward(1, DraftTree.empty(), hidden_layers=(0, 1, 2))
    assert hooks(target.model) == 0


@pytest.mark.parametrize("number", [3, -4])
def test_states_that_the_model_has_not_are_refused_by_number(make, number):
    target = make(tiny_model("llama"), **SIZES)
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
    target: TargetInfo = Target(model, packed_bytes=packed_bytes, **SIZES)
    prompt = rng.integers(0, VOCAB, 9)
    scores = target.prefill(prompt, all_logits=True, hidden_layers=(0, AFTER_FINAL_NORM))
    close = partial(torch.testing.assert_close, rtol=0, atol=1e-5 if packed_bytes else 1e-12)
    head = target.embeddings
    close(head.logits(scores.hidden[AFTER_FINAL_NORM]), scores.logits)
    close(head.embedding[torch.from_numpy(prompt)], scores.hidden[0])
    close(scores.hidden[AFTER_FINAL_NORM] @ head.lm_head.T, scores.logits)
    assert head.lm_head_bias is None and target.n_layers == 2
    assert not head.logits(scores.hidden[AFTER_FINAL_NORM]).requires_grad
    assert not head.embedding.requires_grad and not head.lm_head.requires_grad
    if packed_bytes:  # a packed model gives the states of an unpacked one
        assert target.packed_weights["products"]
        plain = Target(tiny_model("llama", dtype=torch.float32), **SIZES)
        other = plain.prefill(prompt, hidden_layers=(0, 1, AFTER_FINAL_NORM)).hidden
        for i, states in target.prefill(prompt, hidden_layers=tuple(other)).hidden.items():
            torch.testing.assert_close(states, other[i], rtol=0, atol=1e-4)


def test_an_lm_heads_bias_is_read():
    model = tiny_model("llama")
    model.lm_head.bias = torch.nn.Parameter(torch.arange(VOCAB, dtype=torch.float64))
    target = Target(model, **SIZES)
    assert target.embeddings.lm_head_bias.tolist() == list(range(VOCAB))
    states = torch.zeros(1, target.embeddings.lm_head.shape[1], dtype=torch.float64)
    assert target.embeddings.logits(states)[0].tolist() == list(range(VOCAB))


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
