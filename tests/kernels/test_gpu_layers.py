"""Fused layers of a GPU compute what transformers' modules do, to 1e-10 in float64.

They are torch's own operations, so a CPU runs exactly what a graph would record.
"""

import copy
from collections.abc import Iterator
from functools import cache, partial
from types import MethodType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from specbench.decoding.drafter import Drafter
from specbench.decoding.structs import AFTER_FINAL_NORM, DraftTree
from specbench.decoding.verify import GreedyVerifier
from specbench.kernels import gpu_layers
from specbench.kernels.architectures import NORM, known_part
from specbench.kernels.attention import AttentionPlan, attend
from specbench.models.graph_target import MOVED_ROWS, GraphTarget
from specbench.models.hidden_states import decoder_layers
from specbench.models.kv_cache import KVCache
from specbench.models.restore import restored_on_exit
from specbench.models.target import Target
from tests.conftest import CARRIERS, VOCAB, engine, side_by_side, tiny_model

SIZES = {"max_len": 300, "max_nodes": 8, "batch": 3}
moving_model = cache(partial(tiny_model, "llama"))
moving_target = cache(partial(GraphTarget, capture=False, max_len=200, max_nodes=39))
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
    described = fused.describe()["layers"]
    assert sum(described["fused"].values()) == {"qwen3": 13}.get(architecture, 9)
    assert described["stock"] == {}
    end = len(PROMPT)

    def same(expected, actual):
        torch.testing.assert_close(actual.logits, expected.logits, atol=1e-10, rtol=0)
        states_of = [scores.hidden or {} for scores in (expected, actual)]
        assert states_of[0].keys() == states_of[1].keys()
        for i, states in states_of[0].items():
            torch.testing.assert_close(actual.hidden[i], states, atol=1e-10, rtol=0)
        stored = [target.cache.storage[:, :1, :, :end] for target in (fused, stock)]
        torch.testing.assert_close(*stored, atol=1e-10, rtol=0)

    same(*(t.prefill(PROMPT, all_logits=True, hidden_layers=layers) for t in (stock, fused)))
    for tree in TREES.values():
        same(*(target.forward(4, tree, hidden_layers=layers) for target in (stock, fused)))
    ids, depths = torch.tensor([4, 5, 6, 7]), torch.tensor([0, 0, 1, 1])
    seen = torch.tensor([[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1]], dtype=torch.bool)
    for nodes in (ids[:1], ids):
        same(*(target.append(nodes) for target in (stock, fused)))
    same(*(target.extend(ids, seen, depths) for target in (stock, fused)))


