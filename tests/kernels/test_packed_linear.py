"""Products in panels compute what plain ones do, to float32's rounding, and leave the model be."""

import gguf
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from specbench.config.compose import compose
from specbench.config.schema import packed_bytes
from specbench.kernels import packed_linear, panel_kernels
from specbench.kernels.compiled_pass import ONE_CALL, packed_model
from specbench.kernels.weight_forms import give_back, unchanged_regions
from specbench.models.target import Target
from tests.conftest import tiny_model

pytestmark = pytest.mark.skipif(
    not panel_kernels.available(), reason="torch has another OpenMP library"
)


@pytest.mark.parametrize("outputs", [(40,), (16, 8, 5)], ids=["one", "behind one another"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_is_that_of_its_linears(outputs, bias):
    torch.manual_seed(0)
    linears = [nn.Linear(24, size, bias=bias) for size in outputs]
    product = packed_linear.Product.from_linears(linears)
    with torch.inference_mode():
        for shape in [(1, 1, 24), (1, 7, 24), (3, 5, 24), (1, 600, 24)]:
            x = torch.randn(shape)
            expected = torch.cat([linear(x) for linear in linears], dim=-1)
            torch.testing.assert_close(product(x), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("again", [0, 1 << 20])
def test_a_second_target_over_a_packed_model_knows_that_it_is(again):
    model = tiny_model("llama", dtype=torch.float32)
    modules = [type(module) for module in model.modules()]
    first = Target(model, max_len=64, packed_bytes=1 << 20)
    second = Target(model, max_len=64, packed_bytes=again)
    assert second.packed_weights == first.packed_weights
    assert first.packed_weights["products"] == 9  # four a layer and the vocabulary head
    matrices = (p for name, p in model.named_parameters() if "proj" in name or "head" in name)
    assert first.packed_weights["bytes"] >= 4 * sum(p.numel() for p in matrices)  # padded
    assert second.memory_bytes(8) == first.memory_bytes(8)
    assert [type(module) for module in model.modules()] == modules


def test_what_finds_no_memory_goes_through_its_layers():
    model = tiny_model("llama", dtype=torch.float32)
    matrices = (p for name, p in model.named_parameters() if "proj" in name or "head" in name)
    most = 4 * sum(p.numel() for p in matrices)
    small = Target(model, max_len=64, packed_bytes=most - 1)
    assert packed_model(model) is None and small.compiled is None
    assert small.packed_weights["pass"].startswith("engine.packed.memory_gb=")
    assert Target(model, max_len=64, packed_bytes=most).packed_weights["pass"] == ONE_CALL


@pytest.mark.parametrize(
    ("override", "expected"),
    [("engine.packed.memory_gb=2.5", 2_500_000_000), ("engine.packed.enabled=false", 0)],
)
def test_the_limit_of_memory_is_in_gb(override, expected):
    assert packed_bytes(compose([override]).engine.packed) == expected


def test_plain_weights_leave_memory_where_panels_are_read_instead(tmp_path):
    """They are pages of a file that nobody changed; who looks again gets the same numbers."""
    if not unchanged_regions():
        pytest.skip("this system does not tell of its memory")
    model = tiny_model("llama", dtype=torch.float32, vocab_size=4096)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.save_pretrained(tmp_path)
    mapped = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert Target(mapped, max_len=64, packed_bytes=1 << 30).compiled
    head = mapped.lm_head.weight
    assert give_back(head, unchanged_regions())
    with torch.no_grad():
        head[7] = 1.0
    assert not give_back(head, unchanged_regions()), "a number that was set would be lost"
    assert (head[7] == 1.0).all()
    assert all(
        torch.equal(p, expected[name]) for name, p in mapped.named_parameters() if p is not head
    )


def test_what_drafts_is_rounded_to_the_blocks_of_gguf_files():
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
    packed_linear.pack_linears(module, "q8_0")
    # The file rounds by the scale before it is a half, and here by the half: a step apart at most.
    step = float(values.abs().max()) / 127
    torch.testing.assert_close(linear.weight.detach(), values, atol=1.01 * step, rtol=0.0)
    assert torch.equal(odd.weight, before)
    forms = [panel_kernels.form_of(part.product.panels).name for part in module]
    assert forms == ["Q8_0", "float32"]
    x = torch.randn(5, 64)
    plain = nn.functional.linear(x, linear.weight, linear.bias)
    torch.testing.assert_close(module[0](x), plain, atol=1e-5, rtol=1e-5)
