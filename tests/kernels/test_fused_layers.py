"""Fused steps of a layer compute what transformers' modules do, for each known architecture."""

from collections import Counter
from types import MethodType

import accelerate
import numpy as np
import pytest
import torch
from accelerate import hooks
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from specbench.decoding.structs import DraftTree
from specbench.kernels import fused_layers
from specbench.kernels.packed_linear import packed_weights
from specbench.models.target import Target
from tests.conftest import CARRIERS, side_by_side, tiny_model

PROMPT = np.arange(3, 20)
TREE = DraftTree(np.array([5, 6, 7, 8, 9, 4]), np.array([-1, 0, 0, 1, -1, 4]))
ROWS = side_by_side(np.array([5, 6, 7, 8, 9, 4]), 2)


@pytest.mark.parametrize("shape", [(1, 1, 576), (1, 7, 30), (3, 5, 1), (2, 100, 48)])
def test_a_norm_is_the_models_and_a_row_does_not_depend_on_the_others(shape):
    torch.manual_seed(0)
    norm = LlamaRMSNorm(shape[-1], eps=1e-5)
    norm.weight.data.normal_()
    x = torch.randn(shape) * 30
    with torch.inference_mode():
        out = fused_layers.rms_norm(x, norm.weight, norm.variance_epsilon)
        exact = norm(x)
        torch.testing.assert_close(out, exact, atol=1e-5, rtol=1e-5)
        alone = fused_layers.rms_norm(x[-1:, -1:], norm.weight, norm.variance_epsilon)
    assert torch.equal(out[-1:, -1:], alone)
    tiny = torch.full((1, 1, 8), 1e-20)  # the epsilon counts, and nothing divides by zero
    torch.testing.assert_close(
        fused_layers.rms_norm(tiny, torch.ones(8), 1e-5), tiny * 1e-5**-0.5, rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("rows", [1, 6])
def test_a_rotation_is_the_models_to_the_last_bit_and_leaves_values_alone(rows):
    torch.manual_seed(0)
    heads, kv_heads, size = 3, 1, 8
    cos, sin = torch.randn(2, 1, rows, size)
    product = torch.randn(1, rows, 64)[..., : (heads + 2 * kv_heads) * size]  # padded, as panels
    by_head = product.clone().view(1, rows, -1, size).transpose(1, 2)
    queries, keys, values = by_head.split((heads, kv_heads, kv_heads), 1)
    wanted = torch.cat([*apply_rotary_pos_emb(queries, keys, cos, sin), values], 1)
    fused_layers.rotate_(product, cos, sin, heads + kv_heads)
    assert torch.equal(product.view(1, rows, -1, size).transpose(1, 2), wanted)


@pytest.mark.parametrize("architecture", CARRIERS)
@pytest.mark.parametrize("tree", [DraftTree.empty(), TREE, ROWS], ids=["one", "tree", "batch"])
def test_a_fused_pass_gives_the_same_logits(architecture, tree, everything_packed):
    model = tiny_model(architecture, dtype=torch.float32)
    target = Target(model, max_len=64, max_nodes=8, batch=3, packed_bytes=1 << 20)

    def logits() -> torch.Tensor:
        prompt = target.prefill(PROMPT).logits
        return torch.cat([prompt, target.forward(3, tree).logits])

    # Phi-3 keeps its siblings in one matrix; Qwen3's attention normalises each head.
    known = {"phi3": 5, "qwen3": 11}.get(architecture, 9)
    assert target.packed_weights["fused"] == known
    fused = logits()
    fused_layers.unfuse(model)
    assert not any("forward" in vars(module) for module in model.modules())
    torch.testing.assert_close(fused, logits(), atol=2e-4, rtol=2e-4)


def test_calls_from_outside_the_engine_run_the_models_own_attention(everything_packed):
    model = tiny_model("mistral_window", dtype=torch.float32)
    model.set_attn_implementation("sdpa")
    ids = torch.arange(3, 43)[None]  # longer than the window
    with torch.inference_mode():
        wanted = model(ids).logits
        Target(model, max_len=64, packed_bytes=1 << 20)
        model.set_attn_implementation("sdpa")
        torch.testing.assert_close(model(ids).logits, wanted, atol=2e-4, rtol=2e-4)


def test_what_is_not_float32_and_what_others_hooked_is_left_alone():
    assert fused_layers.fuse(tiny_model("llama", dtype=torch.bfloat16)) == 0
    model = tiny_model("llama", dtype=torch.float32)
    norm = model.model.norm
    hook = MethodType(lambda self, x: x, norm)
    norm.forward = hook
    assert fused_layers.fuse(model) == 4  # its other norms: no linear is packed
    fused_layers.unfuse(model)
    assert norm.forward is hook


def test_hooks_on_any_module_run_in_every_pass_and_change_no_logits(everything_packed):
    def logits(model) -> torch.Tensor:
        target = Target(model, max_len=64, max_nodes=8, packed_bytes=1 << 20)
        return torch.cat([target.prefill(PROMPT).logits, target.forward(3, TREE).logits])

    class Counting(hooks.ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            seen[id(module)] += 1
            return args, kwargs

    wanted = logits(tiny_model("llama", dtype=torch.float32))
    model, seen = tiny_model("llama", dtype=torch.float32), Counter()
    first, second = model.model.layers
    hooked = [first.self_attn.q_proj, second.self_attn, second.mlp, model.model.norm, model.lm_head]
    for module in hooked:
        hooks.add_hook_to_module(module, Counting())
    torch.testing.assert_close(logits(model), wanted, atol=2e-4, rtol=2e-4)
    assert [seen[id(module)] for module in hooked] == [2] * 5
    assert packed_weights(model)["layers"] == 13  # the others of fifteen
    assert fused_layers.count_fused(model) == 5  # four norms, one gated product


def test_a_model_that_accelerate_dispatched_decodes_as_any_other(everything_packed):
    plain, model = (tiny_model("llama", dtype=torch.float32) for _ in range(2))
    model = accelerate.dispatch_model(model, {"": "cpu"}, main_device="cpu", force_hooks=True)
    targets = [
        Target(plain, max_len=64, max_nodes=8),
        Target(model, max_len=64, max_nodes=8, packed_bytes=1 << 20),
    ]
    assert (targets[1].packed_weights["layers"], targets[1].packed_weights["fused"]) == (0, 0)
    for target in targets:
        target.prefill(PROMPT)
    one, other = (target.forward(3, TREE).logits for target in targets)
    assert torch.equal(one, other)


def test_inputs_that_the_compiled_code_would_misread_are_refused():
    half = torch.ones(1, 1, 8, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"float32 on the CPU wanted, not torch\.bfloat16"):
        fused_layers.rms_norm(half, torch.ones(8), 1e-5)
    with pytest.raises(TypeError, match="float32 on the CPU"):
        fused_layers.rotate_(torch.ones(1, 1, 16), half, half, 1)
    turned = torch.ones(1, 8, 2).transpose(1, 2)
    with pytest.raises(TypeError, match="contiguous"):
        fused_layers.rotate_(torch.ones(1, 2, 16), turned, turned, 1)
