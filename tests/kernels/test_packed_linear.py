"""Packed linears compute what plain ones do, to float32 rounding, and come off again."""

import json

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from specbench.config.compose import compose
from specbench.config.schema import packed_bytes
from specbench.kernels import autotune, packed_linear
from specbench.kernels.weight_forms import give_back, unchanged_regions
from specbench.models.target import Target
from tests.conftest import tiny_model


@pytest.mark.parametrize("kind", autotune.available_kernels())
@pytest.mark.parametrize("bias", [False, True])
def test_every_kernel_gives_the_plain_product(kind, bias):
    torch.manual_seed(0)
    linear = nn.Linear(24, 40, bias=bias)
    layer = packed_linear.PackedLinear(linear, dict.fromkeys(autotune.ROW_BUCKETS, kind))
    with torch.inference_mode():
        for shape in [(1, 1, 24), (1, 7, 24), (3, 5, 24), (1, 600, 24)]:
            x = torch.randn(shape)
            out = layer(x)
            assert out.shape == (*shape[:-1], 40)
            torch.testing.assert_close(out, linear(x), atol=1e-5, rtol=1e-5)


def test_rows_choose_the_kernel(monkeypatch):
    calls = []
    kinds = autotune.available_kernels()
    first, last = kinds[0], kinds[-1]
    for kind in {first, last}:
        real = autotune.KERNELS[kind]
        monkeypatch.setitem(
            autotune.KERNELS, kind, lambda *a, k=kind, f=real: (calls.append(k), f(*a))[1]
        )
    layer = packed_linear.PackedLinear(nn.Linear(4, 4), {1: first, 8: last})
    for rows in (1, 2, 8, 9):
        layer(torch.randn(rows, 4))
    assert calls == [first, last, last, last]


def test_a_packed_model_gives_the_same_logits(everything_packed, tmp_path):
    model = tiny_model("llama", dtype=torch.float32)
    ids = torch.arange(10)[None]
    with torch.inference_mode():
        before = model(ids).logits
        done = packed_linear.pack_linears(model, memory_bytes=1 << 20, cache_dir=tmp_path)
        after = model(ids).logits
    assert done["layers"] == 15  # seven a layer and the vocabulary head
    torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-4)
    attention = model.model.layers[0].self_attn  # siblings are parts of one matrix
    queries, keys = (part.weight.untyped_storage() for part in (attention.q_proj, attention.k_proj))
    assert queries.data_ptr() == keys.data_ptr()
    packed_linear.unpack_linears(model)
    assert not any(isinstance(m, packed_linear.PackedLinear) for m in model.modules())
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, before)
    other = tiny_model("llama", dtype=torch.float64)
    assert packed_linear.pack_linears(other, memory_bytes=1 << 30)["layers"] == 0


@pytest.mark.parametrize("again", [0, 1 << 20])
def test_a_second_target_over_a_packed_model_knows_that_it_is(everything_packed, again, tmp_path):
    model = tiny_model("llama", dtype=torch.float32)
    first = Target(model, max_len=64, packed_bytes=1 << 20, cache_dir=tmp_path)
    second = Target(model, max_len=64, packed_bytes=again, cache_dir=tmp_path)
    assert second.packed_weights == first.packed_weights
    assert first.packed_weights["layers"] == 15
    assert first.packed_weights["fused"] == 9
    matrices = (p for name, p in model.named_parameters() if "proj" in name or "head" in name)
    copied = everything_packed in autotune.PACKED
    assert first.packed_weights["bytes"] == copied * 4 * sum(p.numel() for p in matrices)
    assert second.memory_bytes(8) == first.memory_bytes(8)


def test_the_budget_counts_what_is_packed_already(everything_packed, tmp_path):
    """The largest weights are packed first."""
    if everything_packed not in autotune.PACKED:
        pytest.skip("this build of torch has no packed kernel")
    model = tiny_model("llama", dtype=torch.float32, vocab_size=400)
    head = 4 * 400 * 32
    assert packed_linear.pack_linears(model, memory_bytes=head, cache_dir=tmp_path)["bytes"] == head
    names = [n for n, m in model.named_modules() if isinstance(m, packed_linear.PackedLinear)]
    assert names == ["lm_head"]
    done = packed_linear.pack_linears(model, memory_bytes=head + 10_000, cache_dir=tmp_path)
    assert head < done["bytes"] <= head + 10_000
    packed_linear.unpack_linears(model)
    assert packed_linear.packed_weights(model) == {
        "layers": 0, "bytes": 0, "plan": {}, "forms": {}
    }  # fmt: skip


