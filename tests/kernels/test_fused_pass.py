"""Passes in few kernels compute what transformers' layers do, to 1e-10 in float64.

Here in torch's operations; `test_row_kernels` compares Triton's kernels with these.
"""

import copy
from types import MethodType

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from specbench.decoding.structs import AFTER_FINAL_NORM, DraftTree
from specbench.kernels import fused_pass
from specbench.kernels.architectures import NORM, known_part
from specbench.models.graph_target import GraphTarget
from specbench.models.restore import restored_on_exit
from specbench.models.target import Target
from tests.conftest import CARRIERS, VOCAB, side_by_side, tiny_model

SIZES = {"max_len": 300, "max_nodes": 8, "batch": 3}
PROMPT = np.arange(3, 33)  # longer than the windows
TREES = {
    "one row": DraftTree.empty(),
    "tree": DraftTree(np.array([5, 6, 7, 8, 9, 4]), np.array([-1, 0, 0, 1, -1, 4])),
    "chain": DraftTree.chain(np.array([5, 6, 7])),
    "batch": side_by_side(np.array([5, 6, 7, 8, 9, 4]), 2),
}


def wide_norms(model: nn.Module) -> nn.Module:
    """transformers' formula of a norm, without its rounding to float32 in a float64 model.

    That rounding is 1e-7, and would hide any mistake below it.
    """

    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + self.variance_epsilon))

    for module in model.modules():
        if known_part(module)[0] == NORM:
            module.forward = MethodType(forward, module)
    return model


def uneven(model: nn.Module) -> nn.Module:
    """Norms with weights, and biases, that are not all the same, as a trained model's."""
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.data = torch.randn_like(parameter) + ("bias" not in name)
    return model


def pair(architecture: str, **options: object) -> tuple[Target, GraphTarget]:
    stock = wide_norms(uneven(tiny_model(architecture)))
    fused = uneven(tiny_model(architecture))
    options = SIZES | {"fused": True, "capture": False} | options
    return Target(stock, **SIZES), GraphTarget(fused, **options)


@pytest.mark.parametrize("architecture", CARRIERS)
def test_fused_passes_give_the_models_own_logits_and_states(architecture):
    layers = (0, 1, AFTER_FINAL_NORM)
    stock, fused = pair(architecture)
    assert fused.describe()["layers"] == "fused"
    end = len(PROMPT)

    def same(expected, actual):
        torch.testing.assert_close(actual.logits, expected.logits, atol=1e-10, rtol=0)
        states_of = [scores.hidden or {} for scores in (expected, actual)]
        assert states_of[0].keys() == states_of[1].keys()
        for i, states in states_of[0].items():
            torch.testing.assert_close(actual.hidden[i], states, atol=1e-10, rtol=0)
        stored = [target.cache.storage[:, :1, :, :end] for target in (fused, stock)]
        torch.testing.assert_close(*stored, atol=1e-10, rtol=0)

    for target in (stock, fused):
        target.prefill(PROMPT)  # through transformers' layers
    fused.cache.storage.copy_(stock.cache.storage)
    for tree in TREES.values():
        same(*(target.forward(4, tree, hidden_layers=layers) for target in (stock, fused)))
    ids, depths = torch.tensor([4, 5, 6, 7]), torch.tensor([0, 0, 1, 1])
    seen = torch.tensor([[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1]], dtype=torch.bool)
    for nodes in (ids[:1], ids):
        same(*(target.append(nodes) for target in (stock, fused)))
    same(*(target.extend(ids, seen, depths) for target in (stock, fused)))


