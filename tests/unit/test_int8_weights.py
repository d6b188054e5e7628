from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from specbench import int8_weights
from specbench.errors import WeightsNotFound
from tests.conftest import tiny_model

ROWS = torch.tensor([[1, 5, 9, 14, 3]])


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """The nearest of 255 steps, row by row, the plain way."""
    out = weight.clone()
    for row in out:
        step = row.abs().max() / 127
        row.copy_((row / step).round() * step)
    return out


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_what_is_read_is_what_was_written_but_for_the_rounding(architecture, tmp_path):
    network = tiny_model(architecture, dtype=torch.float32)
    int8_weights.save(network, tmp_path)
    found = int8_weights.load(tmp_path, dtype=torch.float32, attention="sdpa").eval()
    with torch.no_grad():
        for weight in network.parameters():
            if weight.dim() == 2:
                weight.copy_(rounded(weight))
        assert torch.allclose(found(ROWS).logits, network(ROWS).logits, atol=1e-5)


def test_a_matrix_takes_one_byte_a_number(tmp_path):
    network = tiny_model("llama", dtype=torch.float32)
    int8_weights.save(network, tmp_path)
    stored = load_file(tmp_path / int8_weights.FILE)
    assert stored["model.layers.0.mlp.up_proj.weight"].dtype == torch.int8
    assert stored["model.norm.weight"].dtype == torch.float32


def test_a_damaged_file_is_refused(tmp_path):
    int8_weights.save(tiny_model("llama", dtype=torch.float32), tmp_path)
    path = tmp_path / int8_weights.FILE
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(WeightsNotFound, match=r"int8\.safetensors is damaged"):
        int8_weights.load(tmp_path, dtype=torch.float32, attention="sdpa")


def test_weights_of_another_model_are_refused(tmp_path):
    int8_weights.save(tiny_model("llama", dtype=torch.float32), tmp_path)
    path = tmp_path / int8_weights.FILE
    stored = load_file(path)
    del stored["model.norm.weight"]
    save_file(stored, path)
    with pytest.raises(WeightsNotFound, match=r"model\.norm\.weight"):
        int8_weights.load(tmp_path, dtype=torch.float32, attention="sdpa")