def test_siblings_share_one_product(everything_packed, monkeypatch, tmp_path):
    model = tiny_model("llama", dtype=torch.float32)
    packed_linear.pack_linears(model, memory_bytes=1 << 20, cache_dir=tmp_path)
    layer = model.model.layers[0].self_attn
    calls = []
    real = packed_linear.PackedLinear.forward
    monkeypatch.setattr(
        packed_linear.PackedLinear, "forward", lambda self, x: (calls.append(1), real(self, x))[1]
    )
    x = torch.randn(1, 3, 32)
    with torch.inference_mode():
        query, key, value = layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)
        assert len(calls) == 1
        for out, linear in ((query, layer.q_proj), (key, layer.k_proj), (value, layer.v_proj)):
            wanted = nn.functional.linear(x, linear.weight)
            torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)
        # The same tensor with other numbers, and any order of calls.
        x.mul_(2)
        torch.testing.assert_close(layer.q_proj(x), 2 * query)
        other = torch.randn(1, 2, 32)
        wanted = nn.functional.linear(other, layer.k_proj.weight)
        torch.testing.assert_close(layer.k_proj(other), wanted)
        torch.testing.assert_close(layer.v_proj(x), 2 * value)


def test_a_plan_can_leave_out_a_kernel(monkeypatch):
    """Though it would win: what the engine would choose without it."""
    quick = autotune.available_kernels()[-1]

    def last(times):
        return dict.fromkeys(autotune.ROW_BUCKETS, [*times][-1])

    monkeypatch.setattr(autotune, "_choose", last)
    weights = [torch.randn(16, 8)]
    assert set(autotune.measure_plan(weights)["16x8"].values()) == {quick}
    assert quick not in autotune.measure_plan(weights, without=[quick])["16x8"].values()


def test_the_plan_is_measured_once_and_kept(tmp_path, monkeypatch):
    weights = [torch.randn(8, 4), torch.randn(6, 4)]
    plan = autotune.load_plan(weights, tmp_path)
    assert set(plan) == {"8x4", "6x4"}
    assert all(set(by) == set(autotune.ROW_BUCKETS) for by in plan.values())
    assert {k for by in plan.values() for k in by.values()} <= set(autotune.KERNELS)
    (file,) = (tmp_path / "packed").iterdir()
    assert json.loads(file.read_text())
    monkeypatch.setattr(autotune, "measure_plan", lambda _: pytest.fail("measured twice"))
    assert autotune.load_plan(weights, tmp_path) == plan


def _times(others, **by_rows):
    return dict.fromkeys(autotune.ROW_BUCKETS, others) | {int(k[1:]): v for k, v in by_rows.items()}


@pytest.mark.parametrize(
    ("times", "kinds"),
    [
        # The plain kernel must win clearly: 3.9 is within noise of 4.0.
        ({"plain": _times(10.0, r2=3.9, r4=2.0), "onednn": _times(4.0)}, {2: "onednn", 4: "plain"}),
        # One row counts for more than all other buckets.
        (
            {"plain": _times(10.0), "onednn": _times(4.0, r1=8.0), "panels": _times(5.0, r1=6.0)},
            dict.fromkeys(autotune.ROW_BUCKETS, "panels"),
        ),
        # Without a gain nothing is packed.
        (
            {"plain": _times(1.0), "onednn": _times(2.0), "panels": _times(1.5)},
            dict.fromkeys(autotune.ROW_BUCKETS, "plain"),
        ),
    ],
    ids=["clearly", "one row", "no gain"],
)
def test_which_kernel_is_chosen(times, kinds):
    assert kinds.items() <= autotune._choose(times).items()