@pytest.mark.parametrize("rotated", [8, 6])
@pytest.mark.parametrize("rows", [1, 5])
def test_a_rotation_is_the_models_and_is_written_to_the_cache(rotated, rows):
    from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

    joined = torch.randn(2, rows, 8, 8, dtype=torch.float64)
    cos, sin = torch.randn(2, 2, rows, rotated, dtype=torch.float64)
    queries, keys = apply_rotary_pos_emb(joined[:, :, :4], joined[:, :, 4:6], cos, sin, 2)
    cache, first = torch.zeros(2, 2, 2, 20, 8, dtype=torch.float64), torch.tensor([3, 11])
    actual = fused_pass.rotate(joined.flatten(2), cos, sin, None, 1e-6, *cache, first)
    torch.testing.assert_close(actual, queries, atol=1e-12, rtol=0)
    for batch, slot in enumerate(first):
        for stored, new in zip(cache, (keys, joined[:, :, 6:]), strict=True):
            written = stored[batch, :, slot : slot + rows].transpose(0, 1)
            torch.testing.assert_close(written, new[batch], atol=1e-12, rtol=0)
    assert int((cache != 0).any(-1).sum()) == 2 * 2 * 2 * rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_and_a_gate_round_as_the_models_do(dtype):
    torch.manual_seed(0)
    norm = LlamaRMSNorm(64, eps=1e-5).to(dtype)
    norm.weight.data.normal_()
    x, added = (torch.randn(2, 3, 5, 64) * 30).to(dtype)
    total, normed = fused_pass.add_norm(x, added, norm.weight.detach(), 1e-5)
    assert torch.equal(total, x + added) and torch.equal(normed, norm(x + added))
    gated = fused_pass.gate(torch.cat([x, added], -1))
    assert torch.equal(gated, nn.functional.silu(x) * added)


@pytest.mark.parametrize("architecture", CARRIERS)
def test_a_model_is_given_back_as_it_was(architecture):
    model = uneven(tiny_model(architecture))
    before = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    ids = torch.arange(3, 43)[None]
    with torch.inference_mode():
        expected = model(ids).logits
    attention = model.config._attn_implementation
    with restored_on_exit(model):
        target = GraphTarget(model, fused=True, capture=False, **SIZES)
        target.prefill(PROMPT)
        assert target.forward(3, DraftTree.empty()).logits.isfinite().all()
    assert model.config._attn_implementation == attention
    assert not any("forward" in vars(module) for module in model.modules())
    after = dict(model.named_parameters())
    assert [*after] == [*before]
    for name, (parameter, values) in before.items():
        assert after[name] is parameter
        assert torch.equal(parameter, values)
        assert parameter.is_contiguous()
        assert parameter.untyped_storage().nbytes() == parameter.nbytes  # nobody else's beside it
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, expected)
    assert copy.deepcopy(model)(ids).logits.shape == expected.shape


def test_other_programs_and_targets_with_the_model_run_its_own_layers():
    """Also while it is fused: ``ar_eager`` is what transformers launches."""
    model = tiny_model("llama")
    exact = Target(copy.deepcopy(model), **SIZES)
    fused, eager = GraphTarget(model, fused=True, capture=False, **SIZES), Target(model, **SIZES)
    passes = {}
    for target in (exact, eager):
        target.prefill(PROMPT)
        passes[target] = target.forward(4, TREES["tree"]).logits
    assert torch.equal(passes[exact], passes[eager])
    fused.prefill(PROMPT)
    fused_logits = fused.forward(4, TREES["tree"]).logits
    torch.testing.assert_close(fused_logits, passes[exact], atol=1e-5, rtol=0)


def test_what_is_not_known_to_be_the_same_formula_runs_the_models_layers(caplog):
    config = AutoConfig.for_model(
        "gemma2", vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, pad_token_id=0,
        sliding_window=5,
    )  # fmt: skip
    gemma = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    seen: list[str] = []
    hooked = tiny_model("llama")
    hooked.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: seen.append("q_proj"))
    for model, reason in ((gemma, "Gemma2ForCausalLM"), (hooked, "LlamaForCausalLM")):
        stock = Target(copy.deepcopy(model), **SIZES)
        target = GraphTarget(model, fused=True, capture=False, **SIZES)
        assert reason in target.describe()["layers"] and reason in caplog.text
        for engine_target in (stock, target):
            engine_target.prefill(PROMPT)
        for tree in (TREES["one row"], TREES["tree"], TREES["batch"]):
            logits = [engine_target.forward(4, tree).logits for engine_target in (stock, target)]
            torch.testing.assert_close(*logits, atol=1e-10, rtol=0)
    assert seen
