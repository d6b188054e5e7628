"""A layer's kernels stay few: counted from a trace on the meta device."""

import pytest
import torch

from scripts.bench import kernels

AT_MOST = {"vicuna7b": 17, "llama3_8b": 17, "phi3_mini": 17, "qwen3_8b": 20}  # Qwen3 norms heads


@pytest.mark.parametrize("rows", kernels.ROWS)
@pytest.mark.parametrize("model", kernels.MODELS)
def test_a_fused_layer_launches_few_kernels(model, rows):
    found = kernels.measure_model(model, rows)
    assert found["layer_fused"] <= AT_MOST[model]
    assert found["layer_stock"] >= 39  # what is compared with is transformers' own
    assert found["pass_fused"] < 0.5 * found["pass_stock"]


def test_views_launch_nothing_and_what_copies_first_counts_twice():
    x = torch.empty(4, 6, device="meta")
    index = torch.empty(1, dtype=torch.int64, device="meta")

    def steps() -> None:
        y = x.view(6, 4).transpose(0, 1)[1:].expand(3, 6)
        assert y.shape == (3, 6)
        (x * 2).add_(1)
        x.index_copy(0, index, x[:1])
        torch.empty(3, device="meta")

    assert kernels.kernels_of(steps) == {"mul": 1, "add_": 1, "index_copy": 2}
