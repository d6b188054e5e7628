"""Shorter weights: which values they stand for, and what reads them."""

import copy

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specbench.config.compose import compose, to_config
from specbench.config.schema import ModelConfig
from specbench.decoding.structs import DraftTree
from specbench.errors import ConfigurationError
from specbench.kernels import panel_kernels
from specbench.models import loading
from specbench.models.checkpoints import bundled, short_weights
from specbench.models.target import Target
from specbench.system.bandwidth import streamed_bytes
from tests.tiny_checkpoint import save_checkpoint

pytestmark = pytest.mark.skipif(
    not panel_kernels.available(), reason="torch has another OpenMP library"
)
BUNDLED = ModelConfig(
    name="toy", id=bundled.HUB_ID, embedded=True, gguf_package="none", gguf_file="toy.gguf"
)
SIZES = {  # of whole blocks
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.4,
}  # fmt: skip
TREE = DraftTree(np.array([5, 6, 7, 8]), np.array([-1, 0, 0, 1]))


def target_of(model, **options) -> Target:
    return Target(model, max_len=64, max_nodes=8, packed_bytes=1 << 22, **options)


def logits_of(target: Target) -> torch.Tensor:
    target.prefill(np.arange(3, 9))
    return target.forward(3, TREE).logits.clone()


@pytest.fixture
def gguf_model(tmp_path, monkeypatch):
    """A model whose weights were read from a GGUF file, as the bundled one's."""
    torch.manual_seed(0)
    made_config = AutoConfig.for_model("llama", **SIZES)
    model = AutoModelForCausalLM.from_config(made_config, dtype=torch.float32).eval()
    path, kinds = tmp_path / "toy.gguf", gguf.GGMLQuantizationType
    writer = gguf.GGUFWriter(path, "llama")
    config = model.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.named_parameters():
        if weight.dim() == 1 or "layernorm" in name:
            continue
        kind = kinds.Q4_1 if "layers" in name else kinds.Q8_0
        module = name.removesuffix(".weight")
        values = gguf.quants.quantize(weight.detach().numpy(), kind)
        weight.data = torch.from_numpy(gguf.quants.dequantize(values, kind).copy())
        count = heads.get(module.rpartition(".")[2])
        if count is not None:  # as a file has them: the two that turn together side by side
            values = values.reshape(count, 2, -1, values.shape[1]).swapaxes(1, 2)
            values = values.reshape(len(weight), -1)
        writer.add_tensor(f"{names.get_name(module)}.weight", values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    monkeypatch.setattr(bundled, "find_gguf", lambda *_: path)
    return model


def test_stored_blocks_compute_with_the_same_numbers(gguf_model):
    before = copy.deepcopy(gguf_model)
    assert short_weights.shorten(gguf_model, "stored", BUNDLED) == "stored"
    packed = target_of(gguf_model)
    plain = target_of(before)
    assert set(packed.packed_weights["forms"]) == {"Q4_1", "Q8_0"}
    assert packed.packed_weights["bytes"] < 0.3 * plain.packed_weights["bytes"]
    assert streamed_bytes(gguf_model) < 0.6 * streamed_bytes(before)
    assert torch.equal(logits_of(packed), logits_of(plain))


def test_a_files_other_weights_are_refused(gguf_model):
    with torch.no_grad():
        for weight in gguf_model.parameters():
            weight.mul_(1.5)
    with pytest.raises(ConfigurationError, match=r"no blocks .* of the model.*engine\.weights"):
        short_weights.shorten(gguf_model, "stored", BUNDLED)


def test_a_folder_has_no_stored_blocks(tmp_path):
    save_checkpoint(tmp_path / "model")
    cfg = compose(
        [f"cache_dir={tmp_path}", "model=local", f"model.path={tmp_path / 'model'}",
         "model.dtype=float32", "model.device=cpu", "engine.weights=stored"]
    )  # fmt: skip
    with pytest.raises(ConfigurationError, match=r"has none. Type engine\.weights=float32"):
        loading.load_model(to_config(cfg))