def test_a_busy_moment_chooses_no_kernel(monkeypatch):
    """Kernels take turns: a moment that makes all timings of a round slow changes no choice."""
    kinds = autotune.available_kernels()
    calls = []

    def seconds(call):
        rounds_before = len(calls) // len(kinds)
        calls.append(call)
        busy = rounds_before % autotune.ROUNDS < autotune.ROUNDS // 2
        return (0.001 if call.args[0] == kinds[-1] else 0.002) + busy * (len(calls) % 5)

    monkeypatch.setattr(autotune, "_seconds", seconds)
    plan = autotune.measure_plan([torch.randn(16, 8)])
    assert set(plan["16x8"].values()) == {kinds[-1]}


@pytest.mark.parametrize("damage", ["x", "[]", '{"8x4": {"1": "plain"}}', '{"8x4": {"1": "no"}}'])
def test_a_damaged_plan_is_measured_again(tmp_path, damage):
    weights = [torch.randn(8, 4)]
    plan = autotune.load_plan(weights, tmp_path)
    (file,) = (tmp_path / "packed").iterdir()
    file.write_text(damage)
    assert set(autotune.load_plan(weights, tmp_path)) == set(plan)


@pytest.mark.parametrize(
    ("override", "wanted"),
    [("engine.packed.memory_gb=2.5", 2_500_000_000), ("engine.packed.enabled=false", 0)],
)
def test_the_limit_of_memory_is_in_gb(override, wanted):
    assert packed_bytes(compose([override]).engine.packed) == wanted


def test_plain_weights_leave_memory_where_panels_are_read_instead(tmp_path):
    """They are pages of a file that nobody changed; who looks again gets the same numbers."""
    if "panels" not in autotune.available_kernels() or not unchanged_regions():
        pytest.skip("this system has no panels, or does not tell of its memory")
    model = tiny_model("llama", dtype=torch.float32, vocab_size=4096)
    wanted = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.save_pretrained(tmp_path)
    mapped = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    packed_linear.pack_linears(mapped, memory_bytes=1 << 30, kernel="panels")
    head = mapped.lm_head.weight
    assert give_back(head, unchanged_regions())
    with torch.no_grad():
        head[7] = 1.0
    assert not give_back(head, unchanged_regions()), "a number that was set would be lost"
    assert (head[7] == 1.0).all()
    assert all(
        torch.equal(p, wanted[name]) for name, p in mapped.named_parameters() if p is not head
    )


def test_long_prompts_are_read_from_panels(everything_packed):
    model = tiny_model("llama", dtype=torch.float32)
    if everything_packed != "panels":
        pytest.skip("this build of torch has no panels")
    x = torch.randn(packed_linear.MAX_PREFILL_ROWS_PACKED + 9, 32)
    wanted = model.lm_head(x)
    packed_linear.pack_linears(model, memory_bytes=1 << 30, kernel="panels")
    torch.testing.assert_close(model.lm_head(x), wanted, atol=1e-5, rtol=1e-5)


def test_what_drafts_is_rounded_to_the_blocks_of_gguf_files():
    import gguf

    torch.manual_seed(0)
    kind = gguf.GGMLQuantizationType.Q8_0
    linear = nn.Linear(64, 40, bias=True)
    with torch.no_grad():
        linear.weight[3, :32] = 0.0  # a block without a scale
    file = gguf.quants.quantize(linear.weight.detach().numpy(), kind)
    values = torch.from_numpy(gguf.quants.dequantize(file, kind).copy())
    odd = nn.Linear(24, 8)
    before = odd.weight.clone()
    module = nn.Sequential(linear, odd)
    packed_linear.pack_in_panels(module, "q8_0")
    found = packed_linear.packed_weights(module)
    # The file rounds by the scale before it is a half, and here by the half: a step apart at most.
    step = float(values.abs().max()) / 127
    torch.testing.assert_close(linear.weight.detach(), values, atol=1.01 * step, rtol=0.0)
    assert torch.equal(odd.weight, before)
    if "panels" in autotune.available_kernels():
        assert found["forms"] == {"Q8_0": 1, "float32": 1}
        x = torch.randn(5, 64)
        plain = nn.functional.linear(x, linear.weight, linear.bias)
        torch.testing.assert_close(module[0](x), plain, atol=1e-5, rtol=1e-5)
