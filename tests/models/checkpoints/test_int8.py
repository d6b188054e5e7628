import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from specbench.errors import WeightsNotFound
from specbench.models.checkpoints import int8
from tests.conftest import tiny_model

ROWS = torch.tensor([[1, 5, 9, 14, 3]])


@pytest.fixture
def path(tmp_path):
    """The weights' file of a folder that was written."""
    int8.save(tiny_model("llama", dtype=torch.float32), tmp_path)
    return tmp_path / int8.FILE


def load(path, dtype=torch.float32):
    return int8.load(path.parent, dtype=dtype, attention="sdpa")


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
    int8.save(network, tmp_path)
    loaded = load(tmp_path / int8.FILE).eval()
    with torch.no_grad():
        for weight in network.parameters():
            if weight.dim() == 2:
                weight.copy_(rounded(weight))
        assert torch.allclose(loaded(ROWS).logits, network(ROWS).logits, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
def test_weights_come_in_the_precision_asked_for(dtype, tied, tmp_path):
    """Each is the float32 product of byte and scale, rounded once."""
    config = tiny_model("llama").config
    config.tie_word_embeddings = tied
    network = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    int8.save(network, tmp_path)
    path = tmp_path / int8.FILE
    exact, loaded = load(path).state_dict(), load(path, dtype).eval()
    assert loaded.dtype == dtype
    for name, weight in loaded.state_dict().items():
        assert weight.dtype == dtype, name
        assert torch.equal(weight, exact[name].to(dtype)), name
    head, embedding = loaded.lm_head.weight, loaded.model.embed_tokens.weight
    assert (head.data_ptr() == embedding.data_ptr()) == tied
    dtypes = {name: value.dtype for name, value in load_file(path).items()}
    assert dtypes["model.layers.0.mlp.up_proj.weight"] == torch.int8
    assert dtypes["model.norm.weight"] == torch.float32


def test_a_damaged_file_is_refused(path):
    whole = path.read_bytes()
    header = int.from_bytes(whole[:8], "little")
    damages = {
        "the header cut": whole[:100],
        "the data cut": whole[:-100],
        "nothing left": b"",
        "the length garbled": b"\xff" * 8 + whole[8:],
        "the header garbled": whole[:8] + bytes(255 - byte for byte in whole[8:80]) + whole[80:],
        "the data overwritten": whole[: 8 + header] + b"\xff" * (len(whole) - 8 - header),
    }
    for damage, content in damages.items():
        path.write_bytes(content)
        with pytest.raises(WeightsNotFound, match=r"int8\.safetensors is damaged") as refused:
            load(path)
        assert "Fetch it again" in str(refused.value), damage


def test_numbers_that_overflow_in_the_dtype_asked_for_are_refused(path):
    stored = load_file(path)
    stored["model.norm.weight"][0] = 1e5
    save_file(stored, path)
    load(path, torch.bfloat16)
    with pytest.raises(WeightsNotFound, match=r"model\.norm\.weight.*float16.*Type dtype=bfloat16"):
        load(path, torch.float16)


def test_a_scale_of_another_length_is_refused(path):
    stored = load_file(path)
    matrix = next(name for name, value in stored.items() if value.dtype == torch.int8)
    stored[f"{matrix}.scale"] = stored[f"{matrix}.scale"][:1].clone()  # would fit every row
    save_file(stored, path)
    with pytest.raises(WeightsNotFound, match=rf"{re.escape(matrix)} .* with 1 scales"):
        load(path)


@pytest.mark.parametrize(
    "missing", ["model.norm.weight", "model.layers.0.mlp.up_proj.weight.scale"]
)
def test_a_file_that_lacks_something_is_refused(missing, path):
    stored = load_file(path)
    del stored[missing]
    save_file(stored, path)
    with pytest.raises(WeightsNotFound, match=re.escape(missing)):
        load(path)