@pytest.mark.parametrize("rotated", [8, 6])
@pytest.mark.parametrize("rows", [1, 5])
def test_a_rotation_is_the_models_and_leaves_the_rest_alone(rotated, rows):
    from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

    product = torch.randn(2, rows, 7, 8, dtype=torch.float64)
    cos, sin = torch.randn(2, 2, rows, rotated, dtype=torch.float64)
    queries, keys = product[:, :, :4], product[:, :, 4:6]
    turned = apply_rotary_pos_emb(queries, keys, cos, sin, unsqueeze_dim=2)
    expected = torch.cat([*turned, product[:, :, 6:]], 2)
    gpu_layers.rotate_(product[:, :, :6], cos, AttentionPlan().signed(sin))
    torch.testing.assert_close(product, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize(("dtype", "roundings"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_a_norm_is_the_models_but_for_roundings(dtype, roundings):
    """In the types of a GPU: transformers rounds twice, one kernel once."""
    torch.manual_seed(0)
    norm = LlamaRMSNorm(64, eps=1e-5).to(dtype)
    norm.weight.data.normal_()
    x = (torch.randn(3, 5, 64) * 30).to(dtype)
    holder = nn.Module()
    holder.norm = norm
    expected = norm(x)
    with gpu_layers.fuse(holder, []).active():
        actual = norm(x)
    assert actual.dtype == dtype
    bound = roundings * torch.finfo(dtype).eps
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=bound)


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
    again = GraphTarget(model, fused=True, capture=False, **SIZES)
    assert again.describe() == fused.describe()
    called: list[object] = []
    for module in model.modules():
        forward = vars(module).get("forward")
        if forward is not None:
            compute = forward.compute
            forward.compute = lambda *a, f=compute, **k: (called.append(f), f(*a, **k))[1]
    passes = {}
    for target in (exact, eager):
        target.prefill(PROMPT)
        passes[target] = target.forward(4, TREES["tree"]).logits
    model(torch.arange(3, 9)[None], past_key_values=None)
    assert called == []
    assert torch.equal(passes[exact], passes[eager])
    fused.prefill(PROMPT)
    assert called


def test_what_is_not_known_to_be_the_same_formula_is_left_alone_and_named(caplog):
    config = AutoConfig.for_model(
        "gemma2", vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, pad_token_id=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    target = GraphTarget(model, fused=True, capture=False, max_len=64)
    assert target.describe()["layers"] == {
        "fused": {},
        "stock": {"Gemma2Attention": 2, "Gemma2MLP": 2, "Gemma2RMSNorm": 8},
    }
    assert "no fused form of Gemma2Attention" in caplog.text


def test_hooks_still_run_and_modules_that_others_hooked_stay():
    model = tiny_model("llama")
    seen: list[str] = []
    first, second = model.model.layers
    first.self_attn.q_proj.register_forward_hook(lambda *_: seen.append("q_proj"))
    first.mlp.register_forward_hook(lambda *_: seen.append("mlp"))
    second.mlp.up_proj = nn.Sequential(second.mlp.up_proj)  # as an adapter's
    fusion = gpu_layers.fuse(model, decoder_layers(model))
    assert fusion.describe() == {
        "fused": {"LlamaAttention": 1, "LlamaMLP": 1, "LlamaRMSNorm": 5},
        "stock": {"LlamaAttention": 1, "LlamaMLP": 1},
    }
    target = GraphTarget(model, fused=True, capture=False, **SIZES)
    target.prefill(PROMPT)
    assert seen == ["q_proj", "mlp"]


def on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Heads folded as on a GPU, and results laid out as its memory-efficient kernel leaves them."""
    real = nn.functional.scaled_dot_product_attention

    def efficient(*args: torch.Tensor, **options: object) -> torch.Tensor:
        return real(*args, **options).transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", efficient)
    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda _: False))


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("heads", [4, 2])
def test_heads_that_share_keys_are_attended_in_any_layout_of_the_result(heads, rows, monkeypatch):
    torch.manual_seed(0)
    query = torch.randn(2, rows, heads, 8, dtype=torch.float64).transpose(1, 2)
    keys, values = torch.randn(2, 2, 2, 9, 8, dtype=torch.float64)
    plan = AttentionPlan(mask=torch.randn(1, 1, rows, 9, dtype=torch.float64))
    expected, _ = attend(nn.Module(), query, keys, values, None, plan=plan)
    on_cuda(monkeypatch)
    actual, _ = attend(nn.Module(), query, keys, values, None, plan=plan)
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0)


@given(st.data())
def test_writing_keys_and_values_together_is_writing_both(data):
    rows, batch = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    length, static = data.draw(st.integers(0, 20)), data.draw(st.booleans())
    new = torch.randn(2, batch, 2, rows, 4)
    caches = []
    for both in (False, True):
        cache = KVCache(
            [torch.device("cpu")] * 2, batch=3, kv_heads=2, max_len=32, head_dim=4,
            dtype=torch.float32,
        )  # fmt: skip
        cache.length = length
        slots = torch.arange(length, length + rows)

        def write(cache=cache, both=both):
            return cache.update_both(new, 1) if both else cache.update(new[0], new[1], 1)

        if static:
            with cache.static(slots, 30):
                seen = write()
        else:
            seen = write()
        caches.append((cache.storage, *seen))
    for first_cache, other in zip(*caches, strict=True):
        assert torch.equal(first_cache, other)


@given(st.data())
def test_moving_an_accepted_path_is_a_plain_gather(data):
    """Also of one longer than what the pass moves itself."""
    n = data.draw(st.integers(0, 39))
    count = data.draw(st.integers(0, n))
    path = np.sort(data.draw(st.permutations(range(n)))[:count]).astype(np.int64)
    model = moving_model()
    target = moving_target(model)
    target.cache.storage.copy_(torch.randn_like(target.cache.storage))
    target.cache.length = 11
    before = target.cache.storage.clone()
    slots = torch.arange(11, 11 + 40)
    rows = np.arange(40)
    rows[1 : count + 1] = path + 1
    first = slice(MOVED_ROWS)
    target.cache.move(slots[first], torch.from_numpy(rows)[first] + 11)  # as the pass does
    target._move_rest(path)
    moved_rows = np.concatenate(([0], path + 1)) + 11
    actual = target.cache.storage[:, :1, :, 11 : 12 + count]
    assert torch.equal(actual, before[:, :1, :, moved_rows])
    assert torch.equal(target.cache.storage[..., :11, :], before[..., :11, :])


def test_a_deep_branch_is_committed_as_in_the_eager_target():
    stock, fused = (
        Target(tiny_model("llama"), max_len=200, max_nodes=39),
        GraphTarget(tiny_model("llama"), capture=False, max_len=200, max_nodes=39),
    )
    truth = engine(stock).decode(PROMPT, Drafter(name="plain"), max_new_tokens=30).output_ids
    wrong = (truth[1] + 1) % VOCAB
    tree = DraftTree(np.array([wrong, *truth[1:27]]), np.array([-1, -1, *range(1, 26)]))
    logits = []
    for target in (stock, fused):
        target.prefill(PROMPT)
        verdict = GreedyVerifier().verify(tree, target.forward(truth[0], tree))
        assert len(verdict.path) == 26 > MOVED_ROWS
        target.commit(tree, verdict.path)
        logits.append(target.forward(int(verdict.tokens[-1]), DraftTree.empty()).logits)
    torch.testing.assert_close(*logits, atol=1e-10, rtol=0)
